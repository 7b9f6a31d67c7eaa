"""The migrations, the schema that they create, and the words that Python and SQL share."""

from __future__ import annotations

import contextlib
import itertools
import re

import asyncpg
import pytest

from taskd.core.doctor.finding import Level, Observation
from taskd.core.doctor.object_repairs import Object
from taskd.core.doctor.objects import compare, expected
from taskd.core.jobs.job import FINISHED, LIVE, TRANSITIONS, JobState
from taskd.store.connections.database import Database
from taskd.store.connections.statements import load, sql_root, statement
from taskd.store.reading.doctor import schema_objects
from taskd.store.schema import migrations
from taskd.store.schema.repairs import render
from tests.contracts import schema, sql_functions


async def test_objects_tsv_lists_what_the_migrations_create(sql) -> None:
    found = await schema.installed(sql)
    assert schema.OBJECTS.read_text(encoding="utf-8") == found, (
        "run python -m tests.contracts.schema"
    )


# CREATE TABLE creates these as well.
ALONG = ("column", "constraint", "identity", "partition")


async def test_the_sql_of_every_object_creates_the_same_object(empty_dsn: str) -> None:
    wanted = expected(**schema_objects())
    connection = await asyncpg.connect(empty_dsn)
    try:
        await connection.execute("CREATE SCHEMA taskd; SET check_function_bodies = off")
        left = [each for each in wanted.values() if each.kind not in ALONG]
        while left:
            refused = []
            for each in left:
                try:
                    await connection.execute(each.create)
                except asyncpg.PostgresError:
                    refused.append(each)
            assert len(refused) < len(left), refused
            left = refused
        made = await schema.installed(connection)
    finally:
        await connection.close()
    assert made == schema.OBJECTS.read_text(encoding="utf-8")


TRANSACTION = re.compile("^(BEGIN|COMMIT);$", re.MULTILINE)
DROPS = {
    "column": "ALTER TABLE taskd.{table} DROP COLUMN {part} CASCADE",
    "constraint": "ALTER TABLE taskd.{table} DROP CONSTRAINT {part} CASCADE",
    "identity": "ALTER TABLE taskd.{table} ALTER COLUMN {part} DROP IDENTITY",
    "partition": "ALTER TABLE taskd.job_history DETACH PARTITION taskd.{table}",
    "trigger": "DROP TRIGGER {part} ON taskd.{table}",
}


def _drop(each: Object) -> str:
    table, _, part = each.name.partition("(")[0].partition(".")
    text = DROPS.get(each.kind, f"DROP {each.kind} taskd.{{table}} CASCADE")
    return text.format(table=table, part=part)


async def _repair_until_nothing_helps(sql, wanted: dict) -> list[Observation]:
    """Run what is printed, as often as it changes anything; what is left to complain about."""
    for _ in range(9):
        rows = await sql.fetch(statement("doctor_objects").text)
        left = [each for each in compare(wanted, rows) if each.level is not Level.OK]
        worked = 0
        for repair in (repair for each in left for repair in each.repairs):
            text = re.sub(
                "^(BEGIN|COMMIT);$", "", render(repair.text, repair.args), flags=re.MULTILINE
            )
            with contextlib.suppress(asyncpg.PostgresError):
                async with sql.transaction():
                    await sql.execute(text)
                worked += 1
        if not worked:
            break
    return left


@pytest.mark.long
async def test_what_the_doctor_prints_makes_every_dropped_object_again(sql) -> None:
    wanted = expected(**schema_objects())
    await schema.prepare(sql)
    for each in wanted.values():
        undone = sql.transaction()
        await undone.start()
        try:
            await sql.execute(_drop(each))
        except asyncpg.PostgresError:
            assert "history" in each.name, each  # a partition cannot lose what its parent has
        else:
            left = await _repair_until_nothing_helps(sql, wanted)
            # Nobody knows the values of a required column.
            assert not left or each.owner == "migration", (each, left)
        await undone.rollback()


