"""Lanes: a lane runs the statements of one purpose, over an exclusive or a shared connection.

If a lane with shared connections has no connection, it takes that of another lane that runs no
statement. If there is no such lane, the lane opens a new connection. So an idle worker holds one
connection for all its lanes. A busy worker holds at most one for each lane. Connections that no
lane has used for IDLE_S are closed, except for one.

While the server accepts no further connection, the lanes take turns on the open connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import asyncpg

from taskd.errors import StoreUnavailable, TaskdError
from taskd.store.connections.database import Database, close
from taskd.store.connections.error_translation import NoRoom, is_gone, translated
from taskd.store.connections.prepared_statements import server_started
from taskd.store.connections.shielded import to_its_end
from taskd.store.connections.statements import statement

# The connections of a worker that are idle for this long are closed.
IDLE_S = 10.0
# For how long lanes do not try to open a connection after the server has refused one.
FULL_S = 1.0
# Strides (see Lane) are smaller than this, so a fence, which is a bigint, lasts for billions of
# claims.
STRIDE_MAX = 2**30


class Lane:
    """One connection for one purpose, opened at first use and reopened after it broke.

    A statement that was sent is awaited to its end, even if the caller is cancelled. Otherwise a
    claim or an ack could change rows, and the worker would not know the result. One statement runs
    at a time; the other callers wait.

    Args:
        shared: the connections that the lane shares with other lanes; by default, the lane has a
            connection of its own.

    Attributes:
        stride: the step by which a claim over this lane increases fences. Statements get the step
            as the argument `stride`. The step is 1 at first. After a connection broke, or when the
            lane uses another server, the step is a random number. In these cases, a standby that
            has not received the last claims may have taken over.
        used_at: when the last statement ended (time.monotonic).
    """

    def __init__(
        self,
        database: Database,
        purpose: str,
        shared: SharedConnections | None = None,
        /,
        **settings: str,
    ) -> None:
        self._database = database
        self._shared = shared
        self._running = False
        self.used_at = 0.0
        self.stride = 1
        self._purpose = purpose
        self._settings = settings
        self._connection: asyncpg.Connection | None = None
        self._connecting: asyncio.Task[asyncpg.Connection] | None = None
        self._lock = asyncio.Lock()
        self._times_closed = 0

    async def fetch(self, name: str, *args: Any) -> list[asyncpg.Record]:
        """Run the named statement; return its rows.

        Raises:
            Silence: the server did not reply in time; the statement may have run.
            StoreUnavailable: the server cannot be reached or is busy, or the connection broke (then
                the statement may have run).
            ValueRefused, PermissionDenied, SchemaError, StatementRefused: the server refused the
                statement; nothing was written.
            asyncio.CancelledError: the caller was cancelled, and the statement has ended; or the
                lane was closed.
        """
        # A shielded task for each statement would make a claim 5 % slower.
        return await to_its_end(self._fetch(name, args))

    @property
    def has_connection(self) -> bool:
        """Whether the lane holds a connection, which may have broken."""
        return self._connection is not None

    @property
    def connecting(self) -> bool:
        """Whether the lane waits for a connection."""
        return self._connecting is not None

    def give(self) -> asyncpg.Connection | None:
        """Give up and return the connection; None if there is none, or a statement runs on it."""
        if self._running:
            return None
        connection, self._connection = self._connection, None
        return connection

    @property
    def busy(self) -> bool:
        """Return whether a statement, or a block of at_rest(), is running."""
        return self._lock.locked()

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[None]:
        """Wait until no statement runs, and let no other statement start during the block."""
        async with self._lock:
            yield

    async def _fetch(self, name: str, args: tuple[Any, ...]) -> list[asyncpg.Record]:
        times_closed = self._times_closed
        async with self._lock:
            self._check_open(times_closed)
            connection = await self._ready()
            if self.stride != 1:
                args = _with_stride(name, args, self.stride)
            self._running = True
            try:
                with translated(statement(name).roles):
                    return await self._database.run(connection, name, args, **self._settings)
            except StoreUnavailable as error:
                self._database.failed(connection, error.__cause__ or error)
                self._check_open(times_closed)
                if connection.is_closed() or is_gone(error.__cause__ or error):
                    self.drop()
                elif self._database.pooled:
                    self._has_broken()
                raise
            except TaskdError as error:
                found = self._database.outage(error)
                if found is error:
                    raise
                # Statements that this connection has prepared may name objects that are missing.
                self.drop()
                raise found from error.__cause__
            finally:
                self._running = False
                self.used_at = time.monotonic()
                self._release()

    def _check_open(self, times_closed: int) -> None:
        if self._times_closed != times_closed:
            raise asyncio.CancelledError(f"the connection for {self._purpose} was closed")

    def draw_stride(self) -> None:
        """From now on, increase fences by a random number."""
        self.stride = random.randrange(2, STRIDE_MAX)

    def _has_broken(self) -> None:
        if self._shared is None:
            self.draw_stride()
        else:
            self._shared.broken()

    def _release(self) -> None:
        """Pass the connection, or the right to open one, to a waiting lane."""
        if self._shared is not None:
            self._shared.released(self)

    async def _ready(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            if self._connection is not None:
                self.drop()
            if self._shared is not None and (taken := self._shared.take()) is not None:
                self._connection = taken
                return taken
            # Connect in a separate task. asyncpg ends a slow connect by cancelling the current
            # task, which to_its_end() does not allow.
            connecting = (
                self._database.connect(self._purpose, **self._settings)
                if self._shared is None
                else self._shared.connect()
            )
            self._connecting = asyncio.create_task(connecting, name=f"connect:{self._purpose}")
            times_closed = self._times_closed
            try:
                connection = await self._connecting
            finally:
                self._connecting = None
            if self._times_closed != times_closed:
                # The lane was closed meanwhile, so nobody else would close this connection.
                connection.terminate()
                self._release()
                self._check_open(times_closed)
            self._connection = connection
        return self._connection

    async def open(self) -> None:
        """Connect now, so that a wrong DSN raises an error here."""
        async with self._lock:
            try:
                await self._ready()
            finally:
                self._release()

    def drop(self) -> None:
        """Drop the connection without waiting; the next statement opens a new one."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
            self._has_broken()

    async def close(self) -> None:
        """Close the connection; callers of running and waiting statements get CancelledError."""
        connection, self._connection = self._connection, None
        self._times_closed += 1
        if self._connecting is not None:
            self._connecting.cancel()
        if connection is None:
            return
        if self.busy:
            connection.terminate()
        else:
            await close(connection)


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
            purpose: the name of the lane. The connections have another name, because lanes share
                them.
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
        """Open a connection; if the server has no room, wait for another lane's connection.

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
        """Wait until another lane releases its connection; None if that connection has broken."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            given: asyncpg.Connection | None = await waiter
        except asyncio.CancelledError:
            if waiter.cancelled():
                # released() or _wake_all() can have removed the waiter from the queue.
                with contextlib.suppress(ValueError):
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
        """Let all waiting lanes try to connect, because perhaps no lane has a connection."""
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


@cache
def _position_of_stride(name: str) -> int | None:
    parameters = statement(name).parameters
    return parameters.index("stride") if "stride" in parameters else None


def _with_stride(name: str, args: tuple[Any, ...], stride: int) -> tuple[Any, ...]:
    """Return the arguments of a statement with this stride, if the statement has one."""
    at = _position_of_stride(name)
    return args if at is None else (*args[:at], stride, *args[at + 1 :])
