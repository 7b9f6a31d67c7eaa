"""Two simulated workers under the judge, which call the store's own functions in a fixed order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import asyncpg

from taskd.core.jobs.job import Job, JobState, NewJob
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import AttemptEnd, Raised
from taskd.core.outcomes.policy import decide
from taskd.core.tasks.task import Task
from taskd.core.workflows.workflow import Node, plan
from taskd.store import workflows
from taskd.store.jobs import jobs
from tests.planted_bugs import Bug, Hand
from tests.store.helpers import claim_suspect
from tests.system.judge import Judge, Verdict
from tests.system.recorder import RECORD

QUEUE = "q"
TASK = "work"
LEASE_S = 3600.0

_pids = itertools.count(2_000_000_000)  # no process has such a number


async def _work() -> None:
    """The task of all scenes; its handler is never called."""


WORK = Task(_work, name=TASK, queue=QUEUE)


class Worker:
    """A simulated worker, which does one thing at a time when the test says so."""

    def __init__(self, hand: Hand) -> None:
        self.hand = hand
        self.id = self.pid = next(_pids)

    async def register(self) -> Worker:
        await self.hand.fetch(
            "register_worker",
            self.id,
            LEASE_S,
            None,
            self.pid,
            1,
            "host",
            "boot",
            "ns",
            "0",
            "app",
            [QUEUE],
            [TASK],
            [1],
            1,
            1,
            [],
            "",
        )
        return self

    async def claim(self) -> Job:
        (job,) = await jobs.claim(self.hand, self.id, QUEUE, 10)
        return job

    async def claim_suspect(self) -> Job:
        job = await claim_suspect(self.hand, self.id, [QUEUE], [TASK])
        assert job is not None
        return job

    async def begins(self, job: Job) -> None:
        await self._record(job, "start")

    async def finishes(self, job: Job) -> int:
        """The handler ends well and the worker acks it; how many rows were still its own."""
        await self._record(job, "done")
        return await jobs.ack_done(self.hand, self.id, [job.id], [job.fence])

    async def fails(self, job: Job) -> None:
        await self._record(job, "raised")
        await self.settles(job, Raised(RuntimeError("odd")))

    async def settles(self, job: Job, happened: AttemptEnd) -> None:
        ack = decide(job, WORK, happened)
        await jobs.ack_outcomes(self.hand, self.id, [_at_once(ack)])

    async def does(self, job: Job) -> int:
        await self.begins(job)
        return await self.finishes(job)

    async def reconciles(self, known: set[int]) -> None:
        """Release jobs that the database assigns to this worker and that it does not have."""
        for row in await self.hand.fetch("running_jobs", self.id):
            if row["id"] not in known:
                ack = Ack(row["id"], self.id, row["fence"], JobState.QUEUED, refund=True)
                await jobs.ack_outcomes(self.hand, self.id, [ack])

    async def _record(self, job: Job, phase: str) -> None:
        await self.hand.connection.execute(
            RECORD + "VALUES ($1, $2, $3, $4, $5)", job.id, job.attempt, job.fence, self.pid, phase
        )


def _at_once(ack: Ack) -> Ack:
    """The same ack with the shortest delay: a scene does not wait for a backoff."""
    if ack.delay_s:
        ack.delay_s = 0.001
    return ack


class Scene:
    """A database under judgement, its connections, and two workers."""

    def __init__(self, dsn: str, bug: Bug | None) -> None:
        self.dsn, self.bug = dsn, bug
        self.judge = Judge(dsn)
        self.texts = {bug.statement: bug.text()} if bug else {}
        self.connections: list[asyncpg.Connection] = []
        self.rolled_back: list[int] = []
        self.left_behind: list[int] = []

    async def open(self, *, strict: bool = False) -> Scene:
        await self.judge.install(strict=strict)
        self.house = Hand(await self._connect(), self.texts)
        self.a = await Worker(Hand(await self._connect(), self.texts)).register()
        self.b = await Worker(Hand(await self._connect(), self.texts)).register()
        return self

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()

    async def _connect(self) -> asyncpg.Connection:
        connection = await asyncpg.connect(self.dsn)
        self.connections.append(connection)
        return connection

    async def enqueue(self, **options: Any) -> int:
        (job_id,) = await jobs.enqueue(self.house, [NewJob(TASK, queue=QUEUE, **options)])
        return job_id

    async def bury(self, worker: Worker) -> None:
        assert await self.house.fetch("declare_workers_dead", [worker.id], True)

    async def blame(self, worker: Worker, job_id: int) -> None:
        """Make a job the whole last group of a worker's suspects."""
        await self.sql(
            "UPDATE taskd.worker SET suspects = ARRAY[$2::bigint] WHERE id = $1", worker.id, job_id
        )

    async def rescue(self, max_crashes: int = 3) -> dict[int, JobState]:
        rescued = await jobs.rescue(self.house, 100, max_crashes, max_crashes)
        return {job_id: each.state for job_id, each in rescued.items()}

    async def promote(self) -> None:
        """Promote what is scheduled, however short its delay may be."""
        async with asyncio.timeout(10):
            while not await jobs.promote(self.house, 100):
                await asyncio.sleep(0.001)

    async def sql(self, text: str, *args: Any) -> Any:
        return await self.house.connection.fetchval(text, *args)

    async def verdict(self) -> Verdict:
        return await self.judge.check(rolled_back=self.rolled_back, left_behind=self.left_behind)


Open = Callable[..., Awaitable[Scene]]


async def one_job_done(stage: Scene) -> int:
    job_id = await stage.enqueue()
    await stage.a.does(await stage.a.claim())
    return job_id


async def two_in_a_chain(stage: Scene) -> tuple[int, int]:
    """Two jobs, the second of which waits for the first."""
    made = plan("flow", [Node(name, NewJob(TASK, queue=QUEUE), after) for name, after in CHAIN])
    _, first, second = await workflows.start(stage.house, made, [node.job for node in made.nodes])
    return first, second


CHAIN: list[tuple[str, tuple[str, ...]]] = [("first", ()), ("second", ("first",))]
