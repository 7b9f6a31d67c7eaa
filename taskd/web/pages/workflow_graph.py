"""The graph of a workflow: boxes in columns, each to the right of the boxes that it waits for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from taskd.core.workflows.tree import STATES, state_counts

# The size of a box, and the gaps between boxes.
WIDTH, HEIGHT, RIGHT, BELOW = 172, 46, 44, 16
PARTS_MAX = 200
EDGES_MAX = 2000


@dataclass(frozen=True, slots=True)
class Box:
    """A part of the workflow; `state` is the most important state of its jobs."""

    name: str
    state: str
    state_counts: str
    jobs: int
    first_id: int | None
    x: int
    y: int


@dataclass(frozen=True, slots=True)
class Graph:
    """The boxes, the paths of the lines between them, and the total size."""

    boxes: list[Box]
    edges: list[str]
    width: int
    height: int
    left_out: int


def graph(parts: Sequence[Mapping[str, Any]]) -> Graph:
    """Return the graph of these sorted parts: each part comes after the parts it waits for."""
    drawn = parts[:PARTS_MAX]
    column: dict[str, int] = {}
    for part in drawn:
        behind = [column[name] for name in part["after"] if name in column]
        column[part["part"]] = max(behind, default=-1) + 1
    rows: dict[int, int] = {}
    boxes: dict[str, Box] = {}
    for part in drawn:
        name = part["part"]
        column_index = column[name]
        row = rows.get(column_index, 0)
        rows[column_index] = row + 1
        x, y = column_index * (WIDTH + RIGHT), row * (HEIGHT + BELOW)
        states = part["states"]
        # STATES begins with the most important state. A part that has not started has no state.
        state = next((each for each in STATES if states.get(each)), "planned")
        jobs = sum(states.values())
        boxes[name] = Box(name, state, state_counts(states), jobs, part["first_id"], x, y)
    edges = [
        _edge(boxes[parent], boxes[part["part"]])
        for part in drawn
        for parent in part["after"]
        if parent in boxes
    ]
    width = max((box.x for box in boxes.values()), default=0) + WIDTH
    height = max((box.y for box in boxes.values()), default=0) + HEIGHT
    return Graph(list(boxes.values()), edges[:EDGES_MAX], width, height, len(parts) - len(drawn))


def _edge(parent: Box, child: Box) -> str:
    x, y = parent.x + WIDTH, parent.y + HEIGHT // 2
    to_x, to_y = child.x, child.y + HEIGHT // 2
    middle = to_x - RIGHT // 2
    return f"M{x} {y} C{x + RIGHT // 2} {y} {middle} {to_y} {to_x} {to_y}"
