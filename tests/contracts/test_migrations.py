"""What a migration declares is true: its locks, and the code that works with it."""

from __future__ import annotations

from typing import Any

import asyncpg
import pytest

from taskd.core.migration import LOCK_MODES, Migration, code_range
from taskd.store.connections.database import Database
from taskd.store.connections.statements import load
from taskd.store.schema import migrations
from taskd.store.schema.migrations import all_migrations

# The baseline: before it there was no code that a migration could break.
FIRST_RELEASE = 1
STRONGER = ("AccessShareLock", "RowShareLock", "RowExclusiveLock")  # any statement takes these
HELD = """
SELECT DISTINCT coalesce(parent.relname, c.relname)::text, l.mode
FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
LEFT JOIN pg_class AS parent ON parent.oid = i.inhparent
WHERE l.pid = pg_backend_pid() AND c.relkind IN ('r', 'p', 'v') AND c.oid = ANY ($1::oid[])
  AND NOT l.mode = ANY ($2)
"""
BEFORE = "SELECT oid FROM pg_class WHERE relnamespace = to_regnamespace('taskd')"
# From these columns old code learns that it is too old, when it renews its lease.
FOR_EVER = {
    "worker": {"id", "renewed_at", "lease_until", "draining", "died_at"},
    "migration": {"number", "name", "digest", "works_with", "applied_at"},
}


def in_words(mode: str) -> str:
    """Return a lock mode as in SQL: `ShareUpdateExclusiveLock` is `share update exclusive`."""
    words = "".join(f" {c.lower()}" if c.isupper() else c for c in mode.removesuffix("Lock"))
    return words.strip()


async def locked_by(migration: Migration, connection: Any) -> dict[str, str]:
    """Return the strongest lock that a migration takes on each table that existed before it."""
    there = [each[0] for each in await connection.fetch(BEFORE)]
    transaction = connection.transaction()
    await transaction.start()
    await connection.execute(migration.text)
    held = await connection.fetch(HELD, there, list(STRONGER))
    await transaction.rollback()
    strongest: dict[str, str] = {}
    ranks = list(LOCK_MODES)
    for name, mode in held:
        words = in_words(mode)
        known = strongest.get(name, words)
        strongest[name] = max(words, known, key=ranks.index)
    return strongest


async def test_a_migration_takes_the_locks_that_it_declares_and_no_others(empty_dsn: str) -> None:
    database = Database({"dsn": empty_dsn})
    for each in all_migrations():
        connection = await asyncpg.connect(empty_dsn)
        try:
            if each.in_transaction:  # the others lock nothing that a job waits for
                assert dict(each.locks) == await locked_by(each, connection), each.label
        finally:
            await connection.close()
        await migrations.migrate(database, all_migrations()[: each.number])


async def test_locks_are_found_and_the_strongest_of_a_table_counts(sql: Any) -> None:
    text = """\
-- step: expand
-- works with: >= 1
-- locks: job access exclusive, worker share
CREATE INDEX ON taskd.job (task);
ALTER TABLE taskd.job ADD COLUMN colour text;
CREATE INDEX ON taskd.worker (host);
UPDATE taskd.queue SET max_depth = 1;
"""
    migration = Migration(2, "more", text)
    assert dict(migration.locks) == await locked_by(migration, sql)


def test_an_expand_leaves_older_code_working() -> None:
    floor = 0
    for each in all_migrations():
        if each.is_needed and each.number > FIRST_RELEASE:
            assert each.works_with <= floor, (
                f"{each.label} is an expand, so older code must keep working"
            )
        floor = max(floor, each.works_with)


def test_a_contract_works_with_code_that_was_there_before_it() -> None:
    for each in all_migrations():
        assert each.is_needed or each.works_with < each.number, each.label


async def test_every_statement_works_on_the_oldest_schema_of_this_code(empty_dsn: str) -> None:
    oldest = code_range(all_migrations()).oldest
    await migrations.migrate(Database({"dsn": empty_dsn}), all_migrations()[:oldest])
    connection = await asyncpg.connect(empty_dsn)
    try:
        for each in load().values():
            await connection.prepare(each.text)
    finally:
        await connection.close()


async def test_the_columns_by_which_old_code_learns_that_it_is_too_old_stay(sql: Any) -> None:
    for table, columns in FOR_EVER.items():
        found = await sql.fetch(
            "SELECT attname::text FROM pg_attribute WHERE attrelid = $1::text::regclass",
            f"taskd.{table}",
        )
        assert columns <= {each[0] for each in found}


def test_a_migration_has_a_purpose_of_one_line() -> None:
    for each in all_migrations():
        assert 20 < len(each.what) < 160, each.label


@pytest.mark.parametrize(
    "text",
    [
        "SELECT 1",
        "-- step: expand\nSELECT 1",
        "-- works with: >= 1\nSELECT 1",
        "-- step: shrink\n-- works with: >= 1\nSELECT 1",
        "-- step: expand\n-- works with: >= 3\nSELECT 1",
        "-- step: expand\n-- works with: >= 0\nSELECT 1",
        "-- step: expand\n-- works with: >= 1\n-- works with: >= 2\nSELECT 1",
        "-- step: expand\n-- works with: >= 1\n-- locks: job tight\nSELECT 1",
        "-- step: expand\n-- works with: >= 1\n-- no transaction\nCREATE INDEX CONCURRENTLY a",
    ],
)  # fmt: skip
def test_a_migration_with_missing_or_wrong_declarations_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="0002_odd"):
        Migration(2, "odd", text)
