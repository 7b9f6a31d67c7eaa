"""What a producer decides, and what it does not: limits of tasks, depths, other producers' jobs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.limit import Limit
from taskd.errors import QueueFull
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from tests.logins import Logins
from tests.store.limit_helpers import publish

ARGS = '{"tenant": "acme"}'
# Each way to enqueue the task `t`; a hostile producer names another limit, or none.
WAYS = {
    "enqueue": f"SELECT taskd.enqueue('t', '{ARGS}')",
    "enqueue, other queue": f"SELECT taskd.enqueue('t', '{ARGS}', queue => 'other')",
    "enqueue_one": f"SELECT taskd.enqueue_one('t', 'q', '{ARGS}', 1, NULL, NULL, NULL, NULL, NULL, "
    "NULL, NULL, true, 'mine', '[\"x\"]')",
    "enqueue_usual_job": f"SELECT taskd.enqueue_usual_job('t', 'q', '{ARGS}', 1)",
    "enqueue_usual_jobs": f"SELECT taskd.enqueue_usual_jobs('t', 'q', ARRAY['{ARGS}'], 1)",
    "enqueue_jobs": f"SELECT taskd.enqueue_jobs('{{t}}', '{{q}}', ARRAY['{ARGS}'], '{{1}}')",
    "enqueue_jobs, other limit": f"SELECT taskd.enqueue_jobs('{{t}}', '{{q}}', ARRAY['{ARGS}'], "
    "'{1}', limit_names => '{mine}', limit_values => '{[]}', args_versions => '{9}')",
    "enqueue_unique": f"SELECT taskd.enqueue_unique('t', '{ARGS}', 'k', 'q', checked => true, "
    "limit_name => 'mine', limit_values => '[\"x\"]')",
    "enqueue_unique_batch": f"SELECT taskd.enqueue_unique_batch('{{t}}', '{{q}}', ARRAY['{ARGS}'], "
    "'{1}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{k2}', '{live}', '{}', "
    "'{skip}', '{}', '{}', true, '{}', '{}')",
    "enqueue_after": f"SELECT taskd.enqueue_after('t', '{ARGS}', ARRAY[$1::bigint])",
    "enqueue_workflow": "SELECT taskd.enqueue_workflow('w', 'workflow', NULL, '{t}', '{q}', "
    f"ARRAY['{ARGS}'], '{{1}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', '{{}}', "
    "'{}', '{}', '{}', '{}', '{}', '{}')",
}


@pytest.fixture
async def producer(logins: Logins) -> AsyncIterator[Any]:
    connection = await asyncpg.connect(logins.dsn("producer"))
    yield connection
    await connection.close()


@pytest.mark.parametrize("way", WAYS)
async def test_the_limit_of_a_published_task_holds_whatever_a_producer_passes(
    lane: Lane, sql: Any, producer: Any, way: str
) -> None:
    await publish(lane, Limit(concurrency=1, by="tenant"))
    parent = await producer.fetchval("SELECT taskd.enqueue('parent', queue => 'q')")
    await producer.execute(WAYS[way], *([parent] if "$1" in WAYS[way] else []))
    found = await sql.fetch(
        "SELECT state::text, limit_name, limit_key FROM taskd.job WHERE task = 't'"
    )
    assert [tuple(each) for each in found] == [("blocked", "t", "acme")]


async def test_a_producer_fills_a_queue_up_to_its_depth_and_no_further(
    lane: Lane, sql: Any, producer: Any
) -> None:
    await limits.limit_queue(lane, "q", max_depth=10)
    parent = await producer.fetchval("SELECT taskd.enqueue('parent', queue => 'other')")
    await sql.execute("DELETE FROM taskd.job WHERE id = $1", parent)
    await sql.execute(
        "INSERT INTO taskd.job_history (id, enqueued_at, run_at, finished_at, expires_at, fence, "
        "state, priority, attempt, crashes, interrupts, queue, task, args, errors) VALUES ($1, "
        "now(), now(), now(), now() + interval '1 day', 0, 'done', 1, 1, 0, 0, 'other', 'parent', "
        "'{}', '[]')",
        parent,
    )
    ways = [
        "SELECT taskd.enqueue('u', queue => 'q')",
        "SELECT taskd.enqueue_usual_job('u', 'q', '{}', 1)",
        "SELECT taskd.enqueue_usual_jobs('u', 'q', array_fill('{}'::text, ARRAY[11]), 1)",
        "SELECT taskd.enqueue_jobs('{u}', '{q}', array_fill('{}'::text, ARRAY[11]), '{1}')",
        "SELECT taskd.enqueue_unique('u', '{}', gen_random_uuid()::text, 'q')",
        f"SELECT taskd.enqueue_after('u', '{{}}', ARRAY[{parent}], queue => 'q')",
        "INSERT INTO taskd.job (task, queue) VALUES ('u', 'q')",
    ]
    for way in ways:
        for _ in range(20):
            with contextlib.suppress(
                asyncpg.ConfigurationLimitExceededError, asyncpg.InsufficientPrivilegeError
            ):
                await producer.execute(way)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job WHERE queue = 'q'") <= 10


async def test_the_client_of_a_producer_enqueues_through_the_same_functions(
    lane: Lane, logins: Logins
) -> None:
    await limits.limit_queue(lane, "q", max_depth=10)
    client = Lane(Database({"dsn": logins.dsn("producer")}), "client")
    await jobs.enqueue(client, [NewJob("u", queue="q")] * 4)
    await jobs.enqueue(client, [NewJob("u", queue="q", priority=p) for p in range(4)])
    with pytest.raises(QueueFull):
        await jobs.enqueue(client, [NewJob("u", queue="q")] * 4)
    await client.close()


@pytest.mark.parametrize("on_conflict", ["replace", "debounce"])
async def test_a_producer_moves_anothers_keyed_job_to_no_queue_but_the_published_one(
    lane: Lane, sql: Any, producer: Any, on_conflict: str
) -> None:
    await publish(lane, Limit(concurrency=1), task="u", queue="published")
    keyed = "SELECT taskd.enqueue_unique($1, '{}', 'k', $2, on_conflict => $3)"
    for task in ("u", "unpublished"):
        await producer.execute(keyed, task, "first", "skip")
        await producer.execute(keyed, task, "nowhere", on_conflict)
        assert await _queue(sql, task) == "first"
    await producer.execute(keyed, "u", "published", on_conflict)
    assert await _queue(sql, "u") == "published"


async def _queue(sql: Any, task: str) -> Any:
    return await sql.fetchval("SELECT queue::text FROM taskd.job WHERE task = $1", task)


@pytest.mark.parametrize(
    "more", ["on_conflict => 'replace'", "on_conflict => 'debounce'", "version => 7"]
)
async def test_a_producer_postpones_anothers_keyed_job_by_a_year_at_most(
    sql: Any, producer: Any, more: str
) -> None:
    await producer.execute("SELECT taskd.enqueue_unique('u', '{}', 'k', 'q')")
    with pytest.raises(asyncpg.InvalidParameterValueError, match="within 365 days"):
        await producer.execute(
            f"SELECT taskd.enqueue_unique('u', '{{}}', 'k', 'q', run_at => '8999-01-01', {more})"
        )
    assert await sql.fetchval("SELECT run_at < now() FROM taskd.job")


async def test_a_transaction_of_a_producer_sees_its_rows_and_rolls_them_back(
    sql: Any, producer: Any
) -> None:
    transaction = producer.transaction(isolation="serializable")
    await transaction.start()
    for _ in range(3):
        await asyncio.wait_for(producer.execute("SELECT taskd.enqueue('u', queue => 'q')"), 10)
    await transaction.rollback()
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


HOLDER = """
INSERT INTO taskd.job (queue, task, args, unique_key, key_scope, errors, state, run_at, attempt)
VALUES ('payq', 'pay', '{"card": "4111"}', 'K', 'live', '[{"message": "secret 4222"}]', 'scheduled',
        now() + interval '1 h', 1)
