"""Jobs that name limits which nobody has published: they stop neither admission nor upkeep."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from taskd import events
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.limit import Limit, LimitOf
from taskd.store import workers
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import HeldUp
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import statement
from taskd.store.jobs import jobs, limits
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.services.service import Wakeup
from taskd.worker.upkeep.promoter import Promoter
from tests.logins import Logins
from tests.store.helpers import incarnation
from tests.store.limit_helpers import enqueue, publish, queued, states

NAMES = 3000
# As the owner: no function accepts these any more in one statement of a producer.
UNPUBLISHED = """
INSERT INTO taskd.job (queue, task, state, limit_name, limit_key)
SELECT 'q1', 'say', 'blocked', 'a-evil-' || g, 'k' FROM generate_series(1, $1) AS g
"""
CONSUMERS: dict[str, Consumer] = {}


async def test_a_producer_cannot_insert_a_blocked_job(logins: Logins) -> None:
    producer = await asyncpg.connect(logins.dsn("producer"))
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await producer.execute(UNPUBLISHED, 10)
    await producer.close()


async def test_a_limit_admits_beside_any_number_of_unpublished_limits(lane: Lane, sql: Any) -> None:
    task = await publish(lane, Limit(concurrency=1))
    await sql.execute(UNPUBLISHED, NAMES)
    [job_id] = await enqueue(lane, task, "main")
    # One call admits the job, and parks no more than a batch.
    assert (await limits.admit(lane, 500)).queues == {"q": 1}
    assert await queued(sql) == [job_id]
    assert (await states(sql))["blocked:parked"] == 500
    while (await limits.admit(lane, 500)).checked:
        pass
    # They are checked once, and no limit gets a row.
    assert (await states(sql))["blocked:parked"] == NAMES
    assert (await jobs.next_due(lane)).gate_s is None
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_limit") == 1


async def test_the_jobs_of_an_unpublished_limit_begin_when_it_is_published(
    lane: Lane, sql: Any
) -> None:
    early = NewJob("t", queue="q", limit=LimitOf("t", "[]"))
    [job_id] = await jobs.enqueue(lane, [early])
    await limits.admit(lane, 100)
    assert await states(sql) == {"blocked:parked": 1}
    await publish(lane, Limit(concurrency=1))
    assert await queued(sql) == [job_id]


async def test_a_limit_that_is_being_published_parks_no_job(lane: Lane, dsn: str, sql: Any) -> None:
    await jobs.enqueue(lane, [NewJob("t", queue="q", limit=LimitOf("t", "[]"))])
    publisher = await asyncpg.connect(dsn)
    transaction = publisher.transaction()
    await transaction.start()
    await publisher.execute(
        "INSERT INTO taskd.job_limit (name, concurrency, by_hand) VALUES ('t', 1, true)"
    )
    assert (await limits.admit(lane, 100)).checked == 0
    assert await states(sql) == {"blocked": 1}
    await transaction.commit()
    await publisher.close()
    assert (await limits.admit(lane, 100)).queues == {"q": 1}


async def test_a_call_checks_a_hundred_limits_and_the_next_one_goes_on(
    lane: Lane, sql: Any
) -> None:
    await sql.execute(
        "INSERT INTO taskd.job_limit (name, concurrency, by_hand) "
        "SELECT format('l%s', 1000 + g), 1, true FROM generate_series(1, 250) AS g"
    )
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, limit_name, limit_key) "
        "SELECT 'q', 't', 'blocked', name, '' FROM taskd.job_limit"
    )
    after, calls = "", []
    while not calls or after:
        admitted = await limits.admit(lane, 1000, after_name=after)
        after = admitted.last_name
        calls.append(admitted.checked)
    assert calls == [100, 100, 50]
    assert await states(sql) == {"queued": 250}


async def test_a_call_ends_when_it_has_checked_a_batch(lane: Lane, sql: Any) -> None:
    for name in ("a", "b"):
        await sql.execute(
            "INSERT INTO taskd.job_limit (name, concurrency, by_hand) VALUES ($1, 1, true)", name
        )
        await sql.execute(
            "INSERT INTO taskd.job (queue, task, state, limit_name, limit_key) "
            "SELECT 'q', 't', 'blocked', $1, '' FROM generate_series(1, 30)",
            name,
        )
    first = await limits.admit(lane, 20)
    assert (first.checked, first.last_name) == (20, "a")
    assert (await limits.admit(lane, 20, after_name="a")).queues == {"q": 1}


async def test_the_promoter_admits_all_limits_and_names_a_timeout(
    lane: Lane, dsn: str, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    await sql.execute(UNPUBLISHED, NAMES)
    [job_id] = await enqueue(lane, task, "main")
    promoter = Promoter(lane, CONSUMERS, Wakeup())
    await promoter.tick()
    assert await queued(sql) == [job_id]
    assert (await states(sql))["blocked:parked"] == NAMES
    said: list[str] = []
    monkeypatch.setattr(events, "admission_timed_out", said.append)
    await enqueue(lane, task, "main")
    await sql.execute(
        "CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql "
        "AS 'BEGIN PERFORM pg_sleep(30); RETURN new; END';"
        "CREATE TRIGGER slow BEFORE UPDATE ON taskd.job "
        "FOR EACH STATEMENT EXECUTE FUNCTION public.slow()"
    )
    hasty = Lane(Database({"dsn": dsn}, statement_timeout_s=0.2), "hasty")
    promoter = Promoter(hasty, CONSUMERS, Wakeup())
    for _ in range(2):
        with pytest.raises(HeldUp):
            await promoter.tick()
    await hasty.close()
    assert len(said) == 1


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "a\x1b[2Jb"])
async def test_no_function_accepts_a_name_of_a_limit_out_of_bounds(
    logins: Logins, name: str
) -> None:
    producer = await asyncpg.connect(logins.dsn("producer"))
    calls = {
        "SELECT taskd.enqueue_one('t', 'q', '{}', 1, NULL, NULL, NULL, NULL, NULL, NULL, NULL, "
        "true, $1, '[]')": name,
        "SELECT taskd.enqueue_unique('t', '{}', 'k', 'q', checked => true, limit_name => $1, "
        "limit_values => '[]')": name,
        "SELECT taskd.enqueue_jobs('{t}', '{q}', '{{}}', '{1}', limit_names => $1, "
        "limit_values => '{[]}')": [name],
        "SELECT taskd.enqueue_workflow('w', 'workflow', NULL, '{t}', '{q}', '{{}}', '{1}', '{}', "
        "'{}', '{}', '{}', '{}', '{}', '{}', $1, '{[]}', '{}', '{}', '{}', '{}', '{}')": [name],
    }
    for call, given in calls.items():
        with pytest.raises(asyncpg.CheckViolationError):
            await producer.execute(call.replace("'{{}}'", "ARRAY['{}']"), given)
    await producer.close()


async def test_parked_jobs_of_foreign_tasks_cost_the_upkeep_nothing(
    lane: Lane, dsn: str, sql: Any
) -> None:
    """A producer chooses how many names of tasks the jobs that workers have parked have."""
    await workers.register(lane, incarnation(1), 3600.0, ["q"], {"t": 1})
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, parked, run_at, args_version) "
        "SELECT 'q', 'evil' || g, 'scheduled'::taskd.job_state, true, now() + interval '1 day', "
        "NULL FROM generate_series(1, $1) AS g UNION ALL "
        "SELECT 'q', 't', 'scheduled', true, now() + interval '1 day', 30000 "
        "FROM generate_series(1, $1) AS g",
        NAMES,
    )
    await sql.execute("ANALYZE taskd.job")
    plan = await _explained(dsn, "check_upkeep", 1, 30.0, "host", "boot", "ns")
    assert _rows_read(plan, "job_parked") <= 10


async def test_the_doctor_names_a_few_unpublished_limits_and_reads_no_more(
    lane: Lane, sql: Any
) -> None:
    await publish(lane, Limit(concurrency=1))
    await sql.execute(UNPUBLISHED, NAMES)
    rows = await lane.fetch("doctor_limits", 1000)
    names = [row["name"] for row in rows if not row["known"]]
    assert 1 <= len(names) <= 6


async def _explained(dsn: str, name: str, *args: Any) -> Any:
    each = statement(name)
    connection = await asyncpg.connect(dsn)
    for setting in ("seqscan", "bitmapscan", "hashjoin", "mergejoin"):
        await connection.execute(f"SET enable_{setting} = off")
    values = ", ".join("NULL" if arg is None else f"'{arg}'" for arg in args)
    await connection.execute(f"PREPARE it ({', '.join(each.types)}) AS {each.text}")
    plan = await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) EXECUTE it ({values})")
    await connection.close()
    return json.loads(plan)


def _rows_read(plan: Any, index: str) -> float:
    """Return how many rows the scans of an index have returned or filtered."""
    if isinstance(plan, list):
        return sum(_rows_read(each, index) for each in plan)
    if not isinstance(plan, dict):
        return 0
    own = 0.0
    if plan.get("Index Name") == index:
        rows = plan["Actual Rows"] + plan.get("Rows Removed by Filter", 0)
        own = rows * plan["Actual Loops"]
    return own + sum(_rows_read(each, index) for each in plan.values())


async def test_buckets_are_pruned_in_batches(lane: Lane, sql: Any) -> None:
    """A producer chooses how many keys a limit with a rate has."""
    await sql.execute(
        "INSERT INTO taskd.job_limit (name, rate, burst, by_hand) VALUES ('a', 1, 1, true), "
        "('b', NULL, NULL, true)"
    )
    await sql.execute(
        "INSERT INTO taskd.bucket (limit_name, limit_key, tokens, filled_at) "
        "SELECT name, g, 0, now() - CASE WHEN g % 2 = 0 THEN interval '1 h' ELSE '0 s' END "
        "FROM taskd.job_limit, generate_series(1, 100) AS g"
    )
    await limits.prune_buckets(lane, batch=7)
    left = await sql.fetch("SELECT limit_name, count(*) FROM taskd.bucket GROUP BY 1")
    assert [tuple(each) for each in left] == [("a", 50)]


async def test_the_depth_of_a_queue_is_counted_without_reading_other_jobs(sql: Any) -> None:
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, run_at) SELECT 'other', 't', 'scheduled', "
        "now() + interval '1 day' FROM generate_series(1, $1)",
        NAMES,
    )
    await sql.execute("ANALYZE taskd.job")
    scans = (
        "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables "
        "WHERE relid = 'taskd.job'::regclass"
    )
    async with sql.transaction():
        before = await sql.fetchval(scans)
        await sql.execute("SELECT taskd.queue_depth('q', 10)")
        assert await sql.fetchval(scans) - before < 10
