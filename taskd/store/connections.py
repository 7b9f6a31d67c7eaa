"""The caller's own connection, so that a job is enqueued in the caller's own transaction.

Statements run on it as they are: no transaction is begun, committed or rolled back here, beyond
what the driver does at any statement (psycopg begins one unless it is in autocommit). What asyncpg
raises is translated as everywhere. What psycopg raises stays psycopg's: it is the caller's driver,
whose errors the caller's code and its transaction blocks expect.
"""

from __future__ import annotations

import sys
from typing import Any

import asyncpg
from asyncpg.pool import PoolConnectionProxy

from taskd.store.jobs import Fetches
from taskd.store.statements import statement
from taskd.store.translate import translated

ASYNC_ONES = "an asyncpg connection (also one that a pool lends) or a psycopg.AsyncConnection"
SYNC_ONES = "a psycopg.Connection"


def fetches(conn: object) -> Fetches:
    """What runs statements on a caller's asyncpg connection or psycopg.AsyncConnection.

    Raises:
        TypeError: it is neither; the message says what is accepted.
    """
    if isinstance(conn, asyncpg.Connection | PoolConnectionProxy):
        return _Asyncpg(conn)
    if _is_psycopg(conn, "AsyncConnection"):
        return _AsyncPsycopg(conn)
    if _is_psycopg(conn, "Connection"):
        raise TypeError(
            f"conn is {SYNC_ONES}, which would block the event loop: use the method that ends in "
            f"_sync, or give {ASYNC_ONES}"
        )
    raise TypeError(_refusal(conn, ASYNC_ONES))


def fetches_sync(conn: object) -> Fetches:
    """What runs statements on a caller's psycopg.Connection: its coroutines never suspend.

    Raises:
        TypeError: it is something else; the message says what is accepted.
    """
    if _is_psycopg(conn, "Connection"):
        return _SyncPsycopg(conn)
    raise TypeError(_refusal(conn, SYNC_ONES))


def _is_psycopg(conn: object, kind: str) -> bool:
    # A connection of psycopg's is one only where psycopg has been imported.
    psycopg = sys.modules.get("psycopg")
    return psycopg is not None and isinstance(conn, getattr(psycopg, kind))


def _refusal(conn: object, accepted: str) -> str:
    kind = f"{type(conn).__module__}.{type(conn).__qualname__}"
    return (
        f"conn is a {kind}; taskd takes {accepted}. An ORM's session hands out its driver's "
        "connection (SQLAlchemy: (await connection.get_raw_connection()).driver_connection)."
    )


class _Asyncpg:
    def __init__(self, conn: Any) -> None:
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        with translated():
            # The caller's connection may have a record class of its own.
            rows: list[Any] = await self._conn.fetch(
                statement(name).text, *args, record_class=asyncpg.Record
            )
            return rows


class _AsyncPsycopg:
    def __init__(self, conn: Any) -> None:
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        from psycopg import AsyncRawCursor
        from psycopg.rows import tuple_row

        # The raw cursor leaves `$1` as it is; rows are tuples whatever the connection's factory.
        async with AsyncRawCursor(self._conn, row_factory=tuple_row) as cursor:
            await cursor.execute(statement(name).text, args)
            return await cursor.fetchall()


class _SyncPsycopg:
    def __init__(self, conn: Any) -> None:
        self._conn = conn

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        from psycopg import RawCursor
        from psycopg.rows import tuple_row

        with RawCursor(self._conn, row_factory=tuple_row) as cursor:
            cursor.execute(statement(name).text, args)
            return cursor.fetchall()
