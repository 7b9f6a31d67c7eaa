"""The connections of a client: one pool per event loop, opened at first use."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Self, TypeVar

from taskd import config
from taskd.client.connecting.background_loop import BackgroundLoop, patched
from taskd.client.connecting.database_location import Target, open_target
from taskd.client.connecting.loaded_settings import loaded_settings
from taskd.client.enqueueing import BuiltIns, no_built_ins
from taskd.client.results import ResultWaiter
from taskd.config import Settings
from taskd.config.parsing import schema_name
from taskd.errors import ConfigError
from taskd.store.connections.callers_connection import fetches, fetches_sync, finished
from taskd.store.connections.database import Database
from taskd.store.connections.pool import Pool
from taskd.store.connections.statements import Fetches

T = TypeVar("T")


class ClientConnections:
    """The connections of a client, for code with an event loop and code without one.

    Args:
        dsn, schema, settings, pool_max, built_ins: as in Client.

    Raises:
        ConfigError: the name of the schema is not allowed.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        schema: str | None = None,
        settings: Settings | None = None,
        pool_max: int = 10,
        built_ins: BuiltIns = no_built_ins,
        room_s: float = 0.0,
    ) -> None:
        if dsn is not None:
            settings = replace(settings or Settings(), dsn=dsn, dsn_file=None)
        if schema is not None:
            settings = replace(settings or loaded_settings(), schema=_checked(schema))
        self._settings = settings
        self._known_schema = None if settings is None else settings.schema
        self._pool_max = pool_max
        self._built_ins, self._room_s = built_ins, room_s
        self._target: Target | None = None
        self._listen_dsn: str | None = None
        self._begin()
        _clients.add(self)

    def _begin(self) -> None:
        self._pools: dict[asyncio.AbstractEventLoop, Pool] = {}
        self._closers: dict[asyncio.AbstractEventLoop, AsyncGenerator[None]] = {}
        self._waiters: dict[asyncio.AbstractEventLoop, ResultWaiter] = {}
        self._background: BackgroundLoop | None = None
        self._background_lock = threading.Lock()

    def _leave_to_parent(self) -> None:
        # No code reads this attribute. It keeps these objects alive: their destructors would act on
        # sockets and on an epoll set that the parent process still uses.
        self._inherited = (self._pools, self._closers, self._waiters, self._background)
        self._begin()

    async def __aenter__(self) -> Self:
        try:
            await self.open()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect now. If a setting is wrong, the error is raised here and not at a later call.

        Raises:
            ConfigError: there is no usable DSN, or the server has no such database.
            StoreUnavailable: PostgreSQL cannot be reached, or accepts no writes.
            PermissionDenied: PostgreSQL refuses the login.
            EmbeddedError: the embedded PostgreSQL cannot be started.
        """
        await (await self._pool()).open()

    async def close(self) -> None:
        """Close the connections of this event loop and of the sync methods.

        The connections of another event loop are closed when that loop ends. The next use of the
        client opens new connections.
        """
        loop = asyncio.get_running_loop()
        if loop in self._closers:
            await self._closers[loop].aclose()
        if self._background is None:
            self.close_sync()
        else:
            await asyncio.to_thread(self.close_sync)  # close_sync() waits for the thread's end

    def close_sync(self) -> None:
        """Close the connections of the sync methods, and end the background thread.

        If the client uses the embedded server, the client no longer keeps the server running.
        """
        with self._background_lock:
            background, self._background = self._background, None
        if background is not None:
            background.stop()
        target, self._target = self._target, None
        if target is not None:
            target.close()

    async def using(
        self, work: Callable[[Fetches, BuiltIns], Awaitable[T]], conn: object = None
    ) -> T:
        """Run `work` over `conn`, or over a connection of this client; return the result."""
        return await work(await self._on(conn), self._built_ins)

    def using_sync(
        self, work: Callable[[Fetches, BuiltIns], Coroutine[Any, Any, T]], conn: object = None
    ) -> T:
        """Run `work` like using(), in code without an event loop; `conn` is a blocking connection.

        Raises:
            RuntimeError: `conn` is None, and an event loop is running in this thread, which the
                call would block. Or `conn` is None, and gevent or eventlet has replaced Python's
                threads.
        """
        if conn is not None:
            return finished(work(fetches_sync(conn, self._schema()), self._built_ins))
        self._refuse_in_loop("the method without _sync")
        return self._in_background(self.using(work))

    async def _on(self, conn: object) -> Fetches:
        return await self._pool() if conn is None else fetches(conn, self._schema())

    def _schema(self) -> str:
        """Return the schema of the installation, for statements on the caller's connection.

        Raises:
            ConfigError: the settings, which are read at the first call, are not valid.
        """
        if self._known_schema is None:
            settings = self._settings or config.load().settings
            self._known_schema = settings.schema
        return self._known_schema

    async def _pool(self) -> Pool:
        """Return the pool of the running loop."""
        loop = asyncio.get_running_loop()
        pool = self._pools.get(loop)
        if pool is None:
            target = await self._opened()
            pool = self._pools.get(loop)
        if pool is None:
            self._drop_closed_loops()
            pool = self._pools[loop] = Pool(target.database, size_max=self._pool_max)
            self._waiters[loop] = ResultWaiter(pool, self._listen_database(target))
            self._closers[loop] = closer = self._close_with(loop)
            await anext(closer)
        return pool

    def _drop_closed_loops(self) -> None:
        # Normally, the pool of a loop is removed when the loop closes its async generators. But
        # some loops are closed without closing their async generators.
        for loop in [loop for loop in self._pools if loop.is_closed()]:
            del self._pools[loop], self._closers[loop], self._waiters[loop]

    async def _close_with(self, loop: asyncio.AbstractEventLoop) -> AsyncGenerator[None]:
        # An event loop has no callback for its end. But asyncio.run, uvloop and pytest close the
        # async generators of a loop before they close the loop. So this async generator closes the
        # pool.
        try:
            yield
        finally:
            self._closers.pop(loop, None)
            waiter = self._waiters.pop(loop, None)
            if waiter is not None:
                await waiter.close()
            pool = self._pools.pop(loop, None)
            if pool is not None:
                await pool.close()

    async def _opened(self) -> Target:
        if self._target is not None:
            return self._target
        settings = self._settings or loaded_settings()
        target = await open_target(settings, self._room_s)
        # While open_target() started the embedded server, another loop can have opened the target.
        kept = self._target or target
        if kept is not target:
            target.close()
        self._target, self._listen_dsn = kept, settings.listen_dsn
        return kept

    def _listen_database(self, target: Target) -> Database:
        """Return the database for LISTEN: that of `listen_dsn` if set, else that of the DSN."""
        if not self._listen_dsn:
            return target.database
        return Database({"dsn": self._listen_dsn}, schema=target.database.schema)

    def _refuse_in_loop(self, instead: str) -> None:
        library = patched()
        if library is not None:
            raise RuntimeError(
                f"{library} has replaced Python's threads in this process, and taskd's connections "
                "need a real thread. Enqueue over your own connection of psycopg, Django or "
                "SQLAlchemy: task.on(conn)"
            )
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return
        raise RuntimeError(
            "this call would block the event loop that is running here. "
            f"Await {instead} instead, or enqueue on your own connection, task.on(conn)"
        )

    def _in_background(self, coroutine: Coroutine[Any, Any, T]) -> T:
        with self._background_lock:
            if self._background is None:
                self._background = BackgroundLoop()
            background = self._background
        return background.run(coroutine)


def _checked(schema: str) -> str:
    try:
        return schema_name(schema)
    except ValueError as error:
        raise ConfigError(str(error)) from None


# A forked child has the sockets of its parent, but not the threads and loops that use the sockets.
# So each client opens new connections in the child.
_clients: weakref.WeakSet[ClientConnections] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._leave_to_parent()  # noqa: SLF001


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_after_fork_in_child)
