"""A limited number of log lines, for events that any client can cause."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

# At most this number of events per minute have a line each; one line counts the others.
LINES_MAX = 10
LINES_S = 60.0


class LimitedLines:
    """Logs events of one kind, but at most some lines per minute.

    Args:
        write: logs an event; it is called with the event's fields and the number of events.
    """

    def __init__(self, write: Callable[..., None]) -> None:
        self._write = write
        self._since = float("-inf")
        self._logged = 0
        self._last: tuple[Any, ...] = ()
        self._suppressed = 0
        self._timer: asyncio.TimerHandle | None = None

    def log(self, *fields: Any) -> None:
        """Log one event."""
        now = time.monotonic()
        if self._timer is None and now - self._since >= LINES_S:
            self._since, self._logged = now, 0
        if self._logged < LINES_MAX:
            self._logged += 1
            self._write(*fields, 1)
            return
        self._last, self._suppressed = fields, self._suppressed + 1
        if self._timer is None:
            left_s = self._since + LINES_S - now
            self._timer = asyncio.get_running_loop().call_later(left_s, self.log_rest)

    def log_rest(self) -> None:
        """Log one line for all events without a line of their own.

        The line has their number, and the fields of the last of them.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._suppressed:
            self._write(*self._last, self._suppressed)
        self._last, self._suppressed = (), 0
