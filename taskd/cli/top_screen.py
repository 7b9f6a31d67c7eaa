"""The screen of `taskd top`: what is known, on so many lines and columns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from taskd.cli.output import cell, first_line, span
from taskd.cli.terminal import Line, Span, cells, fit
from taskd.core.top import FullLimit, Queue, Running, View

SORTS = ("due", "queued", "out", "name")
LATE_S = 60.0
# Between a beat and the next pass 5 s; a lease is one of 30 s.
BEAT_LATE_S = 15.0

HELP = (
    ("q, Ctrl-C", "quit"),
    ("up, down", "choose a queue"),
    ("Enter", "see the chosen queue alone, or all again"),
    ("Esc", "see all queues again"),
    ("s", "sort queues by the oldest due job, depth, rate out, or name"),
    ("space", "hold the screen, or let it go on"),
    ("h, ?", "this page, and back"),
)
NOTES = (
    "OLDEST DUE  how long the next job has been due; empty: nothing waits",
    "IN/s OUT/s  jobs that came and ended, of the last 10 s",
    "WAIT RUN    from the due time to the claim, and from the claim to the outcome, of the jobs",
    "            that ended within a minute and were found: 50 and 95 of a hundred took no longer",
    "attended    workers claim all the time, and nobody need ring for them",
    "ENDED/s     of a worker: estimated from its share of the ended jobs that were found",
)


class Ui(NamedTuple):
    """What somebody has chosen to see.

    Attributes:
        status: of the connection, and how it looks.
    """

    interval_s: float
    status: tuple[str, str] = ("", "")
    sort: str = SORTS[0]
    chosen: str | None = None
    only: str | None = None
    held: bool = False
    help: bool = False


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        keep: those with the least go first when there is no room; 0 stays.
        least: cells that it takes at least; one with `wide` gives up all above these when there is
            no room, and the last one takes what is left.
    """

    heading: str
    shown: Callable[[Any], str]
    keep: int = 0
    least: int = 0
    right: bool = True
    wide: bool = False
    style: Callable[[Any], str] = lambda _row: ""


def number(value: float | None) -> str:
    """A rate or a count in few cells."""
    if value is None:
        return ""
    if value == 0 or value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def short(seconds: float | None) -> str:
    """A span in few cells: `3m5s`, `47ms`."""
    if seconds is not None and 0.01 <= seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    return span(seconds).replace(" ", "")


def _name(name: str) -> Callable[[Any], str]:
    return lambda row: cell(str(getattr(row, name)))


def _number(name: str) -> Callable[[Any], str]:
    return lambda row: number(getattr(row, name))


def _span(name: str) -> Callable[[Any], str]:
    return lambda row: short(getattr(row, name))


def _count(name: str) -> Callable[[Any], str]:
    return lambda row: f"{getattr(row, name):,}"


def queue_note(queue: Queue) -> str:
    """What is odd about a queue."""
    if queue.paused:
        return cell("paused" + (f": {queue.pause_reason}" if queue.pause_reason else ""))
    if not queue.workers and queue.live():
        return "NO WORKER"
    if queue.max_running is not None and queue.running >= queue.max_running:
        return f"full: {queue.running:,} of {queue.max_running:,}"
    return "attended" if queue.attended else ""


def _queue_style(queue: Queue) -> str:
    note = queue_note(queue)
    if note == "NO WORKER":
        return "bad"
    return "odd" if queue.paused or note.startswith("full") else "dim"


def _allowed(limit: FullLimit) -> str:
    said = [
        f"{limit.concurrency:,} of a key" if limit.concurrency is not None else "",
        f"{limit.in_all:,} in all" if limit.in_all is not None else "",
        f"{number(limit.rate)}/s" if limit.rate is not None else "",
    ]
    return ", ".join(filter(None, said))


def _progress(job: Running) -> str:
    if job.done is None:
        return ""
    share = f"{job.done / job.total:.0%}" if job.total else f"{job.done:,.10g}"
    return cell(f"{share} {job.note or ''}".strip())


