"""Priorities: integers of 32 bits, and the default of a task, for every way to enqueue its jobs."""

from __future__ import annotations

from typing import Any

import pytest

from taskd import Client, NewJob, Unique, pipeline, stage, task
from taskd.core.schedule import Every, Schedule
from taskd.core.tasks.registry import Registry
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from tests.store.helpers import new_worker

ID = 1_234_567_890


@pytest.fixture
async def registry(lane: Lane) -> Registry:
    """Published tasks of priority 10: `urgent`, and `keyed` with a unique key; and a pipeline."""
    made = Registry()

    @task(registry=made, queue="q", priority=10)
    async def urgent(n: int = 0) -> None: ...

    @task(registry=made, queue="q", priority=10, unique=Unique(by=("n",)))
    async def keyed(n: int = 0) -> None: ...

    @task(registry=made, queue="q")
    async def plain(n: int = 0) -> None: ...

    pipeline("line", stage("own", plain, priority=20), stage("of_the_task", urgent), registry=made)
    await workers.publish(lane, "app", made, [])
    return made


async def priority(sql: Any, job_id: int) -> int:
    found: int = await sql.fetchval("SELECT priority FROM taskd.jobs WHERE id = $1", int(job_id))
    return found


@pytest.mark.parametrize("name", ["urgent", "keyed"])
async def test_jobs_have_the_priority_of_their_task(
    sql: Any, client: Client, registry: Registry, name: str
) -> None:
    declared = next(each for each in registry if each.name == name)
    by_task = await client.enqueue(declared.job(n=1))
    by_name = await client.enqueue_named(name, {"n": 2})
    many = await client.enqueue_many([NewJob(name, f'{{"n": {n}}}', queue="q") for n in (3, 4)])
    by_sql = await sql.fetchval("SELECT taskd.enqueue($1, '{\"n\": 5}')", name)
    late = await sql.fetchval("SELECT taskd.enqueue($1, '{\"n\": 6}', delay_s => 5)", name)
    after = await sql.fetchval(
        "SELECT taskd.enqueue_after($1, '{\"n\": 7}', after => ARRAY[$2::bigint])", name, by_sql
    )
    for job_id in (by_task, by_name, *many, by_sql, late, after):
        assert await priority(sql, job_id) == 10
    given = await client.enqueue_named(name, {"n": 8}, priority=100)
    assert await priority(sql, given) == 100


async def test_a_key_made_in_sql_leaves_the_priority_of_the_task(
    sql: Any, registry: Registry
) -> None:
    made = "SELECT job_id FROM taskd.enqueue_unique('urgent', '{}', 'k', queue => 'q')"
    assert await priority(sql, await sql.fetchval(made)) == 10


async def test_a_task_that_no_worker_has_published_has_the_priority_100(
    sql: Any, client: Client
) -> None:
    assert await priority(sql, await client.enqueue_named("new", queue="q")) == 100
    by_sql = await sql.fetchval("SELECT taskd.enqueue('new', queue => 'q')")
    assert await priority(sql, by_sql) == 100


async def test_a_stage_has_the_priority_of_its_task_or_its_own(
    sql: Any, client: Client, registry: Registry
) -> None:
    plan = await sql.fetchval("SELECT stages FROM taskd.task WHERE name = 'line'")
    assert '"priority": 20' in plan
    assert '"priority": 10' in plan
    for job_id in (
        await client.enqueue_named("line"),
        await sql.fetchval("SELECT taskd.enqueue('line')"),
    ):
        assert await priority(sql, job_id) == 20
    given = await sql.fetchval("SELECT taskd.enqueue('line', priority => 100)")
    assert await priority(sql, given) == 100


async def test_a_schedule_has_its_own_priority_or_that_of_the_task_at_each_tick(
    sql: Any, client: Client, registry: Registry
) -> None:
    await client.schedules.set(Schedule("own", NewJob("urgent", priority=ID), Every(3600.0)))
    await sql.execute("SELECT taskd.set_schedule('task', 'urgent', every => '1 h')")
    assert await priority(sql, (await client.schedules.run("own"))[0]) == ID
    assert await priority(sql, (await client.schedules.run("task"))[0]) == 10
    await sql.execute("UPDATE taskd.task SET priority = 11 WHERE name = 'urgent'")
    assert await priority(sql, (await client.schedules.run("task"))[0]) == 11
    unchanged = "SELECT taskd.set_schedule('task', 'urgent', every => '1 h')"
    assert await sql.fetchval(unchanged) == "unchanged"


async def test_priorities_of_32_bits_decide_the_order_of_claims(
    sql: Any, client: Client, lane: Lane
) -> None:
    from taskd.store.jobs import jobs

    worker = await new_worker(lane)
    ranks = [2**31 - 1, ID, -(2**31), 0, 40_000]
    ids = await client.enqueue_many([NewJob("t", queue="q", priority=each) for each in ranks])
    claimed = [job.id for job in await jobs.claim(lane, worker, "q", 5)]
    assert claimed == [ids[2], ids[3], ids[4], ids[1], ids[0]]
    moved = await client.enqueue(NewJob("t", queue="q"))
    await client.change(moved, priority=ID)
    assert await priority(sql, moved) == ID
