"""All statements that write to jobs run on the same few rows, without a deadlock.

    python -m tests.store.deadlocks --rounds 1000 --seed 7

There are one or two writers of each kind, each with its own connections: claims and acks,
declarations of dead workers, rescue, promotion, admission, deadlines, history and other upkeep;
cancels, retries and changes; restarts, completions, deletions and copies by hand; batches with
unique keys and versions, workflows, runs of a pipeline with keys, limits, pauses, schedules. In a
round each writer acts once, and no writer waits for another. The server counts the deadlocks, so
that a deadlock counts even if the statement succeeds when it is repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import asyncpg

from taskd.store import queues, schedules, tasks, workers
from taskd.store.connections.database import Database
from taskd.store.jobs import jobs, limits
from taskd.store.schema import migrations
from taskd.worker.assembly import PLANS
from tests.schema import fetches
from tests.store.helpers import claim_suspect, done, new_worker
from tests.store.workflow_helpers import WRONG
from tests.store.writers import QUEUES, TASKS, Writers, registry
from tests.system.faults.cluster import private

# A deadlock becomes an error soon, and before any lock_timeout except those of rule 3 in
# sql/README.md.
# JIT is off because plans against PLANS have high costs (stage.py).
IMPATIENT = {"deadlock_timeout": "100ms", "application_name": "crowd", "jit": "off"}
DRAIN_TURNS = 2000

DEADLOCKS = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
STILL_THERE = """
SELECT count(*) FROM pg_stat_activity
WHERE application_name = 'crowd' AND datname = current_database()
"""
# Jobs that may be left: one that waits for a failed parent that can be retried, and its dependants.
LEFT = """
WITH RECURSIVE rests AS (
    SELECT d.job_id
    FROM taskd.dependency AS d JOIN taskd.job_history AS past ON past.id = d.parent_id
    WHERE NOT d.counted AND d.on_failed = 'wait' AND past.state IN ('failed', 'cancelled')
    UNION
    SELECT d.job_id FROM rests JOIN taskd.dependency AS d ON d.parent_id = rests.job_id
    WHERE NOT d.counted
)
SELECT id, task, state::text, gate::text, waits_for, parked, crashes FROM taskd.job
WHERE state <> 'blocked' OR waits_for IS NULL OR id NOT IN (SELECT job_id FROM rests)
"""

Act = Callable[[Any, Any], Awaitable[None]]


class Crowd(Writers):
    """All writers at once."""

    def __init__(self, connect: Callable[..., Awaitable[Any]], rounds: int, seed: int) -> None:
        super().__init__(seed)
        self._connect, self._rounds = connect, rounds

    async def run(self) -> list[str]:
        """Run the writers, then let all jobs end; return what is wrong."""
        sql = await self._connect()
        on = fetches(sql)
        await workers.publish(on, "app", registry(), QUEUES)
        await limits.publish(on, "app", registry())
        before = await sql.fetchval(DEADLOCKS)
        async with asyncio.TaskGroup() as group:
            for each in self._everybody():
                group.create_task(self._loop(each))
        await self._drain(sql)
        found = await self._wrong(sql)
        # A backend reports its counts at its end at the latest.
        while await sql.fetchval(STILL_THERE):
            await asyncio.sleep(0.005)
        deadlocks = await sql.fetchval(DEADLOCKS) - before
        if deadlocks or self.did["40P01"]:
            found.insert(0, f"{max(deadlocks, self.did['40P01'])} deadlocks")
        return found

    def _everybody(self) -> list[Act]:
        return [
            *[self._works] * 2, *[self._enqueues] * 2, *[self._enqueues_keys] * 3,
            self._enqueues_workflows, *[self._cancels] * 2, *[self._retries] * 2, self._changes,
            self._limits, self._pauses, self._schedules, *[self._keeps_up] * 2, self._keeps_house,
            *[self._acts_by_hand] * 2, *[self._runs] * 2,
        ]  # fmt: skip

    async def _loop(self, act: Act) -> None:
        connection = await self._connect(**IMPATIENT)
        acks = await self._connect(**IMPATIENT, **PLANS)
        for _ in range(self._rounds):
            try:
                await act(connection, acks)
            except Exception as error:  # noqa: BLE001 - judged by its SQLSTATE
                self._refused(error)
        await connection.close()
        await acks.close()

    async def _drain(self, sql: Any) -> None:
        """Let all jobs end that can."""
        on = fetches(sql)
        await schedules.delete(on, ["s0", "s1"])
        await queues.resume(on, QUEUES)
        await tasks.resume(on, TASKS)
        await limits.clear(on, ["l"])
        me = await new_worker(on)
        for _ in range(DRAIN_TURNS):
            await self._keeps_up(sql, None)
            batch = []
            for queue in QUEUES:
                batch += await jobs.claim(on, me, queue, 1000)
                batch += (await limits.claim(on, me, queue, 1000)).jobs
            while suspect := await claim_suspect(on, me, QUEUES, TASKS):
                batch.append(suspect)
            self._took(batch)
            if batch:
                await done(on, *sorted(batch, key=lambda job: job.id))
            elif not await sql.fetch(LEFT):
                return
            else:
                await asyncio.sleep(0.01)

    async def _wrong(self, sql: Any) -> list[str]:
        """Return jobs that are stuck, lost, duplicated, or wait for nothing."""
        found = [f"stuck: {tuple(row)}" for row in await sql.fetch(LEFT)]
        found += [f"waits in vain: {tuple(row)}" for row in await sql.fetch(WRONG)]
        there = Counter(row[0] for row in await sql.fetch("SELECT id FROM taskd.jobs"))
        found += [f"job {job_id} is there {n} times" for job_id, n in there.items() if n > 1]
        found += [
            f"job {job_id} is lost" for job_id in sorted(self.born - self.deleted - set(there))
        ]
        return found


class Keys(Crowd):
    """Only the writers to jobs with unique keys, so that more of them meet."""

    def _everybody(self) -> list[Act]:
        return [
            *[self._works] * 2, *[self._enqueues_keys] * 6, *[self._cancels] * 4,
            *[self._retries] * 4, *[self._acts_by_hand] * 2, *[self._keeps_up] * 2,
            self._keeps_house,
        ]  # fmt: skip


async def long(kind: type[Crowd], rounds: int, seed: int) -> int:
    """Run on a server of its own, whose log shows the deadlocks; return the exit code."""
    settings = {"log_min_messages": "error", "log_lock_waits": "on"}
    async with private(settings) as cluster, AsyncExitStack() as stack:
        await migrations.migrate(Database({"dsn": cluster.dsn()}))

        async def connect(**settings: str) -> Any:
            made = await asyncpg.connect(cluster.dsn(), server_settings=settings)
            stack.callback(made.terminate)
            return made

        crowd = kind(connect, rounds, seed)
        wrong = await crowd.run()
        print(f"seed {seed}, {rounds} rounds: {dict(sorted(crowd.did.items()))}")
        print(*wrong, sep="\n")
        log = (cluster.home / "log").read_text(errors="replace").splitlines()
        for at, line in enumerate(log):
            if "deadlock detected" in line:
                print(*log[at : at + 60], sep="\n")
                break
        return 4 if wrong else 0


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--keys", action="store_true", help="only those who write to keyed jobs")
    options = parser.parse_args()
    sys.exit(asyncio.run(long(Keys if options.keys else Crowd, options.rounds, options.seed)))


if __name__ == "__main__":
    main()
