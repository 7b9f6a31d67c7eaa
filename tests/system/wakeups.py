"""No wake-up is lost: a worker falls asleep while producers commit, thousands of times.

    python -m tests.system.wakeups --trials 10000 --seed 7

One worker serves some queues. Each queue goes through rounds: a stream of jobs until the worker
polls the queue and producers no longer notify; then silence, in which the worker clears its mark
and falls asleep; and at random moments around that, one to four producers that enqueue a job each.
Their transactions stay open for a random time, in every isolation level, through SQL and Python: in
some rounds for 0 to 50 ms, in others until after the mark was cleared.

The polls that find a job without a notification come once a minute. So a missing notification shows
as lateness, which is counted from just before COMMIT was sent to the start of the handler. The
worker's own share is counted from the answer to COMMIT, as in the benchmark's S3.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import asyncpg
import uvloop

from taskd import Client
from taskd.config import Settings
from taskd.core.jobs.job import NewJob
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store.connections.database import Database
from taskd.worker import Worker
from taskd.worker.claiming import busy_mark, consumer
from tests.servers import add_dsn, database, server
from tests.system.wakeups_report import LOST_S, Plan, Report, Trial, percentile_s

# The longest allowed value: a job that a notification finds is never taken for one of a poll.
POLL_S = 60.0
# A worker that keeps a millisecond from its last claim sleeps now and then even in a stream: with
# 20 ms in one run of six it never polled while a trial wrote, which proves nothing.
MARK_AFTER_S = 0.005
P999_S = 0.05
OPEN_S_MAX = 0.05
CHECK_EVERY_S = 0.005
# A large backlog, so that every claim is full; and a small one, as a trial's job waits behind it.
STREAM_JOBS, STREAM_AHEAD, STREAM_EVERY_S = 150, 250, 0.002
# A worker that does not poll after a stream of this length is used as it is.
STREAM_S_MAX = 0.5
# Longer than it takes to fall asleep after a stream.
NAP_S_MAX = 2.0
# Marks are read at every level; most transactions have the first.
ISOLATIONS = {"read_committed": 2, "repeatable_read": 1, "serializable": 1}
DOORS = ("SQL", "client")

MARKS = "SELECT queue FROM unnest($1::text[]) AS queue WHERE taskd.is_polled(queue)"
MARKED = "SELECT taskd.is_polled($1)"
ENQUEUE = "SELECT taskd.enqueue('found', jsonb_build_object('number', $1::bigint), queue => $2)"


class Watch:
    """Reads the marks, some two hundred times a second."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._marked: set[str] = set()
        self._looked = asyncio.Condition()

    async def run(self, connection: Any, queues: list[str]) -> None:
        """Read until cancelled."""
        while True:
            marked = {row[0] for row in await connection.fetch(MARKS, queues)}
            self._report.marks += len(marked - self._marked)
            self._report.naps += len(self._marked - marked)
            async with self._looked:
                self._marked = marked
                self._looked.notify_all()
            await asyncio.sleep(CHECK_EVERY_S)

    async def marked(self, queue: str, *, within_s: float) -> bool:
        """Wait until a worker polls a queue; return whether one does."""
        return await self._wait(queue, there=True, within_s=within_s)

    async def unmarked(self, queue: str, *, within_s: float) -> bool:
        """Wait until no worker polls a queue; return whether none does."""
        return await self._wait(queue, there=False, within_s=within_s)

    async def _wait(self, queue: str, *, there: bool, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s), self._looked:
                await self._looked.wait_for(lambda: (queue in self._marked) is there)
        except TimeoutError:
            return False
        return True


