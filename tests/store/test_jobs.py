"""jobs.sql: what people do to jobs: cancel and retry."""

from __future__ import annotations

import asyncio

import pytest

from taskd.core.jobs.job import JobState
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    MAX_CRASHES,
    RUNNING,
    SCHEDULED,
    Connect,
    Ears,
    Transaction,
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


async def test_a_waiting_job_is_cancelled_at_once_and_keeps_what_it_was(sql, lane: Lane) -> None:
    [queued] = await enqueue(lane, args='{"a": 1}', priority=4)
    [scheduled] = await enqueue(lane, delay_s=60)
    before = dict(await row(sql, queued))
    moved = await jobs.cancel(lane, [scheduled, queued], "not needed")
    assert moved == {queued: CANCELLED, scheduled: CANCELLED}
    after = dict(await row(sql, queued))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"state", "finished_at", "reason", "updated_at"}
    assert (after["state"], after["reason"]) == ("cancelled", "not needed")
    assert await state_of(sql, scheduled) == "cancelled"


async def test_a_running_job_is_only_asked_and_finished_ones_are_left_alone(
    sql, lane: Lane, me
) -> None:
    asked, ended = await running(lane, me, 2)
    await done(lane, ended)
    assert await jobs.cancel(lane, [asked.id, ended.id, 10**12], "by hand") == {asked.id: RUNNING}
    assert (await row(sql, asked.id))["cancel_requested"]
    assert await state_of(sql, ended.id) == "done"
    assert await jobs.cancel(lane, [asked.id], "again") == {asked.id: RUNNING}


async def test_a_cancel_that_waits_for_a_claim_asks_the_worker_that_got_the_job(
    sql, lane: Lane, connect: Connect, me
) -> None:
    # The row was queued in the statement's snapshot and is running when it is locked.
    [job_id] = await enqueue(lane)
    cancelling = await connect()
    async with Transaction(await connect()) as claiming:
        [job] = await jobs.claim(fetches(claiming.connection), me, "q", 1)
        late = asyncio.create_task(jobs.cancel(fetches(cancelling), [job_id], "by hand"))
        await waits_for_lock(sql, cancelling)
        await claiming.commit()
        assert await late == {job_id: RUNNING}
    assert (await row(sql, job_id))["cancel_requested"]
    assert await settle(lane, job, SCHEDULED, delay_s=60.0) == CANCELLED


async def test_a_cancel_that_waits_for_a_promotion_cancels(
    sql, lane: Lane, connect: Connect
) -> None:
    [job_id] = await enqueue(lane, delay_s=60)
    await sql.execute("UPDATE taskd.job SET run_at = now()")
    cancelling = await connect()
    async with Transaction(await connect()) as promoting:
        await jobs.promote(fetches(promoting.connection), 10)
        late = asyncio.create_task(jobs.cancel(fetches(cancelling), [job_id], "by hand"))
        await waits_for_lock(sql, cancelling)
        await promoting.commit()
        assert await late == {job_id: CANCELLED}
    assert await state_of(sql, job_id) == "cancelled"


async def test_two_cancels_of_one_job_write_one_end(sql, lane: Lane, connect: Connect) -> None:
    [job_id] = await enqueue(lane)
    second = await connect()
    async with Transaction(await connect()) as first:
        assert await jobs.cancel(fetches(first.connection), [job_id], "one") == {job_id: CANCELLED}
        late = asyncio.create_task(jobs.cancel(fetches(second), [job_id], "two"))
        await waits_for_lock(sql, second)
        await first.commit()
        assert await late == {}
    assert (await row(sql, job_id))["reason"] == "one"


async def test_without_a_history_a_cancelled_job_is_gone(sql, lane: Lane) -> None:
    await sql.execute(
        "INSERT INTO taskd.queue (name, keep_done_s, keep_failed_s) VALUES ('q', 0, 0)"
    )
    [job_id] = await enqueue(lane)
    assert await jobs.cancel(lane, [job_id], "by hand") == {job_id: CANCELLED}
    assert await row(sql, job_id) is None


