"""Pass each event to the meter of the metrics, to the subscribers, and to the log.

At most `job_lines_per_s` successful attempts per second are logged individually; one line
`jobs.folded` per second counts the other successful attempts. Failures are always logged
individually.

A `Meter` counts successful attempts and claims without a dictionary of fields, because making the
dictionary would cost more than counting. job_done() and queue_claimed() are defined in this module,
because they read its state directly. This is faster.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TextIO, cast

import structlog

from taskd.config import hide_password
from taskd.core.humanize import printable, printable_json
from taskd.core.jobs.job import Job

Subscriber = Callable[[str, Mapping[str, Any]], None]


class Meter(Protocol):
    """Counts events for the metrics."""

    def done(self, job: Job, duration_s: float) -> None:
        """Count a successful attempt; called on the main loop."""

    def claimed(self, queue: str, jobs: Sequence[Job], claim_s: float) -> None:
        """Count a claim; called on the main loop.

        Args:
            claim_s: the duration of the claim in seconds.
        """

    def on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """Count an event that emit() sends; called in any thread."""


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_subscribers: list[Subscriber] = []
_meter: Meter | None = None
# Whether there are subscribers or a meter.
_watched = False
_bound: dict[str, Any] = {}
_log: Any = None
_stream: TextIO | None = None
_log_level = LEVELS["error"] + 1


def configure(
    log_format: str = "auto",
    log_level: str = "info",
    *,
    job_lines_per_s: int = 10,
    stream: TextIO | None = None,
) -> None:
    """Log events from now on; no event is logged before the first call.

    Args:
        log_format: `console` (for people), `json`, or `auto`: `console` if the stream is a
            terminal, otherwise `json`.
        log_level: the lowest level that is logged: `debug`, `info`, `warning` or `error`.
        job_lines_per_s: up to this many successful attempts per second are logged individually.
        stream: the stream to which the lines are written; by default, stderr.
    """
    global _log, _log_level, _stream  # noqa: PLW0603 - one process, one log
    stream = _stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    _log_level = LEVELS[log_level]
    _folding.lines_per_s = job_lines_per_s
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=20, sort_keys=False)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    rendering = [_for_terminals, renderer] if console else [renderer, _for_programs]
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console)
    # bind() returns a real logger. Without bind(), _log would be a lazy proxy, which costs 650 ns
    # per call, even for a line below the level.
    _log = structlog.wrap_logger(
        # WriteLogger writes each line in one call. So if several processes write to the same pipe,
        # their lines do not mix.
        structlog.WriteLogger(cast("TextIO", _Unbreakable(stream))),
        processors=[stamp, structlog.processors.add_log_level, _mask, _in_order, *rendering],
        wrapper_class=structlog.make_filtering_bound_logger(_log_level),
    ).bind(**_bound)


def bind(**fields: Any) -> None:
    """Add these fields to every later line of the log, for example the index of the process."""
    global _log  # noqa: PLW0603 - one process, one log
    _bound.update(fields)
    _log = _log if _log is None else _log.bind(**fields)


def log_stream() -> TextIO | None:
    """Return the stream to which the log is written; None if there is no log."""
    return _stream


def is_written() -> bool:
    """Return whether there is a log, as in `taskd run`."""
    return _log is not None


def level() -> int:
    """Return the lowest level that is logged, as a number of the standard module `logging`."""
    return _log_level


def is_subscribed(level: str) -> bool:
    """Return whether events of this level are logged, or there are subscribers."""
    return bool(_subscribers) or _log_level <= LEVELS[level]


def is_watched(level: str) -> bool:
    """Return whether events of this level are logged, or there are subscribers or a meter."""
    return _watched or _log_level <= LEVELS[level]


def line(level: str, text: str, fields: Mapping[str, Any]) -> None:
    """Write a line of the app or a library to the log, if its level is logged.

    The line is no event: neither the meter nor subscribers receive it. The worker, which captures
    the log lines of handlers, calls this if the app has not configured logging itself.
    """
    if _log is not None and LEVELS.get(level, LEVELS["info"]) >= _log_level:
        others = {name: value for name, value in fields.items() if name not in {"event", "level"}}
        getattr(_log, level if level in LEVELS else "info")(text, **others)


class _Unbreakable:
    """A stream that ignores errors, so that the worker continues if nothing reads its log."""

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
    """Let `meter` count every later event; with None, no further event is counted."""
    global _meter  # noqa: PLW0603 - one process, one stream
    _meter = meter
    _update_watched()


def _update_watched() -> None:
    global _watched  # noqa: PLW0603 - one process, one stream
    _watched = bool(_subscribers) or _meter is not None


def emit(name: str, level: str, /, **fields: Any) -> None:
    """Send an event to the meter, to all subscribers, and to the log if it logs this level."""
    if _meter is not None:
        _meter.on_event(name, fields)
    for subscriber in tuple(_subscribers):
        subscriber(name, fields)
    if _log is not None and LEVELS[level] >= _log_level:
        getattr(_log, level)(name, **fields)


def _in_order(_logger: Any, _method: str, event: Any) -> Any:
    """Put the fields timestamp, level and event first, for people who read the line."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return first | event


def _mask(_logger: Any, _method: str, event: Any) -> Any:
    """Mask passwords of DSNs in all text fields."""
    for key, value in event.items():
        if isinstance(value, str) and ("://" in value or "password" in value):
            event[key] = hide_password(value)
    return event


def _for_terminals(_logger: Any, _method: str, event: Any) -> Any:
    """Escape control characters, and indent all lines of a text except the first.

    So a text can neither control the terminal nor imitate a line of the log.
    """
    return {printable(name): _inert(value) for name, value in event.items()}


def _inert(value: Any) -> Any:
    text = value if isinstance(value, str) else repr(value)
    # Numbers and lists stay as they are, so that the renderer colours and quotes them.
    return value if text.isprintable() else printable(text).replace("\n", "\n    ")


def _for_programs(_logger: Any, _method: str, line: str) -> str:
    return printable_json(line)


class _Folding:
    """Allows `lines_per_s` lines between two calls of turn(), and counts the other lines.

    lets_through() is called for each successful attempt. Reading a clock would triple the cost of
    lets_through(). So turn() is called once a second instead.
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
    """Log the number of folded lines; called once a second, and when the worker ends."""
    _folding.turn()


def job_fields(job: Job | None, duration_s: float | None = None) -> dict[str, Any]:
    """Return the fields that describe a job in an event; an empty dict if `job` is None.

    Args:
        duration_s: the duration of an ended attempt. If it is given, the fields for the wait and
            the run time are added.
    """
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
    # Make the fields only for a line that is logged: a line of structlog costs 5 us, which is more
    # than many handlers take.
    if _log_level <= LEVELS["info"] and _log is not None and _folding.lets_through():
        _log.info("job.done", **job_fields(job, duration_s))


def jobs_folded(count: int) -> None:
    """`count` successful attempts were not logged individually."""
    emit("jobs.folded", "info", count=count)


def queue_claimed(queue: str, jobs: Sequence[Job], batch: int, claim_s: float) -> None:
    """A claim returned `count` jobs, of at most `batch`."""
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
