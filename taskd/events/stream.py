"""The stream of events: the log, its format, subscribers, and the meter of the metrics.

At most `job_lines_per_s` successful attempts per second are logged individually; one `jobs.folded`
line counts the others. Failures are always logged individually.

The metrics are no subscriber, but use a `Meter`: making a dictionary for each ended attempt costs
more than counting the attempt. `job_done` and `queue_claimed` are in this module for speed: they
read its state directly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO, cast

import structlog

from taskd.config import hide_password
from taskd.core.jobs.job import Job

Subscriber = Callable[[str, Mapping[str, Any]], None]


class Meter(Protocol):
    """Counts events for the metrics."""

    def done(self, job: Job, duration_s: float) -> None:
        """Count an attempt that ended successfully."""

    def claimed(self, queue: str, jobs: Sequence[Job], claim_s: float) -> None:
        """Count a batch of claimed jobs."""

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Count any other event; any thread can call this."""


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_subscribers: list[Subscriber] = []
_meter: Meter | None = None
# Whether there are subscribers or a meter; frequent events check only this variable.
_watched = False
_bound: dict[str, Any] = {}
_log: Any = None
_log_level = LEVELS["error"] + 1


def configure(
    log_format: str = "auto",
    log_level: str = "info",
    *,
    job_lines_per_s: int = 10,
    stream: TextIO | None = None,
) -> None:
    """Write events to a stream, by default stderr.

    Args:
        log_format: `console` (for people), `json`, or `auto`: `console` if the stream is a
            terminal, `json` otherwise.
        log_level: `debug`, `info`, `warning` or `error`.
        job_lines_per_s: the most successes per second that are logged individually.
    """
    global _log, _log_level  # noqa: PLW0603 - one process, one log
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    _log_level = LEVELS[log_level]
    _folding.lines_per_s = job_lines_per_s
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=20, sort_keys=False)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console)
    # Keep the bound logger: structlog's lazy proxy costs 650 ns per call, also below the level.
    _log = structlog.wrap_logger(
        # WriteLogger writes a line at once, so lines of several processes on a pipe do not mix.
        structlog.WriteLogger(cast("TextIO", _Unbreakable(stream))),
        processors=[stamp, structlog.processors.add_log_level, _mask, _in_order, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_log_level),
    ).bind(**_bound)


def bind(**fields: Any) -> None:
    """Add these fields to every later line, for example the number of the process."""
    global _log  # noqa: PLW0603 - one process, one log
    _bound.update(fields)
    _log = _log if _log is None else _log.bind(**fields)


def is_written() -> bool:
    """Return whether events are written to a stream, as in `taskd run`."""
    return _log is not None


def level() -> int:
    """Return the lowest level that is written, as a number of the module logging."""
    return _log_level


def is_subscribed(level: str) -> bool:
    """Return whether an event of this level is written, or has subscribers."""
    return bool(_subscribers) or _log_level <= LEVELS[level]


def is_watched(level: str) -> bool:
    """Return whether an event of this level is written, or has subscribers or a meter."""
    return _watched or _log_level <= LEVELS[level]


def line(level: str, text: str, fields: Mapping[str, Any]) -> None:
    """Write a line of a handler or a library that configured no log; it is not an event."""
    if _log is not None and LEVELS.get(level, LEVELS["info"]) >= _log_level:
        others = {name: value for name, value in fields.items() if name not in {"event", "level"}}
        getattr(_log, level if level in LEVELS else "info")(text, **others)


class _Unbreakable:
    """A stream that ignores errors: if its reader has gone away, the work must go on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call `subscriber(name, fields)` for every later event; return a function that stops this."""

    def end() -> None:
        _subscribers.remove(subscriber)
        _update_watched()

    _subscribers.append(subscriber)
    _update_watched()
    return end


def measure(meter: Meter | None) -> None:
    """Let `meter` count every later event; None: count no events."""
    global _meter  # noqa: PLW0603 - one process, one stream
    _meter = meter
    _update_watched()


def _update_watched() -> None:
    global _watched  # noqa: PLW0603 - one process, one stream
    _watched = bool(_subscribers) or _meter is not None


def emit(name: str, level: str, /, **fields: Any) -> None:
    """Send an event to the meter, the subscribers and the log."""
    if _meter is not None:
        _meter.on_event(name, fields)
    for subscriber in tuple(_subscribers):
        subscriber(name, fields)
    if _log is not None and LEVELS[level] >= _log_level:
        getattr(_log, level)(name, **fields)


def _in_order(_logger: Any, _method: str, event: Any) -> Any:
    """Put time, level and event first: people read a line from the left."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return first | event


def _mask(_logger: Any, _method: str, event: Any) -> Any:
    """Mask passwords in every field, also in the texts of errors."""
    for key, value in event.items():
        if isinstance(value, str) and ("://" in value or "password" in value):
            event[key] = hide_password(value)
    return event


class _Folding:
    """Allows a limited number of lines between two calls of turn(), and counts the others.

    lets_through() is called for each success. It reads no clock, which would triple its cost.
    """

    def __init__(self) -> None:
        self.lines_per_s = 10
        self.lines = 0
        self.folded = 0

    def lets_through(self) -> bool:
        if self.lines < self.lines_per_s:
            self.lines += 1
            return True
        self.folded += 1
        return False

    def turn(self) -> None:
        folded, self.folded, self.lines = self.folded, 0, 0
        if folded:
            jobs_folded(folded)


_folding = _Folding()


def turn_second() -> None:
    """Log the number of folded successes; called once a second, and when the worker ends."""
    _folding.turn()


def job_fields(job: Job | None, duration_s: float | None = None) -> dict[str, Any]:
    """Return the fields of a job; for an ended attempt, also its times in milliseconds."""
    if job is None:
        return {}
    fields = {"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt}
    if duration_s is not None:
        fields["wait_ms"] = round(job.wait_s * 1000, 1)
        fields["duration_ms"] = round(duration_s * 1000, 1)
    return fields


def job_done(job: Job, duration_s: float) -> None:
    """An attempt ended successfully."""
    if _watched:
        if _meter is not None:
            _meter.done(job, duration_s)
        if _subscribers:
            fields = job_fields(job, duration_s)
            for subscriber in tuple(_subscribers):
                subscriber("job.done", fields)
    # Check first whether the line is written: a line of structlog costs 5 us, a small handler 0.3.
    if _log_level <= LEVELS["info"] and _log is not None and _folding.lets_through():
        _log.info("job.done", **job_fields(job, duration_s))


def jobs_folded(count: int) -> None:
    """`count` successful attempts were not logged individually."""
    emit("jobs.folded", "info", count=count)


def queue_claimed(queue: str, jobs: Sequence[Job], batch: int, claim_s: float) -> None:
    """A batch of jobs was claimed."""
    if _meter is not None:
        _meter.claimed(queue, jobs, claim_s)
    if is_subscribed("debug"):
        emit(
            "queue.claimed",
            "debug",
            queue=queue,
            count=len(jobs),
            batch=batch,
            claim_ms=round(claim_s * 1000, 2),
        )
