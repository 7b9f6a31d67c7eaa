"""What taskd/testing/ asks: databases for single tests, and what is in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import asyncpg

from taskd.store.connections.database import Database, close
from taskd.store.connections.error_translation import translated
from taskd.store.connections.statements import Fetches

Row = dict[str, Any]


class Databases:
    """Makes and drops databases of a server, over one connection.

    Args:
        database: any database of the server; its user may create others.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: asyncpg.Connection | None = None

    async def make(self, name: str, template: str) -> None:
        """Make a database that is a copy of another one, which nobody may be using."""
        await self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY')

    async def drop(self, name: str) -> None:
        """Drop a database, whoever is connected to it."""
        await self._execute(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    async def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            await close(self._connection)

    async def _execute(self, statement: str) -> None:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._database.connect("testing")
        with translated():
            await self._connection.execute(statement)


async def jobs(on: Fetches) -> list[Row]:
    """Every job, in the order of ids; arguments, result and error are JSON text."""
    return [dict(record) for record in await on.fetch("testing_jobs")]


async def due_queues(on: Fetches, tasks: Iterable[str]) -> set[str]:
    """Queues in which something runs, or could be run now by a worker that knows these tasks."""
    return {row[0] for row in await on.fetch("testing_due", list(tasks))}


async def travel(on: Fetches, seconds: float) -> int:
    """Move all that is to come so much closer to now; how many jobs are live."""
    moved: int = (await on.fetch("travel", float(seconds)))[0][0]
    return moved
