"""Attempts that their worker interrupts are logged once, with the reason, and are repeated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.worker.observing.counters import Counters
from tests.worker.conftest import Desk


async def waiting(desk: Desk, **settings: Any) -> tuple[Any, int]:
    """A worker, and a job that waits in it."""
    begun = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        begun.set()
        await asyncio.sleep(600)

    [job_id] = await desk.enqueue(waits.job())
    started = await desk.start(**settings)
    await begun.wait()
    return started, job_id


async def test_a_stop_that_cuts_an_attempt_short_says_so_once(desk: Desk) -> None:
    started, job_id = await waiting(desk, drain_s=0.01, cancel_s=20)
    assert await started.stop() == 0
    [said] = desk.emitted.of("job.interrupted")
    assert said.pop("duration_ms") > 0
    assert said.pop("wait_ms") >= 0
    assert said == {
        "job_id": job_id, "task": "waits", "queue": "default", "attempt": 1,
        "why": "stop", "delay_s": 0.0,
    }  # fmt: skip
    # A claim that was in flight at the stop can have claimed the job again, and released it.
    assert len(desk.emitted.of("job.released")) <= 1
    row = await desk.row(job_id)
    assert (row["state"], row["attempt"], row["interrupts"]) == ("queued", 0, 1)
    assert started.worker.report.jobs["interrupted"] == 1


async def test_a_worker_that_fences_itself_says_so_of_each_attempt(desk: Desk) -> None:
    started, job_id = await waiting(desk)
    (runner,) = started.worker.parts.runners
    started.worker._quiet(True)  # or it would claim the job again
    runner.attempts.cancel_all("fence")
    [said] = await desk.emitted.wait("job.interrupted")
    assert (said["job_id"], said["why"]) == (job_id, "fence")


async def test_one_that_is_abandoned_is_reported_as_well_and_comes_back_later(desk: Desk) -> None:
    begun, end = asyncio.Event(), asyncio.Event()

    @desk.task()
    async def ignores() -> None:
        begun.set()
        while not end.is_set():
            try:
                await end.wait()
            except asyncio.CancelledError:
                continue

    [job_id] = await desk.enqueue(ignores.job())
    started = await desk.start(drain_s=0.01, cancel_s=0.01)
    await begun.wait()
    code = await started.stop()
    end.set()
    assert code == 75
    [said] = desk.emitted.of("job.interrupted")
    assert (said["why"], said["delay_s"]) == ("stop", 5.0)
    [left] = desk.emitted.of("job.abandoned")
    assert left["job_id"] == said["job_id"] == job_id
    row = await desk.row(job_id)
    assert (row["state"], row["attempt"], row["interrupts"]) == ("scheduled", 1, 1)


@pytest.mark.parametrize("why", ["stop", "fence"])
def test_interruptions_are_counted_by_why(why: str) -> None:
    counting = Counters(["q"])
    said = {"job_id": 1, "task": "t", "queue": "q", "attempt": 1, "duration_ms": 1500.0}
    counting.on_event("job.interrupted", said | {"why": why, "delay_s": 0.0})
    [of_task] = counting.counted.tasks
    assert counting.counted.interruptions == {why: 1}
    assert (of_task.outcomes, of_task.done) == ({"interrupted": 1}, 0)
    assert counting.counted.events == {"job.interrupted": 1}
