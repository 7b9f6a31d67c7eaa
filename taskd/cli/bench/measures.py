"""The measurements of `taskd bench`; they use the ordinary client and the ordinary worker."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from taskd.cli.bench.figures import Figures, Times
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import TaskdError
from taskd.store.connections.callers_connection import fetches
from taskd.store.reading import bench as stored

if TYPE_CHECKING:
    from taskd.client import Client, Target
    from taskd.config import Settings
    from taskd.core.jobs.job import NewJob

T = TypeVar("T")

STEPS = ("round trip", "commit", "one by one", "10 clients", "1,000 a call", "drain", "wake-up")

APP = "taskd-bench"
CALLS_MAX = 5000
CLIENTS = 10
BULK_JOBS = 1000
# At most a quarter of all jobs is enqueued one by one, and at most a quarter by the ten clients.
SHARE_MAX = 4
# How long to wait between the drain and the wake-ups, so that the worker is idle.
CALM_S = 1.0
WAKE_UP_EVERY_S = (0.02, 0.05)
TELL_EVERY_S = 0.1
LOOK_EVERY_S = 0.002
STALLED_S = 30.0

# Called with the current step and the share of it that is done.
Report = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Attributes:
        jobs: number of jobs to enqueue (one by one, by ten clients and in bulk), and then to drain.
        wake_ups: number of jobs to enqueue one by one for an idle worker.
        each_s: the longest time for each measurement of round trips, commits and single enqueues,
            in seconds.
    """

    jobs: int
    wake_ups: int
    each_s: float


class Stopped(Exception):
    """A signal has stopped the worker, and with it the measurement."""


