"""Poll the database repeatedly, even across outages, for `taskd top` and `taskd tail`."""

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
    from taskd.store.connections.lanes import Lane

T = TypeVar("T")

# After a poll, wait for at least this multiple of its duration, so that polls use less than 5 % of
# one connection's time.
REST = 20
# The first and the longest delay before a retry.
RETRY_S = (0.5, 5.0)
STATEMENT_TIMEOUT_S = 15.0


@asynccontextmanager
async def watching(session: Session, purpose: str) -> AsyncIterator[Lane]:
    """Check the schema, and yield a connection to the database.

    Raises:
        StoreUnavailable: the database cannot be reached.
        ConfigError: a setting is wrong.
        SchemaError: this taskd does not work with the schema of the database.
    """
    from taskd.store.connections.lanes import Lane
    from taskd.store.schema import migrations

    async with session.target() as target:
        database = target.database.with_timeout(STATEMENT_TIMEOUT_S)
        await migrations.check(database)
        lane = Lane(database, purpose)
        try:
            yield lane
        finally:
            await lane.close()


class Asking:
    """Run queries, and remember whether the database has answered.

    Args:
        interval_s: shortest time from an answer to the next poll, in seconds.

    Attributes:
        error: why the last query got no answer; None if it got one.
        took_s: duration of the last query that the database has answered.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.error: StoreUnavailable | None = None
        self.took_s = 0.0
        self._queried_at = time.monotonic()
        self._good_at = self._queried_at
        self._pending = False

    async def __call__(self, query: Callable[[], Awaitable[T]]) -> T | None:
        """Return the result of `query`; if the database is unavailable, wait and return None."""
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
