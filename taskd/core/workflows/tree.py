"""The tree of a workflow: the line of each part is below the line of a part that it waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# States in the order of a reader's interest: problems first, then activity, then finished states.
STATES = ("failed", "cancelled", "running", "queued", "scheduled", "blocked", "done")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a workflow: one job, all members of a group, or all jobs of one stage.

    Attributes:
        states: number of jobs by state; empty for a stage that has not started.
        after: the names of the parts that this part waits for.
        on_failed: what happens to this part if a part of `after` fails; None stands for `cancel`.
    """

    name: str
    states: Mapping[str, int]
    after: Sequence[str] = ()
    on_failed: str | None = None
    first_id: int | None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the tree.

    Attributes:
        branch: the text before the name of the part, which draws the indent and the branch.
        also_after: the names of the other parts that this part waits for, without its parent in the
            tree.
    """

    part: Part
    branch: str
    also_after: tuple[str, ...]


def lines(parts: Iterable[Part]) -> list[Line]:
    """Return the lines of the tree.

    Args:
        parts: the parts of the workflow, each after the parts that it waits for.
    """
    known: dict[str, Part] = {}
    children_of: dict[str | None, list[Part]] = {}
    parent_of: dict[str, str] = {}
    for part in parts:
        # A part that waits for several parts is placed below the one that comes last in `parts`.
        last = next((name for name in reversed(list(known)) if name in part.after), None)
        known[part.name] = part
        children_of.setdefault(last, []).append(part)
        if last is not None:
            parent_of[part.name] = last
    found: list[Line] = []
    # This does not recurse, because a chain of jobs can be longer than Python's stack.
    waiting = [(part, "", "") for part in reversed(children_of.get(None, []))]
    while waiting:
        part, branch, child_indent = waiting.pop()
        also = tuple(name for name in part.after if name != parent_of.get(part.name))
        found.append(Line(part, branch, also))
        children = children_of.get(part.name, [])
        for child in reversed(children):
            end = child is children[-1]
            lead = "└─ " if end else "├─ "
            waiting.append((child, child_indent + lead, child_indent + ("   " if end else "│  ")))
    return found


def parents_first(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows in their order, but each after the rows of the parts that it waits for.

    A part can wait for a part with a later row, because a running job can add jobs. If two parts
    wait for each other, through different jobs, they keep their order.
    """
    left, found = list(rows), list[dict[str, Any]]()
    waiting = {row["part"] for row in rows}
    while left:
        rest = []
        for row in left:
            if waiting.isdisjoint(row["after"]):
                found.append(row)
                waiting.discard(row["part"])
            else:
                rest.append(row)
        if len(rest) == len(left):
            waiting.discard(rest[0]["part"])
            found.append(rest.pop(0))
        left = rest
    return found


def state_counts(states: Mapping[str, int]) -> str:
    """Return `done` for one job, `3 failed, 9,990 done` for several, `-` for none."""
    counted = [(state, states[state]) for state in STATES if states.get(state)]
    if len(counted) == 1 and counted[0][1] == 1:
        return counted[0][0]
    return ", ".join(f"{number:,} {state}" for state, number in counted) or "-"


def state_of(row: Mapping[str, Any]) -> str:
    """Return the state of a workflow in one word.

    Args:
        row: the number of the workflow's jobs in each state, and `stopped_at`. `waiting` is the
            number of scheduled and queued jobs.

    Returns:
        The state; `gone` if no job of the workflow is stored any more.
    """
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
    """Return the rows of a pipeline in the order of its plan, with a row for each unstarted stage.

    Rows of parts that are not in the plan follow at the end.

    Args:
        stages: the plan of the pipeline. If the workflow is not a pipeline, `stages` is None, and
            `rows` is returned.
    """
    if stages is None:
        return rows
    by_name = {row["part"]: row for row in rows}
    found = []
    before: str | None = None
    for each in stages:
        name, after = each["name"], [] if before is None else [before]
        unstarted = {
            "part": name, "task": each["task"], "first_id": None, "last_id": None, "jobs": 0,
            "states": {}, "on_failed": None,
        }  # fmt: skip
        found.append(by_name.pop(name, unstarted) | {"after": after})
        before = name
    return [*found, *by_name.values()]
