"""Connections that several lanes of a worker share.

A lane without a connection takes the connection of a lane that runs no statement. If there is no
such lane, it opens a new connection. So an idle worker holds one connection for all its lanes, and
a busy worker holds at most one for each lane. Connections that no lane has used for IDLE_S are
closed, except for one.

While the server accepts no further connection, the lanes take turns on the open connections.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextlib import suppress
from typing import Any

import asyncpg

from taskd.store.connections.database import Database, Lane, close
from taskd.store.connections.error_translation import NoRoom, translated
from taskd.store.connections.prepared_statements import server_started

# The connections of a worker that are idle for this long are closed.
IDLE_S = 10.0
# For how long lanes do not try to open a connection after the server has refused one.
FULL_S = 1.0


class SharedConnections:
    """Opens, shares and closes the connections of lanes; belongs to one event loop.

    Args:
        settings: server settings of the connections, as in Database.connect().
    """

    def __init__(self, database: Database, purpose: str, **settings: str) -> None:
        self._database, self._purpose, self._settings = database, purpose, settings
        self._lanes: list[Lane] = []
        # When the server of the last connection started, which identifies the server.
        self._server: Any = None
        self._broke = False
        self._waiting: deque[asyncio.Future[asyncpg.Connection | None]] = deque()
        self._full_until = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()

    def lane(self, purpose: str) -> Lane:
        """Return a new lane that uses these connections.

        Args:
            purpose: the name of the lane; the connections have a name of their own.
        """
        made = Lane(self._database, purpose, self, **self._settings)
        if self._broke:
            made.draw_stride()
        self._lanes.append(made)
        return made

    def __len__(self) -> int:
        """Return the number of connections that the lanes hold."""
        return sum(lane.has_connection for lane in self._lanes)

    def take(self) -> asyncpg.Connection | None:
        """Return the connection of a lane that runs no statement; None if there is none."""
        for lane in self._lanes:
            connection = lane.give()
            if connection is None:
                continue
            if not connection.is_closed():
                return connection
            self.broken()
        return None

    def broken(self) -> None:
        """Make the fences of all lanes jump, because a connection has broken; see Lane.stride."""
        self._broke = True
        for lane in self._lanes:
            lane.draw_stride()

    async def connect(self) -> asyncpg.Connection:
        """Open a connection, or wait for one of another lane if the server has no room.

        Raises:
            NoRoom: the server has no room, and no lane has a connection.
            StoreUnavailable, PermissionDenied, ConfigError: as Database.connect().
        """
        while True:
            if time.monotonic() >= self._full_until:
                try:
                    connection = await self._opened()
                except BaseException as error:
                    if not isinstance(error, NoRoom) or not self._others():
                        self._wake_all()
                        raise
                    self._full_until = time.monotonic() + FULL_S
                else:
                    self._check_idle_later()
                    return connection
            elif not self._others():
                self._full_until = 0.0
                continue
            if (given := self.take() or await self._released()) is not None:
                return given

    async def _opened(self) -> asyncpg.Connection:
        connection = await self._database.connect(self._purpose, **self._settings)
        if not self._database.pooled:
            try:
                with translated():
                    server = await server_started(connection)
            except BaseException:
                connection.terminate()
                raise
            if self._server not in (None, server):
                self.broken()
            self._server = server
        return connection

    def _others(self) -> int:
        """Return how many connections other lanes hold or are opening, for a lane that has none."""
        connecting = sum(lane.connecting for lane in self._lanes) - 1
        return len(self) + connecting - len(self._waiting)

    async def _released(self) -> asyncpg.Connection | None:
        """Wait for the connection of a lane; None if the lane that ended has none any more."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            given: asyncpg.Connection | None = await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # released() or _wake_all() can have removed it from the line.
                with suppress(ValueError):
                    self._waiting.remove(waiter)
            elif (next_one := self._next_waiting()) is not None:
                next_one.set_result(waiter.result())
            elif waiter.result() is not None:
                self._close(waiter.result())
            raise
        return given

    def released(self, lane: Lane) -> None:
        """Give the connection of a lane, whose statement has ended, to the first waiting lane."""
        if (waiter := self._next_waiting()) is not None:
            waiter.set_result(lane.give())

    def _next_waiting(self) -> asyncio.Future[asyncpg.Connection | None] | None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                return waiter
        return None

    def _wake_all(self) -> None:
        """Wake all waiting lanes, so that they try to connect: perhaps no lane has a connection."""
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    def close(self) -> None:
        """Stop checking for idle connections; the lanes close their connections themselves."""
        if self._timer is not None:
            self._timer.cancel()

    def _check_idle_later(self) -> None:
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(IDLE_S / 4, self._check_idle)

    def _check_idle(self) -> None:
        """Close connections that no lane has used for IDLE_S; keep the last used connection."""
        self._timer = None
        longest = time.monotonic() - IDLE_S
        having = [lane for lane in self._lanes if lane.has_connection]
        for lane in sorted(having, key=lambda each: each.used_at)[:-1]:
            if lane.used_at < longest and (connection := lane.give()) is not None:
                self._close(connection)
        if len(self) > 1:
            self._check_idle_later()

    def _close(self, connection: asyncpg.Connection) -> None:
        task = asyncio.create_task(close(connection), name="connection-close")
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
