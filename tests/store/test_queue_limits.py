"""Limits of queues: how many jobs run, start per second, and wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.errors import QueueFull
from taskd.store import queues, workers
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from tests.store.helpers import (
    FAILED,
    SCHEDULED,
    bury,
    claim_suspect,
    done,
    enqueue,
    incarnation,
    rescue,
    settle,
)


async def allow(lane: Lane, *, without: tuple[str, ...] = (), **bounds: Any) -> dict[str, Any]:
    given = dict.fromkeys(("max_running", "max_depth", "rate", "burst")) | bounds
    return await limits.limit_queue(lane, "q", **given, without=without)


async def test_an_ordinary_claim_gets_nothing_from_a_limited_queue(lane: Lane, me: int) -> None:
    await enqueue(lane, 3)
    await allow(lane, max_running=2)
    assert await jobs.claim(lane, me, "q", 10) == []
    assert len((await limits.claim(lane, me, "q", 10)).jobs) == 2
    await allow(lane, without=("max_running",))
    assert len(await jobs.claim(lane, me, "q", 10)) == 1


async def test_slots_come_back_however_a_job_ends(lane: Lane, me: int, other: int) -> None:
    await enqueue(lane, 9)
    await allow(lane, max_running=3)
    first, second, third = (await limits.claim(lane, me, "q", 10)).jobs
    assert (await limits.claim(lane, other, "q", 10)).jobs == []
    await done(lane, first)
    await settle(lane, second, FAILED)
    await settle(lane, third, SCHEDULED, delay_s=60.0)
    assert len((await limits.claim(lane, other, "q", 10)).jobs) == 3
    await bury(lane, other)
    await rescue(lane)
    assert len((await limits.claim(lane, me, "q", 10)).jobs) == 3


async def test_a_suspect_of_a_limited_queue_takes_a_place_too(
    lane: Lane, me: int, other: int
) -> None:
    await enqueue(lane, 1)
    await jobs.claim(lane, me, "q", 1)
    await bury(lane, me)
    await rescue(lane)
    await enqueue(lane, 1)
    await allow(lane, max_running=1)
    [job] = (await limits.claim(lane, other, "q", 10)).jobs
    assert await claim_suspect(lane, other, ["q"], ["t"]) is None
    await done(lane, job)
    assert await claim_suspect(lane, other, ["q"], ["t"]) is not None
    await enqueue(lane, 1)
    assert (await limits.claim(lane, other, "q", 10)).jobs == []


async def test_a_rate_says_when_there_will_be_a_token(lane: Lane, sql: Any, me: int) -> None:
    await enqueue(lane, 5)
    await allow(lane, rate=0.5, burst=2)
    claimed = await limits.claim(lane, me, "q", 10)
    assert len(claimed.jobs) == 2
    assert claimed.opens_s == pytest.approx(2.0, abs=0.5)
    await sql.execute("UPDATE taskd.queue SET filled_at = filled_at - interval '2 s'")
    assert len((await limits.claim(lane, me, "q", 10)).jobs) == 1


async def test_to_change_what_a_queue_is_allowed_allows_no_burst_more(lane: Lane, me: int) -> None:
    await enqueue(lane, 9)
    await allow(lane, rate=0.001, burst=2)
    assert len((await limits.claim(lane, me, "q", 10)).jobs) == 2
    await allow(lane, max_running=9)
    await allow(lane, rate=0.002, burst=3)
    assert (await limits.claim(lane, me, "q", 10)).jobs == []
    await allow(lane, without=("rate",))
    await allow(lane, rate=0.001, burst=2)
    assert len((await limits.claim(lane, me, "q", 10)).jobs) == 2


async def test_tokens_that_found_no_job_are_kept(lane: Lane, me: int) -> None:
    await allow(lane, rate=0.001, burst=3)
    await enqueue(lane, 1)
    assert len((await limits.claim(lane, me, "q", 10)).jobs) == 1
    await enqueue(lane, 5)
    assert len((await limits.claim(lane, me, "q", 10)).jobs) == 2


async def test_claims_of_several_workers_never_pass_the_limit_together(
    dsn: str, lane: Lane, sql: Any, me: int, other: int
) -> None:
    await enqueue(lane, 60)
    await allow(lane, max_running=4)
    lanes = [Lane(Database({"dsn": dsn}), "claim") for _ in range(4)]
    most = []

    async def work(on: Lane, worker: int) -> None:
        while True:
            claimed = sorted((await limits.claim(on, worker, "q", 3)).jobs, key=lambda job: job.id)
            running = await on.fetch("running_jobs", worker)
            most.append(len(running))
            if claimed:
                await done(on, *claimed)
            elif not (await jobs.poll(on, ["q"])):
                return

    await asyncio.gather(*(work(on, (me, other)[n % 2]) for n, on in enumerate(lanes)))
    for on in lanes:
        await on.close()
    # The jobs that used a slot when another one was claimed, by the database's clock.
    passed = await sql.fetchval(
        "SELECT max((SELECT count(*) FROM taskd.job_history AS o "
        "WHERE o.started_at <= h.started_at AND o.finished_at > h.started_at)) "
        "FROM taskd.job_history AS h"
    )
    assert passed <= 4
    assert max(most) <= 4


async def test_a_paused_queue_is_not_claimed_from_whatever_it_allows(lane: Lane, me: int) -> None:
    await enqueue(lane, 1)
    await allow(lane, max_running=2)
    await queues.pause(lane, ["q"], None, None)
    assert (await limits.claim(lane, me, "q", 10)).jobs == []


async def test_workers_hear_which_queues_are_limited(lane: Lane, me: int) -> None:
    assert (await jobs.next_due(lane)).limited == []
    await allow(lane, max_depth=5)
    assert (await jobs.next_due(lane)).limited == []
    await allow(lane, rate=5)
    assert (await jobs.next_due(lane)).limited == ["q"]


# Depth.


async def test_a_full_queue_refuses_whatever_way_a_job_comes(lane: Lane, sql: Any) -> None:
    await allow(lane, max_depth=5)
    await enqueue(lane, 4)
    with pytest.raises(QueueFull, match='"q" is full: 4 jobs wait in it, the limit is 5'):
        await enqueue(lane, 2)
    await enqueue(lane, 1)
    with pytest.raises(QueueFull, match="5 jobs wait"):
        await jobs.enqueue(lane, [NewJob("t", queue="q")])
    refused = "SELECT taskd.enqueue('t', '{}', queue => 'q')"
    with pytest.raises(Exception, match="is full") as said:
        await sql.execute(refused)
    assert "--max-depth" in said.value.hint
    with pytest.raises(Exception, match="is full"):
        await sql.execute("SELECT taskd.enqueue_unique('t', '{}', 'k', queue => 'q')")
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 5


async def test_what_is_for_later_or_for_another_queue_is_not_refused(lane: Lane, me: int) -> None:
    await allow(lane, max_depth=1)
    await enqueue(lane, 1)
    await enqueue(lane, 3, delay_s=60.0)
    await enqueue(lane, 3, queue="other")
    await jobs.claim(lane, me, "q", 1)
    await enqueue(lane, 1)


async def test_a_count_of_a_worker_saves_producers_theirs_and_bulks_do_not_pass_it(
    lane: Lane, sql: Any
) -> None:
    await allow(lane, max_depth=100)
    await enqueue(lane, 10)
    await limits.count_depths(lane)
    counted = await sql.fetchrow("SELECT depth, depth_at FROM taskd.queue WHERE name = 'q'")
    assert counted["depth"] == 10
    await limits.count_depths(lane)
    assert await sql.fetchval("SELECT depth_at FROM taskd.queue") == counted["depth_at"]
    await enqueue(lane, 80)
    with pytest.raises(QueueFull):
        await enqueue(lane, 20)
    await enqueue(lane, 10)
    with pytest.raises(QueueFull):
        await enqueue(lane, 1)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 100


async def test_blocked_jobs_count_as_deep(lane: Lane, sql: Any) -> None:
    await allow(lane, max_depth=2)
    await enqueue(lane, 2)
    await sql.execute("UPDATE taskd.job SET state = 'blocked', limit_name = 'l', limit_key = ''")
    with pytest.raises(QueueFull):
        await enqueue(lane, 1)


async def test_the_rescuer_says_when_depths_are_to_be_counted(lane: Lane, me: int) -> None:
    assert not (await workers.check_upkeep(lane, incarnation(me), 30.0)).uncounted
    await allow(lane, max_depth=2)
    assert (await workers.check_upkeep(lane, incarnation(me), 30.0)).uncounted
    await limits.count_depths(lane)
    assert not (await workers.check_upkeep(lane, incarnation(me), 30.0)).uncounted
