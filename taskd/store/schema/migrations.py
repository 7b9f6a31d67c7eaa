"""Migrations: the files of sql/migrations, and whether a database has the schema that they make."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from taskd.core.migration import CodeRange, Entry, Migration, code_range, misfit, version
from taskd.errors import SchemaMissing
from taskd.store.connections.statements import sql_root
from taskd.store.schema import migration_history

if TYPE_CHECKING:
    from taskd.store.connections.database import Database

LOCK_WAIT_S = 60.0
WORKERS_WAIT_S = 120.0
FILE_NAME = re.compile(r"(\d{4})_(\w+)\.sql")


@cache
def all_migrations() -> tuple[Migration, ...]:
    """Return the migrations of this code, in order."""
    found = []
    for path in (sql_root() / "migrations").iterdir():
        match = FILE_NAME.fullmatch(path.name)
        if match:
            found.append(Migration(int(match[1]), match[2], path.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda each: each.number))


def of_this_code() -> CodeRange:
    """Return the schema versions that this code works with."""
    return code_range(all_migrations())


async def check(database: Database) -> int:
    """Check that this code works with the schema; return the version of the schema.

    Raises:
        SchemaMissing, SchemaOutdated, SchemaTooNew, SchemaEdited: this code does not work with the
            schema; the message says what to do.
    """
    found = await entries(database)
    if not any(entry.is_applied for entry in found):
        from taskd.store.connections.error_translation import no_schema

        raise SchemaMissing(no_schema(database.schema))
    error = misfit(all_migrations(), found)
    if error is not None:
        raise error
    return version(found)


async def entries(database: Database) -> list[Entry]:
    """Return the applied and announced migrations; none if the schema is missing."""
    # Imported here, so that callers of other functions need no PostgreSQL driver.
    from taskd.store.connections.lanes import Lane

    lane = Lane(database, "check")
    try:
        with suppress(SchemaMissing):
            return await migration_history.entries(lane)
        return []
    finally:
        await lane.close()


async def migrate(
    database: Database,
    known: Sequence[Migration] | None = None,
    *,
    drain: bool = False,
    lock_wait_s: float = LOCK_WAIT_S,
    workers_wait_s: float = WORKERS_WAIT_S,
) -> list[Migration]:
    """Apply the missing migrations; safe to repeat, and safe while jobs run.

    Args:
        known: all migrations of a code; by default, those of this code.
        drain: make workers that are too old for a migration drain, and wait for their end.
        lock_wait_s: how long to retry to lock the tables of a migration.
        workers_wait_s: how long to wait for the end of workers that are too old.

    Returns:
        The migrations that this call has applied. Migrations after a postponed one are not applied.

    Raises:
        MigrationFailed, SchemaTooNew, SchemaEdited: a migration could not be applied; the message
            says why, and what was changed.
    """
    # Imported here, because migrate.py imports structlog, which check() does not need.
    from taskd.store.schema.migrate import Runner

    known = known or all_migrations()
    applied: list[Migration] = []
    settings = {"statement_timeout": "0", "lock_timeout": "0"}
    async with database.connection("migrate", **settings) as connection:
        runner = Runner(database, connection, known, lock_wait_s)
        for migration in known:
            if not await runner.is_missing(migration):
                continue
            if not await runner.has_outgrown_nobody(migration, drain, workers_wait_s):
                break
            if await runner.apply(migration):
                applied.append(migration)
    return applied