RETURNING id
"""


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_attempts": "70000"},
        {"args": "NULL"},
        {"checked": "true", "queue": "NULL"},
        {"checked": "NULL", "queue": "NULL"},
    ],
)
async def test_a_refused_replacement_shows_nothing_of_the_job_that_holds_the_key(
    sql: Any, logins: Logins, wrong: dict[str, str]
) -> None:
    await sql.fetchval(HOLDER)
    given = {
        "task": "'pay'", "unique_key": "'K'", "on_conflict": "'replace'", "args": "'{}'",
        "queue": "'payq'",
    } | wrong  # fmt: skip
    named = ", ".join(f"{name} => {value}" for name, value in given.items())
    producer = await asyncpg.connect(logins.dsn("producer"))
    try:
        with pytest.raises(asyncpg.PostgresError) as raised:
            await producer.execute(f"SELECT taskd.enqueue_unique({named})")
    finally:
        await producer.close()
    said = f"{raised.value} {raised.value.detail}"
    assert "4111" not in said
    assert "4222" not in said


async def test_a_replacement_moves_a_job_to_no_limit_and_a_newer_version_to_no_queue(
    sql: Any, logins: Logins
) -> None:
    job_id = await sql.fetchval(HOLDER)
    producer = await asyncpg.connect(logins.dsn("producer"))
    elsewhere = "checked => true, limit_name => 'nobody', limit_values => '[]'"
    try:
        await producer.execute(
            "SELECT taskd.enqueue_unique('pay', '{}', 'K', 'payq', on_conflict => 'replace', "
            f"{elsewhere})"
        )
        row = await sql.fetchrow("SELECT state::text, limit_name FROM taskd.job")
        assert tuple(row) == ("scheduled", None)
        await sql.execute(
            "UPDATE taskd.job SET state = 'running', worker_id = 7, version = 1, fence = 1, "
            "started_at = now()"
        )
        await producer.execute(
            f"SELECT taskd.enqueue_unique('pay', '{{}}', 'K', 'nowhere', version => 2, {elsewhere})"
        )
    finally:
        await producer.close()
    follower = json.loads(
        await sql.fetchval("SELECT follower FROM taskd.job WHERE id = $1", job_id)
    )
    assert (follower["queue"], follower["limit_name"]) == ("payq", None)


async def test_a_replacement_that_makes_a_job_due_is_counted_in_the_depth(
    sql: Any, logins: Logins
) -> None:
    await sql.execute("INSERT INTO taskd.queue (name, max_depth) VALUES ('q', 3)")
    producer = await asyncpg.connect(logins.dsn("producer"))
    enqueue = (
        "SELECT taskd.enqueue_unique('t', '{}', $1, 'q', on_conflict => 'replace', delay_s => $2)"
    )
    try:
        for n in range(6):
            await producer.execute(enqueue, str(n), 100.0)
        with pytest.raises(asyncpg.PostgresError, match="q"):
            for n in range(6):
                await producer.execute(enqueue, str(n), None)
    finally:
        await producer.close()
    assert await sql.fetchval("SELECT count(*) FROM taskd.job WHERE state = 'queued'") == 3
