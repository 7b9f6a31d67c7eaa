"""A check, its findings with their repairs, and the formats of numbers in their texts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

Row = Mapping[str, Any]
# Maps the name of each statement to the rows that it returned. Also contains the LOCAL facts of
# checks.py, each by its name.
Facts = Mapping[str, Sequence[Row]]
# A message shows at most this many names, and the number of the others.
NAMED_MAX = 5
# Shorter delays are normal: a deployment, or the rescue of a dead worker's jobs, causes them.
GRACE_S = 60.0
# The statements count jobs up to this number.
COUNTED_MAX = 10_000


class Level(StrEnum):
    """The levels of findings, from the worst to the best."""

    ERROR = "error"
    WARNING = "warning"
    UNKNOWN = "unknown"
    HINT = "hint"
    OK = "ok"

    @property
    def rank(self) -> int:
        """The position in the order of levels; 0 is the worst."""
        return list(Level).index(self)


# If a finding has one of these levels, `taskd doctor` exits with code 4. If the settings or the
# database cannot be read, it exits with the exit code of that error (errors.py).
FAILED = (Level.ERROR, Level.WARNING)


@dataclass(frozen=True, slots=True)
class Repair:
    """How to repair a problem.

    Attributes:
        kind: `sql`: SQL of sql/repairs.sql; `command`: a shell command; `advice`: a sentence.
        text: the name of the SQL in sql/repairs.sql, the command, or the sentence.
        args: the values for the variables of the SQL.
    """

    kind: str
    text: str
    args: Mapping[str, Any] = field(default_factory=dict)


def sql(name: str, **args: Any) -> Repair:
    """Return a repair by the SQL of this name in sql/repairs.sql, with values for its variables."""
    return Repair("sql", name, args)


def command(text: str) -> Repair:
    """Return a repair by a shell command."""
    return Repair("command", text)


def advice(text: str) -> Repair:
    """Return a repair in words, for a person."""
    return Repair("advice", text)


@dataclass(frozen=True, slots=True)
class Observation:
    """One fact that a check has found, with its level and its repairs."""

    level: Level
    text: str
    repairs: tuple[Repair, ...] = ()


def ok(text: str) -> Observation:
    """Report that there is no problem."""
    return Observation(Level.OK, text)


def hint(text: str, *repairs: Repair) -> Observation:
    """Report something that is not wrong but could be better."""
    return Observation(Level.HINT, text, repairs)


def warning(text: str, *repairs: Repair) -> Observation:
    """Report a problem that does harm now, or will do harm later."""
    return Observation(Level.WARNING, text, repairs)


def error(text: str, *repairs: Repair) -> Observation:
    """Report a problem that makes jobs late, lost or stuck, now or soon."""
    return Observation(Level.ERROR, text, repairs)


def unknown(text: str, *repairs: Repair) -> Observation:
    """Report why a check, or a part of the check, could not run."""
    return Observation(Level.UNKNOWN, text, repairs)


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        name: the name for the command line; it must not change, because scripts use it.
        about: the subject of the check.
        why: one sentence that says why the subject matters.
        needs: the names of the statements, and of the LOCAL facts of checks.py, that `decide` uses.
        decide: returns the observations from these facts. If there are none, the check has passed.
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
        check: the name of the check.
        level: the worst level of the observations.
        found: the texts of the observations, the worst first. Texts of level OK are included only
            if all observations are OK.
        why: the sentence of the check that says why its subject matters.
        repairs: the repairs of the observations in `found`, in the same order, without duplicates.
    """

    check: str
    level: Level
    found: tuple[str, ...]
    why: str
    repairs: tuple[Repair, ...] = ()


def run_check(check: Check, facts: Facts, refused: Mapping[str, str]) -> Finding:
    """Run a check.

    Args:
        refused: maps each statement that failed to the reason. A check that needs one of these
            statements is not run; its level is UNKNOWN.
    """
    missing = [refused[name] for name in check.needs if name in refused]
    observations = (
        [unknown(missing[0])] if missing else list(check.decide(facts)) or [ok("nothing")]
    )
    observations.sort(key=lambda each: each.level.rank)
    worst = observations[0].level
    # Most checks yield an OK as their last observation, whatever they have found. The OK counts
    # only if it is the only observation.
    shown = [each for each in observations if each.level is not Level.OK or worst is Level.OK]
    repairs = tuple(dict.fromkeys(_hashable(m) for each in shown for m in each.repairs))
    return Finding(
        check.name, worst, tuple(each.text for each in shown), check.why, _repairs(repairs)
    )


def _hashable(repair: Repair) -> tuple[str, str, tuple[tuple[str, Any], ...]]:
    return repair.kind, repair.text, tuple(repair.args.items())


def _repairs(keys: Iterable[tuple[str, str, tuple[tuple[str, Any], ...]]]) -> tuple[Repair, ...]:
    return tuple(Repair(kind, text, dict(args)) for kind, text, args in keys)


def count(number: int, noun: str) -> str:
    """Format a number with its noun: `1 job`, `2,000 jobs`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def many(number: int, noun: str) -> str:
    """Format a number with its noun; a count that reached COUNTED_MAX is `10,000 jobs or more`."""
    return count(number, noun) + (" or more" if number >= COUNTED_MAX else "")


def span(seconds: float) -> str:
    """Format a duration: `12s`, `3m`, `2h 10m`, `4d 3h`."""
    whole = max(0, round(seconds))
    for unit, size, below, part in (
        ("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1),
    ):  # fmt: skip
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size}{unit}" + (f" {rest}{below}" if rest else "")
    return f"{whole}s"


def size(number: float) -> str:
    """Format a number of bytes, in units of 1024: `8 kB`, `1.5 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TB"


def names(items: Sequence[object]) -> str:
    """Join at most NAMED_MAX names, and append the number of the others."""
    shown = ", ".join(str(each) for each in items[:NAMED_MAX])
    more = len(items) - NAMED_MAX
    return shown + (f" and {more:,} more" if more > 0 else "")


def only(facts: Facts, name: str) -> Row:
    """Return the first row of a statement or LOCAL fact that has exactly one row."""
    return facts[name][0]


def each_of(rows: Sequence[Row], **values: Any) -> Iterator[Row]:
    """Yield the rows whose columns have these values."""
    return (row for row in rows if all(row[key] == value for key, value in values.items()))
