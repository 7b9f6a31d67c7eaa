"""Acks that are late, or race with cancels and rescues: the guard and the flag decide."""

from __future__ import annotations

import asyncio

import pytest

from taskd.core.jobs.job import Job, JobState, NewJob
from taskd.core.jobs.unique import Unique
from taskd.core.outcomes.ack import Ack
from taskd.store.connections.error_translation import HeldUp
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.schema import fetches
from tests.store.ack_helpers import ALL_STATES, jobs_completed, snapshot
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    QUEUED,
    RUNNING,
    SCHEDULED,
    Connect,
    Transaction,
    bury,
    claim_suspect,
    done,
    enqueue,
    rescue,
    row,
    run_one,
    running,
    settle,
    state_of,
    take_over,
    waits_for_lock,
)

# Cancelling a running job: the flag decides what may no longer run.


@pytest.mark.parametrize(
    ("state", "ends_as", "reason"),
    [
        (SCHEDULED, CANCELLED, "by hand"),
        (QUEUED, CANCELLED, "by hand"),
        (FAILED, FAILED, "gave up"),
        (CANCELLED, CANCELLED, "gave up"),
        (DONE, DONE, "gave up"),
    ],
)
async def test_a_cancel_flagged_between_claim_and_ack_decides_what_would_run_again(
    sql, lane: Lane, me, state: JobState, ends_as: JobState, reason: str
) -> None:
    job = await run_one(lane, me)
    assert await jobs.cancel(lane, [job.id], "by hand") == {job.id: RUNNING}
    assert await settle(lane, job, state, delay_s=60.0, reason="gave up") == ends_as
    ended = await row(sql, job.id)
    assert (ended["state"], ended["reason"]) == (ends_as.value, reason)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


async def test_a_success_wins_over_a_cancellation_that_came_too_late(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me)
    await jobs.cancel(lane, [job.id], "by hand")
    assert await done(lane, job) == 1
    assert await state_of(sql, job.id) == "done"


async def test_an_ack_that_waits_for_a_cancel_decides_by_the_flag_it_then_finds(
    sql, lane: Lane, connect: Connect, me
) -> None:
    plain, again = await running(lane, me, 2)
    acking = await connect()
    async with Transaction(await connect()) as cancelling:
        await jobs.cancel(fetches(cancelling.connection), [plain.id, again.id], "by hand")
        first = asyncio.create_task(settle(fetches(acking), again, SCHEDULED, delay_s=60.0))
        await waits_for_lock(sql, acking)
        await cancelling.commit()
        assert await first is CANCELLED
    assert await done(lane, plain) == 1
    assert await state_of(sql, again.id) == "cancelled"