class Trials:
    """Plays the rounds of several queues concurrently.

    Attributes:
        nap_s: about how long it takes from the end of a stream until the mark is cleared.
    """

    def __init__(self, plan: Plan, dsn: str, pool: Any, client: Client) -> None:
        self.plan, self.dsn = plan, dsn
        self.report = Report(plan)
        self.watch = Watch(self.report)
        self.nap_s = 0.2
        self._pool, self._client = pool, client
        self._dice = random.Random(plan.seed)
        self._streamed: Counter[str] = Counter()
        # One at a time, so that the machine is not full while others measure how late they are.
        self._may_stream = asyncio.Semaphore(1)
        self._sent: dict[int, float] = {}
        self._answered: dict[int, float] = {}
        self._started: dict[int, asyncio.Future[float]] = {}
        self._busy: Task[..., Any] = Task(self._do_busy, name="busy")
        self._found: Task[..., Any] = Task(self._do_found, name="found")
        self.registry = Registry()
        self.registry.add(self._busy)
        self.registry.add(self._found)

    async def _do_busy(self, queue: str) -> None:
        self._streamed[queue] -= 1

    async def _do_found(self, number: int) -> None:
        started = self._started[number]
        if not started.done():
            started.set_result(time.perf_counter())

    async def play(self, queue: str) -> None:
        """Rounds on one queue until all trials of the plan are given out."""
        while trials := self._next_round(queue):
            self.report.rounds += 1
            await self._stream(queue)
            quiet_since = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                for trial in trials:
                    group.create_task(self._produce(trial), name=f"producer:{trial.number}")
                group.create_task(self._learn_nap(queue, quiet_since), name=f"nap:{queue}")
            for trial in trials:
                await self._wait_for(trial)

    def _next_round(self, queue: str) -> list[Trial]:
        left = self.plan.trials - len(self.report.trials)
        # Mostly one: a producer that notifies wakes the worker for the jobs of the others as well.
        count = min(left, self._dice.choice((1, 1, 1, 1, 2, 2, 3, 4)))
        across = self._dice.random() < 0.5
        first = len(self.report.trials)
        trials = [
            Trial(
                number=first + n,
                queue=queue,
                isolation=self._dice.choices([*ISOLATIONS], [*ISOLATIONS.values()])[0],
                door=self._dice.choice(DOORS),
                begins_s=self._dice.uniform(0, self.nap_s * (0.8 if across else 1.6)),
                open_s=self._dice.uniform(0, OPEN_S_MAX),
                across=across,
            )
            for n in range(count)
        ]
        self.report.trials += trials
        return trials

    async def _stream(self, queue: str) -> None:
        """Keep the worker busy until it polls the queue, and for a moment longer."""
        jobs = [replace(self._busy.job(queue), queue=queue)] * STREAM_JOBS
        longer = self._dice.randrange(10)
        async with self._may_stream, self._pool.acquire() as connection:
            polled = asyncio.create_task(self.watch.marked(queue, within_s=STREAM_S_MAX))
            while not polled.done() or (longer := longer - 1) > 0:
                if self._streamed[queue] < STREAM_AHEAD:
                    self._streamed[queue] += STREAM_JOBS
                    await self._client.enqueue_many(jobs, conn=connection)
                await asyncio.sleep(STREAM_EVERY_S)

    async def _learn_nap(self, queue: str, quiet_since: float) -> None:
        if await self.watch.unmarked(queue, within_s=NAP_S_MAX):
            took_s = time.perf_counter() - quiet_since
            self.nap_s += (took_s - self.nap_s) / 20

    async def _produce(self, trial: Trial) -> None:
        """Enqueue the trial's job in a transaction of its own."""
        number, queue = trial.number, trial.queue
        self._started[number] = asyncio.get_running_loop().create_future()
        await asyncio.sleep(trial.begins_s)
        async with self._pool.acquire() as connection:
            transaction = connection.transaction(isolation=trial.isolation)
            await transaction.start()
            if trial.door == "SQL":
                await connection.fetchval(ENQUEUE, number, queue)
            else:
                job: NewJob = replace(self._found.job(number), queue=queue)
                await self._client.enqueue(job, conn=connection)
            unnotified = await connection.fetchval(MARKED, queue)
            if trial.across:
                await self.watch.unmarked(queue, within_s=NAP_S_MAX)
            await asyncio.sleep(trial.open_s)
            self._sent[number] = time.perf_counter()
            await transaction.commit()
            self._answered[number] = time.perf_counter()
            self.report.unnotified += unnotified
            self.report.crossed += unnotified and not await connection.fetchval(MARKED, queue)

    async def _wait_for(self, trial: Trial) -> None:
        """Wait until the trial's handler has begun; give up a job that is not found."""
        try:
            async with asyncio.timeout(LOST_S):
                began = await asyncio.shield(self._started[trial.number])
        except TimeoutError:
            return
        number, report = trial.number, self.report
        report.lateness_s[number] = max(0.0, began - self._sent[number])
        report.wait_s[number] = max(0.0, began - self._answered[number])