QUEUES = (
    Column("QUEUE", _name("queue"), least=10, right=False, wide=True),
    Column("QUEUED", _count("queued"), least=7),
    Column("RUNNING", _count("running"), keep=9),
    Column("SCHEDULED", _count("scheduled"), keep=4),
    Column("BLOCKED", _count("blocked"), keep=3),
    Column(
        "OLDEST DUE",
        _span("oldest_due_s"),
        keep=10,
        least=7,
        style=lambda row: "odd" if (row.oldest_due_s or 0) > LATE_S else "",
    ),
    Column("IN/s", _number("in_per_s"), keep=8, least=6),
    Column("OUT/s", _number("out_per_s"), keep=8, least=6),
    Column("WAIT p50", _span("wait_p50_s"), keep=1),
    Column("WAIT p95", _span("wait_p95_s"), keep=7),
    Column("RUN p50", _span("run_p50_s"), keep=2),
    Column("RUN p95", _span("run_p95_s"), keep=6),
    Column("WORKERS", _count("workers"), keep=5),
    Column("", queue_note, least=9, right=False, wide=True, style=_queue_style),
)
WORKERS = (
    Column("WORKER", lambda row: cell(f"{row.host}:{row.pid}"), least=12, right=False, wide=True),
    Column(
        "STATE",
        _name("state"),
        least=8,
        right=False,
        style=lambda row: {"live": "good", "draining": "odd"}.get(row.state, "bad"),
    ),
    Column("RUNNING", _count("running")),
    Column("ENDED/s", _number("ended_per_s"), keep=5),
    Column(
        "BEAT",
        _span("beat_ago_s"),
        keep=6,
        least=6,
        style=lambda row: "odd" if row.beat_ago_s > BEAT_LATE_S else "",
    ),
    Column("UP", _span("up_s"), keep=2, least=6),
    Column("VERSION", _name("version"), keep=1, right=False),
    Column("APP", _name("app"), keep=3, right=False),
    Column("QUEUES", lambda row: cell(",".join(row.queues)), least=8, right=False, wide=True),
)
RUNNING = (
    Column("RUNNING FOR", _span("running_s")),
    Column("JOB", _name("id"), least=6),
    Column("TASK", _name("task"), least=12, right=False, wide=True),
    Column("QUEUE", _name("queue"), least=8, right=False, wide=True),
    Column("ATTEMPT", _count("attempt"), keep=3),
    Column("WORKER", lambda row: row.worker_id, keep=2, right=False),
    Column("PROGRESS", _progress, right=False, wide=True, least=8),
)
TASKS = (
    Column("TASK, LAST MINUTE", _name("task"), least=17, right=False, wide=True),
    Column("QUEUE", _name("queue"), keep=1, right=False),
    Column("DONE", _count("done"), least=5),
    Column("FAILED", _count("failed"), style=lambda row: "bad" if row.failed else ""),
    Column("RETRIED", _count("retried"), style=lambda row: "odd" if row.retried else ""),
    Column("RUN p50", _span("run_p50_s"), keep=2),
    Column("RUN p95", _span("run_p95_s")),
    Column(
        "LAST ERROR", lambda row: cell(first_line(row.last_error)), least=26, right=False, wide=True
    ),
)
LIMITS = (
    Column("FULL LIMIT", _name("name"), least=12, right=False, wide=True),
    Column("KEY", _name("key"), least=10, right=False, wide=True),
    Column("RUNNING", _count("running")),
    Column("WAITING", _count("waiting"), style=lambda _row: "odd"),
    Column("ALLOWED", _allowed, least=10, right=False, wide=True),
)


class Section(NamedTuple):
    """A table of the screen, and what stands there when it is empty."""

    columns: Sequence[Column]
    rows: Sequence[Any]
    empty: str


def screen(view: View | None, ui: Ui, width: int, height: int) -> list[Line]:
    """All lines, from the first to the last one of the screen."""
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
    """As somebody wants them."""
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
        at = datetime.fromtimestamp(view.now_s).astimezone().strftime("%H:%M:%S")
    status, style = ui.status
    room = width - cells(title) - cells(at) - 4
    middle = fit(("held  " if ui.held else "") + cell(status), max(room, 0), right=True)
    head: list[Line] = [[(title, "head"), ("  ", ""), (middle, style), ("  " + at, "")]]
    if view is not None:
        head.append(_totals(view, width))
    return head