async def test_a_cancel_that_waits_for_an_ack_finds_the_job_gone(
    sql, lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    cancelling = await connect()
    async with Transaction(await connect()) as acking:
        assert await done(fetches(acking.connection), job) == 1
        late = asyncio.create_task(jobs.cancel(fetches(cancelling), [job.id], "by hand"))
        await waits_for_lock(sql, cancelling)
        await acking.commit()
        assert await late == {}
    assert await state_of(sql, job.id) == "done"


async def test_a_cancel_that_waits_for_a_retry_cancels_the_waiting_job(
    sql, lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    cancelling = await connect()
    async with Transaction(await connect()) as acking:
        await settle(fetches(acking.connection), job, SCHEDULED, delay_s=60.0)
        late = asyncio.create_task(jobs.cancel(fetches(cancelling), [job.id], "by hand"))
        await waits_for_lock(sql, cancelling)
        await acking.commit()
        assert await late == {job.id: CANCELLED}
    assert await state_of(sql, job.id) == "cancelled"


# Keys that a job holds while it waits: a job that goes back to waiting meets a new job of its key.


async def two_of_a_key(sql, lane: Lane, me: int) -> tuple[Job, Job]:
    """Two running jobs: one with the key `k`, and one without a key."""
    keyed = NewJob("t", queue="q", unique=Unique("k", scope="waiting"))
    await jobs.enqueue(lane, [keyed, NewJob("t", queue="q")])
    one, other = sorted(await jobs.claim(lane, me, "q", 2), key=lambda job: job.id)
    key = await sql.fetchval("SELECT unique_key FROM taskd.job WHERE id = $1", one.id)
    return (one, other) if key else (other, one)


def retry_of(job: Job) -> Ack:
    return Ack(job.id, job.worker_id, job.fence, SCHEDULED, delay_s=60.0)


ENQUEUE_KEY = "SELECT job_id FROM taskd.enqueue_unique('t', '{}', 'k', 'q', key_scope => 'waiting')"


@pytest.mark.parametrize("commits", [True, False])
async def test_an_ack_does_not_wait_for_a_producer_that_is_taking_the_key(
    sql, lane: Lane, connect: Connect, me, commits: bool
) -> None:
    keyed, plain = await two_of_a_key(sql, lane, me)
    batch = sorted((retry_of(keyed), retry_of(plain)), key=lambda ack: ack.id)
    async with Transaction(await connect()) as producing:
        newer = await producing.connection.fetchval(ENQUEUE_KEY)
        with pytest.raises(HeldUp):
            await jobs.ack_outcomes(lane, me, batch)
        # Nothing of the batch was written; the other job does not wait.
        assert await state_of(sql, plain.id) == "running"
        assert await jobs.ack_outcomes(lane, me, [retry_of(plain)]) == {plain.id: SCHEDULED}
        await (producing.commit() if commits else producing.rollback())
    went = await jobs.ack_outcomes(lane, me, [retry_of(keyed)])
    assert went == {keyed.id: CANCELLED if commits else SCHEDULED}
    if commits:
        assert (await row(sql, keyed.id))["reason"] == f"superseded by job {newer}"
        assert await state_of(sql, newer) == "queued"


async def test_a_rescue_leaves_a_job_whose_key_a_producer_is_taking_for_later(
    sql, lane: Lane, connect: Connect, me
) -> None:
    keyed, plain = await two_of_a_key(sql, lane, me)
    await bury(lane, me)
    async with Transaction(await connect()) as producing:
        newer = await producing.connection.fetchval(ENQUEUE_KEY)
        assert await rescue(lane) == {plain.id: SCHEDULED}
        await producing.commit()
    assert await rescue(lane) == {keyed.id: CANCELLED}
    assert (await row(sql, keyed.id))["reason"] == f"superseded by job {newer}"


async def test_a_holder_that_is_just_claimed_leaves_the_key_to_the_job_that_goes_back(
    sql, lane: Lane, connect: Connect, me
) -> None:
    keyed, _ = await two_of_a_key(sql, lane, me)
    newer = await sql.fetchval(ENQUEUE_KEY)
    async with Transaction(await connect()) as claiming:
        assert await jobs.claim(fetches(claiming.connection), me, "q", 5)
        with pytest.raises(HeldUp):
            await jobs.ack_outcomes(lane, me, [retry_of(keyed)])
        await claiming.commit()
    assert await jobs.ack_outcomes(lane, me, [retry_of(keyed)]) == {keyed.id: SCHEDULED}
    assert await state_of(sql, newer) == "running"


async def test_of_two_jobs_of_a_key_in_one_batch_the_newer_one_waits(sql, lane: Lane, me) -> None:
    older, plain = await two_of_a_key(sql, lane, me)
    newer_id = await sql.fetchval(ENQUEUE_KEY)
    [newer] = await jobs.claim(lane, me, "q", 5)
    await jobs.ack_outcomes(lane, me, sorted(map(retry_of, (older, newer)), key=lambda a: a.id))
    assert await state_of(sql, newer_id) == "scheduled"
    assert (await row(sql, older.id))["reason"] == f"superseded by job {newer_id}"
    assert await sql.fetchval("SELECT count(*) FROM taskd.jobs") == 3
    assert await state_of(sql, plain.id) == "running"


async def test_a_producer_that_waits_for_an_ack_finds_the_job_that_went_back(
    sql, lane: Lane, connect: Connect, me
) -> None:
    keyed, _ = await two_of_a_key(sql, lane, me)
    producing = await connect()
    async with Transaction(await connect()) as acking:
        await jobs.ack_outcomes(fetches(acking.connection), me, [retry_of(keyed)])
        late = asyncio.create_task(producing.fetchval(ENQUEUE_KEY))
        await waits_for_lock(sql, producing)
        await acking.commit()
        assert await late == keyed.id


# Late acks.


@pytest.mark.parametrize("state", ALL_STATES)
async def test_a_late_ack_changes_nothing(sql, lane: Lane, me, state: JobState) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    before = await snapshot(sql)
    assert await settle(lane, job, state, refund=True, error='{"type": "E"}') is None
    assert await done(lane, job) == 0
    assert await jobs_completed(lane, job) == []
    assert await snapshot(sql) == before


@pytest.mark.parametrize("state", ALL_STATES)
async def test_a_late_ack_does_not_end_the_run_of_another_worker(
    sql, lane: Lane, me, other, state: JobState
) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    again = await claim_suspect(lane, other, ["q"], ["t"])
    assert again is not None
    before = await snapshot(sql)
    assert await settle(lane, job, state) is None
    assert await done(lane, job) == 0
    assert await jobs_completed(lane, job) == []
    assert await snapshot(sql) == before
    assert await done(lane, again) == 1


async def test_an_earlier_fence_of_the_same_worker_does_not_end_its_later_run(
    sql, lane: Lane, me
) -> None:
    job = await run_one(lane, me)
    await settle(lane, job, QUEUED, refund=True)
    [again] = await jobs.claim(lane, me, "q", 1)
    assert again.fence == job.fence + 1
    assert await done(lane, job) == 0
    assert await settle(lane, job, FAILED) is None
    assert await jobs_completed(lane, job) == []
    assert await state_of(sql, job.id) == "running"
    assert await done(lane, again) == 1


async def test_the_same_fence_under_another_workers_id_matches_nothing(
    sql, lane: Lane, me, other
) -> None:
    # After a failover that lost a claim two workers may hold the same id and fence.
    job = await run_one(lane, me)
    job.worker_id = other
    assert await done(lane, job) == 0
    assert await settle(lane, job, DONE) is None
    assert await jobs_completed(lane, job) == []
    assert await state_of(sql, job.id) == "running"


async def test_a_worker_that_nobody_is_matches_no_waiting_job(sql, lane: Lane) -> None:
    # `IS NOT DISTINCT FROM` is true for two NULLs; a waiting job has no worker.
    [job_id] = await enqueue(lane)
    for name, args in (
        ("ack_done", (None, [job_id], [0])),
        ("complete_job", (job_id, None, 0, None, None, None)),
    ):
        assert [r for r in await lane.fetch(name, *args) if r[0]] == []
    assert await state_of(sql, job_id) == "queued"


async def test_rescue_steps_over_a_job_whose_ack_is_being_written(
    sql, lane: Lane, connect: Connect, me
) -> None:
    first, second = await running(lane, me, 2)
    await bury(lane, me)
    async with Transaction(await connect()) as acking:
        assert await done(fetches(acking.connection), first) == 1
        assert await rescue(lane) == {second.id: SCHEDULED}
        await acking.commit()
    assert await rescue(lane) == {}
    assert await state_of(sql, first.id) == "done"


async def test_rescue_takes_the_job_after_all_when_its_ack_rolls_back(
    lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    await bury(lane, me)
    async with Transaction(await connect()) as acking:
        await done(fetches(acking.connection), job)
        assert await rescue(lane) == {}
        await acking.rollback()
    assert await rescue(lane) == {job.id: SCHEDULED}


async def test_an_ack_that_waits_for_a_rescue_changes_nothing(
    sql, lane: Lane, connect: Connect, me
) -> None:
    one, two = await running(lane, me, 2)
    await bury(lane, me)
    for job, write in ((one, done), (two, lambda on, job: settle(on, job, FAILED))):
        acking = await connect()
        async with Transaction(await connect()) as rescuing:
            await jobs.rescue(fetches(rescuing.connection), 1, 3, 3)
            late = asyncio.create_task(write(fetches(acking), job))
            await waits_for_lock(sql, acking)
            await rescuing.commit()
            assert not await late
        assert await state_of(sql, job.id) == "scheduled"
