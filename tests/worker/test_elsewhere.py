"""Workers with different code on one queue: each job goes to a worker that can run it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from tests.worker.conftest import Desk, until

# Below the delay of a parked job, 10 s. Polls of idle queues come later.
SOON_S = 8.0
POLL_S = 60.0


@pytest.fixture
def desk(desk: Desk) -> Desk:
    """Workers that poll so seldom that a missing notification fails the test."""
    desk.settings["poll_s"] = POLL_S
    return desk


def registry_of(*names: str, args_version: int = 1, seconds: float = 0.0) -> Registry:
    async def handler() -> None:
        await asyncio.sleep(seconds)

    made = Registry()
    upgrade = {n: lambda args: args for n in range(1, args_version)}
    for name in names:
        made.add(Task(handler, name=name, args_version=args_version, upgrade=upgrade))
    return made


@pytest.mark.parametrize("old_workers", [1, 3, 6])
async def test_a_new_task_runs_at_once_beside_older_idle_workers(
    desk: Desk, old_workers: int
) -> None:
    for _ in range(old_workers):
        await desk.start(registry_of("old"))
    await desk.start(registry_of("old", "new"))
    for _ in range(3):
        for _ in range(7):
            [job_id] = await desk.enqueue(NewJob("new", queue="default"))
            await desk.settled(job_id, within_s=SOON_S)
    # No attempt was counted for a job that an older worker has released.
    rows = await desk.sql.fetch("SELECT DISTINCT state::text, attempt FROM taskd.jobs")
    assert [tuple(row) for row in rows] == [("done", 1)]


async def test_a_worker_that_starts_later_gets_the_parked_jobs_at_once(desk: Desk) -> None:
    await desk.start(registry_of("old"))
    ids = await desk.enqueue(*(NewJob("new", queue="default") for _ in range(20)))
    parked = "SELECT count(*) = 20 FROM taskd.job WHERE parked AND state = 'scheduled'"
    await until(lambda: desk.sql.fetchval(parked))
    assert all(not each["elsewhere"] for each in desk.emitted.of("task.unknown"))
    await desk.start(registry_of("new"))
    await desk.settled(*ids, within_s=SOON_S)


async def test_newer_arguments_run_at_once_where_code_reads_them(desk: Desk) -> None:
    await desk.start(registry_of("report"))
    await desk.start(registry_of("report", args_version=2))
    for _ in range(5):
        new = NewJob("report", queue="default", args_version=2)
        [job_id, old] = await desk.enqueue(new, NewJob("report", queue="default"))
        await desk.settled(job_id, old, within_s=SOON_S)


async def test_arguments_that_no_worker_reads_are_parked_until_one_does(desk: Desk) -> None:
    await desk.start(registry_of("report", args_version=2))
    [job_id] = await desk.enqueue(NewJob("report", queue="default", args_version=3))
    await until(lambda: desk.sql.fetchval("SELECT parked FROM taskd.job WHERE id = $1", job_id))
    await desk.start(registry_of("report", args_version=3))
    await desk.settled(job_id, within_s=SOON_S)


async def test_two_apps_share_a_queue(desk: Desk) -> None:
    await desk.start(registry_of("mail"))
    await desk.start(registry_of("report"))
    names = [name for _ in range(2000) for name in ("mail", "report")]
    ids = await desk.enqueue(*(NewJob(name, queue="default") for name in names))
    await desk.settled(*ids, within_s=30.0)
    # Each worker has met the other's task a few times at most, and left the rest in the queue.
    assert sum(each["count"] for each in desk.emitted.of("task.unknown")) < len(ids) / 2


async def test_a_busy_worker_notifies_the_one_that_can_run_what_it_leaves(desk: Desk) -> None:
    await desk.start(registry_of("old", seconds=0.01), concurrency=2)
    await desk.start(registry_of("new"))

    async def feed() -> None:
        while True:
            await desk.enqueue(*(NewJob("old", queue="default") for _ in range(50)))
            await asyncio.sleep(0.1)

    feeding = asyncio.create_task(feed())
    try:
        for _ in range(5):
            [job_id] = await desk.enqueue(NewJob("new", queue="default"))
            await desk.settled(job_id, within_s=SOON_S)
    finally:
        feeding.cancel()


async def test_a_job_is_parked_again_when_its_last_worker_is_gone(desk: Desk) -> None:
    old = await desk.start(registry_of("old"), lease_s=3.0)
    new = await desk.start(registry_of("new"), lease_s=3.0)
    [job_id] = await desk.enqueue(NewJob("new", queue="default"))
    await desk.settled(job_id, within_s=SOON_S)
    [other] = await desk.enqueue(NewJob("new", queue="default"))
    await desk.settled(other, within_s=SOON_S)
    await new.stop()
    [left] = await desk.enqueue(NewJob("new", queue="default"))
    await until(lambda: desk.sql.fetchval("SELECT parked FROM taskd.job WHERE id = $1", left))
    assert old.worker.parts.shared.elsewhere.refused("default") == {}


async def test_jobs_of_another_queue_are_not_brought_back(desk: Desk, sql: Any) -> None:
    """A worker that has the task and not the queue would only move the jobs to and fro."""
    await desk.start(registry_of("old"), queues=("default",))
    [job_id] = await desk.enqueue(NewJob("new", queue="default"))
    await until(lambda: sql.fetchval("SELECT parked FROM taskd.job WHERE id = $1", job_id))
    other = await desk.start(registry_of("new"), queues=("other",))
    await other.worker.parts.rescuer.tick()
    assert await sql.fetchval("SELECT parked FROM taskd.job WHERE id = $1", job_id)
