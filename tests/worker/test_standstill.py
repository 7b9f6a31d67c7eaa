"""Time for which the process or its event loop stood still does not count for the handlers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from taskd.worker.upkeep.timer import Timer
from tests.worker.conftest import Desk, Started, until

PAUSE_S = 70.0


def stand_still(worker: Started, *, lease: bool, by: int | None = None) -> None:
    """Set all clocks of the worker back, as if nothing had run for PAUSE_S seconds.

    Args:
        lease: the lease was not renewed meanwhile.
        by: the id of the job that blocked the loop; None: the process was stopped.
    """
    pulse, attempts = worker.worker._pulse, worker.worker.parts.runners[0].attempts.running
    pulse.ticked -= PAUSE_S
    if by is not None:
        pulse.blocked = pulse.ticked, attempts[by].job
    for attempt in attempts.values():
        attempt.began -= PAUSE_S
        if attempt.context is not None and attempt.context.deadline is not None:
            attempt.context.deadline -= PAUSE_S
    if lease:
        worker.worker._lease.trusted_until -= PAUSE_S


def timer_of(worker: Started) -> Timer:
    services = [each for tier in worker.worker.parts.supervisor._tiers for each in tier]
    return next(each for each in services if isinstance(each, Timer))


async def test_a_stopped_process_burns_no_attempt_by_a_timeout(desk: Desk) -> None:
    go = asyncio.Event()
    left: list[float] = []

    @desk.task(timeout_s=PAUSE_S - 5, max_attempts=1)
    async def waits(ctx: Any) -> None:
        await go.wait()
        left.append(ctx.remaining_s())

    (job,) = await desk.enqueue(waits.job())
    worker = await desk.start()
    attempts = worker.worker.parts.runners[0].attempts.running
    await until(lambda: job in attempts)
    stand_still(worker, lease=False)
    await until(lambda: attempts[job].stood_still_s > 0)
    go.set()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"]) == ("done", 1)
    # Without the usual time of a tick, and what the test took.
    assert 0 < left[0] <= PAUSE_S - 5


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_worker_that_stood_still_for_a_lease_fences_before_it_times_out(
    desk: Desk, blocks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task(timeout_s=PAUSE_S - 5, max_attempts=2)
    async def waits(ctx: Any) -> None:
        if ctx.fence == 1:
            await asyncio.sleep(600)

    (job,) = await desk.enqueue(waits.job())
    worker = await desk.start(lease_s=2.0)
    await until(lambda: worker.worker.parts.runners[0].running)
    # The threads of the worker do not stand still: they must neither renew the lease nor look for
    # the blocking job before the timer ticks.
    monkeypatch.setattr(worker.worker._lease, "renewed", lambda _sent: None)
    stand_still(worker, lease=True, by=job if blocks else None)
    await timer_of(worker).tick()
    await desk.emitted.wait("worker.fenced")
    monkeypatch.undo()
    (row,) = await desk.settled(job)
    [cut] = desk.emitted.of("job.interrupted")
    assert (cut["job_id"], cut["why"]) == (job, "fence")
    assert (row["state"], row["attempt"], row["fence"]) == ("done", 1, 2)


async def test_a_cancelled_handler_has_its_grace_time_after_a_standstill(desk: Desk) -> None:
    ended = asyncio.Event()

    @desk.task(timeout_s=600)
    async def cleans_up() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            await ended.wait()

    (job,) = await desk.enqueue(cleans_up.job())
    worker = await desk.start(cancel_s=PAUSE_S - 5)
    attempts = worker.worker.parts.runners[0].attempts.running
    await until(lambda: job in attempts)
    worker.worker.parts.runners[0].cancel_job(job, "by hand")
    attempt = attempts[job]
    assert attempt.cancelled_at is not None
    attempt.cancelled_at -= PAUSE_S
    stand_still(worker, lease=False)
    await until(lambda: attempt.stood_still_s > 0)
    ended.set()
    (row,) = await desk.settled(job)
    assert row["state"] == "cancelled"
    assert not desk.emitted.of("job.abandoned")


async def test_a_blocked_loop_counts_for_the_handler_that_blocks_it_only(desk: Desk) -> None:
    go = asyncio.Event()

    @desk.task(timeout_s=1.5, max_attempts=1)
    async def waits() -> None:
        await go.wait()

    @desk.task(timeout_s=1.5, max_attempts=1)
    async def blocks() -> None:
        await asyncio.sleep(0)
        time.sleep(1.6)
        await asyncio.sleep(600)

    worker = await desk.start()
    (waiting,) = await desk.enqueue(waits.job())
    await until(lambda: worker.worker.parts.runners[0].running)
    (blocking,) = await desk.enqueue(blocks.job())
    await desk.emitted.wait("job.failed", job_id=blocking)
    go.set()
    blocked, waited = await desk.settled(blocking, waiting)
    if blocked["id"] != blocking:
        blocked, waited = waited, blocked
    assert blocked["reason"].startswith("TimedOut")
    assert waited["state"] == "done"


async def test_a_thread_that_ran_on_while_the_loop_was_blocked_is_timed_out(desk: Desk) -> None:
    go = asyncio.Event()

    @desk.task(timeout_s=PAUSE_S - 5, max_attempts=1)
    def runs() -> None:
        asyncio.run_coroutine_threadsafe(go.wait(), loop).result()

    @desk.task(timeout_s=600)
    async def blocks() -> None:
        await go.wait()

    loop = asyncio.get_running_loop()
    thread, blocking = await desk.enqueue(runs.job(), blocks.job())
    worker = await desk.start(cancel_s=600.0)
    attempts = worker.worker.parts.runners[0].attempts.running
    await until(lambda: len(attempts) == 2 and not attempts[thread].waits_for_slot)
    timed = attempts[thread]
    stand_still(worker, lease=False, by=blocking)
    await until(lambda: timed.why)
    assert timed.why == "timeout"
    assert timed.stood_still_s == 0
    go.set()
    await desk.settled(thread, blocking)
