"""max_attempts=1: the handler begins once, whatever ends its attempt; max_crashes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.core.jobs.verdicts import Snooze
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.jobs import jobs
from tests.worker.conftest import Desk, Started


class Once:
    """A task whose handler counts its beginnings, and waits until `release` is set."""

    def __init__(self, desk: Desk, **options: Any) -> None:
        self.release = asyncio.Event()
        self.begun: list[tuple[int, int]] = []

        @desk.task(**{"max_attempts": 1} | options)
        async def once(ctx: Any) -> None:
            self.begun.append((ctx.attempt, ctx.max_attempts))
            await self.release.wait()

        self.task: Task[..., Any] = once


async def begun(desk: Desk, once: Once) -> int:
    """Enqueue a job, and wait until its handler has begun."""
    (job,) = await desk.enqueue(once.task.job())
    await desk.emitted.wait("job.started", job_id=job)
    return job


async def declared_dead(desk: Desk, worker: Started) -> None:
    """Declare a worker dead as if its process had been killed, and rescue its jobs."""
    me = worker.worker.parts.shared.lease.worker_id
    assert await workers.declare_dead(desk.lane, [me], proved=True)
    await jobs.rescue(desk.lane, 100, 3, 10)


async def test_a_stop_during_the_only_attempt_fails_the_job(desk: Desk) -> None:
    once = Once(desk)
    worker = await desk.start(drain_s=0.0)
    job = await begun(desk, once)
    assert await worker.stop() == 0
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"]) == ("failed", 1)
    assert row["reason"] == (
        "Interrupted: the worker stopped during the only attempt (max_attempts=1)"
    )
    assert desk.emitted.of("job.failed", job_id=job)
    assert once.begun == [(1, 1)]


async def test_the_death_of_its_worker_fails_the_job(desk: Desk) -> None:
    once = Once(desk)
    worker = await desk.start()
    job = await begun(desk, once)
    await declared_dead(desk, worker)
    (row,) = await desk.settled(job)
    assert (row["state"], row["reason"]) == ("failed", "began once, and its worker died")
    assert once.begun == [(1, 1)]


async def test_a_job_that_was_claimed_and_not_started_runs_later(desk: Desk) -> None:
    once = Once(desk)
    first = await desk.start(concurrency=1, drain_s=0.0)
    await begun(desk, once)
    (waits,) = await desk.enqueue(once.task.job())
    first.worker.parts.runners[0].add(await jobs.claim(desk.lane, _id(first), "default", 1))
    await first.stop()
    assert (await desk.row(waits))["state"] == "queued"
    once.release.set()
    await desk.start()
    (row,) = await desk.settled(waits)
    assert (row["state"], row["attempt"]) == ("done", 1)
    assert once.begun == [(1, 1)] * 2


async def test_a_retry_by_hand_allows_one_more_beginning(desk: Desk) -> None:
    once = Once(desk)
    worker = await desk.start()
    job = await begun(desk, once)
    await declared_dead(desk, worker)
    await desk.settled(job)
    assert await jobs.retry(desk.lane, [job]) == [job]
    await desk.emitted.wait("job.started", 2, job_id=job)
    await declared_dead(desk, worker)
    (row,) = await desk.settled(job)
    assert (row["state"], row["reason"]) == ("failed", "began once, and its worker died")
    assert once.begun == [(1, 1), (2, 2)]


async def test_a_handler_that_snoozes_its_job_asks_for_another_beginning(desk: Desk) -> None:
    begun: list[int] = []

    @desk.task(max_attempts=1)
    async def later() -> None:
        begun.append(1)
        if len(begun) == 1:
            raise Snooze(0.01)

    (job,) = await desk.enqueue(later.job())
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], len(begun)) == ("done", 1, 2)


async def test_max_attempts_of_the_context_does_not_grow_with_crashes(desk: Desk) -> None:
    once = Once(desk, max_attempts=5)
    worker = await desk.start()
    job = await begun(desk, once)
    await declared_dead(desk, worker)
    once.release.set()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], row["crashes"]) == ("done", 2, 1)
    assert once.begun == [(1, 5), (2, 5)]


@pytest.mark.parametrize(("max_crashes", "beginnings"), [(0, 1), (2, 3)])
async def test_max_crashes_limits_the_beginnings_after_deaths(
    desk: Desk, max_crashes: int, beginnings: int
) -> None:
    once = Once(desk, max_attempts=5, max_crashes=max_crashes)
    worker = await desk.start()
    job = await begun(desk, once)
    for deaths in range(beginnings):
        await desk.emitted.wait("job.started", deaths + 1, job_id=job)
        await declared_dead(desk, worker)
    (row,) = await desk.settled(job)
    assert (row["state"], row["reason"]) == ("failed", "crashed")
    assert len(once.begun) == beginnings


def _id(worker: Started) -> int:
    return worker.worker.parts.shared.lease.worker_id
