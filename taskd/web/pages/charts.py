"""Charts. A template draws their shapes as SVG, in a box of any width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from taskd.core.humanize import span

Row = dict[str, Any]
WIDTH, HEIGHT = 600.0, 120.0
GAP = 1.5
# Durations that are easy to read, for the top of an axis.
SPANS_S = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300),
    *(600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800),
)


@dataclass(frozen=True, slots=True)
class Bar:
    """A segment of a bar.

    Attributes:
        kind: `done`, `failed` or `cancelled`.
        tooltip: the text of the bar's tooltip.
    """

    kind: str
    x: float
    y: float
    width: float
    height: float
    tooltip: str


@dataclass(frozen=True, slots=True)
class Line:
    """A line through the steps, with gaps where no job finished."""

    kind: str
    path: str
    dots: list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Chart:
    """How many jobs have finished recently, and how long they waited and ran.

    Attributes:
        window_s: the covered time.
        asked_s: the requested time.
        bars_top, lines_top: the values at the upper edges of the charts.
        marks: times below the axis, from the left to the right edge.
        latest: p50 and p95 of the wait and run times of the last steps; None if no job finished.
    """

    since: datetime
    until: datetime
    window_s: float
    asked_s: float
    step_s: float
    done: int
    failed: int
    cancelled: int
    per_s: float
    bars: list[Bar]
    bars_top: str
    lines: list[Line]
    lines_top: str
    marks: list[datetime]
    tooltip: str
    latest: dict[str, float | None]

    @property
    def empty(self) -> bool:
        """Return whether no job finished."""
        return not (self.done or self.failed or self.cancelled)

    @property
    def shortened(self) -> bool:
        """Return whether the chart covers less than the requested time, as too many jobs ended."""
        return self.window_s < self.asked_s * 0.98


def chart(rows: Sequence[Row], steps: int, asked_s: float) -> Chart:
    """Return the chart of these rows of store/reading/dashboard.finished_recently."""
    since, until = rows[0]["since"], rows[0]["until"]
    window_s = max((until - since).total_seconds(), 0.001)
    by_step = {row["step"]: row for row in rows if row["step"] is not None}
    counts = {kind: sum(row[kind] for row in by_step.values()) for kind in KINDS}
    step_s = window_s / steps
    most = max((sum(row[kind] for kind in KINDS) for row in by_step.values()), default=0)
    top = _round_up(most)
    lines, lines_top = _lines(by_step, steps)
    tooltip = ", ".join(f"{number:,} {kind}" for kind, number in counts.items() if number)
    return Chart(
        since=since,
        until=until,
        window_s=window_s,
        asked_s=asked_s,
        step_s=step_s,
        done=counts["done"],
        failed=counts["failed"],
        cancelled=counts["cancelled"],
        per_s=sum(counts.values()) / window_s,
        bars=_bars(by_step, steps, top, since, step_s),
        bars_top=f"{top:,}",
        lines=lines,
        lines_top=span(lines_top),
        marks=[since + timedelta(seconds=window_s * part / 4) for part in range(5)],
        tooltip=f"{tooltip or 'no job finished'} in {span(window_s)}",
        latest=_latest(by_step),
    )


KINDS = ("done", "failed", "cancelled")
LINES = (("wait-p50", "wait_s", 0), ("wait-p95", "wait_s", 1), ("run-p95", "run_s", 1))


def _bars(
    by_step: dict[int, Row], steps: int, top: int, since: datetime, step_s: float
) -> list[Bar]:
    bars = []
    width = WIDTH / steps
    for step, row in sorted(by_step.items()):
        at = (since + timedelta(seconds=step * step_s)).strftime("%H:%M:%S")
        parts = ", ".join(f"{row[kind]:,} {kind}" for kind in KINDS if row[kind])
        tooltip, y = f"{at} UTC, {span(step_s)}: {parts}", HEIGHT
        # Failures are at the bottom, where they are easy to compare.
        for kind in ("failed", "cancelled", "done"):
            if row[kind]:
                # A non-zero value is always visible, however small.
                height = max(row[kind] / top * HEIGHT, 1.5)
                y -= height
                box = (round(step * width + GAP / 2, 2), round(y, 2), round(width - GAP, 2))
                bars.append(Bar(kind, *box, round(height, 2), tooltip))
    return bars


def _lines(by_step: dict[int, Row], steps: int) -> tuple[list[Line], float]:
    most = max(
        (row[name][index] for row in by_step.values() for _, name, index in LINES if row[name]),
        default=0.0,
    )
    top = next((each for each in SPANS_S if each >= most), most)
    return [_line(by_step, steps, top, *each) for each in LINES], top


def _line(
    by_step: dict[int, Row], steps: int, top: float, kind: str, name: str, index: int
) -> Line:
    words, dots, pen_down = [], [], False
    for step in range(steps):
        row = by_step.get(step)
        values = row[name] if row else None
        if not values or values[index] is None:
            pen_down = False
            continue
        x = round((step + 0.5) * WIDTH / steps, 2)
        y = round(HEIGHT - values[index] / top * HEIGHT, 2)
        words.append(f"{'L' if pen_down else 'M'}{x} {y}")
        alone = not pen_down and not (by_step.get(step + 1) or {}).get(name)
        if alone:
            dots.append((x, y))
        pen_down = True
    return Line(kind, " ".join(words), dots)


def _latest(by_step: dict[int, Row]) -> dict[str, float | None]:
    """Return the median of each percentile over the last quarter of steps with finished jobs."""
    found: dict[str, float | None] = {}
    for name in ("wait_s", "run_s"):
        tooltip = [row[name] for _, row in sorted(by_step.items()) if row[name]]
        last = tooltip[-max(1, len(tooltip) // 4) :]
        for index, word in enumerate(("p50", "p95")):
            values = sorted(each[index] for each in last if each[index] is not None)
            key = f"{name[:-2]}_{word}"
            found[key] = values[len(values) // 2] if values else None
    return found


def _round_up(number: int) -> int:
    """Return the next number of 1, 2, 5, 10, 20, 50 ..., which is easy to read on an axis."""
    if number <= 1:
        return 1
    size = int(10 ** int(math.log10(number)))
    return next(top for top in (size, 2 * size, 5 * size, 10 * size) if top >= number)