class Measures:
    """One run of the benchmark.

    Args:
        name: the name of the queue and of the task.
        regain: called when the worker has ended, to install the benchmark's signal handlers again.
            The worker replaces these handlers and does not restore them.
    """

    def __init__(
        self, name: str, plan: Plan, settings: Settings, regain: Callable[[], None]
    ) -> None:
        self._name, self._plan, self._regain = name, plan, regain
        self._settings = replace(settings, queues=(name,))
        self._starts = Starts()
        self._task: Task[[], Coroutine[Any, Any, None]] = Task(
            self._starts.handler(), name=name, queue=name
        )
        self._job: NewJob = self._task.job()

    async def run(
        self, target: Target, client: Client, environment: stored.Environment, report: Report
    ) -> Figures:
        """Measure everything, one step after another; call `report` with the progress.

        Raises:
            Stopped: a signal has stopped the worker.
            TaskdError: no job ran for 30 s; or an error of the client or the worker.
        """
        self._report = report
        plan, database = self._plan, target.database
        async with database.connection("bench") as connection:
            on = fetches(connection, database.schema)
            round_trip = await self._spans("round trip", lambda: stored.round_trip(on), CALLS_MAX)
            commit = await self._spans("commit", lambda: stored.commit(on), CALLS_MAX)
            # Enqueue one job before the measurement: this opens a connection, and PostgreSQL plans
            # the statement.
            await client.enqueue(self._job)
            share = min(CALLS_MAX, plan.jobs // SHARE_MAX)
            single = await self._spans("one by one", lambda: client.enqueue(self._job), share)
            shared, shared_s = await self._from_many(client, share // CLIENTS)
            bulk = plan.jobs - 1 - len(single) - CLIENTS - shared
            bulk_s = await self._in_bulk(client, bulk)
            async with self._worker(target):
                drain_s, cpu_s = await self._drain(lambda: stored.live(on, self._name))
                wake_ups = await self._wake_ups(client)
        return Figures(
            postgresql=environment.postgresql,
            durable=environment.durable,
            notified=not database.pooled or self._settings.listen_dsn is not None,
            round_trip=Times.of(round_trip),
            commit=Times.of(commit),
            enqueue_single_per_s=round(len(single) / sum(single), 1),
            enqueue_clients_per_s=round(shared / shared_s, 1),
            enqueue_bulk_per_s=round(bulk / bulk_s, 1),
            drain_jobs=plan.jobs,
            drain_per_s=round(plan.jobs / drain_s, 1),
            drain_cpu=round(cpu_s / drain_s, 3),
            wake_up=Times.of(wake_ups),
        )

    # Client calls.

    async def _spans(
        self, step: str, call: Callable[[], Awaitable[object]], at_most: int
    ) -> list[float]:
        """Repeat a call for `each_s` seconds, but at most `at_most` times; return the times."""
        spans: list[float] = []
        began = now = time.perf_counter()
        while len(spans) < at_most and (not spans or now - began < self._plan.each_s):
            await call()
            before, now = now, time.perf_counter()
            spans.append(now - before)
            self._report(step, max((now - began) / self._plan.each_s, len(spans) / at_most))
        return spans

    async def _from_many(self, client: Client, at_most: int) -> tuple[int, float]:
        """Let ten coroutines enqueue jobs one by one; return the number of jobs and the time."""

        async def enqueue() -> object:
            return await client.enqueue(self._job)

        # The first round opens the connections.
        await _together(enqueue)
        began = time.perf_counter()
        spans = await _together(lambda: self._spans("10 clients", enqueue, at_most))
        return sum(map(len, spans)), time.perf_counter() - began

    async def _in_bulk(self, client: Client, count: int) -> float:
        """Enqueue the remaining jobs, a thousand per call; return the time."""
        began = time.perf_counter()
        for done in range(0, count, BULK_JOBS):
            await client.enqueue_many([self._job] * min(BULK_JOBS, count - done))
            self._report("1,000 a call", done / count)
        return time.perf_counter() - began

    # The worker.

    @asynccontextmanager
    async def _worker(self, target: Target) -> AsyncIterator[None]:
        """Run a worker in this process until the block ends."""
        from taskd.worker import Worker

        registry = Registry()
        registry.add(self._task)
        worker = Worker(self._settings, registry, target.database, app=APP)
        ending = False

        async def work() -> None:
            try:
                await worker.run()
            finally:
                self._regain()
            if not ending:
                raise Stopped

        self._working = asyncio.create_task(work(), name="bench:worker")
        try:
            yield
        finally:
            ending = True
            worker.stop("done")
            await asyncio.gather(self._working, return_exceptions=True)
        self._working.result()

    async def _drain(self, live: Callable[[], Awaitable[int]]) -> tuple[float, float]:
        """Return seconds from the first job's start to the last ack, and the CPU seconds used."""
        await self._until_started(self._plan.jobs, "drain")
        ends = time.monotonic() + STALLED_S
        while await live():
            self._go_on_until(ends)
            await asyncio.sleep(LOOK_EVERY_S)
        starts = self._starts
        return time.perf_counter() - starts.first_at, time.process_time() - starts.first_cpu_s

    async def _wake_ups(self, client: Client) -> list[float]:
        """Return seconds from the commit of each job to its start in an idle worker."""
        await asyncio.sleep(CALM_S)
        spans: list[float] = []
        for number in range(1, self._plan.wake_ups + 1):
            await asyncio.sleep(random.uniform(*WAKE_UP_EVERY_S))
            await client.enqueue(self._job)
            committed_at = time.perf_counter()
            await self._until_started(self._plan.jobs + number)
            # A worker that happens to poll can start the job before the client knows of the commit.
            spans.append(max(0.0, self._starts.last_at - committed_at))
            self._report("wake-up", number / self._plan.wake_ups)
        return spans

    async def _until_started(self, count: int, step: str | None = None) -> None:
        """Wait until handlers have started this many times in total."""
        starts = self._starts
        seen, ends = starts.count, time.monotonic() + STALLED_S
        while starts.count < count:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_EVERY_S):
                    await starts.reach(count)
            if starts.count > seen:
                seen, ends = starts.count, time.monotonic() + STALLED_S
            self._go_on_until(ends)
            if step is not None:
                self._report(step, starts.count / count)

    def _go_on_until(self, ends: float) -> None:
        """Raise an error if the worker has ended or the deadline has passed."""
        if self._working.done():
            self._working.result()
        if time.monotonic() > ends:
            raise TaskdError(
                f"no job of the queue {self._name} has started or ended for {STALLED_S:.0f} s, so "
                "there is nothing to measure. Is the queue paused, or does the database not answer?"
            )


async def _together(work: Callable[[], Coroutine[Any, Any, T]]) -> list[T]:
    """Run ten calls at the same time; return their results."""
    tasks = [asyncio.create_task(work(), name=f"bench:client-{n}") for n in range(CLIENTS)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


class Starts:
    """A handler that does nothing, and counts its starts.

    Attributes:
        first_at, first_cpu_s: the clock, and the CPU time of this process, at the first start.
        last_at: the clock at the last start.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first_at = self.last_at = self.first_cpu_s = 0.0
        self._expected = 0
        self._reached = asyncio.Event()

    async def reach(self, count: int) -> None:
        """Wait until the handler has started this many times."""
        self._expected = count
        self._reached.clear()
        if self.count < count:
            await self._reached.wait()

    def handler(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """Return a handler that counts its starts in this object."""

        async def nothing() -> None:
            self.count += 1
            self.last_at = time.perf_counter()
            if self.count == 1:
                self.first_at, self.first_cpu_s = self.last_at, time.process_time()
            if self.count == self._expected:
                self._reached.set()

        return nothing
