"""Workers whose running jobs are completed or restarted by hand."""

from __future__ import annotations

import asyncio
import threading

import pytest

from taskd.store import workers
from taskd.store.jobs import jobs
from tests.worker.conftest import Desk, until


async def test_the_handler_of_a_job_that_is_completed_by_hand_is_cancelled(desk: Desk) -> None:
    cancelled = asyncio.Event()

    @desk.task()
    async def hangs() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()

    await desk.start()
    [job_id] = await desk.enqueue(hangs.job())
    await desk.emitted.wait("job.started", job_id=job_id)
    await jobs.complete(desk.lane, [job_id], '"by hand"', "it hung")
    async with asyncio.timeout(30):
        await cancelled.wait()
    await desk.emitted.wait("job.interrupted", job_id=job_id, why="by hand")
    await desk.emitted.wait("job.ended_by_hand", job_id=job_id, fence=1)
    row = await desk.row(job_id)
    assert (row["state"], row["result"]) == ("done", '"by hand"')


async def test_an_outcome_that_comes_after_a_completion_by_hand_is_not_written(
    desk: Desk,
) -> None:
    """The handler ends before its worker has seen the completion."""
    go = asyncio.Event()

    @desk.task()
    async def returns() -> str:
        await go.wait()
        return "its own"

    await desk.start()
    [job_id] = await desk.enqueue(returns.job())
    await desk.emitted.wait("job.started", job_id=job_id)
    await desk.sql.execute("SELECT set_config('taskd.notify', 'off', false)")
    await desk.sql.fetch("SELECT taskd.complete(ARRAY[$1::bigint], '\"by hand\"')", job_id)
    go.set()
    await desk.emitted.wait("job.ended_by_hand", job_id=job_id, fence=1)
    assert (await desk.row(job_id))["result"] == '"by hand"'


async def test_a_hanging_job_is_restarted_and_done_by_its_next_attempt(desk: Desk) -> None:
    attempts: list[int] = []

    @desk.task(max_attempts=1)
    async def hangs_once() -> None:
        attempts.append(len(attempts) + 1)
        if len(attempts) == 1:
            await asyncio.sleep(3600)

    await desk.start()
    [job_id] = await desk.enqueue(hangs_once.job())
    await desk.emitted.wait("job.started", job_id=job_id)
    await jobs.restart(desk.lane, [job_id], "it hangs", delay_s=0.5)
    await desk.emitted.wait("job.interrupted", job_id=job_id, why="by hand")
    [row] = await desk.settled(job_id)
    assert (row["state"], row["attempt"], row["max_attempts"]) == ("done", 2, 2)
    assert desk.emitted.ends(job_id) == ["job.done"]
    assert attempts == [1, 2]


async def test_a_function_that_hangs_in_a_thread_cannot_write_its_outcome(desk: Desk) -> None:
    """The thread cannot be stopped: its attempt is abandoned, and its outcome is refused."""
    go = threading.Event()
    ran: list[int] = []

    @desk.task()
    def hangs_once() -> None:
        ran.append(1)
        if len(ran) == 1:
            go.wait(60)

    await desk.start(cancel_s=0.2)
    [job_id] = await desk.enqueue(hangs_once.job())
    await until(lambda: ran)
    await jobs.restart(desk.lane, [job_id], "it hangs", delay_s=3600)
    try:
        await desk.emitted.wait("job.abandoned", job_id=job_id, why="by hand")
        await desk.emitted.wait("job.ended_by_hand", job_id=job_id)
    finally:
        go.set()
    await until(lambda: desk.sql.fetchval("SELECT state = 'scheduled' FROM taskd.job"))
    await desk.sql.execute("SELECT taskd.change(ARRAY[$1::bigint], delay_s => 0)", job_id)
    [row] = await desk.settled(job_id)
    assert (row["state"], len(ran)) == ("done", 2)


async def test_a_job_that_waits_in_the_buffer_is_not_started_after_it_was_completed(
    desk: Desk,
) -> None:
    go = asyncio.Event()
    ran: list[int] = []

    @desk.task()
    async def waits(n: int) -> None:
        ran.append(n)
        await go.wait()

    worker = await desk.start(concurrency=1)
    ids = await desk.enqueue(waits.job(n=0), waits.job(n=1))
    await until(lambda: ran)
    await jobs.complete(desk.lane, ids, None, "")
    go.set()
    await desk.emitted.wait("job.ended_by_hand", job_id=ids[0])
    await worker.stop()
    assert ran == [0]
    assert await desk.states() == {"done": 2}


async def test_the_own_transaction_of_a_handler_is_rolled_back_after_a_completion_by_hand(
    desk: Desk,
) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    @desk.task(transaction=True)
    async def pays(ctx) -> None:  # type: ignore[no-untyped-def]
        await ctx.conn.execute("CREATE TABLE IF NOT EXISTS public.paid (n int)")
        begun.set()
        await go.wait()

    await desk.start()
    [job_id] = await desk.enqueue(pays.job())
    await begun.wait()
    await jobs.complete(desk.lane, [job_id], None, "")
    go.set()
    await desk.emitted.wait("job.ended_by_hand", job_id=job_id)
    assert await desk.sql.fetchval("SELECT to_regclass('public.paid')") is None


@pytest.mark.parametrize("back", [False, True])
async def test_the_jobs_of_a_worker_that_is_declared_dead_by_hand_run_elsewhere(
    desk: Desk, back: bool
) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.other_worker(77, lease_s=60)
    [job_id] = await desk.enqueue(quick.job())
    [claimed] = await jobs.claim(desk.lane, 77, "default", 1)
    await desk.start()
    assert await workers.declare_dead_by_hand(desk.lane, 77, "odd") == "lives"
    await desk.sql.execute(
        "UPDATE taskd.worker SET renewed_at = now() - interval '31 s' WHERE id = 77"
    )
    assert await workers.declare_dead_by_hand(desk.lane, 77, "its host is off") == "dead"
    [row] = await desk.settled(job_id)
    assert (row["state"], row["attempt"]) == ("done", 1)
    if back:
        assert await jobs.ack_done(desk.lane, 77, [job_id], [claimed.fence]) == 0
        statuses = await jobs.check_acks(desk.lane, 77, [job_id], [claimed.fence])
        assert statuses == {job_id: "lost"}
