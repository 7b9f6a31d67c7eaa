"""Migrations: applied once, however many runners start at the same time, and never backwards."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import pytest

from taskd import events
from taskd.core.migration import Migration
from taskd.errors import (
    MigrationFailed,
    PermissionDenied,
    SchemaEdited,
    SchemaMissing,
    SchemaOutdated,
    SchemaTooNew,
)
from taskd.store.connections.database import Database
from taskd.store.schema import migrate, migrations
from taskd.store.schema.migrate import ADVISORY_LOCK
from taskd.store.schema.migrations import all_migrations
from taskd.store.schema.sql_script import script
from tests.cli.test_db import psql
from tests.store.helpers import PATIENCE_S, Connect

NEXT = len(all_migrations()) + 1
VALID = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass('taskd.job_extra')"
OLD_WORKER = """
INSERT INTO taskd.worker (id, lease_until, pid, pid_started, host, boot_id, pid_namespace, version,
    app, queues, tasks, schema_newest)
VALUES (7, now() + interval '1 hour', 4242, 1, 'host1', 'boot', 'ns', '0.1', 'app', '{}', '{}', $1)
"""


def made(sql: str, *lines: str, step: str = "expand", works_with: int = 1) -> Migration:
    head = [f"step: {step}", f"works with: >= {works_with}", *lines]
    text = "".join(f"-- {line}\n" for line in head)
    return Migration(NEXT, "more", f"-- It is here to be tried.\n--\n{text}\n{sql}\n")


def known(*more: Migration) -> tuple[Migration, ...]:
    return (*all_migrations(), *more)


@pytest.fixture
def emitted() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    said: list[tuple[str, dict[str, Any]]] = []
    end = events.subscribe(lambda name, fields: said.append((name, dict(fields))))
    yield said
    end()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "RETRY_S_MAX", 0.3)


async def test_of_several_that_migrate_at_once_each_migration_is_applied_by_one(empty_dsn) -> None:
    database = Database({"dsn": empty_dsn})
    text = made("CREATE TABLE taskd.more{0} ();").text
    known = (*all_migrations(), *(Migration(n, "more", text.format(n)) for n in (NEXT, NEXT + 1)))
    applied = await asyncio.gather(*(migrations.migrate(database, known) for _ in range(4)))
    by_number = attrgetter("number")
    assert sorted((each for one in applied for each in one), key=by_number) == list(known)
    assert await migrations.check(database) == NEXT + 1


async def test_a_migration_waits_for_another_one_and_says_so(
    database: Database, connect: Connect, emitted
) -> None:
    newer = made("CREATE TABLE taskd.more ();")
    holder = await connect()
    await holder.execute("SELECT pg_advisory_lock($1)", ADVISORY_LOCK)
    waiting = asyncio.create_task(migrations.migrate(database, known(newer), lock_wait_s=0.0))
    async with asyncio.timeout(PATIENCE_S):
        while not emitted:
            assert not waiting.done()
            await asyncio.sleep(0.01)
    assert emitted == [("migration.waits", {})]
    await holder.close()
    assert await waiting == [newer]


async def test_a_migration_does_not_wait_for_ever_for_another_one(
    database: Database, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(migrate, "RUNNER_WAIT_S", 0.1)
    holder = await connect()
    await holder.execute("SELECT pg_advisory_lock($1)", ADVISORY_LOCK)
    with pytest.raises(MigrationFailed, match="another session has held"):
        await migrations.migrate(database, known(made("SELECT 1;")))


@pytest.mark.usefixtures("impatient")
async def test_a_migration_that_gets_no_lock_tries_again_and_then_names_the_holder(
    database: Database, sql, connect: Connect, emitted
) -> None:
    newer = made(
        "CREATE TABLE taskd.half (); ALTER TABLE taskd.job ADD COLUMN more text;",
        "locks: job access exclusive",
    )
    reading = await connect(application_name="report")
    transaction = reading.transaction()
    await transaction.start()
    await reading.fetch("SELECT FROM taskd.job")
    pid = reading.get_server_pid()
    with pytest.raises(MigrationFailed, match=rf"no lock in 1 try: .*pid {pid} \(report, idle"):
        await migrations.migrate(database, known(newer), lock_wait_s=0.0)
    assert await sql.fetchval("SELECT to_regclass('taskd.half')") is None

    again = asyncio.create_task(migrations.migrate(database, known(newer)))
    async with asyncio.timeout(PATIENCE_S):
        while not emitted:
            await asyncio.sleep(0.01)
    name, said = emitted[0]
    assert (name, said["number"]) == ("migration.delayed", NEXT)
    assert "lock timeout" in said["error"]
    assert f"pid {pid} (report" in said["held_by"][0]
    await reading.close()
    assert await again == [newer]
    assert await migrations.migrate(database, known(newer)) == []


async def test_a_migration_that_fails_changes_nothing_and_says_so(dsn: str, sql) -> None:
    newer = made("CREATE TABLE taskd.half (); SELECT 1 / 0;")
    with pytest.raises(MigrationFailed, match=r"_more failed: division by zero. It changed noth"):
        await migrations.migrate(Database({"dsn": dsn}), known(newer))
    assert await sql.fetchval("SELECT to_regclass('taskd.half')") is None
    assert await migrations.check(Database({"dsn": dsn})) == NEXT - 1


async def test_a_login_without_the_right_to_migrate_gets_permission_denied(
    logins, dsn: str
) -> None:
    newer = made("CREATE TABLE taskd.half ();")
    with pytest.raises(PermissionDenied):
        await migrations.migrate(Database({"dsn": logins.dsn("worker")}), known(newer))


# Migrations without a transaction.

INDEX = "CREATE INDEX CONCURRENTLY IF NOT EXISTS job_extra ON taskd.job (task, run_at);"


@pytest.mark.usefixtures("impatient")
async def test_an_index_that_was_left_invalid_is_made_again(
    database: Database, sql, connect: Connect
) -> None:
    newer = made(INDEX, "no transaction")
    # A transaction with an older snapshot: the index build has to wait for its end.
    old = await connect()
    transaction = old.transaction(isolation="repeatable_read")
    await transaction.start()
    await old.fetch("SELECT FROM taskd.job")
    writer = await connect()
    with pytest.raises(MigrationFailed, match=f"pid {old.get_server_pid()} .*It continues where"):
        await migrations.migrate(database, known(newer), lock_wait_s=0.3)
    assert await sql.fetchval(VALID) is False
    # Jobs are enqueued and end meanwhile.
    await writer.execute("INSERT INTO taskd.job (queue, task, args) VALUES ('q', 't', '{}')")
    await transaction.rollback()
    assert await migrations.migrate(database, known(newer)) == [newer]
    assert await sql.fetchval(VALID) is True
    assert await migrations.migrate(database, known(newer)) == []


async def test_several_that_build_an_index_at_once_build_it_once(dsn: str, sql) -> None:
    newer = made(INDEX, "no transaction")
    database = Database({"dsn": dsn})
    async with asyncio.timeout(PATIENCE_S):
        applied = await asyncio.gather(
            *(migrations.migrate(database, known(newer)) for _ in range(3))
        )
    assert sorted(applied, key=len) == [[], [], [newer]]
    assert await sql.fetchval(VALID) is True


async def test_the_script_for_psql_builds_an_index_again_that_was_left_invalid(
    dsn: str, sql
) -> None:
    more = made("CREATE TABLE taskd.more ();")
    text = made(INDEX, "no transaction").text
    index = Migration(NEXT + 1, "index", text)
    await sql.execute("CREATE INDEX job_extra ON taskd.job (task)")
    await sql.execute(
        "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'taskd.job_extra'::regclass"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [psql(), "-X", "-q", "-v", "ON_ERROR_STOP=1", dsn],
        input=script([more, index]), text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert await sql.fetchval(VALID) is True
    columns = "SELECT pg_get_indexdef('taskd.job_extra'::regclass)"
    assert "run_at" in await sql.fetchval(columns)
    assert await migrations.migrate(Database({"dsn": dsn}), known(more, index)) == []


# Old workers.


async def test_what_living_workers_are_too_old_for_waits_if_this_code_works_without_it(
    database: Database, sql, emitted
) -> None:
    await sql.execute(OLD_WORKER, NEXT - 2)
    newer = made("CREATE TABLE taskd.more ();", step="contract", works_with=NEXT - 1)
    await sql.execute("UPDATE taskd.migration SET works_with = 0")
    assert await migrations.migrate(database, known(newer)) == []
    assert [name for name, _ in emitted] == ["migration.postponed"]
    assert emitted[0][1]["workers"] == ["host1/4242 (taskd 0.1)"]
    await sql.execute("UPDATE taskd.worker SET died_at = now()")
    assert await migrations.migrate(database, known(newer)) == [newer]


async def test_what_this_code_needs_is_refused_while_workers_are_too_old_for_it(
    database: Database, sql
) -> None:
    await sql.execute(OLD_WORKER, NEXT - 1)
    newer = made("CREATE TABLE taskd.more ();", works_with=NEXT)
    with pytest.raises(MigrationFailed, match=r"host1/4242 .*--drain"):
        await migrations.migrate(database, known(newer))
    assert await sql.fetchval("SELECT to_regclass('taskd.more')") is None


async def test_a_drain_is_announced_and_waited_for(database: Database, sql, emitted) -> None:
    await sql.execute(OLD_WORKER, NEXT - 1)
    newer = made("CREATE TABLE taskd.more ();", works_with=NEXT)
    with pytest.raises(MigrationFailed, match="is announced"):
        await migrations.migrate(database, known(newer), drain=True, workers_wait_s=0.1)
    assert [name for name, _ in emitted] == ["migration.announced"]
    # Code that will not work with it refuses to start; nothing else has changed.
    with pytest.raises(SchemaTooNew, match=f"about to be at {NEXT:04d}"):
        await migrations.check(database)
    assert await sql.fetchval("SELECT to_regclass('taskd.more')") is None

    waiting = asyncio.create_task(migrations.migrate(database, known(newer), drain=True))
    async with asyncio.timeout(PATIENCE_S):
        while len(emitted) == 1:
            await asyncio.sleep(0.01)
    await sql.execute("UPDATE taskd.worker SET died_at = now()")
    assert await waiting == [newer]


# Schemas of other versions.


async def test_a_database_without_the_schema_is_recognized(empty_dsn: str) -> None:
    with pytest.raises(SchemaMissing, match="taskd db migrate"):
        await migrations.check(Database({"dsn": empty_dsn}))
    assert await migrations.entries(Database({"dsn": empty_dsn})) == []


async def test_an_older_database_names_what_it_lacks(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    newer = known(made("SELECT 1"))
    monkeypatch.setattr(migrations, "all_migrations", lambda: newer)
    with pytest.raises(SchemaOutdated, match=f"{NEXT:04d}_more"):
        await migrations.check(database)


async def test_a_newer_database_is_used_as_long_as_it_says_so(database: Database, sql) -> None:
    later = "INSERT INTO taskd.migration VALUES ($1, 'later', '', $2, now())"
    await sql.execute(later, NEXT, NEXT - 1)
    assert await migrations.check(database) == NEXT
    assert await migrations.migrate(database) == []
    await sql.execute(later, NEXT + 1, NEXT)
    for refuse in (migrations.check, migrations.migrate):
        with pytest.raises(SchemaTooNew, match=f"at {NEXT + 1:04d}, which works with .*{NEXT:04d}"):
            await refuse(database)


async def test_a_database_of_a_build_before_the_first_release_is_recognized(
    database: Database, sql
) -> None:
    await sql.execute("ALTER TABLE taskd.migration DROP COLUMN works_with")
    for refuse in (migrations.check, migrations.migrate):
        with pytest.raises(SchemaEdited, match=r"before the first release"):
            await refuse(database)


async def test_a_migration_that_was_edited_is_neither_used_nor_built_upon(
    database: Database, sql
) -> None:
    await sql.execute("UPDATE taskd.migration SET digest = 'other' WHERE number = 1")
    for refuse in (migrations.check, migrations.migrate):
        with pytest.raises(SchemaEdited, match="0001_baseline"):
            await refuse(database)
