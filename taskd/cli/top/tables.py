"""The columns of the tables of `taskd top`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from taskd.cli.shared.output import cell, first_line, span
from taskd.core.humanize import worker_label
from taskd.core.watching.top import FullLimit, Queue, Running, Worker

LATE_S = 60.0


class Column(NamedTuple):
    """A column of a table.

    Attributes:
        keep: on a narrow screen, the column with the lowest `keep` is dropped first. A column with
            `keep` 0 is never dropped.
        least: the minimum width in characters.
        wide: whether the texts of the column are cut on a narrow screen.
    """

    heading: str
    text: Callable[[Any], str]
    keep: int = 0
    least: int = 0
    right: bool = True
    wide: bool = False
    style: Callable[[Any], str] = lambda _row: ""


def number(value: float | None) -> str:
    """Return a rate or a count in few characters."""
    if value is None:
        return ""
    if value == 0 or value >= 99.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def short(seconds: float | None) -> str:
    """Return a duration in few characters: `3m5s`, `47ms`."""
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
    """Return a note about a queue."""
    if queue.paused:
        return cell("paused" + (f": {queue.pause_reason}" if queue.pause_reason else ""))
    if not queue.workers and queue.live():
        return "NO WORKER"
    if queue.max_running is not None and queue.running >= queue.max_running:
        return f"full: {queue.running:,} of {queue.max_running:,}"
    return "polled" if queue.polled else ""


def _queue_style(queue: Queue) -> str:
    note = queue_note(queue)
    if note == "NO WORKER":
        return "bad"
    return "odd" if queue.paused or note.startswith("full") else "dim"


def _allowed(limit: FullLimit) -> str:
    parts = [
        f"{limit.concurrency:,} per key" if limit.concurrency is not None else "",
        f"{limit.in_all:,} in all" if limit.in_all is not None else "",
        f"{number(limit.rate)}/s" if limit.rate is not None else "",
    ]
    return ", ".join(filter(None, parts))


def _progress(job: Running) -> str:
    if job.done is None:
        return ""
    share = f"{job.done / job.total:.0%}" if job.total else f"{job.done:,.10g}"
    return cell(f"{share} {job.note or ''}".strip())


def _worker(worker: Worker) -> str:
    return cell(worker_label(worker.host, worker.pid, worker.name))


QUEUES = (
    Column("QUEUE", _name("queue"), least=10, right=False, wide=True),
    Column("QUEUED", _count("queued"), least=7),
    Column("RUNNING", _count("running"), keep=9),
    Column("SCHEDULED", _count("scheduled"), keep=4),
    Column("RETRYING", _count("retrying"), keep=4),
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
    Column("WORKER", _worker, least=12, right=False, wide=True),
    Column(
        "STATE",
        _name("state"),
        least=8,
        right=False,
        style=lambda row: {"live": "good", "late": "odd", "draining": "odd"}.get(row.state, "bad"),
    ),
    Column("RUNNING", _count("running")),
    Column("ENDED/s", _number("ended_per_s"), keep=5),
    Column(
        "RENEWED",
        _span("renewed_ago_s"),
        keep=6,
        least=6,
        style=lambda row: "odd" if row.state == "late" else "",
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
