"""A producer's connections: opened when needed, shared by the coroutines of one event loop."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import asyncpg

from taskd.store.database import Database
from taskd.store.statements import statement
from taskd.store.translate import translated

CLOSE_TIMEOUT_S = 2.0


class Pool:
    """Runs statements, each in a transaction of its own, on up to `size_max` connections.

    Belongs to the event loop that first uses it. A connection is closed after five idle minutes.
    """

    def __init__(self, database: Database, *, size_max: int = 10) -> None:
        self._database = database
        self._size_max = size_max
        self._pool: asyncpg.Pool | None = None

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        """Run the named statement; its rows.

        Raises:
            Silence: no answer in time; it may have run.
            StoreUnavailable: the connection could not be made, or broke (then it may have run).
            ValueRefused: a value was refused; nothing was written.
        """
        with translated(statement(name).roles):
            pool = await self._ready()
            async with pool.acquire() as connection:
                return await self._database.run(connection, name, args)

    async def open(self) -> None:
        """Connect now, so that a wrong DSN shows.

        Raises:
            StoreUnavailable, PermissionDenied, ConfigError: as the server answers, or does not.
        """
        with translated():
            async with (await self._ready()).acquire():
                pass

    async def close(self) -> None:
        """Let statements end and close the connections; those that take over 2 s are dropped."""
        pool, self._pool = self._pool, None
        if pool is not None:
            with contextlib.suppress(TimeoutError):
                # On a timeout, asyncpg itself terminates what is left.
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await pool.close()

    async def _ready(self) -> asyncpg.Pool:
        if self._pool is None:
            pool = asyncpg.create_pool(
                min_size=0, max_size=self._size_max, connect=self._connect, reset=_leave_as_is
            )
            # With min_size 0 this opens nothing and never suspends: no second caller gets between.
            self._pool = await pool
        return self._pool

    async def _connect(self, *_: Any, **__: Any) -> asyncpg.Connection:
        return await self._database.connect("client")


async def _leave_as_is(_connection: Any) -> None:
    """Replaces asyncpg's reset, a round trip at each release (RESET ALL, UNLISTEN, CLOSE ALL ...).

    Safe because nobody else gets at these connections, and a statement of ours leaves no
    session state behind. asyncpg still rolls back a transaction that was left open.
    """
