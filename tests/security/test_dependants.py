"""Jobs with many dependants: what a producer enqueues behind a job costs that job's end little."""

from __future__ import annotations

import time
from typing import Any

import asyncpg
import pytest

from taskd.store import workflows
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.helpers import DONE, FAILED, done, new_worker, settle

FAMILY = """
WITH run AS (
    INSERT INTO taskd.workflow (name, kind) VALUES ('w', 'workflow') RETURNING id
), parent AS (
    INSERT INTO taskd.job (queue, task, workflow_id) SELECT 'q', 'parent', id FROM run
    RETURNING id, workflow_id
)
SELECT id, workflow_id FROM parent
"""
UNBLOCK = "SELECT taskd.unblock(ARRAY[$1::bigint], ARRAY[$2::text])"
CHILDREN = """
WITH child AS (
    INSERT INTO taskd.job (queue, task, state, workflow_id, waits_for)
    SELECT 'q', 'child', 'blocked', $2::bigint, 1 FROM generate_series(1, $3::integer)
    RETURNING id
)
INSERT INTO taskd.dependency (parent_id, job_id, workflow_id, on_failed)
SELECT $1::bigint, id, $2::bigint, 'cancel' FROM child
"""


async def family(sql: Any, children: int) -> int:
    """Insert a job with this number of dependants; return its id."""
    parent, run = await sql.fetchrow(FAMILY)
    await sql.execute(CHILDREN, parent, run, children)
    return int(parent)


async def test_dependants_of_one_job_in_one_transaction_write_its_row_once(sql: Any) -> None:
    parent = await sql.fetchval("SELECT taskd.enqueue('parent', queue => 'q')")
    async with sql.transaction():
        await sql.execute(
            f"SELECT taskd.enqueue_after('t', '{{}}', ARRAY[{parent}], queue => 'q') "
            "FROM generate_series(1, 100)"
        )
        updates = (
            "SELECT n_tup_upd FROM pg_stat_xact_user_tables WHERE relid = 'taskd.job'::regclass"
        )
        assert await sql.fetchval(updates) == 1
    assert await sql.fetchval("SELECT count(*) FROM taskd.dependency") == 100


@pytest.mark.parametrize("state", ["failed", "done"])
async def test_ten_times_the_dependants_cost_about_ten_times_as_much(
    lane: Lane, sql: Any, state: str
) -> None:
    """Nested loops over all of them took a hundred times as long: 40 s for 16,000."""
    took = []
    for children in (800, 8000):
        parent = await family(sql, children)
        await sql.execute("ANALYZE taskd.job; ANALYZE taskd.dependency")
        began = time.monotonic()
        await sql.execute(UNBLOCK, parent, state)
        await deferred(lane)
        took.append(time.monotonic() - began)
    assert took[1] < 40 * took[0] + 1.0


async def deferred(lane: Lane) -> list[int]:
    """Handle the dependants that were left to upkeep; return the numbers of the batches."""
    batches = []
    while read := await workflows.unblock_dependants(lane, 1000):
        batches.append(read)
    return batches


async def counts(sql: Any) -> dict[str, int]:
    rows = await sql.fetch(
        "SELECT task || ':' || state, count(*) FROM taskd.jobs WHERE task <> 'parent' GROUP BY 1"
    )
    return {each[0]: each[1] for each in rows}


@pytest.mark.parametrize(
    ("state", "ends"), [("failed", "cancelled"), ("done", "queued"), ("cancelled", "cancelled")]
)
async def test_upkeep_handles_many_dependants_in_batches(
    lane: Lane, sql: Any, state: str, ends: str
) -> None:
    parent = await family(sql, 2500)
    assert await sql.fetchval(UNBLOCK, parent, state) == 0
    assert await counts(sql) == {"child:blocked": 2500}
    assert len(await deferred(lane)) == 4
    assert await counts(sql) == {f"child:{ends}": 2500}
    assert await sql.fetchval("SELECT count(*) FROM taskd.unblocking") == 0


async def test_dependants_of_cancelled_dependants_are_cancelled(lane: Lane, sql: Any) -> None:
    parent = await family(sql, 1001)
    child, run = await sql.fetchrow("SELECT max(id), max(workflow_id) FROM taskd.job")
    await sql.execute(CHILDREN, child, run, 3)
    await sql.execute(UNBLOCK, parent, "failed")
    await deferred(lane)
    assert await counts(sql) == {"child:cancelled": 1004}