def _totals(view: View, width: int) -> Line:
    """What there is in all; what matters least is left out where there is no room."""
    counts = {
        name: sum(getattr(each, name) for each in view.queues)
        for name in ("queued", "running", "scheduled", "blocked")
    }
    failed = sum(each.failed for each in view.tasks)
    retried = sum(each.retried for each in view.tasks)
    said: list[Span] = [(f"{jobs:,} {name}", "") for name, jobs in counts.items() if jobs]
    said = said or [("no jobs", "")]
    said.append((f"in {number(view.in_per_s) or '-'}/s", ""))
    said.append((f"out {number(view.out_per_s) or '-'}/s", ""))
    said.append((f"{failed:,} failed", "bad" if failed else ""))
    said.append((f"{retried:,} retried in 1m", "odd" if retried else ""))
    for name in (" blocked", " scheduled"):
        if sum(cells(text) + 2 for text, _ in said) - 2 > width:
            said = [each for each in said if not each[0].endswith(name)]
    return [span_ for each in said for span_ in (each, ("  ", ""))]


def _foot(ui: Ui, width: int) -> Line:
    said = "q quit  h help  " + ("space go on" if ui.held else "space hold")
    said += f"  s sort: {ui.sort}  Enter " + ("all queues" if ui.only else "one queue")
    every = f"every {span(ui.interval_s)} "
    return [(fit(" " + said, width - cells(every)) + every, "bar")]


def _help() -> list[Line]:
    lines: list[Line] = [[]]
    lines += [[("  " + fit(key, 12), "head"), (what, "")] for key, what in HELP]
    return [*lines, [], *([("  " + note, "dim")] for note in NOTES)]


def _body(view: View, ui: Ui, width: int, room: int) -> list[Line]:
    queues = sorted_queues(view, ui.sort)
    start = "taskd run" + (f" --queue {ui.only}" if ui.only else "")
    sections = [
        Section(QUEUES, queues, "no queue: no job waits and no worker serves one"),
        Section(WORKERS, view.workers, f"no live worker: start one with `{start}`"),
        Section(RUNNING, _named(view), "nothing runs"),
        Section(TASKS, view.tasks, "nothing has ended within the last minute"),
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
    """Running jobs, their workers by host and pid."""
    from msgspec.structs import replace

    names = {each.id: cell(f"{each.host}:{each.pid}") for each in view.workers}
    return [
        replace(each, worker_id=names.get(each.worker_id, each.worker_id)) for each in view.running
    ]


def _shares(sections: Sequence[Section], room: int) -> list[int]:
    """Rows for each section beside its heading; what one does not need another one gets."""
    wanted = [max(len(each.rows), 1) for each in sections]
    shares = [0] * len(sections)
    left = room
    for number_, _ in enumerate(sections):
        if left >= 2:
            shares[number_], left = 1, left - 2
    while left > 0 and (short_ := [n for n, want in enumerate(wanted) if 0 < shares[n] < want]):
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
        told = f" {len(rows):,} of {len(section.rows):,}"
        head = fit(head, width - cells(told)) + told
    lines: list[Line] = [[(fit(head, width), "head")]]
    for row in rows:
        spans: list[Span] = []
        for each, size in zip(columns, widths, strict=True):
            spans.append((fit(each.shown(row), size, right=each.right), each.style(row)))
            spans.append((" ", ""))
        if isinstance(row, Queue) and row.queue == chosen:
            spans = [(fit("".join(text for text, _ in spans), width), "chosen")]
        lines.append(spans)
    if not rows and section.empty:
        lines.append([(section.empty, "dim")])
    return lines


def _window(rows: Sequence[Any], room: int, chosen: str | None) -> Sequence[Any]:
    """So many rows, the chosen one among them."""
    at = next(
        (n for n, row in enumerate(rows) if isinstance(row, Queue) and row.queue == chosen), 0
    )
    start = max(0, at - room + 1)
    return rows[start : start + room]


def _widths(section: Section, rows: Sequence[Any], width: int) -> tuple[list[Column], list[int]]:
    """The columns for which there is room, and how wide each is."""
    columns = list(section.columns)

    def natural(column: Column) -> int:
        shown = [cells(column.shown(row)) for row in rows]
        return max([cells(column.heading), column.least, *shown])

    def least(column: Column) -> int:
        return max(column.least, cells(column.heading)) if column.wide else natural(column)

    while sum(map(least, columns)) + len(columns) - 1 > width:
        going = [each for each in columns if each.keep]
        if not going:
            break
        columns.remove(min(going, key=lambda each: each.keep))
    sizes = [least(each) for each in columns]
    left = width - sum(sizes) - len(columns) + 1
    # A cell for each that wants one, again and again: no long name takes the room of an error.
    wanted = [natural(each) for each in columns]
    while left > 0 and (growing := [n for n, size in enumerate(sizes) if size < wanted[n]]):
        for each in growing[:left]:
            sizes[each] += 1
            left -= 1
    return columns, sizes
