"""Log lines of handlers: which lines are kept, and how much of each line.

A handler can log a million lines, or a line of a gigabyte, and a line can contain secret arguments.
So each line is shortened and redacted at once, by the same rules as errors. Of many lines, the
first and the last ones are kept.
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
    """The attempts whose log lines are kept."""

    OFF = "off"
    FAILED = "failed"
    ALL = "all"


def keep_logs_of(task: str, value: str | None) -> KeepLogs | None:
    """Return the checked option `keep_logs` of a task; None: the setting of the worker applies.

    Raises:
        ValueError: it is not a valid option.
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
    """One line, as it is stored.

    Attributes:
        at: when it was logged, by the clock of the worker's host.
        level: `debug`, `info`, `warning` or `error`.
        logger: the logger's name, if it has one.
        fields: further fields, as text.
        traceback: the traceback of the exception that was logged with the line.
    """

    at: str
    level: str
    text: str
    logger: str = ""
    fields: dict[str, str] = {}
    traceback: str = ""


class LogEvent(msgspec.Struct, frozen=True):
    """One line, as the handler logged it.

    Attributes:
        at_s: when it was logged, in seconds since 1970.
        level: `debug`, `info`, `warning` or `error`.
        logger: the logger's name, if it has one.
        fields: further fields.
        error: the exception that was logged with it.
    """

    at_s: float
    level: str
    text: object
    logger: str = ""
    fields: Mapping[str, Any] = {}
    error: BaseException | None = None


def line_of(event: LogEvent, hide: Callable[[str], str]) -> bytes:
    """Return a line as JSON of at most 4 KiB; never raises.

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
        if len(written) > LINE_BYTES_MAX:  # text that JSON escapes takes more room
            line = Line(line.at, event.level, clean(line.text, TEXT_BYTES_MAX // 6))
            written = msgspec.json.encode(line)
    except Exception:  # noqa: BLE001 - the __str__ of a logged object can raise anything
        return msgspec.json.encode(Line("", event.level, "(this line could not be read)"))
    return written


def _shown(value: Any, hide: Callable[[str], str]) -> str:
    text = value if isinstance(value, str) else repr(value)
    return clean(hide(text), FIELD_BYTES_MAX)


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-10))


def _tail(text: str) -> str:
    """Return the last bytes of a traceback, which name the error."""
    safe = clean(text, 1 << 20)
    cut = safe.encode()[-TRACEBACK_BYTES_MAX:].decode("utf-8", "ignore")
    return cut if len(cut) == len(safe) else "…" + cut


class Lines:
    """The kept lines of one attempt: the first and the last ones, and how many were omitted."""

    __slots__ = ("_bytes", "_first", "_first_bytes", "_last", "left_out")

    def __init__(self) -> None:
        self._first: list[bytes] = []
        # Made when needed: most attempts log few lines, which take less memory than an empty deque.
        self._last: deque[bytes] | None = None
        self._first_bytes = self._bytes = 0
        self.left_out = 0

    def add(self, line: bytes) -> None:
        """Keep one more line; if there are too many, drop older ones, but none of the first."""
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
        """Return the number of lines before the omitted ones."""
        return len(self._first)

    @property
    def size(self) -> int:
        """Return the size of the lines in bytes."""
        return self._first_bytes + self._bytes

    def each(self) -> list[str]:
        """Return each line as JSON text."""
        return [line.decode() for line in (*self._first, *(self._last or ()))]

    def to_json(self) -> str:
        """Return the lines as a JSON array."""
        return "[" + b",".join((*self._first, *(self._last or ()))).decode() + "]"
