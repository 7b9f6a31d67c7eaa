"""Connections to PostgreSQL: where the database is, how to connect, and what an outage is.

For each of its own statements, taskd limits the wait for the reply, by asyncpg's `command_timeout`
or by its own check. Without a limit, a statement on a half-open socket would never end.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

import asyncpg

from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.errors import ConfigError, StoreUnavailable, TaskdError
from taskd.store.connections import driver_args
from taskd.store.connections.connect_errors import reaching, target_of, why_read_only
from taskd.store.connections.error_translation import (
    STRAYED,
    Down,
    NoRoom,
    is_gone,
    outage,
    translate,
    translated,
)
from taskd.store.connections.prepared_statements import Connection
from taskd.store.connections.statements import statement

CONNECT_TIMEOUT_S = 5.0
# The client waits this much longer than the server's timeout, so that the server's error usually
# arrives first.
SILENCE_AFTER_S = 2.0
ROOM_EVERY_S = 0.25
# An outage has ended if no error was noted for this long. Every service of a worker retries within
# this time.
QUIET_S = 12.0
# Maximum number of error texts that are reported for one outage.
ERRORS_MAX = 10


class Trouble:
    """The outage of a database that has worked before; shared by all threads of a worker.

    Only permanent errors that are raised as outages are noted here; see outage().

    Args:
        report: called with the text of an error and its notes, which say what to do.
    """

    def __init__(self, report: Callable[[str, Sequence[str]], None]) -> None:
        self._report = report
        self._errors: set[str] = set()
        self._text, self._began, self._noted_at = "", 0.0, 0.0

    def note(self, error: StoreUnavailable) -> None:
        """Record an error, and report its text once in an outage; at most ERRORS_MAX texts."""
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
        """Return the seconds from the first to the last error of an outage that has ended.

        Each ended outage is returned once. The result is None if no further outage has ended.
        """
        if not self._errors or not self._is_quiet():
            return None
        self._errors = set()
        return self._noted_at - self._began


class Database:
    """Where the database is and how to connect; holds no connection itself.

    Args:
        connect_args: arguments of asyncpg.connect (a `dsn`, or host, user, database ...).
        statement_timeout_s: the server's limit for a statement, in seconds. The client waits
            SILENCE_AFTER_S longer for the reply.
        revive: restarts the embedded server; called in a thread if no server accepts connections.
        schema: the schema of the installation in this database.
        read_args: returns the current `connect_args`; called before each connect, because the
            password can have changed.
        room_s: how long connect() retries, in seconds, while the server has no free connection.
            Commands of the command line use this. Services of workers do not need it, because they
            retry by themselves.

    Attributes:
        trouble: the record of outages; None before begin_use().
        pooled: whether a pooler is in front of the database. If so, taskd expects another session
            for each transaction, and relies on no session state. None before the first connect.
    """

    def __init__(
        self,
        connect_args: Mapping[str, Any],
        *,
        statement_timeout_s: float = 5.0,
        schema: str = SCHEMA_DEFAULT,
        revive: Callable[[], None] | None = None,
        read_args: Callable[[], Mapping[str, Any]] | None = None,
        room_s: float = 0.0,
    ) -> None:
        self.room_s = room_s
        self.statement_timeout_s = statement_timeout_s
        self.schema = schema
        self.pooled: bool | None = None
        self.trouble: Trouble | None = None
        self._revive = revive
        self._read_args = read_args
        self._use_args(connect_args)

    def _use_args(self, connect_args: Mapping[str, Any]) -> None:
        parameters = driver_args.parameters_of(connect_args)
        self.connect_args = dict(connect_args)
        self._parameters = parameters
        self._addresses = driver_args.addresses(parameters)
        self._target = target_of(parameters)

    def with_timeout(self, statement_timeout_s: float) -> Database:
        """Return a copy with another statement timeout."""
        made = copy.copy(self)
        made.statement_timeout_s = statement_timeout_s
        return made

    def begin_use(self, report: Callable[[str, Sequence[str]], None]) -> None:
        """Declare that the database works: from now on, raise permanent errors as outages.

        Args:
            report: as in Trouble.
        """
        self.trouble = Trouble(report)

    def outage(self, error: TaskdError) -> TaskdError:
        """Return a permanent error as an outage, after begin_use(); return other errors as is."""
        made = None if self.trouble is None else outage(error)
        if made is None or self.trouble is None:
            return error
        self.trouble.note(made)
        return made

    @property
    def binds_channel(self) -> bool:
        """Whether the DSN requires channel binding; taskd verifies the certificate instead."""
        return self._target.binds_channel

    @property
    def silence_s(self) -> float:
        """Seconds without a reply after which the client gives up."""
        return self.statement_timeout_s + SILENCE_AFTER_S

    async def connect(
        self, purpose: str, watched: bool = False, /, **settings: str
    ) -> asyncpg.Connection:
        """Open a connection whose `application_name` is `<schema> <purpose>`.

        Args:
            watched: whether the caller checks for replies that take longer than silence_s. If not,
                or behind a pooler, asyncpg checks.
            settings: server settings in addition to the usual ones, or in place of these.

        Raises:
            NoRoom: the server has no free connection.
            StoreUnavailable: no server accepts connections, or none accepts writes.
            PermissionDenied: the server refuses the login.
            ConfigError: the DSN cannot be used, or the server has no such database.
        """
        until = time.monotonic() + self.room_s
        while True:
            try:
                return await self._connect_once(purpose, watched, settings)
            except NoRoom:
                if time.monotonic() >= until:
                    raise
            await asyncio.sleep(ROOM_EVERY_S)

    async def _connect_once(
        self, purpose: str, watched: bool, settings: Mapping[str, str]
    ) -> asyncpg.Connection:
        self._read_args_again()
        with self._outages(), reaching(self._target, self._connect_timeout_s()):
            try:
                connection = await self._connect_directly_or_not(purpose, settings, watched)
            except (ConnectionRefusedError, FileNotFoundError):
                if self._revive is None:
                    raise
                await asyncio.to_thread(self._revive)
                connection = await self._connect_directly_or_not(purpose, settings, watched)
        _keep_alive(connection, self._parameters)
        return connection

    async def connect_plain(self, purpose: str) -> asyncpg.Connection:
        """Open a connection for statements of the app; the session keeps the settings of its user.

        Call connect() first, because connect() finds out whether there is a pooler.

        Raises:
            StoreUnavailable, PermissionDenied, ConfigError: as connect().
        """
        # As in _connect_directly_or_not: prepare nothing, and do not ask the host for its role.
        pooled: dict[str, Any] = {"statement_cache_size": 0, "target_session_attrs": "any"}
        self._read_args_again()
        with self._outages(), reaching(self._target, self._connect_timeout_s()):
            connection = await self._connect(
                {"application_name": f"{self.schema} {purpose}"},
                command_timeout=None,
                **(pooled if self.pooled else {}),
            )
        _keep_alive(connection, self._parameters)
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

    def _connect_timeout_s(self) -> float:
        """Return the seconds within which each host must answer."""
        return driver_args.connect_timeout_s(self._parameters) or CONNECT_TIMEOUT_S

    def _driver_args(self, address: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of asyncpg.connect for a host, without settings of the server."""
        any_host = self.connect_args.get("target_session_attrs") == "any"
        return {
            "target_session_attrs": "any" if any_host else "read-write",
            "timeout": self._connect_timeout_s(),
            **driver_args.arguments(self._parameters),
            **address,
        }

    def _read_args_again(self) -> None:
        if self._read_args is None:
            return
        # If the DSN file cannot be read, the last DSN may still be valid.
        with contextlib.suppress(ConfigError):
            args = self._read_args()
            if args != self.connect_args:
                self._use_args(args)

    def run(
        self, connection: Connection, name: str, args: tuple[Any, ...], **settings: str
    ) -> Coroutine[Any, Any, list[asyncpg.Record]]:
        """Run the named statement on a connection that connect() opened with these settings.

        The caller must pass an error of the statement to failed().
        """
        if not self.pooled:
            return connection.run(name, args)
        return self._run_pooled(connection, statement(name, self.schema).text, args, settings)

    def failed(self, connection: asyncpg.Connection, error: BaseException) -> None:
        """If a statement's error shows that there is a pooler, note it, and drop the connection."""
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
            # No ROLLBACK: the statement may still run, and cannot be cancelled through a pooler.
            raise
        except Exception as error:
            if isinstance(error, asyncpg.ReadOnlySQLTransactionError) and is_gone(error):
                # Through a pooler, the connect does not check the role of the host. So try another
                # host at the next connect.
                self._addresses = [*self._addresses[1:], self._addresses[0]]
            if not connection.is_closed():
                await self.roll_back(connection)
            raise
        await self.commit(connection)
        return rows

    async def begin(self, connection: asyncpg.Connection, **settings: str) -> None:
        """Begin a transaction; through a pooler, set the server settings for the transaction."""
        assignments = "".join(
            f" SET LOCAL {key} = '{value}';" for key, value in self._settings(settings).items()
        )
        if not self.pooled:
            assignments = ""
        await connection.execute(f"BEGIN ISOLATION LEVEL READ COMMITTED;{assignments}")

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
            # With other schemas in the path, any user who can create objects there could replace
            # functions and operators of statements.
            "search_path": "pg_catalog",
        } | dict(settings)

    async def _connect_directly_or_not(
        self, purpose: str, settings: Mapping[str, str], watched: bool
    ) -> asyncpg.Connection:
        """Connect with the server settings, or, through a pooler, without them."""
        name = {"application_name": f"{self.schema} {purpose}"}
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
        # Through a pooler, prepare nothing by name, and send no query outside of a transaction.
        return await self._connect(name, statement_cache_size=0, target_session_attrs="any")

    async def _connect(self, server_settings: dict[str, str], **args: Any) -> asyncpg.Connection:
        """Connect to the first suitable host; try the host of the last connect first."""
        addresses = self._addresses
        args = {"command_timeout": self.silence_s} | args
        server_settings = driver_args.server_settings(self._parameters) | server_settings
        unsure: Exception | None = None
        for number, address in enumerate(addresses, 1):
            try:
                connection = await asyncpg.connect(
                    **(self._driver_args(address) | args),
                    server_settings=server_settings,
                    connection_class=Connection,
                )
            except Exception as error:
                known_error = translate(error)
                if not isinstance(known_error, StoreUnavailable):
                    raise
                # Raise the error of a host that is down only if all hosts are down. Otherwise, the
                # database may be up on a host that did not answer.
                unsure = unsure or (None if isinstance(known_error, Down) else error)
                if number == len(addresses):
                    raise await self._read_only(address, unsure or error) from None
            else:
                connection.schema = self.schema
                # Replace the list in one assignment, because the lease thread reads the same list.
                self._addresses = [address, *(each for each in addresses if each != address)]
                return connection
        raise AssertionError("there is at least one address")

    async def _read_only(self, address: Mapping[str, Any], error: Exception) -> Exception:
        """Return the error, or, if the host accepts no writes, an error that says why.

        Args:
            address: the address of the host.
        """
        not_matched: type[Exception] = asyncpg.exceptions.TargetServerAttributeNotMatched
        if not isinstance(error, not_matched):
            return error
        args = self._driver_args(address) | {"target_session_attrs": "any"}
        try:
            connection = await asyncpg.connect(
                **args,
                server_settings=driver_args.server_settings(self._parameters),
                command_timeout=self.silence_s,
            )
            try:
                return await why_read_only(connection, self._target)
            finally:
                await close(connection)
        except Exception:  # noqa: BLE001 - the known error says enough
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
    """Close the connection; drop the socket if this fails, or takes longer than a second."""
    try:
        await connection.close(timeout=1.0)
    except Exception:  # noqa: BLE001 - the connection ends either way
        connection.terminate()


def _keep_alive(connection: asyncpg.Connection, parameters: Mapping[str, str]) -> None:
    # asyncpg sets only TCP_NODELAY. `_transport` is private; a test checks that it still exists.
    transport = getattr(connection, "_transport", None)
    sock = transport.get_extra_info("socket") if transport is not None else None
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_KEEPALIVE, int(parameters.get("keepalives") != "0")
    )
    for name, value in driver_args.keepalive(parameters).items():
        # No operating system has all of these options.
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
