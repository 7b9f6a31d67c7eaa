"""A rolling restart under load: one worker after another is stopped and started again.

    python -m tests.system.rolling --restarts 200 --every 2

No job is lost, and none is charged an attempt: a stopping worker releases the jobs that it had
claimed and not started, and those that it interrupts after its drain.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import asyncpg

from taskd.core.jobs.job import NewJob
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.servers import add_dsn, database, server
from tests.system import chaos_app as app
from tests.system.fleet import START_S, Fleet, until
from tests.system.judge import Judge, Verdict

BEAT_S = 0.1
# Longer than the drain: some of these are interrupted, and start again elsewhere.
LONG_MS = 2500
DRAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run consists of.

    Attributes:
        every_s: from one stop to the next.
        rate: jobs enqueued per second.
    """

    restarts: int
    every_s: float
    workers: int
    rate: int
    seed: int


@dataclass(slots=True)
class Report:
    """The result; `burned` counts attempts beyond the first that no job has requested."""

    plan: Plan
    verdict: Verdict
    took_s: float
    restarts: int
    exit_codes: Counter[int]
    burned: int
    interrupted: int
    not_done: int

    def problems(self) -> list[str]:
        """Everything that breaks a promise; empty when all is well."""
        found = [str(breach) for breach in self.verdict.breaches]
        if set(self.exit_codes) != {0}:
            found.append(f"exit codes of stopped workers: {dict(self.exit_codes)}")
        if self.burned or self.not_done:
            found.append(f"{self.burned:,} attempts burned, {self.not_done:,} jobs not done")
        return found

    def __str__(self) -> str:
        plan = self.plan
        return (
            f"seed {plan.seed}: {self.restarts} restarts of {plan.workers} workers, one every "
            f"{plan.every_s:g} s, {plan.rate} jobs/s; {self.took_s:.0f} s; attempts burned "
            f"{self.burned:,}, interrupted and repeated {self.interrupted:,}, exit codes "
            f"{dict(self.exit_codes)}\n{self.verdict}"
        )


def load(count: int, dice: random.Random) -> list[NewJob]:
    """Return `count` jobs of the kinds that never fail."""
    kinds = {
        app.instant.job: 80,
        lambda: app.waits.job(ms=dice.randint(10, 500)): 10,
        lambda: app.works_in_thread.job(ms=dice.randint(1, 50)): 9,
        lambda: app.waits.job(ms=LONG_MS): 1,
    }
    return [make() for make in dice.choices([*kinds], weights=[*kinds.values()], k=count)]


async def run(plan: Plan, dsn: str, logs: Path) -> Report:
    """Play the plan in a migrated database of its own."""
    began = time.monotonic()
    dice = random.Random(plan.seed)
    judge = Judge(dsn)
    await judge.install()
    connection = await asyncpg.connect(dsn, server_settings={"application_name": "judge rolling"})
    fleet = Fleet(dsn, judge, 30.0, logs, drain_s=DRAIN_S)
    try:
        await fleet.start(plan.workers)
        async with _producer(plan, dice, dsn) as enqueued:
            stopped = [await _restart(plan, connection, fleet) for _ in range(plan.restarts)]
        await until(partial(_none, connection, LEFT), 120.0, fleet, "every job has ended")
        codes = Counter(fleet.exit_codes[pid] for pid in stopped if pid in fleet.exit_codes)
        await _up(plan, connection, fleet)
        codes.update(await fleet.stop())
        await until(partial(_none, connection, SESSIONS), START_S, fleet, "sessions are gone")
        verdict = await judge.check(enqueued=enqueued)
        row = await connection.fetchrow(FIGURES)
        took_s = time.monotonic() - began
        return Report(plan, verdict, took_s, len(stopped), codes, *row)
    finally:
        await fleet.close()
        await connection.close()


@asynccontextmanager
async def _producer(plan: Plan, dice: random.Random, dsn: str) -> AsyncIterator[list[int]]:
    """Enqueue at the plan's rate for as long as the block lasts; the ids."""
    enqueued: list[int] = []
    lane = Lane(Database({"dsn": dsn}), "rolling")

    async def produce() -> None:
        while True:
            enqueued.extend(await jobs.enqueue(lane, load(max(1, int(plan.rate * BEAT_S)), dice)))
            await asyncio.sleep(BEAT_S)

    producing = asyncio.create_task(produce(), name="producer")
    try:
        yield enqueued
    finally:
        # A statement in flight is awaited; its ids are lost, and the judge counts rows anyway.
        producing.cancel()
        with suppress(asyncio.CancelledError):
            await producing
        await lane.close()


async def _restart(plan: Plan, connection: asyncpg.Connection, fleet: Fleet) -> int:
    """Stop the one that has been up for longest; its pid."""
    due = asyncio.get_running_loop().time() + plan.every_s
    pid = (await _up(plan, connection, fleet))[0]
    fleet.restart(pid)
    await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
    return pid


async def _up(plan: Plan, connection: asyncpg.Connection, fleet: Fleet) -> list[int]:
    """Wait until all workers are up; their pids, the oldest first."""
    found: list[int] = []

    async def everyone() -> bool:
        found[:] = [row["pid"] for row in await connection.fetch(OLDEST, fleet.pids())]
        return len(found) == plan.workers

    await until(everyone, START_S, fleet, "all workers are up")
    return found


async def _none(connection: asyncpg.Connection, statement: str) -> bool:
    return not await connection.fetchval(statement)


OLDEST = """
SELECT pid FROM taskd.worker
WHERE died_at IS NULL AND NOT draining AND pid = ANY ($1::integer[]) ORDER BY started_at
"""
LEFT = "SELECT EXISTS (SELECT 1 FROM taskd.job)"
SESSIONS = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
AND backend_type = 'client backend' AND pid <> pg_backend_pid()
"""
FIGURES = """
SELECT coalesce(sum(attempt - 1), 0)::integer, coalesce(sum(interrupts), 0)::integer,
       (count(*) FILTER (WHERE state <> 'done'))::integer
FROM taskd.jobs
"""


async def _main(plan: Plan, place: str) -> int:
    async with database(place, "rolling") as dsn:
        logs = Path(tempfile.mkdtemp(prefix="taskd-rolling-"))
        print(f"seed {plan.seed}; {dsn}; logs in {logs}", flush=True)
        report = await run(plan, dsn, logs)
        print(report)
        print("\n".join(report.problems()) or "in order")
        return 4 if report.problems() else 0


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--restarts", type=int, default=200)
    parser.add_argument("--every", type=float, default=2.0, help="seconds")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--rate", type=int, default=200, help="jobs per second")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    add_dsn(parser)
    options = parser.parse_args()
    plan = Plan(options.restarts, options.every, options.workers, options.rate, options.seed)
    with server(options.dsn) as place:
        code = asyncio.run(_main(plan, place))
    sys.exit(code)


if __name__ == "__main__":
    main()