async def test_the_end_of_a_job_is_recorded_however_many_jobs_wait_for_it(
    lane: Lane, sql: Any
) -> None:
    parent = await family(sql, 20_000)
    me = await new_worker(lane)
    [job] = await jobs.claim(lane, me, "q", 1)
    assert await settle(lane, job, FAILED)
    assert await counts(sql) == {"child:blocked": 20_000}
    assert (
        await sql.fetchval("SELECT state::text FROM taskd.jobs WHERE id = $1", parent) == "failed"
    )
    await deferred(lane)
    assert await counts(sql) == {"child:cancelled": 20_000}


async def test_dependants_wait_again_for_a_job_that_is_retried(lane: Lane, sql: Any) -> None:
    parent = await family(sql, 2500)
    me = await new_worker(lane)
    [job] = await jobs.claim(lane, me, "q", 1)
    await settle(lane, job, FAILED)
    assert await workflows.unblock_dependants(lane, 1000) == 1000
    assert await counts(sql) == {"child:blocked": 1500, "child:cancelled": 1000}
    await sql.fetch("SELECT * FROM taskd.retry(ARRAY[$1::bigint])", parent)
    assert await deferred(lane) == []
    assert await counts(sql) == {"child:blocked": 2500}
    [job] = await jobs.claim(lane, me, "q", 1)
    await done(lane, job)
    await deferred(lane)
    assert await counts(sql) == {"child:queued": 2500}


async def test_a_dependant_that_is_locked_delays_no_other(lane: Lane, sql: Any) -> None:
    parent = await family(sql, 2001)
    await sql.execute(UNBLOCK, parent, "done")
    async with sql.transaction():
        await sql.execute(
            "SELECT FROM taskd.job WHERE task = 'child' AND id % 700 = 0 ORDER BY id FOR UPDATE"
        )
        await deferred(lane)
        assert await counts(sql) == {"child:queued": 1999, "child:blocked": 2}
    await deferred(lane)
    assert await counts(sql) == {"child:queued": 2001}
    assert await sql.fetchval("SELECT count(*) FROM taskd.unblocking") == 0


LATE = "SELECT taskd.enqueue_after('child', '{{}}', ARRAY[{}], queue => 'q')"


async def test_an_open_transaction_of_a_producer_delays_no_dependant_but_its_own(
    lane: Lane, sql: Any, dsn: str
) -> None:
    parent = await family(sql, 2000)
    await settle(lane, (await jobs.claim(lane, await new_worker(lane), "q", 1))[0], DONE)
    producer = await asyncpg.connect(dsn)
    try:
        async with producer.transaction():
            await producer.execute(LATE.format(parent))
            await deferred(lane)
            assert await counts(sql) == {"child:queued": 2000}
    finally:
        await producer.close()
    await deferred(lane)
    assert await counts(sql) == {"child:queued": 2001}


async def test_a_dependant_whose_id_is_lower_than_that_of_a_handled_one_is_not_lost(
    lane: Lane, sql: Any, dsn: str
) -> None:
    """Ids do not commit in their order."""
    parent = await family(sql, 1500)
    await settle(lane, (await jobs.claim(lane, await new_worker(lane), "q", 1))[0], DONE)
    slow = await asyncpg.connect(dsn)
    try:
        async with slow.transaction():
            await slow.execute(LATE.format(parent))
            await sql.execute(LATE.format(parent))
            assert await workflows.unblock_dependants(lane, 1000)
            assert await workflows.unblock_dependants(lane, 1000)
    finally:
        await slow.close()
    await deferred(lane)
    assert await counts(sql) == {"child:queued": 1502}


async def test_a_new_dependant_of_an_ended_job_waits_for_nothing(lane: Lane, sql: Any) -> None:
    parent = await family(sql, 1001)
    me = await new_worker(lane)
    [job] = await jobs.claim(lane, me, "q", 1)
    await done(lane, job)
    late = f"SELECT taskd.enqueue_after('child', '{{}}', ARRAY[{parent}], queue => 'q')"
    await sql.execute(late)
    await deferred(lane)
    await sql.execute(late)
    assert await counts(sql) == {"child:queued": 1003}


async def test_a_cancelled_parent_is_cancelled_at_once(lane: Lane, sql: Any) -> None:
    parent = await family(sql, 2500)
    rows = await sql.fetch("SELECT * FROM taskd.cancel(ARRAY[$1::bigint])", parent)
    assert [tuple(each) for each in rows] == [(parent, "cancelled")]
    await deferred(lane)
    assert await counts(sql) == {"child:cancelled": 2500}
