"""How `taskd top` and `taskd tail` poll: repeatedly, and across outages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from taskd.cli.shared.output import span
from taskd.cli.shared.session import Session
from taskd.errors import StoreUnavailable

if TYPE_CHECKING:
    from taskd.store.connections.database import Lane

T = TypeVar("T")

# Wait this many times as long as a poll took: polls use at most 5 % of one connection's time.
REST = 20
RETRY_S = (0.5, 5.0)
ANSWER_S = 15.0


@asynccontextmanager
async def watching(session: Session, purpose: str) -> AsyncIterator[Lane]:
    """Open a connection to a database whose schema fits; at the end it is closed at once.

    Raises:
        StoreUnavailable, ConfigError, SchemaError: the database cannot be reached, or does not fit.
    """
    from taskd.store.connections.database import Database, Lane
    from taskd.store.schema import migrations

    async with session.target() as target:
        database = Database(target.database.connect_args, statement_timeout_s=ANSWER_S)
        await migrations.check(database)
        lane = Lane(database, purpose)
        try:
            yield lane
        finally:
            await lane.close()


class Asking:
    """Poll, and poll again while the database does not answer.

    Args:
        interval_s: seconds between two polls; longer if polls are slow.

    Attributes:
        error: why the database does not answer now.
        took_s: duration of the last poll.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.error: StoreUnavailable | None = None
        self.took_s = 0.0
        self._queried_at = time.monotonic()
        self._good_at = self._queried_at
        self._pending = False

    async def __call__(self, query: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of `query`. If it fails, set `error`, wait, and return None."""
        self._queried_at, self._pending = time.monotonic(), True
        try:
            answer = await query()
        except StoreUnavailable as error:
            first, self.error = self.error is None, error
            down_s = self._queried_at - self._good_at
            await asyncio.sleep(RETRY_S[0] if first else min(RETRY_S[1], max(1.0, down_s / 4)))
            return None
        finally:
            self._pending = False
        self._good_at = time.monotonic()
        self.took_s, self.error = self._good_at - self._queried_at, None
        return answer

    def rest_s(self) -> float:
        """Return how many seconds to wait after the last answer."""
        return max(self.interval_s, self.took_s * REST)

    def status(self) -> tuple[str, str]:
        """Return the state of the connection, and its style."""
        now = time.monotonic()
        if self.error is not None:
            return f"NO DATABASE for {span(round(now - self._good_at))}: {self.error}", "bad"
        waits_s = now - self._queried_at
        if self._pending and waits_s > 2:
            return f"no answer for {span(round(waits_s))}", "odd"
        slow = self.rest_s() > self.interval_s
        took = f"answered in {max(1, round(self.took_s * 1000))} ms"
        return (f"{took}, every {span(round(self.rest_s(), 1))}" if slow else took), "dim"
