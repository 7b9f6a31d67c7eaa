"""The caller's own connection, so that a job is enqueued in the caller's own transaction.

The connection belongs to a driver (asyncpg, psycopg, psycopg2), to SQLAlchemy or to Django. taskd
only runs statements on this connection. taskd never begins, commits or rolls back a transaction.
Most drivers and frameworks begin a transaction at the first statement, unless the connection is in
autocommit. With SQLAlchemy and Django, taskd uses their objects, never the driver's connection
below them. That connection may not be in the framework's transaction yet.

Errors of asyncpg become errors of taskd. Errors of other drivers and of frameworks are raised
unchanged, because the caller's code and transaction blocks expect them. The exceptions are KeyHeld,
QueueFull and SequenceBehind, which taskd raises with every kind of connection.

This module imports psycopg or psycopg2 only if the connection belongs to that driver. It never
imports SQLAlchemy or Django: if the caller has an object of one of these libraries, the library is
already loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Mapping
from functools import cache
from typing import Any, TypeVar

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from taskd.store.connections.error_translation import translated
from taskd.store.connections.statements import PARAMETER, Fetches, statement

T = TypeVar("T")

ASYNC_ONES = (
    "an asyncpg connection (also one from a pool), a psycopg.AsyncConnection, or "
    "SQLAlchemy's AsyncConnection or AsyncSession"
)
SYNC_ONES = (
    "a connection of psycopg or psycopg2, SQLAlchemy's Connection or Session, or "
    "django.db.connection"
)


def fetches(conn: object, schema: str) -> Fetches:
    """Return an object that runs statements on the caller's connection in an event loop.

    Args:
        schema: the schema of the installation.

    Raises:
        TypeError: the type is not supported; the message says which types are.
    """
    if isinstance(conn, asyncpg.Connection | PoolConnectionProxy):
        return _Asyncpg(conn, schema)
    adapter = _adapter(conn, _ASYNC)
    if adapter is not None:
        return adapter(conn, schema)
    if _adapter(conn, _SYNC) is not None:
        raise TypeError(
            f"conn is a {_kind(conn)}, which would block the event loop. Use the method that ends "
            f"in _sync, or pass {ASYNC_ONES}"
        )
    raise TypeError(f"conn is a {_kind(conn)}; taskd takes {ASYNC_ONES}")


def fetches_sync(conn: object, schema: str) -> Fetches:
    """Return an object that runs statements on a blocking connection: its coroutines never suspend.

    Args:
        schema: the schema of the installation.

    Raises:
        TypeError: the type is not supported; the message says which types are.
    """
    adapter = _adapter(conn, _SYNC)
    if adapter is not None:
        return adapter(conn, schema)
    if isinstance(conn, asyncpg.Connection | PoolConnectionProxy) or _adapter(conn, _ASYNC):
        raise TypeError(
            f"conn is a {_kind(conn)}, which needs an event loop. Await the method without _sync, "
            f"or pass {SYNC_ONES}"
        )
    raise TypeError(f"conn is a {_kind(conn)}; taskd takes {SYNC_ONES}")


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, such as one over a blocking connection."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a sync connection suspended")


def _kind(conn: object) -> str:
    return f"{type(conn).__module__}.{type(conn).__qualname__}"


def _adapter(
    conn: object, adapters: Mapping[tuple[str, str], Callable[[Any, str], Fetches]]
) -> Callable[[Any, str], Fetches] | None:
    for (module, name), adapter in adapters.items():
        kind = getattr(sys.modules.get(module), name, None)
        if isinstance(kind, type) and isinstance(conn, kind):
            return adapter
    return None


@cache
def _with_names(name: str, schema: str) -> str:
    """Return a statement with `%(name)s` in place of `$1`, for drivers without `$1`."""
    source = statement(name, schema)
    return PARAMETER.sub(
        lambda found: f"%({source.parameters[int(found[1]) - 1]})s", source.text.replace("%", "%%")
    )


def _named(name: str, args: tuple[Any, ...], schema: str) -> tuple[str, dict[str, Any]]:
    return _with_names(name, schema), dict(zip(statement(name).parameters, args, strict=True))


class CallersConnection:
    """Runs statements in the caller's transaction, which can stay open for long."""


class _Asyncpg(CallersConnection):
    def __init__(self, conn: Any, schema: str) -> None:
        self._schema = schema
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        with translated(statement(name).roles):
            # The caller's connection can have a record class of its own.
            rows: list[Any] = await self._conn.fetch(
                statement(name, self._schema).text, *args, record_class=asyncpg.Record
            )
            return rows


