"""Capture the log lines of handlers: add the job to each line, and pass lines to the log writer.

The job is looked up when a line is logged. Binding the job when an attempt starts would slow down
handlers that never log. In the thread of the event loop, the loop monitor knows the job whose
handler runs. A thread of a pool receives the job with each call. So lines of structlog and of the
standard library have `job_id`, `task`, `queue` and `attempt`, however the app has configured
logging. If taskd writes a log and the app has not configured structlog, taskd writes structlog's
lines in the format of its own log. If the root logger has no handler, taskd writes the lines of the
root logger in the same way.

Lines from threads that a handler starts itself, and from callbacks such as those of
loop.call_later(), have no job.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import structlog

from taskd import events
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import LogEvent

LEVELS = {"critical": "error", "fatal": "error", "exception": "error", "warn": "warning"}
# The attribute that marks a record whose job was already added.
MARK = "_taskd_seen"
BOUND = ("job_id", "task", "queue", "attempt", "batch_jobs", "batch_job_ids")
# A log line of a batch names at most this many job ids.
NAMED_MAX = 20
# Attributes that every record of the standard library has; others come from the logging call.
PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", MARK}
UNLOGGED = PLAIN.union(BOUND)

_here = threading.local()


class LineSink(Protocol):
    """Receives the log lines of handlers."""

    def line(self, job: Job, line: LogEvent) -> None:
        """Receive a line of a handler, in the thread that logged the line."""


@contextmanager
def on_behalf_of(job: Job | None) -> Iterator[None]:
    """Set the job of the lines that this thread logs during the block."""
    before = getattr(_here, "job", None)
    _here.job = job
    try:
        yield
    finally:
        _here.job = before


def _run_for(job: Job | None, call: Callable[..., Any], args: Any, options: Any) -> Any:
    with on_behalf_of(job):
        return call(*args, **options)


class JobThreads(ThreadPoolExecutor):
    """A thread pool in which each call logs lines for the job of the code that submitted the call.

    Args:
        whose: returns the job for which the thread that calls submit() works.
        threads: the maximum number of threads; None for the default of ThreadPoolExecutor.
        name: the prefix of the threads' names.
    """

    def __init__(self, whose: Callable[[], Job | None], threads: int | None, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self._whose = whose

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a call, as ThreadPoolExecutor does."""
        return super().submit(_run_for, self._whose(), fn, args, kwargs)