async def run(plan: Plan, dsn: str) -> Report:
    """Play the plan in a migrated database of its own."""
    began = time.monotonic()
    queues = [f"nap{n}" for n in range(plan.queues)]
    async with AsyncExitStack() as stack:
        # As a setting it is at most 60 s, and what follows an empty claim is no setting.
        stack.enter_context(mock.patch.object(consumer, "POLL_UNSURE_S", POLL_S))
        # Shorter streams, and one nap after the other: the same steps, more often.
        stack.enter_context(mock.patch.object(busy_mark, "MARK_AFTER_S", MARK_AFTER_S))
        stack.enter_context(mock.patch.object(busy_mark, "MARK_AT_MOST_EVERY_S", 0.0))
        pool = await stack.enter_async_context(
            asyncpg.create_pool(dsn, min_size=plan.queues, max_size=3 * plan.queues)
        )
        client = await stack.enter_async_context(Client(dsn))
        trials = Trials(plan, dsn, pool, client)
        await stack.enter_async_context(_working(trials, queues))
        watching = asyncio.create_task(
            trials.watch.run(await stack.enter_async_context(pool.acquire()), queues),
            name="watch",
        )
        try:
            async with asyncio.TaskGroup() as group:
                for queue in queues:
                    group.create_task(trials.play(queue), name=f"play:{queue}")
        finally:
            watching.cancel()
            await asyncio.wait({watching})
    trials.report.took_s = time.monotonic() - began
    return trials.report


@asynccontextmanager
async def _working(trials: Trials, queues: list[str]) -> AsyncIterator[None]:
    """One worker for all queues, in this process."""
    settings = Settings(dsn=trials.dsn, queues=tuple(queues), poll_s=POLL_S, drain_s=1.0)
    worker = Worker(settings, trials.registry, Database({"dsn": trials.dsn}))
    running = asyncio.create_task(worker.run(), name="worker")
    ready = asyncio.create_task(worker.ready.wait(), name="ready")
    await asyncio.wait({running, ready}, return_when="FIRST_COMPLETED")
    if running.done():
        running.result()
    try:
        yield
    finally:
        ready.cancel()
        worker.stop()
        await running


async def _main(plan: Plan, place: str) -> int:
    async with database(place, "wakeups") as dsn:
        print(f"seed {plan.seed}; {dsn}", flush=True)
        report = await run(plan, dsn)
        print(report)
        problems = report.problems()
        if percentile_s(report.wait_s, 0.999) > P999_S:
            problems.append(f"p99.9 is over {1000 * P999_S:g} ms; on a quiet machine it is not")
        print("\n".join(problems) or "in order")
        return 4 if problems else 0


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--queues", type=int, default=12, help="that are played at the same time")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    add_dsn(parser)
    options = parser.parse_args()
    plan = Plan(options.trials, options.queues, options.seed)
    with server(options.dsn) as place:
        code = uvloop.run(_main(plan, place))
    sys.exit(code)


if __name__ == "__main__":
    main()
