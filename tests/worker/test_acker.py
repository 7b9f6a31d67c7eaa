"""The acker alone: which outcomes must wait when another one cannot be written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskd.core.jobs.job import Job, JobState
from taskd.core.outcomes.ack import Ack
from taskd.core.tasks.registry import Registry
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import Silence, ValueRefused
from taskd.worker.finishing.acker import Acker
from taskd.worker.lease.state import Lease
from taskd.worker.observing.loop_monitor import LoopMonitor, Pulse
from taskd.worker.stopping.emergency_stop import EmergencyStop
from tests.worker.conftest import Desk, until

ME = 42


class Line:
    """A lane whose database answers as the test says."""

    def __init__(self) -> None:
        self.sent: list[list[int]] = []
        self.written: list[int] = []

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        await asyncio.sleep(0.001)
        if name != "ack_outcomes":
            return []
        self.sent.append(list(args[1]))
        self.refuse(args)
        self.written += args[1]
        return [(job_id, "done") for job_id in args[1]]

    def refuse(self, args: Any) -> None:
        """Raise what the database raises."""


def said(job_id: int, result: str, fence: int = 1) -> Ack:
    return Ack(job_id, ME, fence, JobState.DONE, result=result)


@asynccontextmanager
async def running(lane: Any) -> AsyncIterator[Acker]:
    acker = Acker(lane)
    task = asyncio.create_task(acker.run())
    try:
        yield acker
        acker.stop()
        async with asyncio.timeout(10):
            await asyncio.shield(task)
    finally:
        task.cancel()


async def test_who_waits_for_room_always_lets_the_others_work(desk: Desk) -> None:
    acker = Acker(desk.lane)
    acker._unanswered(StoreUnavailable("gone"))
    acker._room.set()  # a service that crashed may have left it so
    began = time.monotonic()
    await acker.room(0.05)
    assert time.monotonic() - began >= 0.04


async def test_a_database_that_refuses_has_answered(desk: Desk) -> None:
    lane, verdicts = Line(), [StoreUnavailable("gone"), ValueRefused("odd")]

    def refuse(_: Any) -> None:
        if verdicts:
            raise verdicts.pop(0)

    lane.refuse = refuse
    async with running(lane) as acker:
        acker.outcome(said(1, "odd"))
        await until(lambda: lane.written == [1])
        assert acker.has_room()
    assert desk.emitted.of("store.back")


async def test_what_is_set_aside_is_tried_again_while_more_is_set_aside(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskd.worker.finishing.acker.ASIDE_S", 0.1)
    lane = Line()

    def refuse(args: Any) -> None:
        if "bad" in args[9]:
            raise ValueRefused("odd")

    lane.refuse = refuse
    async with running(lane) as acker:
        for job_id in range(1, 11):
            acker.outcome(said(job_id, "bad"))
            await asyncio.sleep(0.05)
        assert 1 in lane.written


async def test_a_batch_that_silence_swallows_twice_is_sent_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lane = Line()

    def refuse(args: Any) -> None:
        if sum(map(len, args[9])) > 400:
            raise Silence("PostgreSQL did not answer in time")

    lane.refuse = refuse
    async with running(lane) as acker:
        for job_id in range(8):
            acker.outcome(said(job_id, "x" * 100))
        await until(lambda: sorted(lane.written) == list(range(8)))
    assert [len(ids) for ids in lane.sent[:3]] == [8, 8, 4]


async def test_of_two_outcomes_of_a_job_the_one_of_the_claim_that_holds_counts(desk: Desk) -> None:
    await desk.other_worker(ME)
    job = await desk.sql.fetchval(
        "INSERT INTO taskd.job (queue, task, state, worker_id, fence, attempt, started_at) "
        "VALUES ('q', 't', 'running', $1, 2, 2, now()) RETURNING id",
        ME,
    )
    async with running(desk.lane) as acker:
        acker.outcome(said(job, "1", fence=2))
        acker.outcome(Ack(job, ME, 1, JobState.QUEUED, refund=True))
        await until(lambda: not acker.backlog)
    assert (await desk.row(job))["state"] == "done"
    assert [had["fence"] for had in desk.emitted.of("job.lost")] == [1]


async def test_leaving_writes_all_but_what_is_locked_and_closes_the_row(desk: Desk) -> None:
    await desk.other_worker(ME)
    ids = await desk.sql.fetch(
        "INSERT INTO taskd.job (queue, task, state, worker_id, fence, attempt, started_at) "
        "SELECT 'q', 't', 'running', $1, 1, 1, now() FROM generate_series(1, 6) RETURNING id",
        ME,
    )
    jobs = [
        Job(row[0], 1, "t", "{}", 1, None, None, 100, 0, 0.0, 0.0, queue="q", worker_id=ME)
        for row in ids
    ]
    lease = Lease(30.0)
    lease.worker_id = ME
    database, watch = Database({"dsn": desk.dsn}), LoopMonitor(Pulse())
    leaving = EmergencyStop(database, lease, Acker(desk.lane), [], Registry(), watch)
    async with desk.sql.transaction():
        held = [jobs[0].id, jobs[5].id]
        await desk.sql.execute("SELECT FROM taskd.job WHERE id = ANY ($1) FOR UPDATE", held)
        given = [Ack(job.id, ME, 1, JobState.QUEUED, refund=True) for job in jobs[3:]]
        await leaving._write(jobs[:3], given)
    assert await desk.states() == {"running": 2, "done": 2, "queued": 2}
    assert await desk.sql.fetchval("SELECT died_at IS NOT NULL FROM taskd.worker")
