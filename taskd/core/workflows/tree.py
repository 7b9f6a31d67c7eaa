"""The tree of a workflow: its parts in lines, each below the last of those that it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# States in the order of a reader's interest: problems, activity, what is over.
STATES = ("failed", "cancelled", "running", "queued", "scheduled", "blocked", "done")


@dataclass(frozen=True, slots=True)
class Part:
    """A job of a workflow, or all members of a group, or all jobs of one stage.

    Attributes:
        states: number of jobs by state; none for a stage that has not started.
        after: the names of the parts that it waits for.
        on_failed: what happens if one of these fails, unless it is cancelled then.
    """

    name: str
    states: Mapping[str, int]
    after: Sequence[str] = ()
    on_failed: str | None = None
    first_id: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tree: the text before the name, and further parts that it waits for."""

    part: Part
    branch: str
    also_after: tuple[str, ...]


def lines(parts: Iterable[Part]) -> list[Line]:
    """Return the lines of these parts, which come after those that they wait for."""
    known: dict[str, Part] = {}
    under: dict[str | None, list[Part]] = {}
    hangs: dict[str, str] = {}
    for part in parts:
        # A part that waits for several is below the last of them, when the others have been listed.
        last = next((name for name in reversed(list(known)) if name in part.after), None)
        known[part.name] = part
        under.setdefault(last, []).append(part)
        if last is not None:
            hangs[part.name] = last
    found: list[Line] = []
    # No recursion: a chain can be longer than Python's stack.
    waiting = [(part, "", "") for part in reversed(under.get(None, []))]
    while waiting:
        part, branch, below = waiting.pop()
        also = tuple(name for name in part.after if name != hangs.get(part.name))
        found.append(Line(part, branch, also))
        children = under.get(part.name, [])
        for child in reversed(children):
            end = child is children[-1]
            lead = "└─ " if end else "├─ "
            waiting.append((child, below + lead, below + ("   " if end else "│  ")))
    return found


def state_counts(states: Mapping[str, int]) -> str:
    """Return `done`; `3 failed, 9,990 done`; `-` for a stage that has not started."""
    counted = [(state, states[state]) for state in STATES if states.get(state)]
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    return ", ".join(f"{number:,} {state}" for state, number in counted) or "-"


def state_of(row: Mapping[str, Any]) -> str:
    """Return a workflow's state in a word, from those of its jobs."""
    if row["running"] or row["waiting"]:
        return "stopping" if row["stopped_at"] else "running"
    if row["blocked"]:
        return "waiting"
    for state in ("failed", "cancelled"):
        if row[state]:
            return state
    return "done" if row["done"] else "gone"


def with_stages(
    rows: list[dict[str, Any]], stages: Sequence[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """Return the parts; of a pipeline also stages that have not started, in the plan's order."""
    if stages is None:
        return rows
    by_name = {row["part"]: row for row in rows}
    found = []
    before: str | None = None
    for each in stages:
        name, after = each["name"], [] if before is None else [before]
        nothing = {
            "part": name, "task": each["task"], "first_id": None, "last_id": None, "jobs": 0,
            "states": {}, "on_failed": None,
        }  # fmt: skip
        found.append(by_name.pop(name, nothing) | {"after": after})
        before = name
    return [*found, *by_name.values()]