class LogCapture:
    """Adds the job to every line of a handler, from install() to remove().

    Args:
        whose: returns the job for which the calling thread works, if the thread belongs to no pool.
        keeps: receives the lines that have a job; with None, no lines are stored.
        hides: returns the function that redacts a job's arguments in lines that taskd writes, or
            None if the task redacts nothing.
        together: maps the id of the first job of each running batch to all jobs of the batch. Lines
            that the batch logs belong to its first job.
    """

    def __init__(
        self,
        whose: Callable[[], Job | None],
        keeps: LineSink | None = None,
        hides: Callable[[Job], Callable[[str], str] | None] = lambda _: None,
        together: Mapping[int, Sequence[Job]] | None = None,
    ) -> None:
        self._whose, self._writer, self._hides = whose, keeps, hides
        self._together = {} if together is None else together
        self._filter = _Filter(self)
        self._filtered: list[logging.Handler] = []
        self._own: logging.Handler | None = None
        self._adopted = False
        self._root_level = logging.root.level

    def job(self) -> Job | None:
        """Return the job for which this thread works now, or None."""
        return getattr(_here, "job", None) or self._whose()

    def install(self) -> None:
        """Install the capture in structlog and in the handlers that the app has configured so far.

        If the app has not configured structlog, let taskd write the lines of structlog. If the root
        logger has no handler, let taskd write the lines of the root logger.
        """
        if events.is_written() and not structlog.is_configured():
            structlog.configure(processors=[self._to_events], wrapper_class=_filtering())
            self._adopted = True
        if not isinstance(structlog.get_config()["processors"], list):
            structlog.configure(processors=[*structlog.get_config()["processors"]])
        # Change the list itself: a logger that was used before has cached the list.
        structlog.get_config()["processors"].insert(0, self._processor)
        root = logging.root
        if not root.handlers and (events.is_written() or self._writer is not None):
            self._own = _ToEvents(self._write) if events.is_written() else logging.NullHandler()
            root.addHandler(self._own)
            if events.is_written():
                self._root_level = root.level
                root.setLevel(events.level())
        for logger in (root, *root.manager.loggerDict.values()):
            for handler in getattr(logger, "handlers", ()):
                handler.addFilter(self._filter)
                self._filtered.append(handler)

    def remove(self) -> None:
        """Remove the capture, and restore everything that install() has changed."""
        # An error means that the capture was not installed, or that the app has configured other
        # processors since.
        with suppress(ValueError, AttributeError):
            structlog.get_config()["processors"].remove(self._processor)
        if self._adopted:
            structlog.reset_defaults()
            self._adopted = False
        for handler in self._filtered:
            handler.removeFilter(self._filter)
        self._filtered.clear()
        if self._own is not None:
            logging.root.removeHandler(self._own)
            if isinstance(self._own, _ToEvents):
                logging.root.setLevel(self._root_level)
            self._own = None

    def relevel(self) -> None:
        """Apply a new level of taskd's log to the lines that taskd writes for the app."""
        if self._adopted:
            structlog.configure(wrapper_class=_filtering())
        if isinstance(self._own, _ToEvents):
            logging.root.setLevel(events.level())

    def _processor(
        self, logger: Any, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Add the job to an event of structlog, as its first processor."""
        job = self.job()
        if job is None:
            return event
        # If structlog passes the event to the standard library, record() passes it to the writer.
        if self._writer is not None and not isinstance(logger, logging.Logger):
            fields = {
                name: value
                for name, value in event.items()
                if name not in {"event", "exc_info", *BOUND}
            }
            error = _error(event.get("exc_info"))
            level = LEVELS.get(method, method)
            line = LogEvent(time.time(), level, event.get("event", ""), "", fields, error)
            self._writer.line(job, line)
        self._bind(event, job)
        return event

    def _to_events(self, _logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        """Write an event to taskd's log, as the last processor if the app has configured none."""
        fields = dict(event)
        text, error = fields.pop("event", ""), _error(fields.pop("exc_info", None))
        self._write(LEVELS.get(method, method), str(text), fields, error)
        raise structlog.DropEvent

    def _write(
        self, level: str, text: str, fields: dict[str, Any], error: BaseException | None
    ) -> None:
        """Write a line to taskd's log, without the arguments that the job's task redacts."""
        if error is not None:
            given = (type(error), error, error.__traceback__)
            fields["exception"] = logging.Formatter().formatException(given)
        job = self.job()
        hide = None if job is None else self._hides(job)
        if hide is not None:
            text = hide(text)
            fields = {
                name: value if name in BOUND else hide(value if type(value) is str else repr(value))
                for name, value in fields.items()
            }
        events.line(level, text, fields)

    def record(self, record: logging.LogRecord) -> None:
        """Add the job to a record of the standard library; later calls with this record do nothing.

        Each logging handler calls this, because there is no filter that all records pass.
        """
        line = record.__dict__
        job = None if MARK in line else self.job()
        if job is None:
            return
        if self._writer is not None:
            fields = {name: value for name, value in line.items() if name not in UNLOGGED}
            text: object = record.msg
            if isinstance(text, dict):  # structlog's ProcessorFormatter gets the event as a dict
                own = {"event", *BOUND}
                fields |= {name: each for name, each in text.items() if name not in own}
                text = text.get("event", "")
            else:
                text = _message(record)
            level = _level_of(record.levelno)
            error = _error(record.exc_info)
            self._writer.line(
                job, LogEvent(record.created, level, text, record.name, fields, error)
            )
        line[MARK] = True
        self._bind(line, job)

    def _bind(self, line: MutableMapping[str, Any], job: Job) -> None:
        """Add the fields of the job; fields that the logging call has set keep their values."""
        line.setdefault("job_id", job.id)
        line.setdefault("task", job.task)
        line.setdefault("queue", job.queue)
        line.setdefault("attempt", job.attempt)
        jobs = self._together.get(job.id)
        if jobs is not None:
            line.setdefault("batch_jobs", len(jobs))
            line.setdefault("batch_job_ids", [each.id for each in jobs[:NAMED_MAX]])


class _Filter(logging.Filter):
    def __init__(self, lines: LogCapture) -> None:
        super().__init__()
        self._lines = lines

    def filter(self, record: logging.LogRecord) -> bool:
        self._lines.record(record)
        return True


class _ToEvents(logging.Handler):
    """Passes records to a function that writes them to taskd's log."""

    def __init__(self, write: Callable[[str, str, dict[str, Any], BaseException | None], None]):
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        fields = {name: value for name, value in record.__dict__.items() if name not in PLAIN}
        level = _level_of(record.levelno)
        self._write(
            level, _message(record), {"logger": record.name} | fields, _error(record.exc_info)
        )


def _filtering() -> Any:
    """Return a class of loggers with the level of taskd's log."""
    return structlog.make_filtering_bound_logger(events.level())


def _message(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001 - arguments that do not fit the text must not fail the attempt
        return str(record.msg)


def _level_of(number: int) -> str:
    for name in ("error", "warning", "info"):
        if number >= events.LEVELS[name]:
            return name
    return "debug"


def _error(given: Any) -> BaseException | None:
    if isinstance(given, BaseException):
        return given
    if isinstance(given, tuple):
        return given[1] if len(given) == 3 else None
    return sys.exc_info()[1] if given else None


def own_threads(loop: asyncio.AbstractEventLoop, whose: Callable[[], Job | None]) -> Executor:
    """Make asyncio.to_thread() use a JobThreads pool, and return this pool."""
    made = JobThreads(whose, None, "taskd-to-thread")
    loop.set_default_executor(made)
    return made
