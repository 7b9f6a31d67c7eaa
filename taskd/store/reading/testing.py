"""Statements of taskd.testing: make and drop databases of tests, and read their jobs."""

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
        database: any database of the server; its user must be allowed to create databases.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: asyncpg.Connection | None = None

    async def make(self, name: str, template: str) -> None:
        """Make a database that is a copy of another one, which must have no connections."""
        await self._execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY FILE_COPY')

    async def drop(self, name: str) -> None:
        """Drop a database, even if it has connections."""
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
    """Return every job, sorted by id; arguments, result and error are JSON text."""
    return [dict(record) for record in await on.fetch("testing_jobs")]


async def due_queues(on: Fetches, tasks: Iterable[str]) -> set[str]:
    """Return the queues with a running job, a job that a worker could run now, or a due tick.

    Args:
        tasks: the tasks that the worker knows.
    """
    return {row[0] for row in await on.fetch("testing_due", list(tasks))}


async def travel(on: Fetches, seconds: float) -> int:
    """Move all times in the rows `seconds` into the past; return how many jobs are live."""
    moved: int = (await on.fetch("travel", float(seconds)))[0][0]
    return moved
