"""The screen of `taskd top`, for a given number of lines and columns.

tables.py defines the columns of the tables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from taskd.cli import typed
from taskd.cli.shared.output import cell, span
from taskd.cli.shared.terminal import Line, Span, cells, fit
from taskd.cli.top.tables import LIMITS, QUEUES, RUNNING, TASKS, WORKERS, Column, number
from taskd.core.humanize import clock, worker_label, zone
from taskd.core.watching.top import Queue, Running, View

SORTS = ("due", "queued", "out", "name")

HELP = (
    ("q, Ctrl-C", "quit"),
    ("up, down", "choose a queue"),
    ("Enter", "show only the chosen queue, or all queues again"),
    ("Esc", "show all queues again"),
    ("s", "sort queues by the oldest due job, depth, rate out, or name"),
    ("space", "hold the screen, or continue"),
    ("h, ?", "show this page, or go back"),
)
NOTES = (
    "OLDEST DUE  how long the oldest due job has been due; empty: no job is due",
    "IN/s OUT/s  jobs enqueued and jobs ended per second, in the last 10 s",
    "WAIT RUN    from the due time to the claim, and from the claim to the outcome;",
    "            p50, p95: percentiles of a sample of jobs ended in the last minute",
    "polled      workers poll the queue continuously; producers send no NOTIFY",
    "ENDED/s     OUT/s of all queues, times the worker's share of the sampled jobs",
)


class Ui(NamedTuple):
    """The choices of the user.

    Attributes:
        status: the state of the connection, and its style.
        sort: one of SORTS.
        chosen: the highlighted queue.
        only: the only queue that the screen shows; None to show all queues.
        held: whether the screen is held, and shows no new results.
        help: whether the help page is shown.
    """

    interval_s: float
    status: tuple[str, str] = ("", "")
    sort: str = SORTS[0]
    chosen: str | None = None
    only: str | None = None
    held: bool = False
    help: bool = False


class Section(NamedTuple):
    """A table of the screen, and the text to show if the table has no rows."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    empty: str


def screen(view: View | None, ui: Ui, width: int, height: int) -> list[Line]:
    """Return all lines of the screen."""
    lines = _head(view, ui, width)
    foot: Line = _foot(ui, width)
    room = max(height - len(lines) - 1, 0)
    if ui.help:
        body = _help()
    elif view is None:
        body = [[("waiting for the database ...", "dim")]]
    else:
        body = _body(view, ui, width, room)
    body = body[:room]
    body += [[]] * (room - len(body))
    return [*lines, *body, foot][:height]


def sorted_queues(view: View, sort: str) -> list[Queue]:
    """Return the queues in the chosen order."""
    keys: dict[str, Callable[[Queue], Any]] = {
        "due": lambda row: (-(row.oldest_due_s or -1.0), row.queue),
        "queued": lambda row: (-row.queued, row.queue),
        "out": lambda row: (-(row.out_per_s or 0.0), row.queue),
        "name": lambda row: row.queue,
    }
    return sorted(view.queues, key=keys[sort])


def _head(view: View | None, ui: Ui, width: int) -> list[Line]:
    title = "taskd top" + (f"  queue {ui.only}" if ui.only else "")
    at = ""
    if view is not None:
        now = datetime.fromtimestamp(view.now_s, UTC)
        at = clock(now)[:8] + zone(now)
    status, style = ui.status
    room = width - cells(title) - cells(at) - 4
    middle = fit(("held  " if ui.held else "") + cell(status), max(room, 0), right=True)
    head: list[Line] = [[(title, "head"), ("  ", ""), (middle, style), ("  " + at, "")]]
    if view is not None:
        head.append(_totals(view, width))
    return head


def _totals(view: View, width: int) -> Line:
    """Return the line of totals; on a narrow screen, without jobs that need no worker now."""
    counts = {
        name: sum(getattr(each, name) for each in view.queues)
        for name in ("queued", "running", "scheduled", "retrying", "blocked")
    }
    failed = sum(each.failed for each in view.tasks)
    retried = sum(each.retried for each in view.tasks)
    spans: list[Span] = [(f"{jobs:,} {name}", "") for name, jobs in counts.items() if jobs]
    spans = spans or [("no jobs", "")]
    spans.append((f"in {number(view.in_per_s) or '-'}/s", ""))
    spans.append((f"out {number(view.out_per_s) or '-'}/s", ""))
    spans.append((f"{failed:,} failed", "bad" if failed else ""))
    spans.append((f"{retried:,} retried in 1m", "odd" if retried else ""))
    for name in (" blocked", " scheduled", " retrying"):
        if sum(cells(text) + 2 for text, _ in spans) - 2 > width:
            spans = [each for each in spans if not each[0].endswith(name)]
    return [span_ for each in spans for span_ in (each, ("  ", ""))]


