"""The lock of a limit: which statements take it, wait for it, and leave openings."""

from __future__ import annotations

import asyncio
from typing import Any

from taskd.core.jobs.limit import Limit
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from tests.schema import fetches
from tests.store.helpers import (
    Connect,
    Transaction,
    done,
    waits_for_lock,
)
from tests.store.limit_helpers import enqueue, lined_up, one_runs, publish, queued


async def test_a_job_that_is_parked_while_another_one_ends_is_not_left_behind(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    task, job, _ = await one_runs(lane, me, "x")
    [second] = await enqueue(lane, task, "x")
    ending = await connect()
    async with Transaction(ending) as transaction:
        # It has the lock of the limit and has not committed: others see the slot as used.
        await ending.execute("DELETE FROM taskd.job WHERE id = $1", job.id)
        await ending.execute("SELECT taskd.free_slots('{t}', '{\"\"}')")
        assert (await limits.admit(lane, 100)).checked == 0
        await transaction.commit()
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]


async def test_the_end_of_a_job_sees_what_was_parked_while_it_waited_for_the_lock(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    # It gives up after 100 ms and inserts an opening, which can happen on a starved machine.
    await sql.execute("ALTER FUNCTION taskd.lock_limit SET lock_timeout = '30s'")
    task, job, _ = await one_runs(lane, me, "x")
    [second] = await enqueue(lane, task, "x")
    parking = await connect()
    async with Transaction(parking) as transaction:
        assert (await parking.fetchrow("SELECT * FROM taskd.admit_due(100, 0, 1000, '{}', '')"))[
            "checked"
        ] == 1
        ending = await connect()
        ended = asyncio.create_task(
            ending.execute(
                "WITH gone AS (DELETE FROM taskd.job WHERE id = $1 RETURNING *) "
                "SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key)) FROM gone",
                job.id,
            )
        )
        await waits_for_lock(sql, ending)
        await transaction.commit()
        await ended
    assert await queued(sql) == [second]


async def test_a_forgotten_transaction_holds_up_no_ack(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    _, job, [_, second] = await one_runs(lane, me, "x", "x")
    forgotten = await connect()
    async with Transaction(forgotten):
        await forgotten.execute("SELECT FROM taskd.job_limit FOR UPDATE")
        assert await done(lane, job) == 1
        assert await queued(sql) == []
    assert (await jobs.next_due(lane)).gate_s <= 0
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]


async def test_a_handlers_own_transaction_keeps_no_lock_of_the_limit(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    _, born = await lined_up(lane, Limit(concurrency=2), *["x"] * 5)
    first, second = sorted(await jobs.claim(lane, me, "q", 10), key=lambda job: job.id)
    handlers = await connect()
    async with Transaction(handlers) as transaction:
        ended = (first.id, me, first.fence, None, None, None)
        assert await fetches(handlers).fetch("complete_job", *ended)
        assert await done(lane, second) == 1
        assert await queued(sql) == [born[2]]
        await transaction.commit()
    assert (await limits.admit(lane, 100)).checked == 1
    assert await queued(sql) == born[2:4]


async def test_a_producer_takes_no_lock_of_the_limit(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    _, job, [_, second] = await one_runs(lane, me, "x", "x")
    producer = await connect()
    async with Transaction(producer):
        await producer.execute("SELECT taskd.enqueue('t', '{}')")
        await producer.execute(
            "SELECT taskd.enqueue_unique('t', '{}', 'k', on_conflict => 'replace')"
        )
        await done(lane, job)
        assert await queued(sql) == [second]


async def test_jobs_of_a_limit_that_is_locked_hold_up_no_other_limit(
    lane: Lane, sql: Any, connect: Connect
) -> None:
    held = await publish(lane, Limit(concurrency=9), task="held")
    free = await publish(lane, Limit(concurrency=9), task="free")
    await enqueue(lane, held, *["x"] * 5)
    forgotten = await connect()
    async with Transaction(forgotten):
        await forgotten.execute("SELECT FROM taskd.job_limit WHERE name = 'held' FOR UPDATE")
        await sql.execute(
            "INSERT INTO taskd.opening (limit_name, limit_key) "
            "SELECT 'held', '' FROM generate_series(1, 5)"
        )
        [second] = await enqueue(lane, free, "x")
        await limits.admit(lane, 3)
        assert await queued(sql) == [second]
        await sql.execute(
            "UPDATE taskd.job SET state = 'blocked', gate = 'parked' WHERE id = $1", second
        )
        await sql.execute("INSERT INTO taskd.opening (limit_name, limit_key) VALUES ('free', '')")
        await limits.admit(lane, 3)
        assert await queued(sql) == [second]
