"""Producers that do not use the client: taskd.enqueue(...) from SQL, and rows written by hand."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import asyncpg
import pytest

from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.connections.lanes import Lane


async def enqueue(sql: Any, call: str) -> int:
    job_id: int = await sql.fetchval(f"SELECT taskd.enqueue({call})")
    return job_id


async def test_sql_enqueues_with_the_queue_of_the_published_task(
    sql: Any, published: Registry
) -> None:
    job_id = await enqueue(sql, """'send', '{"to": "x"}'""")
    row = await sql.fetchrow("SELECT * FROM taskd.job WHERE id = $1", job_id)
    assert (row["queue"], row["task"], row["state"]) == ("email", "send", "queued")
    assert (row["priority"], row["max_attempts"], row["timeout_s"]) == (100, None, None)
    assert json.loads(row["args"]) == {"to": "x"}


async def test_sql_sets_every_option(sql: Any) -> None:
    job_id = await enqueue(
        sql,
        "'other', queue => 'bulk', priority => -3, max_attempts => 4, timeout_s => 2.5,"
        " run_at => '2100-01-01 00:00+00'",
    )
    row = await sql.fetchrow("SELECT * FROM taskd.job WHERE id = $1", job_id)
    assert (row["queue"], row["priority"], row["max_attempts"]) == ("bulk", -3, 4)
    assert (row["timeout_s"], row["state"], row["run_at"].year) == (2.5, "scheduled", 2100)
    assert json.loads(row["args"]) == {}


async def test_sql_delays_a_job(sql: Any) -> None:
    job_id = await enqueue(sql, "'other', queue => 'q', delay_s => 90")
    row = await sql.fetchrow(
        "SELECT state, run_at - enqueued_at AS delay FROM taskd.job WHERE id = $1", job_id
    )
    assert (row["state"], row["delay"]) == ("scheduled", timedelta(seconds=90))


async def test_a_delay_that_is_over_is_queued(sql: Any) -> None:
    job_id = await enqueue(sql, "'other', queue => 'q', run_at => '2020-01-01'")
    assert await sql.fetchval("SELECT state FROM taskd.job WHERE id = $1", job_id) == "queued"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        ("'send'", 'task "send" needs the argument "to"'),
        ("""'send', '{"to": "x", "cc": "y"}'""", 'task "send" has no argument "cc"'),
        ("'nobody'", 'no worker has published a task named "nobody" and no queue was named'),
        ("'x', '[1]', queue => 'q'", "must be a JSON object"),
        ("'x', NULL, queue => 'q'", "must be a JSON object"),
        ("""'x', ('{"a": "' || repeat('x', 300000) || '"}')::jsonb, queue => 'q'""", "262144"),
    ],
)
async def test_sql_refuses_what_does_not_fit_and_says_why(
    sql: Any, published: Registry, call: str, says: str
) -> None:
    with pytest.raises(asyncpg.PostgresError, match=says):
        await enqueue(sql, call)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


async def test_an_unknown_task_with_a_queue_is_taken(sql: Any) -> None:
    assert await enqueue(sql, """'nobody', '{"any": 1}', queue => 'q'""") > 0


async def test_its_notification_arrives_only_at_the_commit(sql: Any, listener: Any) -> None:
    async with sql.transaction():
        await enqueue(sql, "'a', queue => 'email'")
        assert await listener.notified() == []
    assert await listener.notified() == ["email"]


async def test_a_value_that_must_be_made_once_is_made_once(sql: Any) -> None:
    await sql.execute("CREATE SEQUENCE n")
    for n in (1, 2):
        job_id = await enqueue(sql, "'a', jsonb_build_object('n', nextval('n')), 'q'")
        args = await sql.fetchval("SELECT args FROM taskd.job WHERE id = $1", job_id)
        assert json.loads(args) == {"n": n}


async def test_a_rollback_takes_job_and_notification_back(sql: Any, listener: Any) -> None:
    transaction = sql.transaction()
    await transaction.start()
    await enqueue(sql, "'a', queue => 'email'")
    await transaction.rollback()
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0
    assert await listener.notified() == []


async def test_a_search_path_does_not_lead_it_astray(sql: Any) -> None:
    await sql.execute("CREATE SCHEMA evil; CREATE TABLE evil.job (id int); SET search_path = evil")
    assert await enqueue(sql, "'a', queue => 'q'") > 0


LIMITS = [
    ("queue", "'it''s'"),
    ("queue", "repeat('q', 49)"),
    ("queue", "''"),
    ("queue", "'Email'"),
    ("queue", "E'a\\n'"),
    ("task", "''"),
    ("task", "repeat('t', 201)"),
    ("max_attempts", "0"),
    ("max_attempts", "1001"),
    ("max_attempts", "70000"),
    ("priority", "3000000000"),
    ("priority", "-3000000000"),
    ("run_at", "timestamptz '9999-01-01 00:00+00'"),
    ("run_at", "timestamptz 'infinity'"),
    ("run_at", "timestamptz '-infinity'"),
    ("run_at", "timestamptz '0001-06-01 00:00+00'"),
    ("deadline", "timestamptz '0001-01-01 00:00+00 BC'"),
    ("timeout_s", "0"),
    ("timeout_s", "-1"),
    ("timeout_s", "double precision 'NaN'"),
    ("timeout_s", "double precision 'Infinity'"),
    ("metadata", "'[]'"),
    ("metadata", "jsonb_build_object('a', repeat('x', 9000))"),
    ("args", "'[]'"),
    ("args", "'5'"),
    ("args", '\'{"a": "\\u0000"}\''),
    ("args", '\'{"a": "\\ud800"}\''),
    ("args", "'{\"a\": NaN}'"),
    ("args", "('{\"a\": \"' || repeat('x', 300000) || '\"}')::jsonb"),
    # Each takes 20 bytes as it is stored, and is a text of 128 KiB.
    ("args", "jsonb_build_object('a', array_fill(1e131071::numeric, ARRAY[30]))"),
]
DEFAULTS = {"queue": "'q'", "task": "'t'", "args": "'{}'"}


@pytest.mark.parametrize(("column", "value"), LIMITS)
async def test_the_database_refuses_what_the_client_refuses(
    sql: Any, column: str, value: str
) -> None:
    columns = DEFAULTS | {column: value}
    names, values = ", ".join(columns), ", ".join(columns.values())
    with pytest.raises(asyncpg.PostgresError):
        await sql.execute(f"INSERT INTO taskd.job ({names}) VALUES ({values})")
    call = ", ".join(f"{name} => {given}" for name, given in columns.items())
    with pytest.raises(asyncpg.PostgresError):
        await enqueue(sql, call)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


# A published task goes a short way, where its job needs no more than that.

VALUES = [(column, value) for column, value in LIMITS if column != "task"]
OPTIONS = [
    "queue => 'known'",
    "queue => 'another'",
    "priority => -3",
    "run_at => '2100-01-01 00:00+00'",
    "run_at => '2020-01-01 00:00+00'",
    "delay_s => 90",
    "max_attempts => 4",
    "timeout_s => 2.5",
    "deadline => '2100-01-01 00:00+00'",
    "deadline_s => 90",
    "no_key => true",
    """metadata => '{"tag": "x"}'""",
]


@pytest.fixture
async def known(lane: Lane) -> None:
    async def known(a: str | None = None) -> None: ...

    registry = Registry()
    for name in ("known", "t"):
        registry.add(Task(known, name=name, queue="known"))
    await workers.publish(lane, "app", registry, ["known"])


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("option", [*OPTIONS, ", ".join(OPTIONS[1:8:2] + OPTIONS[8:])])
async def test_a_published_task_makes_the_same_job_as_one_that_is_not(
    sql: Any, option: str
) -> None:
    queue = "" if "queue" in option else ", queue => 'known'"
    rows = "SELECT to_jsonb(job) - '{id,task}'::text[] FROM taskd.job ORDER BY id"
    args = """'{"a": "b"}'"""
    async with sql.transaction():
        await enqueue(sql, f"'known', {args}, {option}")
        await enqueue(sql, f"'unknown', {args}, {option}{queue}")
    [known, unknown] = [json.loads(row[0]) for row in await sql.fetch(rows)]
    assert known == unknown


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("column", "value"), VALUES)
async def test_of_a_published_task_the_same_values_are_refused(
    sql: Any, column: str, value: str
) -> None:
    columns = {"task": "'t'", column: value}
    call = ", ".join(f"{name} => {given}" for name, given in columns.items())
    with pytest.raises(asyncpg.PostgresError) as short:
        await enqueue(sql, call)
    columns = {"queue": "'q'"} | columns | {"task": "'unknown'"}
    call = ", ".join(f"{name} => {given}" for name, given in columns.items())
    with pytest.raises(asyncpg.PostgresError) as long:
        await enqueue(sql, call)
    assert short.value.sqlstate == long.value.sqlstate
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


async def test_a_row_with_the_defaults_alone_is_a_job(sql: Any) -> None:
    await sql.execute("INSERT INTO taskd.job (queue, task) VALUES ('q', 't')")
    assert await sql.fetchval("SELECT state FROM taskd.job") == "queued"


async def test_a_row_cannot_be_born_finished_or_ownerless(sql: Any) -> None:
    for state in ("done", "failed", "cancelled", "running"):
        with pytest.raises(asyncpg.CheckViolationError):
            await sql.execute(
                f"INSERT INTO taskd.job (queue, task, state) VALUES ('q', 't', '{state}')"
            )