class _AsyncPsycopg(CallersConnection):
    def __init__(self, conn: Any, schema: str) -> None:
        self._schema = schema
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        from psycopg import AsyncRawCursor
        from psycopg.rows import tuple_row

        # The raw cursor leaves `$1` as it is. Its rows are tuples, whatever row factory the
        # connection has.
        async with AsyncRawCursor(self._conn, row_factory=tuple_row) as cursor:
            await cursor.execute(statement(name, self._schema).text, args)
            return await cursor.fetchall()


class _Psycopg(CallersConnection):
    def __init__(self, conn: Any, schema: str) -> None:
        self._schema = schema
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        from psycopg import RawCursor
        from psycopg.rows import tuple_row

        with RawCursor(self._conn, row_factory=tuple_row) as cursor:
            cursor.execute(statement(name, self._schema).text, args)
            return cursor.fetchall()


class _Psycopg2(CallersConnection):
    def __init__(self, conn: Any, schema: str) -> None:
        self._schema = schema
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        from psycopg2.extensions import cursor as plain

        with self._conn.cursor(cursor_factory=plain) as cursor:
            cursor.execute(*_named(name, args, self._schema))
            rows: list[Any] = cursor.fetchall()
            return rows


class _Django(CallersConnection):
    def __init__(self, conn: Any, schema: str) -> None:
        self._schema = schema
        if conn.vendor != "postgresql":
            raise TypeError(
                f"conn is Django's connection {conn.alias!r} to {conn.vendor}. Pass the one to "
                "PostgreSQL, for example django.db.connections['jobs']"
            )
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        with self._conn.cursor() as cursor:
            cursor.execute(*_named(name, args, self._schema))
            rows: list[Any] = cursor.fetchall()
            return rows


class _SqlAlchemy(CallersConnection):
    def __init__(self, conn: Any, schema: str) -> None:
        self._schema = schema
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        made = self._conn.exec_driver_sql(*_for_driver(self._conn, name, args, self._schema))
        rows: list[Any] = made.fetchall()
        return rows


class _SqlAlchemySession(CallersConnection):
    def __init__(self, session: Any, schema: str) -> None:
        self._schema = schema
        self._session = session

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        # The session's transaction begins here if this is its first statement.
        return await _SqlAlchemy(self._session.connection(), self._schema).fetch(name, *args)


class _AsyncSqlAlchemy(CallersConnection):
    def __init__(self, conn: Any, schema: str) -> None:
        self._schema = schema
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        text, named = _for_driver(self._conn, name, args, self._schema)
        result = await self._conn.exec_driver_sql(text, named)
        rows: list[Any] = result.fetchall()
        return rows


class _AsyncSqlAlchemySession(CallersConnection):
    def __init__(self, session: Any, schema: str) -> None:
        self._schema = schema
        self._session = session

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        conn = await self._session.connection()
        return await _AsyncSqlAlchemy(conn, self._schema).fetch(name, *args)


def _for_driver(conn: Any, name: str, args: tuple[Any, ...], schema: str) -> tuple[str, Any]:
    """Return the statement and its arguments for the driver below SQLAlchemy."""
    dialect = conn.dialect
    if dialect.driver in {"psycopg", "psycopg_async", "psycopg2"}:
        return _named(name, args, schema)
    if dialect.driver == "asyncpg":
        return statement(name, schema).text, args
    raise TypeError(
        f"conn is SQLAlchemy's connection over {dialect.name}+{dialect.driver}; taskd supports "
        "postgresql+psycopg, postgresql+psycopg2 and postgresql+asyncpg"
    )


# Maps the module and the name of each class of connections to its adapter.
_ASYNC: Mapping[tuple[str, str], Callable[[Any, str], Fetches]] = {
    ("psycopg", "AsyncConnection"): _AsyncPsycopg,
    ("sqlalchemy.ext.asyncio", "AsyncConnection"): _AsyncSqlAlchemy,
    ("sqlalchemy.ext.asyncio", "AsyncSession"): _AsyncSqlAlchemySession,
    ("sqlalchemy.ext.asyncio", "async_scoped_session"): _AsyncSqlAlchemySession,
}
_SYNC: Mapping[tuple[str, str], Callable[[Any, str], Fetches]] = {
    ("psycopg", "Connection"): _Psycopg,
    ("psycopg2.extensions", "connection"): _Psycopg2,
    ("sqlalchemy.engine", "Connection"): _SqlAlchemy,
    ("sqlalchemy.orm", "Session"): _SqlAlchemySession,
    ("sqlalchemy.orm", "scoped_session"): _SqlAlchemySession,
    ("django.db.backends.base.base", "BaseDatabaseWrapper"): _Django,
    ("django.utils.connection", "ConnectionProxy"): _Django,
}