def test_migrations_are_numbered_without_gaps_and_no_other_files_are_beside_them() -> None:
    found = migrations.all_migrations()
    assert [each.number for each in found] == list(range(1, len(found) + 1))
    files = sorted(path.name for path in (sql_root() / "migrations").iterdir())
    assert files == [f"{each.number:04d}_{each.name}.sql" for each in found]


def test_every_function_says_what_calls_it() -> None:
    assert len(sql_functions.functions()) > 70
    for path in sql_functions.paths():
        text = path.read_text(encoding="utf-8")
        assert sql_functions.with_callers(text) == text, "run python -m tests.contracts.schema"
    assert all(sql_functions.callers(name) for name in sql_functions.functions())


def test_every_migration_begins_with_its_purpose() -> None:
    for each in migrations.all_migrations():
        assert re.match(r"-- \w.{20,}", each.text), each.name


async def test_migrating_twice_changes_nothing(database: Database) -> None:
    before = await migrations.entries(database)
    assert await migrations.migrate(database) == []
    assert await migrations.entries(database) == before
    assert [(each.number, each.digest, each.is_applied) for each in before] == [
        (each.number, each.digest, True) for each in migrations.all_migrations()
    ]


async def test_the_states_are_the_same_in_python_and_postgresql(sql) -> None:
    labels = await sql.fetch(
        "SELECT enumlabel::text FROM pg_enum WHERE enumtypid = 'taskd.job_state'::regtype "
        "ORDER BY enumsortorder"
    )
    assert [each[0] for each in labels] == [state.value for state in JobState]


async def test_the_history_holds_finished_jobs_only(sql) -> None:
    text = await sql.fetchval(
        "SELECT pg_get_constraintdef(oid) FROM pg_constraint "
        "WHERE conrelid = 'taskd.job_history'::regclass AND conname = 'job_history_is_finished'"
    )
    assert set(re.findall(r"'(\w+)'", text)) == {state.value for state in FINISHED}


def test_the_statements_make_the_moves_that_the_core_allows_and_no_others() -> None:
    moves = {move for each in load().values() for move in each.moves}
    allowed = {(before.value if before else "-", after.value) for before, after in TRANSITIONS}
    assert moves == allowed


def test_a_statement_that_writes_a_state_says_which_moves_it_makes() -> None:
    writes = re.compile(r"INSERT INTO taskd\.job\b|UPDATE taskd\.job\b[^;]*\bSET state")
    for each in load().values():
        if writes.search(each.text) or "DELETE FROM taskd.job AS" in each.text:
            assert each.moves, each.name


UNFIT = (
    ("max_attempts", "0", "attempts_are_1_to_1000"),
    ("timeout_s", "'NaN'", "timeout_is_1_ms_to_30_days"),
    ("deadline", "'infinity'", "moment_is_finite"),
    ("unique_key", "''", "unique_key_is_bounded"),
    ("metadata", "'[]'", "metadata_is_an_object"),
)


@pytest.mark.parametrize(("column", "value", "name"), UNFIT)
async def test_optional_values_are_checked_however_they_are_written(
    sql, column: str, value: str, name: str
) -> None:
    with pytest.raises(asyncpg.CheckViolationError, match=name):
        await sql.execute(
            f"INSERT INTO taskd.job (queue, task, {column}) VALUES ('q', 't', {value})"
        )
    await sql.execute("INSERT INTO taskd.job (queue, task) VALUES ('q', 't')")
    with pytest.raises(asyncpg.CheckViolationError, match=name):
        await sql.execute(f"UPDATE taskd.job SET {column} = {value}")


async def test_a_running_job_has_a_worker_and_no_other_job_has_one(sql) -> None:
    insert = "INSERT INTO taskd.job (queue, task, state, worker_id) VALUES ('q', 't', $1, $2)"
    waiting = LIVE - {JobState.RUNNING}
    for state, worker_id in itertools.product(JobState, (None, 7)):
        fits = state in waiting if worker_id is None else state is JobState.RUNNING
        if fits:
            await sql.execute(insert, state, worker_id)
        else:
            with pytest.raises(asyncpg.CheckViolationError, match="job_fits_its_state"):
                await sql.execute(insert, state, worker_id)
