"""claim.sql: each job goes to exactly one live worker, most urgent first."""

from __future__ import annotations

import asyncio
import re
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from taskd.store import queues, workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    QUEUED,
    SCHEDULED,
    Connect,
    Transaction,
    bury,
    claim_suspect,
    due_now,
    enqueue,
    new_worker,
    rescue,
    row,
    run_one,
    running,
    settle,
    state_of,
    take_over,
)


async def test_a_claim_stores_the_worker_and_raises_the_fence(sql, lane: Lane, me) -> None:
    [job_id] = await enqueue(lane, args='{"a": 1}', max_attempts=7, timeout_s=2.5, priority=3)
    [job] = await jobs.claim(lane, me, "q", 10)
    assert (job.id, job.fence, job.attempt, job.task, job.queue) == (job_id, 1, 1, "t", "q")
    assert (job.args, job.max_attempts, job.timeout_s, job.priority) == ('{"a": 1}', 7, 2.5, 3)
    assert (job.worker_id, job.crashes) == (me, 0)
    assert 0 <= job.wait_s < 60
    written = await row(sql, job_id)
    assert (written["state"], written["worker_id"], written["fence"]) == ("running", me, 1)
    assert written["started_at"] >= written["run_at"]


async def test_attempts_beyond_all_numbers_keep_no_other_job_from_being_claimed(
    sql, lane: Lane, me
) -> None:
    odd, _ = await enqueue(lane, 2)
    await sql.execute("UPDATE taskd.job SET attempt = 32767 WHERE id = $1", odd)
    claimed = await jobs.claim(lane, me, "q", 10)
    assert [job.attempt for job in claimed] == [32767, 1]


async def test_jobs_come_by_priority_then_due_time_then_id(sql, lane: Lane, me) -> None:
    late, early, low, high, twin = [
        (await enqueue(lane, priority=priority))[0] for priority in (100, 100, 200, -5, 100)
    ]
    await sql.execute(
        "UPDATE taskd.job SET run_at = now() - "
        "make_interval(secs => CASE id WHEN $1 THEN 60 ELSE 9 END)",
        early,
    )
    order = [high, early, late, twin, low]
    assert [job.id for job in await jobs.claim(lane, me, "q", 2)] == order[:2]
    assert [job.id for job in await jobs.claim(lane, me, "q", 9)] == order[2:]


async def test_a_claim_takes_no_other_queue_and_no_more_than_its_batch(lane: Lane, me) -> None:
    await enqueue(lane, 3)
    await enqueue(lane, 3, queue="elsewhere")
    assert len(await jobs.claim(lane, me, "q", 2)) == 2
    assert len(await jobs.claim(lane, me, "q", 9)) == 1
    assert await jobs.claim(lane, me, "q", 9) == []


async def test_a_job_that_is_not_due_is_not_claimed(lane: Lane, me) -> None:
    await enqueue(lane, delay_s=3600)
    await enqueue(lane, run_at=datetime(2999, 1, 1, tzinfo=UTC))
    assert await jobs.claim(lane, me, "q", 9) == []


async def test_two_claiming_connections_share_the_jobs_and_never_one_job(
    lane: Lane, connect: Connect, me, other
) -> None:
    total = 50 * 2 * 5
    ids = set(await enqueue(lane, total))
    connections = [await connect(), await connect()]
    claimed: list[int] = []

    async def loop(connection, worker) -> None:
        for _ in range(50):
            claimed.extend(job.id for job in await jobs.claim(fetches(connection), worker, "q", 5))

    await asyncio.gather(*map(loop, connections, (me, other)))
    # Each connection has skipped the rows that the other had locked; the rest is still there.
    while batch := await jobs.claim(lane, me, "q", 100):
        claimed.extend(job.id for job in batch)
    assert len(claimed) == total
    assert set(claimed) == ids


async def test_a_claim_steps_over_what_another_claim_holds(
    lane: Lane, connect: Connect, me, other
) -> None:
    first, second = await enqueue(lane, 2)
    async with Transaction(await connect()) as claiming:
        held = await jobs.claim(fetches(claiming.connection), me, "q", 1)
        assert [job.id for job in held] == [first]
        assert [job.id for job in await jobs.claim(lane, other, "q", 9)] == [second]
        await claiming.rollback()
    assert [job.id for job in await jobs.claim(lane, other, "q", 9)] == [first]


async def test_a_job_that_was_claimed_and_given_back_meanwhile_comes_with_its_own_fence(
    lane: Lane, me, other
) -> None:
    job = await run_one(lane, me)
    await settle(lane, job, QUEUED, refund=True)
    [again] = await jobs.claim(lane, other, "q", 1)
    assert (again.id, again.fence, again.attempt) == (job.id, 2, 1)


@pytest.mark.parametrize("how", ["declared_dead", "expired", "retired", "unknown"])
async def test_a_worker_that_is_no_more_claims_nothing(sql, lane: Lane, how: str) -> None:
    worker = await new_worker(lane)
    [plain] = await enqueue(lane)
    [suspect] = await enqueue(lane)
    await sql.execute(
        "UPDATE taskd.job SET state = 'scheduled', crashes = 1 WHERE id = $1", suspect
    )
    match how:
        case "declared_dead":
            await bury(lane, worker)
        case "expired":
            await sql.execute("UPDATE taskd.worker SET lease_until = now() - interval '1 s'")
        case "retired":
            await workers.retire(lane, worker)
        case _:
            worker += 1
    assert await jobs.claim(lane, worker, "q", 9) == []
    assert await claim_suspect(lane, worker, ["q"], ["t"]) is None
    assert [await state_of(sql, each) for each in (plain, suspect)] == ["queued", "scheduled"]


