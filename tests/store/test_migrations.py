"""Migrations: applied once by however many start at the same time, and never backwards."""

from __future__ import annotations

import asyncio
from operator import attrgetter

import asyncpg
import pytest

from taskd.errors import SchemaMissing, SchemaOutdated, SchemaTooNew, StoreUnavailable
from taskd.store import migrations
from taskd.store.database import Database
from taskd.store.migrations import ADVISORY_LOCK, Migration, all_migrations
from tests.store.helpers import PATIENCE_S


async def test_of_several_that_migrate_at_once_each_migration_is_applied_by_one(empty_dsn) -> None:
    database = Database({"dsn": empty_dsn})
    applied = await asyncio.gather(*(migrations.migrate(database) for _ in range(4)))
    by_number = attrgetter("number")
    assert sorted((each for one in applied for each in one), key=by_number) == list(
        all_migrations()
    )
    await migrations.check(database)


async def test_who_migrates_waits_for_who_is_migrating_longer_than_for_a_table(
    empty_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What limits the wait for a table's lock must not limit this one.
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT_MS", 100)
    holder = await asyncpg.connect(empty_dsn)
    await holder.execute("SELECT pg_advisory_lock($1)", ADVISORY_LOCK)
    waiting = asyncio.create_task(migrations.migrate(Database({"dsn": empty_dsn})))
    async with asyncio.timeout(PATIENCE_S):
        while not await holder.fetchval(
            "SELECT true FROM pg_locks JOIN pg_stat_activity USING (pid) "
            "WHERE locktype = 'advisory' AND NOT granted "
            "AND clock_timestamp() > query_start + interval '300 ms' "
            "AND datname = current_database()"
        ):
            assert not waiting.done()
    await holder.close()
    assert await waiting == list(all_migrations())


async def test_a_migration_that_waits_for_a_table_gives_up_and_changes_nothing(
    dsn: str, sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "CREATE TABLE taskd.half (); ALTER TABLE taskd.job ADD COLUMN more text"
    newer = Migration(len(all_migrations()) + 1, "more", text)
    known = (*all_migrations(), newer)
    monkeypatch.setattr(migrations, "all_migrations", lambda: known)
    monkeypatch.setattr(migrations, "LOCK_TIMEOUT_MS", 50)
    reading = await asyncpg.connect(dsn)
    transaction = reading.transaction()
    await transaction.start()
    await reading.fetch("SELECT FROM taskd.job")
    with pytest.raises(StoreUnavailable, match="lock timeout"):
        await migrations.migrate(Database({"dsn": dsn}))
    assert await sql.fetchval("SELECT to_regclass('taskd.half')") is None
    await reading.close()
    assert await migrations.migrate(Database({"dsn": dsn})) == [newer]


async def test_a_database_without_the_schema_is_told_apart(empty_dsn: str) -> None:
    with pytest.raises(SchemaMissing, match="taskd db migrate"):
        await migrations.check(Database({"dsn": empty_dsn}))
    assert await migrations.applied(Database({"dsn": empty_dsn})) == {}


async def test_an_older_database_names_what_it_lacks(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = Migration(len(all_migrations()) + 1, "keys", "SELECT 1")
    known = (*all_migrations(), newer)
    monkeypatch.setattr(migrations, "all_migrations", lambda: known)
    with pytest.raises(SchemaOutdated, match=f"{newer.number:04d}_keys"):
        await migrations.check(database)


async def test_a_newer_database_is_neither_used_nor_migrated(database: Database, sql) -> None:
    newest = all_migrations()[-1].number
    await sql.execute("INSERT INTO taskd.migration VALUES ($1, 'later', '')", newest + 1)
    for refuse in (migrations.check, migrations.migrate):
        with pytest.raises(SchemaTooNew, match=f"{newest + 1:04d}"):
            await refuse(database)