def _foot(ui: Ui, width: int) -> Line:
    spans = "q quit  h help  " + ("space go on" if ui.held else "space hold")
    spans += f"  s sort: {ui.sort}  Enter " + ("all queues" if ui.only else "one queue")
    every = f"every {span(ui.interval_s)} "
    return [(fit(" " + spans, width - cells(every)) + every, "bar")]


def _help() -> list[Line]:
    lines: list[Line] = [[]]
    lines += [[("  " + fit(key, 12), "head"), (what, "")] for key, what in HELP]
    return [*lines, [], *([("  " + note, "dim")] for note in NOTES)]


def _body(view: View, ui: Ui, width: int, room: int) -> list[Line]:
    queues = sorted_queues(view, ui.sort)
    start = typed("taskd run" + (f" --queue {ui.only}" if ui.only else ""))
    sections = [
        Section(QUEUES, queues, "no queue: no job waits, and no worker serves a queue"),
        Section(WORKERS, view.workers, f"no live worker. Start one: `{start}`"),
        Section(RUNNING, _named(view), "nothing runs"),
        Section(TASKS, view.tasks, "no job has ended within the last minute"),
    ]
    if view.limits:
        sections.append(Section(LIMITS, view.limits, ""))
    shares = _shares(sections, room)
    spare = room - sum(rows + 1 for rows in shares if rows)
    lines: list[Line] = []
    for section, rows in zip(sections, shares, strict=True):
        if rows > 0:
            if lines and spare >= len(sections):
                lines.append([])
            lines += _table(section, rows, width, ui.chosen)
    return lines


def _named(view: View) -> list[Running]:
    """Return the running jobs, with the host and the pid of the worker in place of its id."""
    from msgspec.structs import replace

    names = {each.id: cell(worker_label(each.host, each.pid, each.name)) for each in view.workers}
    return [
        replace(each, worker_id=names.get(each.worker_id, each.worker_id)) for each in view.running
    ]


def _shares(sections: Sequence[Section], room: int) -> list[int]:
    """Return the number of rows for each section; unneeded rows go to other sections."""
    wanted_sizes = [max(len(each.rows), 1) for each in sections]
    shares = [0] * len(sections)
    left = room
    for number_, _ in enumerate(sections):
        if left >= 2:
            shares[number_], left = 1, left - 2
    while left > 0 and (
        short_ := [n for n, want in enumerate(wanted_sizes) if 0 < shares[n] < want]
    ):
        for each in short_[:left]:
            shares[each] += 1
            left -= 1
    return shares


def _table(section: Section, room: int, width: int, chosen: str | None) -> list[Line]:
    rows = _window(section.rows, room, chosen)
    columns, widths = _widths(section, rows, width)
    more = len(section.rows) - len(rows)
    head = " ".join(
        fit(each.heading, size, right=each.right)
        for each, size in zip(columns, widths, strict=True)
    )
    if more:
        of_all = f" {len(rows):,} of {len(section.rows):,}"
        head = fit(head, width - cells(of_all)) + of_all
    lines: list[Line] = [[(fit(head, width), "head")]]
    for row in rows:
        spans: list[Span] = []
        for each, size in zip(columns, widths, strict=True):
            spans.append((fit(each.text(row), size, right=each.right), each.style(row)))
            spans.append((" ", ""))
        if isinstance(row, Queue) and row.queue == chosen:
            spans = [(fit("".join(text for text, _ in spans), width), "chosen")]
        lines.append(spans)
    if not rows and section.empty:
        lines.append([(section.empty, "dim")])
    return lines


def _window(rows: Sequence[Any], room: int, chosen: str | None) -> Sequence[Any]:
    """Return `room` rows that include the chosen one."""
    at = next(
        (n for n, row in enumerate(rows) if isinstance(row, Queue) and row.queue == chosen), 0
    )
    start = max(0, at - room + 1)
    return rows[start : start + room]


def _widths(section: Section, rows: Sequence[Any], width: int) -> tuple[list[Column], list[int]]:
    """Return the columns that fit, and their widths."""
    columns = list(section.columns)

    def natural(column: Column) -> int:
        texts = [cells(column.text(row)) for row in rows]
        return max([cells(column.heading), column.least, *texts])

    def least(column: Column) -> int:
        return max(column.least, cells(column.heading)) if column.wide else natural(column)

    while sum(map(least, columns)) + len(columns) - 1 > width:
        going = [each for each in columns if each.keep]
        if not going:
            break
        columns.remove(min(going, key=lambda each: each.keep))
    sizes = [least(each) for each in columns]
    left = width - sum(sizes) - len(columns) + 1
    # Columns that need more cells get one cell each in turn. Otherwise, a long name could take all
    # the cells that an error needs.
    wanted_sizes = [natural(each) for each in columns]
    while left > 0 and (growing := [n for n, size in enumerate(sizes) if size < wanted_sizes[n]]):
        for each in growing[:left]:
            sizes[each] += 1
            left -= 1
    return columns, sizes