async def test_a_claim_that_commits_after_its_worker_was_declared_dead_is_found_by_the_next_rescue(
    sql, lane: Lane, connect: Connect, me, other
) -> None:
    [job_id] = await enqueue(lane)
    async with Transaction(await connect()) as claiming:
        [job] = await jobs.claim(fetches(claiming.connection), me, "q", 1)
        await bury(lane, me)
        assert await rescue(lane) == {}  # nothing to see yet
        await claiming.commit()
    assert await state_of(sql, job_id) == "running"
    assert await rescue(lane) == {job_id: SCHEDULED}
    again = await claim_suspect(lane, other, ["q"], ["t"])
    assert again is not None
    assert (again.id, again.fence) == (job_id, job.fence + 1)


async def test_a_claim_that_commits_after_the_forgetting_is_found_as_well(
    sql, lane: Lane, connect: Connect, me
) -> None:
    [job_id] = await enqueue(lane)
    async with Transaction(await connect()) as claiming:
        await jobs.claim(fetches(claiming.connection), me, "q", 1)
        await bury(lane, me)
        await workers.prune(lane, -1.0)
        assert await sql.fetchval("SELECT count(*) FROM taskd.worker WHERE id = $1", me) == 0
        await claiming.commit()
    assert await rescue(lane) == {job_id: SCHEDULED}


async def test_a_paused_queue_hands_out_nothing_until_its_time_is_over(sql, lane: Lane, me) -> None:
    [job_id] = await enqueue(lane)
    [suspect] = await enqueue(lane)
    await sql.execute(
        "UPDATE taskd.job SET state = 'scheduled', crashes = 1 WHERE id = $1", suspect
    )
    await queues.pause(lane, ["q"], 3600, "mail server down")
    assert await jobs.claim(lane, me, "q", 9) == []
    assert await claim_suspect(lane, me, ["q"], ["t"]) is None
    await sql.execute("UPDATE taskd.queue SET paused_until = now() - interval '1 s'")
    assert [job.id for job in await jobs.claim(lane, me, "q", 9)] == [job_id]
    found = await claim_suspect(lane, me, ["q"], ["t"])
    assert found is not None
    assert found.id == suspect


async def test_a_claimed_job_that_was_cancelled_while_queued_is_gone(sql, lane: Lane, me) -> None:
    [job_id] = await enqueue(lane)
    assert await jobs.cancel(lane, [job_id], "not needed") == {job_id: CANCELLED}
    assert await jobs.claim(lane, me, "q", 9) == []


async def test_the_suspects_that_were_youngest_at_the_crash_come_first(
    sql, lane: Lane, me, other
) -> None:
    suspects = [job.id for job in await running(lane, me, 3)]
    await bury(lane, me)
    await rescue(lane)
    await sql.execute("UPDATE taskd.job SET started_at = now() + make_interval(secs => id)")
    order = []
    while suspect := await claim_suspect(lane, other, ["q"], ["t"]):
        assert suspect.crashes == 1
        assert suspect.queue == "q"
        order.append(suspect.id)
    assert order == suspects[::-1]


async def test_a_suspect_is_claimed_only_by_workers_that_serve_its_queue_and_know_its_task(
    lane: Lane, me, other
) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    assert await claim_suspect(lane, other, ["r"], ["t"]) is None
    assert await claim_suspect(lane, other, ["q"], ["u"]) is None
    assert await claim_suspect(lane, other, ["q", "r"], ["t", "u"]) is not None


async def test_two_processes_claim_two_different_suspects(
    lane: Lane, connect: Connect, me, other
) -> None:
    several = await running(lane, me, 2)
    await bury(lane, me)
    await rescue(lane)
    third = await new_worker(lane)
    async with Transaction(await connect()) as claiming:
        one = await claim_suspect(fetches(claiming.connection), other, ["q"], ["t"])
        two = await claim_suspect(lane, third, ["q"], ["t"])
        await claiming.commit()
    assert one is not None
    assert two is not None
    assert {one.id, two.id} == {job.id for job in several}


async def test_a_suspect_whose_time_has_not_come_waits(sql, lane: Lane, me, other) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    await sql.execute("UPDATE taskd.job SET run_at = now() + interval '1 h'")
    assert await claim_suspect(lane, other, ["q"], ["t"]) is None
    await due_now(sql, job.id)
    assert await claim_suspect(lane, other, ["q"], ["t"]) is not None


async def test_a_claim_asks_no_more_whether_what_a_job_says_is_within_its_limits(
    sql: Any, lane: Lane, me: int
) -> None:
    """Nor do later moves of the job: otherwise each claim would pay for optional values."""
    job = await sql.fetchval(
        "INSERT INTO taskd.job (queue, task, timeout_s, metadata) "
        "VALUES ('default', 'quick', 5, '{}') RETURNING id"
    )
    text = await sql.fetchval("SELECT pg_get_functiondef('taskd.job_is_valid'::regproc)")
    refuses, times = re.subn(r"(?s)BEGIN\s.*\sEND", "BEGIN RAISE 'asked'; END", text)
    assert times == 1
    await sql.execute(refuses)
    with pytest.raises(asyncpg.RaiseError, match="asked"):
        await sql.execute("UPDATE taskd.job SET timeout_s = 6")
    [claimed] = await jobs.claim(lane, me, "default", 1)
    assert await jobs.ack_done(lane, me, [job], [claimed.fence]) == 1
