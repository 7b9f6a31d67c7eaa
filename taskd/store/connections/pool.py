"""A producer's connections: opened when needed, shared by the coroutines of one event loop.

With asyncpg's own pool, an enqueue would take several times the CPU time. That pool does more than
is needed here. No caller holds a connection over several statements, and taskd's statements leave
no session state to reset. This pool checks twice a second for statements that got no reply, while
asyncpg sets a timer for each statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import Any

import asyncpg

from taskd.store.connections.database import Database, close
from taskd.store.connections.error_translation import is_gone, translated
from taskd.store.connections.statements import statement
from taskd.store.group_enqueue import Group

CLOSE_TIMEOUT_S = 2.0
CANCEL_S = 1.0
IDLE_S = 300.0
CHECK_IDLE_EVERY_S = 60.0
CHECK_SILENCE_EVERY_S = 0.5


class Pool:
    """Runs statements, each in its own transaction, on up to `size_max` connections.

    Belongs to the event loop that uses it. A connection is closed after five to six idle minutes.

    Attributes:
        group: sends concurrent single jobs in shared statements; None before the first job.
    """

    def __init__(self, database: Database, *, size_max: int = 10, purpose: str = "client") -> None:
        self.group: Group | None = None
        self.size_max = size_max
        self._database = database
        self._purpose = purpose
        # How many connections can still be opened; each open or opening connection takes a slot.
        self._free_slots = size_max
        # Idle connections, with the time.monotonic() of their last use. The connection that was
        # used last is used next.
        self._idle: list[tuple[asyncpg.Connection, float]] = []
        # Maps each connection with a running statement to the time.monotonic() of the statement's
        # start. The oldest statement comes first.
        self._busy: dict[asyncpg.Connection, float] = {}
        self._waiting: deque[asyncio.Future[asyncpg.Connection | None]] = deque()
        self._leaving: set[asyncio.Task[None]] = set()
        self._idle_timer: asyncio.TimerHandle | None = None
        self._silence_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._gone = asyncio.Event()

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        """Run the named statement; return its rows.

        Raises:
            Silence: the server did not reply in time; the statement may have run.
            StoreUnavailable: the server cannot be reached or is busy, the connection broke (then
                the statement may have run), or the pool was closed.
            ValueRefused, PermissionDenied, SchemaError, StatementRefused: the server refused the
                statement; nothing was written.
        """
        try:
            connection = self._at_hand() or await self._awaited()
            self._busy[connection] = time.monotonic()
            if self._silence_timer is None:
                self._check_silence_later()
            try:
                rows = await self._database.run(connection, name, args)
            except BaseException as error:
                await self._failed(connection, error)
                raise
        except Exception:
            with translated(statement(name).roles):
                raise
        del self._busy[connection]
        self._give(connection)
        return rows

    async def _failed(self, connection: asyncpg.Connection, error: BaseException) -> None:
        """Keep a connection whose statement has failed, or drop it.

        Raises:
            TimeoutError: the server did not reply in time.
        """
        self._database.failed(connection, error)
        since = self._busy.pop(connection)
        silent = connection.is_closed() and since < self._too_long_ago()
        # A refused statement has ended on the server, so the connection is kept. After a
        # cancellation, or without a reply, the statement may still run there. A connection to a
        # server that accepts no writes any more is dropped, too.
        ended = isinstance(error, asyncpg.PostgresError) and not is_gone(error)
        if ended and not connection.is_closed() and not connection.is_in_transaction():
            self._give(connection)
        else:
            leaving = self._drop(connection)
            if isinstance(error, asyncio.CancelledError):
                # When the caller continues, the statement must not write anything any more.
                await asyncio.wait({leaving}, timeout=CANCEL_S)
        if silent and isinstance(error, Exception):
            raise TimeoutError from error

    async def open(self) -> None:
        """Connect now, so that a wrong DSN raises an error here.

        Raises:
            StoreUnavailable, PermissionDenied, ConfigError: as Database.connect().
        """
        with translated():
            self._give(self._at_hand() or await self._awaited())

    async def close(self) -> None:
        """Wait up to 2 s for the statements that are running, and close all connections.

        Callers that wait for a connection get StoreUnavailable.
        """
        self._closed = True
        for each in (self._idle_timer, self._silence_timer):
            if each is not None:
                each.cancel()
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(asyncpg.InterfaceError("the client has been closed"))
        while self._idle:
            self._drop(self._idle.pop()[0])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                while self._busy or self._leaving:
                    self._gone.clear()
                    await self._gone.wait()
        for connection in self._busy:
            connection.terminate()
        for task in self._leaving:
            task.cancel()

    def _at_hand(self) -> asyncpg.Connection | None:
        """Return an idle connection that is open, or None."""
        while self._idle:
            connection, _ = self._idle.pop()
            if not connection.is_closed():
                return connection
            self._free_slots += 1
        return None

    async def _awaited(self) -> asyncpg.Connection:
        """Open a connection, or, if `size_max` are open, wait until one is free."""
        self._check_open()
        if self._free_slots > 0:
            self._free_slots -= 1
        else:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                given = await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                    self._give(waiter.result())
                raise
            if given is not None:
                return given
        try:
            # `watched` is True, because this pool checks for silence itself.
            connection = await self._database.connect(self._purpose, True)
        except BaseException:
            self._give(None)
            raise
        if self._closed:
            # close() did not wait for this connection, and nothing may be written after close().
            self._drop(connection)
        self._check_open()
        return connection

    def _check_open(self) -> None:
        if self._closed:
            raise asyncpg.InterfaceError("the client has been closed")

    def _give(self, connection: asyncpg.Connection | None) -> None:
        """Give a connection, or a free slot (None), to the first waiting caller, or keep it."""
        if self._closed and connection is not None:
            self._drop(connection)
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(connection)
                return
        if connection is None:
            self._free_slots += 1
            return
        self._idle.append((connection, time.monotonic()))
        if self._idle_timer is None:
            self._check_idle_later()

    def _drop(self, connection: asyncpg.Connection) -> asyncio.Task[None]:
        """Return a task that cancels the statement and closes the connection, within a second."""
        task = asyncio.create_task(close(connection), name="connection-close")
        self._leaving.add(task)
        task.add_done_callback(self._left)
        self._give(None)
        return task

    def _left(self, task: asyncio.Task[None]) -> None:
        self._leaving.discard(task)
        self._gone.set()

    def _check_idle_later(self) -> None:
        self._idle_timer = asyncio.get_running_loop().call_later(
            CHECK_IDLE_EVERY_S, self._check_idle
        )

    def _check_idle(self) -> None:
        """Close connections that have been idle for IDLE_S."""
        self._idle_timer = None
        longest = time.monotonic() - IDLE_S
        while self._idle and self._idle[0][1] < longest:
            self._drop(self._idle.pop(0)[0])
        if self._idle:
            self._check_idle_later()

    def _check_silence_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._silence_timer = loop.call_later(CHECK_SILENCE_EVERY_S, self._check_silence)

    def _check_silence(self) -> None:
        """Drop connections without a reply for silence_s; the server's timeout has passed then."""
        self._silence_timer = None
        # Through a pooler, asyncpg's own timers apply, because a statement of taskd is three
        # statements there.
        if not self._database.pooled:
            for connection, since in self._busy.items():
                if since >= self._too_long_ago():
                    break
                connection.terminate()
        if self._busy:
            self._check_silence_later()

    def _too_long_ago(self) -> float:
        """Return the time.monotonic() before which a statement began if its reply is overdue."""
        return time.monotonic() - self._database.silence_s
