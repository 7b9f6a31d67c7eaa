"""Findings of a check, and their remedies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Row = Mapping[str, Any]
# Rows, by the name of the statement that fetched them.
Facts = Mapping[str, Sequence[Row]]
# The most names in a message; the others are counted.
NAMED_MAX = 5
# Jobs are counted up to this number.
COUNTED_MAX = 10_000


class Level(StrEnum):
    """The level of a finding, the worst first."""

    ERROR = "error"
    WARNING = "warning"
    UNKNOWN = "unknown"
    HINT = "hint"
    OK = "ok"

    @property
    def rank(self) -> int:
        """Return the rank; 0 is the worst."""
        return list(Level).index(self)


# Levels for which the command exits with 4.
FAILED = (Level.ERROR, Level.WARNING)


@dataclass(frozen=True, slots=True)
class Repair:
    """A remedy.

    Attributes:
        kind: `sql`, of sql/repairs.sql; `command`, for a shell; `advice`, in words.
        text: the name of the SQL, the command, or the words.
        args: the values for the SQL.
    """

    kind: str
    text: str
    args: Mapping[str, Any] = field(default_factory=dict)


def sql(name: str, **args: Any) -> Repair:
    """Return SQL of sql/repairs.sql, with its values."""
    return Repair("sql", name, args)


def command(text: str) -> Repair:
    """Return a command for a shell."""
    return Repair("command", text)


def advice(text: str) -> Repair:
    """Return advice that only a person can follow."""
    return Repair("advice", text)


@dataclass(frozen=True, slots=True)
class Observation:
    """One finding of a check."""

    level: Level
    text: str
    repairs: tuple[Repair, ...] = ()


def ok(text: str) -> Observation:
    """Return a passed check, with its figures."""
    return Observation(Level.OK, text)


def hint(text: str, *repairs: Repair) -> Observation:
    """Return a hint: nothing is wrong, but it could be better."""
    return Observation(Level.HINT, text, repairs)


def warning(text: str, *repairs: Repair) -> Observation:
    """Return a warning: it harms, or will."""
    return Observation(Level.WARNING, text, repairs)


def error(text: str, *repairs: Repair) -> Observation:
    """Return an error: jobs are late, lost or stuck because of it, or will be soon."""
    return Observation(Level.ERROR, text, repairs)


def unknown(text: str, *repairs: Repair) -> Observation:
    """Return a check that could not run, and why."""
    return Observation(Level.UNKNOWN, text, repairs)


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: stable, as scripts use it.
        about: the subject of the check.
        why: why it matters, in one sentence.
        needs: the statements whose rows it uses.
        decide: returns its findings from these rows; none means that the check passed.
    """

    name: str
    about: str
    why: str
    needs: tuple[str, ...]
    decide: Callable[[Facts], Iterable[Observation]]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check.

    Attributes:
        level: the worst level of its findings.
        found: its findings, the worst first.
        repairs: their remedies, in the same order.
    """

    check: str
    level: Level
    found: tuple[str, ...]
    why: str
    repairs: tuple[Repair, ...] = ()


def run_check(check: Check, facts: Facts, refused: Mapping[str, str]) -> Finding:
    """Return the result of a check.

    Args:
        refused: why a statement returned no rows, by its name.
    """
    missing = [refused[name] for name in check.needs if name in refused]
    observations = (
        [unknown(missing[0])] if missing else list(check.decide(facts)) or [ok("nothing")]
    )
    observations.sort(key=lambda each: each.level.rank)
    worst = observations[0].level
    # Beside a problem, passed parts are of no interest.
    shown = [each for each in observations if each.level is not Level.OK or worst is Level.OK]
    repairs = tuple(dict.fromkeys(_hashable(m) for each in shown for m in each.repairs))
    return Finding(
        check.name, worst, tuple(each.text for each in shown), check.why, _repairs(repairs)
    )


def _hashable(repair: Repair) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    return repair.kind, repair.text, tuple(repair.args.items())


def _repairs(keys: Iterable[tuple[str, str, tuple[tuple[str, Any], ...]]]) -> tuple[Repair, ...]:
    return tuple(Repair(kind, text, dict(args)) for kind, text, args in keys)


# Words and figures.


def count(number: int, noun: str) -> str:
    """Return `1 job`, `2,000 jobs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def many(number: int, noun: str) -> str:
    """Return the same for a number that is counted only up to COUNTED_MAX."""
    return count(number, noun) + (" or more" if number >= COUNTED_MAX else "")


def span(seconds: float) -> str:
    """Return `12s`, `3m`, `2h 10m`, `4d 3h`."""
    whole = max(0, round(seconds))
    for unit, size, below, part in (
        ("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1),
    ):  # fmt: skip
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"


def size(number: float) -> str:
    """Return `8 kB`, `1.5 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TB"


def names(items: Sequence[object]) -> str:
    """Return the first few names, and how many more there are."""
    shown = ", ".join(str(each) for each in items[:NAMED_MAX])
    more = len(items) - NAMED_MAX
    return shown + (f" and {more:,} more" if more > 0 else "")


def only(facts: Facts, name: str) -> Row:
    """Return the row of a statement that has one row."""
    return facts[name][0]


def each_of(rows: Sequence[Row], **values: Any) -> Iterator[Row]:
    """Return the rows with these values."""
    return (row for row in rows if all(row[key] == value for key, value in values.items()))
