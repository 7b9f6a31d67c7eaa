"""Plain functions that ignore their timeout: their jobs, their threads, and their worker."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from taskd.core.doctor.finding import Level
from taskd.core.jobs.backoff import Fixed
from taskd.core.tasks.task import Task
from taskd.worker.running.attempt_table import AttemptTable
from tests.worker.conftest import Desk, until
from tests.worker.test_on_call import at_once, found, why

__all__ = ["at_once"]

SOON = Fixed(0.1)


class Stuck:
    """A task whose first attempts, `hangs` of them, run until `release` is set."""

    def __init__(self, desk: Desk, **options: Any) -> None:
        self.release = threading.Event()
        self.starts = 0
        self.hangs = 1
        options = {"timeout_s": 0.1, "max_attempts": 2, "backoff": SOON} | options

        @desk.task(**options)
        def stuck() -> str:
            self.starts += 1
            if self.starts <= self.hangs:
                self.release.wait(60)
            return "done"

        self.task: Task[..., Any] = stuck


@pytest.fixture
def stuck(desk: Desk) -> Iterator[Stuck]:
    desk.settings["cancel_s"] = 0.2
    made = Stuck(desk)
    yield made
    made.release.set()


async def abandoned(desk: Desk, *jobs: int) -> None:
    """Wait until the first attempts of these jobs were abandoned, and the jobs are due again."""
    for job in jobs:
        await desk.emitted.wait("job.abandoned", job_id=job)
        await desk.state(job, "queued")


async def test_another_worker_takes_a_job_whose_thread_hangs(desk: Desk, stuck: Stuck) -> None:
    await desk.start()
    (job,) = await desk.enqueue(stuck.task.job())
    await abandoned(desk, job)
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], stuck.starts) == ("done", 2, 2)
    [error] = json.loads(row["errors"])
    assert error["type"] == "TimedOut"


async def test_an_idle_worker_is_notified_of_a_job_whose_thread_hangs_elsewhere(
    desk: Desk, stuck: Stuck
) -> None:
    # No poll of an idle queue: only the notification wakes the other worker.
    await desk.start(poll_s=60)
    (job,) = await desk.enqueue(stuck.task.job())
    await desk.emitted.wait("job.started", job_id=job)
    await desk.start(poll_s=60)
    (row,) = await desk.settled(job, within_s=20)
    assert (row["state"], row["attempt"]) == ("done", 2)


async def test_the_only_worker_runs_the_job_again_when_its_thread_has_ended(
    desk: Desk, stuck: Stuck
) -> None:
    worker = await desk.start(threads=2, poll_s=60)
    (job,) = await desk.enqueue(stuck.task.job())
    await abandoned(desk, job)
    [left] = desk.emitted.of("job.abandoned", job_id=job)
    assert "self.release.wait(60)" in left["stack"]
    assert (await desk.emitted.wait("worker.threads_lost"))[0] == {
        "lost": 1,
        "threads": 2,
        "tasks": {"stuck": 1},
    }
    assert worker.worker.status().lost_threads == {"stuck": 1}
    stuck.release.set()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], stuck.starts) == ("done", 2, 2)
    await desk.emitted.wait("worker.thread_returned", job_id=job)
    assert worker.worker.status().lost_threads == {}
    assert await worker.stop() == 0


async def test_a_suspect_whose_thread_hangs_is_left_to_others(desk: Desk, stuck: Stuck) -> None:
    await desk.start()
    (job,) = await desk.enqueue(stuck.task.job())
    await abandoned(desk, job)
    await desk.sql.execute(
        "UPDATE taskd.job SET crashes = 1, state = 'scheduled', started_at = now(), run_at = now()"
    )
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], stuck.starts) == ("done", 2, 2)


async def test_a_claim_that_had_begun_before_releases_the_job(
    desk: Desk, stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The claim was sent before the attempt was abandoned, so it did not leave the job out.
    left_out = AttemptTable.still_run
    monkeypatch.setattr(AttemptTable, "still_run", lambda _: [])
    await desk.start()
    (job,) = await desk.enqueue(stuck.task.job())
    await desk.emitted.wait("job.abandoned", job_id=job)
    await desk.emitted.wait("job.released", job_id=job)
    monkeypatch.setattr(AttemptTable, "still_run", left_out)
    row = await desk.state(job, "queued")
    assert (row["attempt"], stuck.starts) == (1, 1)


async def test_until_empty_ends_beside_a_thread_that_never_ends(desk: Desk, stuck: Stuck) -> None:
    (job,) = await desk.enqueue(stuck.task.job())
    worker = desk.worker(until_empty=True)
    assert await worker.end() == 75
    assert worker.worker.report.left == {"still_run": 1}
    row = await desk.row(job)
    assert (row["attempt"], stuck.starts) == (1, 1)
    assert row["state"] in ("scheduled", "queued")


async def test_why_and_the_doctor_name_the_worker_that_hangs(desk: Desk, stuck: Stuck) -> None:
    await desk.start(threads=2)
    (job,) = await desk.enqueue(stuck.task.job())
    await abandoned(desk, job)
    finding = await found(desk, "abandoned_attempts", Level.WARNING)
    assert "1 attempt of the task stuck ignored the timeout" in finding.found[0]
    assert f"still runs as job {job} in the worker" in finding.found[0]
    assert "it has lost 1 of 2 threads" in finding.found[0]
    assert finding.repairs[0].text.startswith("kill -TERM ")

    text, commands = (await why(desk, job))["still_runs"]
    assert "no other live worker can run it" in text
    assert commands[0] == "taskd doctor abandoned_attempts"


async def test_a_worker_without_any_thread_left_is_an_error(desk: Desk, stuck: Stuck) -> None:
    stuck.hangs = 2
    await desk.start(threads=2)
    await desk.enqueue(stuck.task.job(), stuck.task.job())
    finding = await found(desk, "abandoned_attempts")
    assert "it has lost 2 of 2 threads" in finding.found[0]


async def test_a_worker_drains_when_the_allowed_threads_are_lost(desk: Desk, stuck: Stuck) -> None:
    stuck.hangs = 2
    first = await desk.start(max_lost_threads=2)
    job, other = await desk.enqueue(stuck.task.job(), stuck.task.job())
    assert await first.end() == 75
    assert (first.worker.report.why, first.worker.report.abandoned) == ("2 lost threads", 2)
    # The process that its supervisor starts runs the jobs.
    await desk.start()
    rows = await desk.settled(job, other)
    assert [(row["state"], row["attempt"]) for row in rows] == [("done", 2)] * 2


async def test_a_handler_that_swallows_its_cancellation_keeps_no_thread(desk: Desk) -> None:
    release = threading.Event()

    @desk.task(timeout_s=0.1, backoff=SOON)
    async def deaf() -> None:
        while not release.is_set():
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue

    worker = await desk.start(max_lost_threads=1, cancel_s=0.2)
    (job,) = await desk.enqueue(deaf.job())
    try:
        finding = await found(desk, "abandoned_attempts", Level.WARNING)
        assert "threads" not in finding.found[0]
        assert "still_runs" in await why(desk, job)
        assert not worker.worker.report.why
    finally:
        release.set()
    await until(lambda: not worker.worker.parts.runners[0].abandoned)
