"""Connections to PostgreSQL, and lanes: a lane is one connection that serves one purpose.

Connections need asyncpg >= 0.32 with `command_timeout`: without it, a half-open socket would block
a statement, and its pool, without limit.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import asyncpg

from taskd.errors import ConfigError, StoreUnavailable, TaskdError
from taskd.store.connections import dsn_hosts
from taskd.store.connections.connect_errors import reaching, target_of, why_read_only
from taskd.store.connections.error_translation import (
    STRAYED,
    Down,
    is_gone,
    outage,
    translate,
    translated,
)
from taskd.store.connections.prepared_statements import Connection
from taskd.store.connections.shielded import to_its_end
from taskd.store.connections.statements import statement

CONNECT_TIMEOUT_S = 5.0
# Wait this much longer than the server's own timeout: its error usually arrives.
SILENCE_AFTER_S = 2.0
# TCP keepalive finds a dead peer within 10 + 3 * 5 s; with the kernel's defaults it takes 2 h 11
# min.
TCP_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
TCP_USER_TIMEOUT_MS = 20_000
# Every service of a worker tries again within this time: without an error in it, a trouble is over.
QUIET_S = 12.0
# The most errors of one outage that are reported; each text is reported once.
ERRORS_MAX = 10
# The largest stride; a fence has room for a billion of them.
STRIDE_MAX = 2**30


class Trouble:
    """What is missing in a database that has worked; shared by all threads of a worker.

    Args:
        report: called with each new error, and what to do.
    """

    def __init__(self, report: Callable[[str, Sequence[str]], None]) -> None:
        self._report = report
        self._errors: set[str] = set()
        self._text, self._began, self._noted_at = "", 0.0, 0.0

    def note(self, error: StoreUnavailable) -> None:
        """Remember an error, and report it if it is new."""
        text, now = str(error), time.monotonic()
        if not self._errors:
            self._began = now
        self._text, self._noted_at = text, now
        if text not in self._errors and len(self._errors) < ERRORS_MAX:
            self._errors.add(text)
            self._report(text, getattr(error, "__notes__", ()))

    def __str__(self) -> str:
        return self._text if self._errors and not self._is_quiet() else ""

    def _is_quiet(self) -> bool:
        return time.monotonic() - self._noted_at > QUIET_S

    def ended_s(self) -> float | None:
        """Return how long a trouble lasted that is over; None: there is none, or it lasts."""
        if not self._errors or not self._is_quiet():
            return None
        self._errors = set()
        return self._noted_at - self._began


class Database:
    """Where the database is and how to connect; holds no connection itself.

    Args:
        connect_args: arguments of asyncpg.connect (a `dsn`, or host, user, database ...).
        statement_timeout_s: seconds that a statement may take on the server; the client gives up a
            little later.
        revive: restarts the embedded server when it does not answer; blocks.
        read_args: returns the present `connect_args`, at each connect: a password may be rotated.

    Attributes:
        trouble: what a worker that uses this database misses now; None: none does yet.
        pooled: whether the database is behind a pooler that assigns a session to each transaction,
            so that taskd cannot rely on session state; None: not connected yet.
    """

    def __init__(
        self,
        connect_args: Mapping[str, Any],
        *,
        statement_timeout_s: float = 5.0,
        revive: Callable[[], None] | None = None,
        read_args: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self.statement_timeout_s = statement_timeout_s
        self.pooled: bool | None = None
        self.trouble: Trouble | None = None
        self._revive = revive
        self._read_args = read_args
        self._use_args(connect_args)

    def _use_args(self, connect_args: Mapping[str, Any]) -> None:
        self.connect_args = dict(connect_args)
        self._addresses = dsn_hosts.addresses(connect_args)
        self._target = target_of(connect_args)

    def with_timeout(self, statement_timeout_s: float) -> Database:
        """Return the same database with another limit for statements."""
        made = copy.copy(self)
        made.statement_timeout_s = statement_timeout_s
        return made

    def begin_use(self, report: Callable[[str, Sequence[str]], None]) -> None:
        """From now on raise permanent errors as outages, as this database has worked.

        Args:
            report: called with each new error, and what to do.
        """
        self.trouble = Trouble(report)

    def outage(self, error: TaskdError) -> TaskdError:
        """Return the error as an outage, if it is one and this database has worked before."""
        made = None if self.trouble is None else outage(error)
        if made is None or self.trouble is None:
            return error
        self.trouble.note(made)
        return made

    @property
    def silence_s(self) -> float:
        """Seconds without a reply after which the client gives up."""
        return self.statement_timeout_s + SILENCE_AFTER_S

    async def connect(
        self, purpose: str, watched: bool = False, /, **settings: str
    ) -> asyncpg.Connection:
        """Open a connection whose `application_name` is `taskd <purpose>`.

        Args:
            watched: the caller itself checks for replies that take longer than silence_s; without
                this, and behind a pooler, asyncpg checks.
            settings: server settings in addition to the usual ones.

        Raises:
            StoreUnavailable, PermissionDenied, ConfigError: as the server answers, or does not.
        """
        self._read_args_again()
        with self._outages(), reaching(self._target, CONNECT_TIMEOUT_S):
            try:
                connection = await self._connect_directly_or_not(purpose, settings, watched)
            except (ConnectionRefusedError, FileNotFoundError):
                if self._revive is None:
                    raise
                await asyncio.to_thread(self._revive)
                connection = await self._connect_directly_or_not(purpose, settings, watched)
        _keep_alive(connection)
        return connection

    async def connect_plain(self, purpose: str) -> asyncpg.Connection:
        """Open a connection for statements of the app; the session keeps the settings of its user.

        Call it after another connection, which has found out whether there is a pooler.

        Raises:
            StoreUnavailable, PermissionDenied, ConfigError: as the server answers, or does not.
        """
        # As in _connect_directly_or_not: prepare nothing, and do not ask the host for its role.
        pooled: dict[str, Any] = {"statement_cache_size": 0, "target_session_attrs": "any"}
        self._read_args_again()
        with self._outages(), reaching(self._target, CONNECT_TIMEOUT_S):
            connection = await self._connect(
                {"application_name": f"taskd {purpose}"},
                command_timeout=None,
                **(pooled if self.pooled else {}),
            )
        _keep_alive(connection)
        return connection

    @contextlib.contextmanager
    def _outages(self) -> Iterator[None]:
        try:
            yield
        except TaskdError as error:
            found = self.outage(error)
            if found is error:
                raise
            raise found from error.__cause__

    def _read_args_again(self) -> None:
        if self._read_args is None:
            return
        # If the file is gone, the last DSN may still do.
        with contextlib.suppress(ConfigError):
            args = self._read_args()
            if args != self.connect_args:
                self._use_args(args)

    def run(
        self, connection: Connection, name: str, args: tuple[Any, ...], **settings: str
    ) -> Coroutine[Any, Any, list[asyncpg.Record]]:
        """Run the named statement on a connection that was opened here with these settings.

        Report its errors to failed().
        """
        if not self.pooled:
            return connection.run(name, args)
        return self._run_pooled(connection, statement(name).text, args, settings)

    def failed(self, connection: asyncpg.Connection, error: BaseException) -> None:
        """Note that a statement of this connection failed: a pooler is recognised by its errors."""
        if isinstance(error, STRAYED):
            self.pooled = True
            connection.terminate()

    async def _run_pooled(
        self,
        connection: asyncpg.Connection,
        text: str,
        args: tuple[Any, ...],
        settings: dict[str, str],
    ) -> list[asyncpg.Record]:
        """Run the statement in a transaction of its own, with the settings."""
        await self.begin(connection, **settings)
        try:
            rows: list[asyncpg.Record] = await connection.fetch(text, *args)
        except TimeoutError:
            raise  # the statement that still runs there cannot be cancelled
        except Exception as error:
            if isinstance(error, asyncpg.ReadOnlySQLTransactionError):
                # The host was not asked for its role when connecting: try another host first.
                self._addresses = [*self._addresses[1:], self._addresses[0]]
            if not connection.is_closed():
                await self.roll_back(connection)
            raise
        await self.commit(connection)
        return rows

    async def begin(self, connection: asyncpg.Connection, **settings: str) -> None:
        """Begin a transaction; through a pooler, with the settings that a session would keep."""
        words = "".join(
            f" SET LOCAL {key} = '{value}';" for key, value in self._settings(settings).items()
        )
        spoken = words if self.pooled else ""
        await connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED;{spoken}")

    async def commit(self, connection: asyncpg.Connection) -> None:
        """Commit the transaction."""
        await connection.execute("COMMIT")

    async def roll_back(self, connection: asyncpg.Connection) -> None:
        """Roll the transaction back."""
        await connection.execute("ROLLBACK")

    def _settings(self, settings: Mapping[str, str]) -> dict[str, str]:
        return {
            "statement_timeout": str(int(self.statement_timeout_s * 1000)),
            "lock_timeout": str(int(self.statement_timeout_s * 400)),
            "idle_in_transaction_session_timeout": "15000",
            "jit": "off",
            "client_min_messages": "error",
            # A user who can create functions or operators in other schemas could put better matches
            # there.
            "search_path": "pg_catalog",
        } | dict(settings)

    async def _connect_directly_or_not(
        self, purpose: str, settings: Mapping[str, str], watched: bool
    ) -> asyncpg.Connection:
        """Connect with the settings; without them if a pooler rejects them."""
        name = {"application_name": f"taskd {purpose}"}
        if not self.pooled:
            isolation = {"default_transaction_isolation": "read committed"}
            unwatched: dict[str, Any] = {"command_timeout": None} if watched else {}
            try:
                connection = await self._connect(
                    name | isolation | self._settings(settings), **unwatched
                )
            except asyncpg.ProtocolViolationError as error:
                if "startup parameter" not in str(error):
                    raise
                self.pooled = True
            else:
                if self.pooled is None:
                    self.pooled = await _is_pooled(connection)
                if not self.pooled:
                    return connection
                connection.terminate()
        # Prepare nothing by name, and send no query before the first transaction.
        return await self._connect(name, statement_cache_size=0, target_session_attrs="any")

    async def _connect(self, server_settings: dict[str, str], **args: Any) -> asyncpg.Connection:
        """Connect to the first suitable host; start with the last one that was suitable."""
        addresses = self._addresses
        args = {"command_timeout": self.silence_s} | args
        unsure: Exception | None = None
        for number, address in enumerate(addresses, 1):
            try:
                connection = await asyncpg.connect(
                    **({"target_session_attrs": "read-write"} | self.connect_args | address | args),
                    timeout=CONNECT_TIMEOUT_S,
                    server_settings=server_settings,
                    connection_class=Connection,
                )
            except Exception as error:
                known_error = translate(error)
                if not isinstance(known_error, StoreUnavailable):
                    raise
                # If one host is down and another one cannot be reached, the database may still be
                # up.
                unsure = unsure or (None if isinstance(known_error, Down) else error)
                if number == len(addresses):
                    raise await self._read_only(address, unsure or error) from None
            else:
                # One assignment, as the lease thread connects by the same list.
                self._addresses = [address, *(each for each in addresses if each != address)]
                return connection
        raise AssertionError("there is at least one address")

    async def _read_only(self, address: Mapping[str, Any], error: Exception) -> Exception:
        """Return the error of the last host; one that says why, if the host accepts no writes."""
        not_matched: type[Exception] = asyncpg.exceptions.TargetServerAttributeNotMatched
        if not isinstance(error, not_matched):
            return error
        args = self.connect_args | dict(address) | {"target_session_attrs": "any"}
        try:
            connection = await asyncpg.connect(
                **args, timeout=CONNECT_TIMEOUT_S, command_timeout=self.silence_s
            )
            try:
                return await why_read_only(connection, self._target)
            finally:
                await close(connection)
        except Exception:  # noqa: BLE001 - the error that is known says enough
            return error

    @contextlib.asynccontextmanager
    async def connection(self, purpose: str, **settings: str) -> AsyncIterator[asyncpg.Connection]:
        """Open a connection for the duration of a block."""
        connection = await self.connect(purpose, **settings)
        try:
            with translated():
                yield connection
        finally:
            await close(connection)


async def _is_pooled(connection: asyncpg.Connection) -> bool:
    """Return whether a pooler answers: its backend key is not that of the server process."""
    try:
        pid = await connection.fetchval("SELECT pg_backend_pid()")
    except STRAYED:
        return True
    except BaseException:
        connection.terminate()
        raise
    return bool(pid != connection.get_server_pid())


async def close(connection: asyncpg.Connection) -> None:
    """Close the connection in order within a second, otherwise drop the socket."""
    try:
        await connection.close(timeout=1.0)
    except Exception:  # noqa: BLE001 - it is going away either way
        connection.terminate()


def _keep_alive(connection: asyncpg.Connection) -> None:
    # asyncpg sets only TCP_NODELAY; its transport is private, and a test watches it.
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
    """One connection for one purpose, opened at first use and reopened after it broke.

    A statement that was sent is awaited to its end even if the caller is cancelled: otherwise a
    claim or an ack could change rows, and the worker would not know the result. One statement runs
    at a time; the other callers wait.

    Attributes:
        stride: by how much a claim over this lane increases fences: 1; after the connection broke,
            a random number. The next server can be another one, which does not know earlier claims.
    """

    def __init__(self, database: Database, purpose: str, **settings: str) -> None:
        self._database = database
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
            Silence: no answer in time; the statement may have run.
            StoreUnavailable: the connection broke (the statement may have run), or the server is
                busy.
            ValueRefused: a value was refused; nothing was written.
            asyncio.CancelledError: the caller was cancelled, and the statement has ended; or the
                lane was closed.
        """
        # Not a shielded task per statement: that makes a claim 5 % slower.
        return await to_its_end(self._fetch(name, args))

    @property
    def busy(self) -> bool:
        """Return whether a statement is running."""
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
            try:
                with translated(statement(name).roles):
                    return await self._database.run(connection, name, args, **self._settings)
            except StoreUnavailable as error:
                self._database.failed(connection, error.__cause__ or error)
                self._check_open(times_closed)
                if connection.is_closed() or is_gone(error.__cause__ or error):
                    self.drop()
                elif self._database.pooled:
                    self._draw_stride()
                raise
            except TaskdError as error:
                found = self._database.outage(error)
                if found is error:
                    raise
                # What was prepared there may name objects that are gone.
                self.drop()
                raise found from error.__cause__

    def _check_open(self, times_closed: int) -> None:
        if self._times_closed != times_closed:
            raise asyncio.CancelledError(f"the connection for {self._purpose} was closed")

    def _draw_stride(self) -> None:
        self.stride = random.randrange(2, STRIDE_MAX)

    async def _ready(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            if self._connection is not None:
                self._draw_stride()
            # In a task of its own: asyncpg ends a slow connect by cancelling the current task.
            self._connecting = asyncio.create_task(
                self._database.connect(self._purpose, **self._settings),
                name=f"connect:{self._purpose}",
            )
            times_closed = self._times_closed
            try:
                connection = await self._connecting
            finally:
                self._connecting = None
            if self._times_closed != times_closed:
                # The connection was opened while the lane was being closed, and no one else knows
                # it.
                connection.terminate()
                self._check_open(times_closed)
            self._connection = connection
        return self._connection

    async def open(self) -> None:
        """Connect now, so that a wrong DSN shows at the start."""
        async with self._lock:
            await self._ready()

    def drop(self) -> None:
        """Drop the connection at once; the next statement opens a new one."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None
            self._draw_stride()

    async def close(self) -> None:
        """Close in order; a running statement is cut off, and its caller gets an error."""
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