@pytest.mark.parametrize("state", [FAILED, CANCELLED])
async def test_a_retry_keeps_id_fence_and_errors_and_notifies(
    sql, lane: Lane, me, state: JobState
) -> None:
    job = await run_one(lane, me, args='{"a": 1}', priority=9, timeout_s=3.0)
    await settle(lane, job, state, error='{"type": "E"}', reason="gave up")
    ended = await row(sql, job.id)
    ears = Ears(sql)
    await ears.listen("taskd_q")
    assert await jobs.retry(lane, [job.id]) == [job.id]
    assert await ears.so_far() == ["taskd_q"]
    again = await row(sql, job.id)
    assert (again["state"], again["fence"], again["attempt"]) == ("queued", 1, 1)
    assert again["run_at"] >= ended["finished_at"]
    for name in ("args", "priority", "timeout_s", "errors", "enqueued_at", "task", "queue"):
        assert again[name] == ended[name], name
    [claimed] = await jobs.claim(lane, me, "q", 1)
    assert (claimed.id, claimed.fence, claimed.attempt) == (job.id, 2, 2)
    assert await done(lane, job) == 0  # what the earlier attempt left behind
    assert await done(lane, claimed) == 1


async def test_new_jobs_never_get_the_id_of_a_retried_one(lane: Lane, me) -> None:
    job = await run_one(lane, me)
    await settle(lane, job, FAILED)
    await jobs.retry(lane, [job.id])
    [newer] = await enqueue(lane)
    assert newer > job.id


@pytest.mark.parametrize(
    ("attempt", "own_limit", "task_limit", "limit"),
    [
        (3, 3, None, 4),  # spent: one more
        (2, 3, None, 3),  # one is left: as it was
        (5, 3, None, 6),
        (20, None, None, 21),  # the default is spent
        (19, None, None, None),
        (5, None, 5, 6),  # the task's own limit is spent
        (4, None, 5, None),
        (999, 999, None, 1000),
    ],
)
async def test_a_retried_job_has_at_least_one_more_attempt(
    sql, lane: Lane, me, attempt, own_limit, task_limit, limit
) -> None:
    if task_limit is not None:
        await sql.execute(
            "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
            "VALUES ('t', 'app', '', 'q', $1, '{}')",
            task_limit,
        )
    job = await run_one(lane, me, max_attempts=own_limit)
    await settle(lane, job, FAILED)
    await sql.execute("UPDATE taskd.job_history SET attempt = $1", attempt)
    assert await jobs.retry(lane, [job.id]) == [job.id]
    again = await row(sql, job.id)
    assert (again["attempt"], again["max_attempts"]) == (attempt, limit)


async def test_a_job_with_a_thousand_attempts_stays_where_it_is(sql, lane: Lane, me) -> None:
    spent, other = await running(lane, me, 2)
    await settle(lane, spent, FAILED)
    await settle(lane, other, FAILED)
    await sql.execute("UPDATE taskd.job_history SET attempt = 1000 WHERE id = $1", spent.id)
    assert await jobs.retry(lane, [spent.id, other.id]) == [other.id]
    assert await state_of(sql, spent.id) == "failed"


async def test_only_failed_and_cancelled_jobs_are_retried(sql, lane: Lane, me) -> None:
    ended, runs = await running(lane, me, 2)
    await settle(lane, ended, DONE)
    [queued] = await enqueue(lane)
    assert await jobs.retry(lane, [ended.id, runs.id, queued, 10**12]) == []
    states = [await state_of(sql, each) for each in (ended.id, runs.id, queued)]
    assert states == ["done", "running", "queued"]


async def test_a_retried_suspect_starts_with_a_clean_record(sql, lane: Lane, me, other) -> None:
    job = await run_one(lane, me)
    await sql.execute("UPDATE taskd.job SET crashes = $1, interrupts = 4", MAX_CRASHES - 1)
    await take_over(lane, job)
    ended = await row(sql, job.id)
    assert (ended["state"], ended["crashes"]) == ("failed", MAX_CRASHES)
    await jobs.retry(lane, [job.id])
    again = await row(sql, job.id)
    assert (again["state"], again["crashes"], again["interrupts"]) == ("queued", 0, 0)
    assert len(await jobs.claim(lane, other, "q", 1)) == 1
    assert await rescue(lane) == {}


async def test_two_retries_bring_a_job_back_once(sql, lane: Lane, connect: Connect, me) -> None:
    job = await run_one(lane, me)
    await settle(lane, job, FAILED)
    second = await connect()
    async with Transaction(await connect()) as first:
        assert await jobs.retry(fetches(first.connection), [job.id]) == [job.id]
        late = asyncio.create_task(jobs.retry(fetches(second), [job.id]))
        await waits_for_lock(sql, second)
        await first.commit()
        assert await late == []
    assert await state_of(sql, job.id) == "queued"
