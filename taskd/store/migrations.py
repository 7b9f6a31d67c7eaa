"""Migrations: sql/migrations/NNNN_name.sql, forward only, each in one transaction.

What was applied stands in `taskd.migration`. An advisory lock lets one process migrate at a time.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from functools import cache

import asyncpg

from taskd.errors import SchemaMissing, SchemaOutdated, SchemaTooNew
from taskd.store.database import Database
from taskd.store.statements import sql_root
from taskd.store.translate import NO_SCHEMA

FILE_NAME = re.compile(r"(\d{4})_(\w+)\.sql")
ADVISORY_LOCK = 0x7461736B64  # "taskd"
LOCK_TIMEOUT_MS = 2000

# It holds the list of what was applied, so it cannot itself be a migration.
LEDGER = """
CREATE TABLE IF NOT EXISTS taskd.migration (
    number integer PRIMARY KEY,
    name text NOT NULL,
    digest text NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT clock_timestamp()
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file of sql/migrations."""

    number: int
    name: str
    text: str = field(repr=False)

    @property
    def digest(self) -> str:
        """Fingerprint of the text; tells an edited migration from the one that was applied."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@cache
def all_migrations() -> tuple[Migration, ...]:
    """The migrations that this code brings, in order."""
    found = []
    for path in (sql_root() / "migrations").iterdir():
        match = FILE_NAME.fullmatch(path.name)
        if match:
            found.append(Migration(int(match[1]), match[2], path.read_text(encoding="utf-8")))
    return tuple(sorted(found, key=lambda each: each.number))


async def migrate(database: Database) -> list[Migration]:
    """Apply what is missing; returns it. Safe to call at the same time from anywhere.

    Raises:
        SchemaTooNew: the database has migrations that this code does not know.
        PermissionDenied: the role may not create the schema.
    """
    applied: list[Migration] = []
    async with database.connection(
        "migrate", statement_timeout="0", lock_timeout="0"
    ) as connection:
        for migration in all_migrations():
            async with connection.transaction():
                # Held until the commit, and by the transaction: behind a pooler the session is
                # anybody's.
                await connection.execute(
                    "SELECT pg_advisory_xact_lock($1)", ADVISORY_LOCK, timeout=120
                )
                # A migration may take as long as it needs, but it waits 2 s at most for a table: a
                # waiting ALTER TABLE would block every claim behind it. Not so for whoever
                # migrates already.
                await connection.execute(
                    f"SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"
                )
                done = await _applied(connection)
                _refuse_newer(done)
                if migration.number in done:
                    continue
                await connection.execute(migration.text, timeout=3600)
                await connection.execute(LEDGER)
                await connection.execute(
                    "INSERT INTO taskd.migration (number, name, digest) VALUES ($1, $2, $3)",
                    migration.number,
                    migration.name,
                    migration.digest,
                )
            applied.append(migration)
    return applied


async def check(database: Database) -> None:
    """Make sure that the schema fits this code.

    Raises:
        SchemaMissing, SchemaOutdated, SchemaTooNew: it does not; the message says what to do.
    """
    async with database.connection("check") as connection:
        done = await _applied(connection)
    if not done:
        raise SchemaMissing(NO_SCHEMA)
    _refuse_newer(done)
    missing = [m for m in all_migrations() if m.number not in done]
    if missing:
        names = ", ".join(f"{m.number:04d}_{m.name}" for m in missing)
        raise SchemaOutdated(f"the schema taskd lacks {names}. Run `taskd db migrate`.")


async def applied(database: Database) -> dict[int, str]:
    """Number and digest of what was applied; empty when the schema is missing."""
    async with database.connection("check") as connection:
        return await _applied(connection)


async def _applied(connection: asyncpg.Connection) -> dict[int, str]:
    if await connection.fetchval("SELECT to_regclass('taskd.migration')") is None:
        return {}
    rows = await connection.fetch("SELECT number, digest FROM taskd.migration ORDER BY number")
    return {row["number"]: row["digest"] for row in rows}


def _refuse_newer(done: dict[int, str]) -> None:
    newest = max((m.number for m in all_migrations()), default=0)
    newer = [number for number in done if number > newest]
    if newer:
        raise SchemaTooNew(
            f"the schema taskd is at {max(newer):04d}; this code knows up to {newest:04d}. "
            "Upgrade taskd on this machine."
        )
