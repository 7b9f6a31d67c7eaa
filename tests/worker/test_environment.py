"""A copy of another environment's database: no job and no schedule of it runs by itself."""

from __future__ import annotations

import asyncio

import pytest

from taskd.core.jobs.job import NewJob
from taskd.errors import ConfigError
from taskd.store import queues
from taskd.store.schema import environment
from tests.worker.conftest import Desk

SCHEDULE = (
    "SELECT taskd.set_schedule('often', 'send', queue => 'mail', every => '1 s', "
    "next_at => now() - interval '1 s')"
)


@pytest.fixture
def sent(desk: Desk) -> list[int]:
    """What the handler was called with."""
    calls: list[int] = []

    @desk.task(queue="mail")
    async def send(n: int = 0) -> None:
        calls.append(n)

    return calls


@pytest.mark.parametrize(
    ("wanted", "found", "words"),
    [
        ("staging", "production", "taskd db adopt staging"),
        (None, "production", "TASKD_ENVIRONMENT=production"),
        ("staging", None, "taskd db migrate"),
    ],
)
async def test_a_worker_of_another_environment_does_not_start(
    desk: Desk, sent: list[int], wanted: str | None, found: str | None, words: str
) -> None:
    await desk.enqueue(NewJob("send", queue="mail"))
    if found is not None:
        await environment.name(desk.lane, found)
    worker = desk.worker(environment=wanted)
    with pytest.raises(ConfigError, match=words):
        await worker.end()
    # It has published nothing, either.
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.task") == 0
    assert sent == []


async def test_a_worker_of_the_environment_runs_jobs(desk: Desk, sent: list[int]) -> None:
    await environment.name(desk.lane, "production")
    [job] = await desk.enqueue(NewJob("send", queue="mail"))
    await desk.start(environment="production")
    await desk.settled(job)
    assert sent == [0]


async def test_a_live_worker_runs_nothing_of_a_copy_that_takes_the_place_of_its_database(
    desk: Desk, sent: list[int]
) -> None:
    await environment.name(desk.lane, "staging")
    await desk.start(environment="staging")
    # A dump of production has its jobs, and no row of this worker.
    await desk.sql.execute(
        "BEGIN; UPDATE taskd.environment SET name = 'production'; DELETE FROM taskd.worker;"
        "INSERT INTO taskd.job (queue, task) VALUES ('mail', 'send'); COMMIT;"
        "NOTIFY taskd_mail"
    )
    [refused] = await desk.emitted.wait("service.crashed", service="register-again")
    assert "belongs to the environment 'production'" in str(refused)
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.job WHERE state = 'queued'") == 1
    await environment.adopt(desk.lane, "staging", pauses=False)
    async with asyncio.timeout(60):
        while not sent:
            await asyncio.sleep(0.01)


async def test_an_adopted_copy_holds_its_jobs_and_schedules_until_they_are_resumed(
    desk: Desk, sent: list[int]
) -> None:
    await environment.name(desk.lane, "production")
    await desk.sql.execute(SCHEDULE)
    await queues.pause(desk.lane, ["other"], 1.0, "for a second")
    [held] = await desk.enqueue(NewJob("send", queue="mail"))
    adopted = await environment.adopt(desk.lane, "staging", pauses=None)
    assert adopted == ("production", True, 2, 1)
    paused = "SELECT count(*) FROM taskd.queue WHERE paused_at IS NOT NULL AND paused_until IS NULL"
    assert await desk.sql.fetchval(paused) == 2

    @desk.task(queue="own")
    async def own() -> None:
        pass

    await desk.start(environment="staging")
    await desk.settled(*await desk.enqueue(NewJob("own", queue="own")))
    assert sent == []
    assert (await desk.row(held))["state"] == "queued"
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.jobs WHERE task = 'send'") == 1
    await queues.resume(desk.lane, ["mail"])
    await desk.settled(held)
    assert sent == [0]


async def test_only_a_copy_is_paused_unless_it_is_asked_for(desk: Desk) -> None:
    await desk.enqueue(NewJob("send", queue="mail"))
    adopt = environment.adopt
    assert (await adopt(desk.lane, "a", pauses=None)) == (None, False, 0, 0)
    assert (await adopt(desk.lane, "a", pauses=None)) == ("a", False, 0, 0)
    assert (await adopt(desk.lane, "b", pauses=False)) == ("a", False, 0, 0)
    assert (await adopt(desk.lane, "b", pauses=True)) == ("b", True, 1, 0)
