"""Log lines of handlers: which lines are kept, and how much of each line.

A handler can log a million lines, or a line of a gigabyte, and a line can contain secret arguments.
So taskd redacts and shortens each line when it is logged, as it does with errors of attempts. Only
the names of the logger and of the fields are not redacted. If an attempt logs many lines, its first
and its last lines are kept.
"""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec

from taskd.core.jobs.failure import clean

FIRST_MAX, LAST_MAX = 50, 150
FIRST_BYTES_MAX, LAST_BYTES_MAX = 16 * 1024, 48 * 1024
LINE_BYTES_MAX = 4096
TEXT_BYTES_MAX = 2000
FIELDS_MAX = 20
FIELD_BYTES_MAX = 200
TRACEBACK_BYTES_MAX = 1500
NAME_BYTES_MAX = 100


class KeepLogs(StrEnum):
    """The attempts whose log lines are stored."""

    OFF = "off"
    FAILED = "failed"
    ALL = "all"


def keep_logs_of(task: str, value: str | None) -> KeepLogs | None:
    """Return the checked option `keep_logs` of a task; with None, the worker's setting applies.

    Raises:
        ValueError: `value` is not a value of KeepLogs.
    """
    if value is None:
        return None
    try:
        return KeepLogs(value)
    except ValueError:
        raise ValueError(
            f"task {task}: keep_logs {value!r} is none of {', '.join(KeepLogs)}"
        ) from None


class Line(msgspec.Struct, frozen=True, omit_defaults=True):
    """A log line as it is stored.

    Attributes:
        at: when the line was logged, by the clock of the worker's host, as ISO 8601 in UTC. Empty
            if the line could not be formatted.
        level: `debug`, `info`, `warning` or `error`.
        logger: the logger's name, or an empty text.
        fields: further fields, as text.
        traceback: the end of the traceback of the exception that was logged with the line.
    """

    at: str
    level: str
    text: str
    logger: str = ""
    fields: dict[str, str] = {}
    traceback: str = ""


class LogEvent(msgspec.Struct, frozen=True):
    """A log line as the handler logged it.

    Attributes:
        at_s: when the line was logged, in seconds since 1970.
        level: `debug`, `info`, `warning` or `error`.
        text: the message; an object other than a text is formatted with str().
        logger: the logger's name, or an empty text.
        fields: further fields.
        error: the exception that was logged with the line.
    """

    at_s: float
    level: str
    text: object
    logger: str = ""
    fields: Mapping[str, Any] = {}
    error: BaseException | None = None


def line_of(event: LogEvent, hide: Callable[[str], str]) -> bytes:
    """Return a line as JSON of at most 4 KiB.

    If formatting a logged object raises an Exception, the returned line only says so. Other
    BaseExceptions are passed on: one of them, MustEnd, can interrupt a handler with process=True
    while the handler logs.

    Args:
        hide: removes secrets from a text; it is called before texts are shortened.
    """
    try:
        fields = {
            clean(str(name), NAME_BYTES_MAX): _shown(value, hide)
            for name, value in list(event.fields.items())[:FIELDS_MAX]
        }
        trace = "" if event.error is None else _tail(hide(_trace(event.error)))
        line = Line(
            datetime.fromtimestamp(event.at_s, UTC).isoformat(timespec="milliseconds"),
            event.level,
            clean(hide(str(event.text)), TEXT_BYTES_MAX),
            clean(event.logger, NAME_BYTES_MAX),
            fields,
            trace,
        )
        written = msgspec.json.encode(line)
        if len(written) > LINE_BYTES_MAX:
            # Drop the logger, the fields and the traceback. JSON writes a control character in six
            # bytes, so shorten the text to a sixth.
            line = Line(line.at, event.level, clean(line.text, TEXT_BYTES_MAX // 6))
            written = msgspec.json.encode(line)
    except Exception:  # noqa: BLE001 - the __str__ of a logged object can raise any of them
        return msgspec.json.encode(Line("", event.level, "(this line could not be formatted)"))
    return written


def _shown(value: Any, hide: Callable[[str], str]) -> str:
    text = value if isinstance(value, str) else repr(value)
    return clean(hide(text), FIELD_BYTES_MAX)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-10))


def _tail(text: str) -> str:
    """Return the end of a traceback, which contains the error's type and message."""
    safe = clean(text, 1 << 20)
    cut = safe.encode()[-TRACEBACK_BYTES_MAX:].decode("utf-8", "ignore")
    return cut if len(cut) == len(safe) else "…" + cut


class Lines:
    """The kept lines of one attempt.

    Attributes:
        left_out: number of lines that were dropped between the first and the last lines.
    """

    __slots__ = ("_bytes", "_first", "_first_bytes", "_last", "left_out")

    def __init__(self) -> None:
        self._first: list[bytes] = []
        # Created when needed: the few lines of most attempts take less memory than an empty deque.
        self._last: deque[bytes] | None = None
        self._first_bytes = self._bytes = 0
        self.left_out = 0

    def add(self, line: bytes) -> None:
        """Add a line. If the last lines are now too many or too large, drop the oldest of them."""
        size = len(line)
        if (
            self._last is None
            and len(self._first) < FIRST_MAX
            and self._first_bytes + size <= FIRST_BYTES_MAX
        ):
            self._first.append(line)
            self._first_bytes += size
            return
        if self._last is None:
            self._last = deque()
        self._last.append(line)
        self._bytes += size
        while len(self._last) > LAST_MAX or self._bytes > LAST_BYTES_MAX:
            self._bytes -= len(self._last.popleft())
            self.left_out += 1

    @property
    def first(self) -> int:
        """The number of first lines, which are never dropped."""
        return len(self._first)

    @property
    def size(self) -> int:
        """The size of all kept lines in bytes."""
        return self._first_bytes + self._bytes

    def each(self) -> list[str]:
        """Return the kept lines, each as a JSON object."""
        return [line.decode() for line in (*self._first, *(self._last or ()))]

    def to_json(self) -> str:
        """Return the kept lines as one JSON array."""
        return "[" + b",".join((*self._first, *(self._last or ()))).decode() + "]"
