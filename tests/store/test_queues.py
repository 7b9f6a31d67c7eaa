"""queues.sql: pausing, retention, and what is left in queues."""

from __future__ import annotations

import asyncio

import pytest

from taskd.core.jobs.job import NewJob
from taskd.store import queues, workers
from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.reading import reports
from tests.schema import fetches
from tests.store.helpers import (
    QUEUED,
    SCHEDULED,
    Connect,
    Ears,
    Transaction,
    due_now,
    enqueue,
    run_one,
    settle,
    take_over,
    waits_for_lock,
)


async def declare(on, *names: str) -> None:
    await on.fetch("declare_queues", list(names))


async def test_declaring_makes_a_row_per_queue_and_leaves_existing_ones_alone(sql, lane) -> None:
    await queues.pause(lane, ["b"], None, "why")
    await declare(lane, "b", "a", "a")
    rows = await sql.fetch("SELECT name, paused_at, keep_done_s, keep_failed_s FROM taskd.queue")
    seen = {each["name"]: each for each in rows}
    assert seen.keys() == {"a", "b"}
    assert seen["a"]["paused_at"] is None
    assert (seen["a"]["keep_done_s"], seen["a"]["keep_failed_s"]) == (604800, 2592000)
    assert seen["b"]["paused_at"] is not None


@pytest.mark.parametrize("first", [declare, lambda on, *names: queues.pause(on, names, None, None)])
async def test_queues_are_written_in_the_order_of_their_names(
    sql, lane: Lane, connect: Connect, first
) -> None:
    # Two starting workers that write the same queues in different orders would deadlock.
    names = [f"q{n}" for n in range(40)]
    await connect_and_hold(sql, connect, names[0], first, names[::-1])


async def connect_and_hold(sql, connect: Connect, held: str, first, names: list[str]) -> None:
    """Lock the first name: a statement that writes all names must wait there first."""
    writing = await connect()
    async with Transaction(await connect()) as holding:
        await declare(fetches(holding.connection), held)
        late = asyncio.create_task(first(fetches(writing), *names))
        await waits_for_lock(sql, writing)
        await asyncio.wait_for(declare(fetches(holding.connection), *names), 10)
        await holding.commit()
        await late


async def test_a_pause_says_since_when_until_when_and_why(sql, lane: Lane) -> None:
    assert await queues.pause(lane, ["b", "a"], 60, "mail server down") == ["a", "b"]
    [a, _b] = await sql.fetch("SELECT * FROM taskd.queue ORDER BY name")
    assert a["pause_reason"] == "mail server down"
    assert (a["paused_until"] - a["paused_at"]).total_seconds() == pytest.approx(60, abs=1)
    await queues.pause(lane, ["a"], None, None)
    again = await sql.fetchrow("SELECT * FROM taskd.queue WHERE name = 'a'")
    assert (again["paused_until"], again["pause_reason"]) == (None, None)


async def test_a_resume_returns_and_notifies_the_queues_that_were_paused(sql, lane: Lane) -> None:
    await declare(lane, "a", "b")
    await queues.pause(lane, ["b"], None, None)
    ears = Ears(sql)
    await ears.listen("taskd_a", "taskd_b")
    assert await queues.resume(lane, ["a", "b", "c"]) == ["b"]
    assert await ears.so_far() == ["taskd_b"]
    assert await sql.fetchval("SELECT count(*) FROM taskd.queue WHERE paused_at IS NOT NULL") == 0
    assert await queues.resume(lane, ["b"]) == []


async def test_a_paused_queue_takes_new_jobs_and_hands_them_out_when_resumed(lane, me) -> None:
    await queues.pause(lane, ["q"], None, None)
    await enqueue(lane)
    assert await jobs.claim(lane, me, "q", 1) == []
    await queues.resume(lane, ["q"])
    assert len(await jobs.claim(lane, me, "q", 1)) == 1


async def test_retention_is_set_in_parts(lane: Lane) -> None:
    kept = await reports.keep_queue(lane, "a", 60, None)
    assert kept == {"name": "a", "keep_done_s": 60, "keep_failed_s": 2592000}
    assert (await reports.keep_queue(lane, "a", None, 0))["keep_done_s"] == 60
    assert (await reports.keep_queue(lane, "a", None, None))["keep_failed_s"] == 0


@pytest.mark.parametrize("seconds", [-1, 315360001])
async def test_a_retention_outside_its_limits_is_refused(lane: Lane, seconds: int) -> None:
    with pytest.raises(ValueRefused):
        await reports.keep_queue(lane, "a", seconds, None)


async def left(lane: Lane, *names: str) -> dict[str, int]:
    counted = await workers.left(lane, names or ["q"], ["t"], [])
    return {name: count for name, count in counted._asdict().items() if count}


async def test_what_is_left_is_sorted_by_what_can_be_done_about_it(sql, lane: Lane, me) -> None:
    assert await left(lane) == {}
    job = await run_one(lane, me)
    assert await left(lane) == {"running": 1}
    await enqueue(lane, 2)
    await jobs.enqueue(lane, [NewJob("strange", queue="q")])
    await enqueue(lane, delay_s=3600)
    await enqueue(lane, queue="elsewhere")
    expected = {"running": 1, "runnable": 2, "unknown": 1, "future": 1}
    assert await left(lane) == expected
    await settle(lane, job, SCHEDULED, delay_s=30.0)
    soon = {name: expected[name] for name in expected if name != "running"} | {"soon": 1}
    assert await left(lane) == soon
    await sql.execute("UPDATE taskd.job SET run_at = now() + interval '1 h' WHERE attempt = 1")
    later = {name: soon[name] for name in soon if name != "soon"} | {"later_retries": 1}
    assert await left(lane) == later
    await queues.pause(lane, ["q"], None, None)
    assert await left(lane) == {"paused": 5}
    assert await left(lane, "q", "elsewhere") == {"paused": 5, "runnable": 1}


async def test_a_pause_that_is_over_counts_no_more(sql, lane: Lane) -> None:
    await enqueue(lane)
    await queues.pause(lane, ["q"], 60, None)
    assert await left(lane) == {"paused": 1}
    await sql.execute("UPDATE taskd.queue SET paused_until = now() - interval '1 s'")
    assert await left(lane) == {"runnable": 1}


async def test_a_due_job_that_nobody_has_promoted_yet_keeps_a_worker_going(sql, lane) -> None:
    [job_id] = await enqueue(lane, delay_s=60)
    assert await left(lane) == {"future": 1}
    await due_now(sql, job_id)
    assert await left(lane) == {"soon": 1}


async def test_a_suspect_keeps_a_worker_going(lane: Lane, me) -> None:
    await take_over(lane, await run_one(lane, me))
    assert await left(lane) == {"soon": 1}


async def test_a_released_job_is_runnable_again(lane: Lane, me) -> None:
    await settle(lane, await run_one(lane, me), QUEUED, refund=True)
    assert await left(lane) == {"runnable": 1}
