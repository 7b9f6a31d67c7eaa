"""Connections: how taskd reaches PostgreSQL, and lanes, which keep one connection for one purpose.

asyncpg >= 0.32 with `command_timeout`: without it a half-open socket hangs a query, and the
pool that owns it, for ever (measured: over 12 s and counting; with it 2.0 s).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import asyncpg

from taskd.errors import StoreUnavailable
from taskd.store.statements import statement
from taskd.store.translate import is_gone, translated

CONNECT_TIMEOUT_S = 5.0
# A dead peer is found in 10 + 3 * 5 s; the kernel's default takes 2 h 11 min.
TCP_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
TCP_USER_TIMEOUT_MS = 20_000


class Database:
    """Where the database is and how to connect to it; holds no connection itself.

    Args:
        connect_args: what asyncpg.connect takes (a `dsn`, or host, user, database ...).
        statement_timeout_s: seconds that one statement may take on the server; the client gives
            up a little later, so that the server's verdict usually arrives.
        revive: brings a server of our own back when nobody answers at its address; blocking.
    """

    def __init__(
        self,
        connect_args: Mapping[str, Any],
        *,
        statement_timeout_s: float = 5.0,
        revive: Callable[[], None] | None = None,
    ) -> None:
        self.connect_args = dict(connect_args)
        self.statement_timeout_s = statement_timeout_s
        self._revive = revive

    async def connect(self, purpose: str, **settings: str) -> asyncpg.Connection:
        """A new connection whose `application_name` is `taskd <purpose>`.

        Args:
            settings: server settings on top of the usual ones.

        Raises:
            StoreUnavailable, PermissionDenied, ConfigError: as the server answers, or does not.
        """
        timeout_ms = str(int(self.statement_timeout_s * 1000))
        server_settings = {
            "application_name": f"taskd {purpose}",
            "statement_timeout": timeout_ms,
            "lock_timeout": str(int(self.statement_timeout_s * 400)),
            "idle_in_transaction_session_timeout": "15000",
            "default_transaction_isolation": "read committed",
            "jit": "off",
            "client_min_messages": "error",
        } | settings
        with translated():
            try:
                connection = await self._connect(server_settings)
            except (ConnectionRefusedError, FileNotFoundError):
                if self._revive is None:
                    raise
                await asyncio.to_thread(self._revive)
                connection = await self._connect(server_settings)
        _keep_alive(connection)
        return connection

    async def _connect(self, server_settings: dict[str, str]) -> asyncpg.Connection:
        return await asyncpg.connect(
            **({"target_session_attrs": "read-write"} | self.connect_args),
            timeout=CONNECT_TIMEOUT_S,
            command_timeout=self.statement_timeout_s + 2.0,
            server_settings=server_settings,
        )

    @contextlib.asynccontextmanager
    async def connection(self, purpose: str, **settings: str) -> AsyncIterator[asyncpg.Connection]:
        """A connection for the length of a block."""
        connection = await self.connect(purpose, **settings)
        try:
            with translated():
                yield connection
        finally:
            await close(connection)


async def close(connection: asyncpg.Connection) -> None:
    """Close politely within a second, else drop the socket."""
    try:
        await connection.close(timeout=1.0)
    except Exception:  # noqa: BLE001 - it is going away either way
        connection.terminate()


def _keep_alive(connection: asyncpg.Connection) -> None:
    # asyncpg sets TCP_NODELAY and nothing else; its transport is private, and a test watches it.
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in TCP_KEEPALIVE:
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, TCP_USER_TIMEOUT_MS)


class Lane:
    """One connection for one purpose, made when needed and re-made after it broke.

    A statement that was sent is awaited to its end even when the caller is cancelled: a claim or
    an ack whose fate nobody waits for would leave rows that nobody knows about. One statement at
    a time; callers queue.
    """

    def __init__(self, database: Database, purpose: str, **settings: str) -> None:
        self._database = database
        self._purpose = purpose
        self._settings = settings
        self._connection: asyncpg.Connection | None = None
        self._lock = asyncio.Lock()
        self._statements: set[asyncio.Task[Any]] = set()

    async def fetch(self, name: str, *args: Any) -> list[asyncpg.Record]:
        """Run the named statement; its rows.

        Raises:
            Silence: no answer in time; it may have run.
            StoreUnavailable: the connection broke (it may have run), or the server is busy.
            ValueRefused: a value was refused; nothing was written.
        """
        task = asyncio.create_task(self._fetch(name, args), name=f"statement:{name}")
        self._statements.add(task)
        task.add_done_callback(self._statements.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if not task.done():
                await asyncio.wait({task})
            if not task.cancelled():
                task.exception()
            raise

    async def _fetch(self, name: str, args: tuple[Any, ...]) -> list[asyncpg.Record]:
        async with self._lock:
            connection = await self._ready()
            try:
                with translated():
                    rows: list[asyncpg.Record] = await connection.fetch(statement(name).text, *args)
                    return rows
            except StoreUnavailable as error:
                if connection.is_closed() or is_gone(error.__cause__ or error):
                    self.drop()
                raise

    async def _ready(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._database.connect(self._purpose, **self._settings)
        return self._connection

    async def open(self) -> None:
        """Connect now, so that a wrong DSN shows at the start."""
        async with self._lock:
            await self._ready()

    def drop(self) -> None:
        """Throw the connection away at once; the next statement makes a new one."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Close politely; with a statement in flight at once, and whoever waits for it is told."""
        connection, self._connection = self._connection, None
        if self._statements:
            if connection is not None:
                connection.terminate()
            for each in self._statements:
                each.cancel()
        elif connection is not None:
            await close(connection)
