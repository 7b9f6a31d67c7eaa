"""One run: jobs are offered while faults come and go; then everything must end, and is judged."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskd import Client
from taskd.core.jobs.job import NewJob
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.schema import migrations
from taskd.workflows import Workflow
from tests.system import chaos_load, chaos_report
from tests.system.chaos_app import hopeless, pill
from tests.system.chaos_load import Made, Run
from tests.system.faults.cluster import Cluster, private
from tests.system.faults.disk import small_disk
from tests.system.judge import Judge
from tests.system.nemesis import app
from tests.system.nemesis.faults import FAULTS, Mark, World, possible, strike
from tests.system.nemesis.hosts import Host, Notes
from tests.system.nemesis.report import Plan, Report

SETTINGS = {"max_connections": "200", "deadlock_timeout": "200ms"}
FEED_S = 0.25


def load(plan: Plan, dice: random.Random) -> list[Made]:
    """The jobs of a plan."""
    ledger: chaos_load.Kinds = {
        lambda: app.transfers.job(amount=1): 1,
        app.books.job: 1,
    }
    if plan.load == "ledger":
        return chaos_load.drawn(ledger, plan.jobs, dice)
    made = chaos_load.drawn(
        chaos_load.kinds(dice)
        | {
            lambda: app.transfers.job(amount=1): 6,
            lambda: app.blocks_loop.job(ms=dice.randint(50, 500)): 1,
            app.stubborn.job: 1,
            lambda: app.once.job(ms=dice.randint(0, 300)): 3,
            lambda: app.survives_once.job(ms=dice.randint(0, 300)): 2,
            lambda: NewJob("newer", queue="fast"): 2,
        },
        plan.jobs - plan.pills,
        dice,
    )
    for _ in range(plan.pills):
        made.insert(dice.randint(0, len(made) * 3 // 4), pill.job())
    return made


class Play:
    """A run in a cluster of its own."""

    def __init__(self, plan: Plan, home: Path, cluster: Cluster, disk: Path | None) -> None:
        self.plan, self._home, self._cluster = plan, home, cluster
        self._dice = random.Random(plan.seed)
        self._notes = Notes()
        self._judge = Judge(cluster.dsn())
        self._lane = Lane(Database({"dsn": cluster.dsn()}), "nemesis")
        self._client = Client(cluster.dsn())
        settings = {
            "lease_s": plan.lease_s,
            "statement_timeout_s": min(5.0, plan.lease_s / 3),
            "drain_s": 5.0,
            "cancel_s": 1.0,
        }
        self._hosts = [
            Host(f"host-{number}", home, cluster, self._notes, settings)
            for number in range(1, plan.hosts + 1)
        ]
        self._hosts[-1].old_code = plan.hosts > 1
        self._world = World(cluster, self._hosts, self._dice, plan.longest_s, disk, self._client)
        self._marks: list[Mark] = []

    async def run(self) -> Report:
        """All of it.

        Raises:
            AssertionError: jobs are left when it has been calm for long.
        """
        began = time.monotonic()
        await migrations.migrate(Database({"dsn": self._cluster.dsn()}))
        await self._judge.install()
        for statement in (app.LEDGER, app.TRANSFERS):
            await self._cluster.ask(statement)
        waiting = load(self.plan, self._dice)
        try:
            for host in self._hosts:
                await host.start(self.plan.processes)
            await self._all_up()
            await self._cluster.ask(GROWN_UP)
            async with self._feeding(waiting):
                await self._harm()
            calm = time.monotonic()
            await self._client.schedules.pause(list(SCHEDULES), reason="nemesis")
            await self._client.limit("mixed", None)
            await self._drained()
            drained_s = time.monotonic() - calm
            await self._all_up()
            for host in self._hosts:
                await host.stop()
            await self._client.close()
            await self._lane.close()
            await self._until(ALONE, 30.0, "the workers' sessions are gone")
            return await self._judged(waiting, began, drained_s)
        finally:
            for host in self._hosts:
                await host.close()

    async def _all_up(self) -> None:
        pids = [pid for host in self._hosts for pid in host.pids()]
        await self._until(UP, 60.0, "all workers are up", len(pids))

    async def _drained(self) -> None:
        """Wait until every job has ended: as long as it takes, unless nothing ends any more."""
        ended, moved = -1, time.monotonic()
        while not (await self._cluster.ask(EMPTY))[0][0]:
            [row] = await self._cluster.ask(ENDED)
            if row[0] != ended:
                ended, moved = row[0], time.monotonic()
            await self._wait(moved + self.plan.idle_within_s, "another job has ended", 1.0)

    async def _until(self, text: str, within_s: float, what: str, *args: Any) -> None:
        deadline = time.monotonic() + within_s
        while not (await self._cluster.ask(text, *args))[0][0]:
            await self._wait(deadline, what)

    async def _wait(self, deadline: float, what: str, s: float = 0.1) -> None:
        if time.monotonic() > deadline:
            left = "\n".join(map(str, await self._cluster.ask(LEFT)))
            raise AssertionError(f"seed {self.plan.seed}: in vain: {what}\n{left}")
        await asyncio.sleep(s)

    # The load.

    @asynccontextmanager
    async def _feeding(self, waiting: Sequence[Made]) -> AsyncIterator[None]:
        """Offer all jobs during the block; the block ends when all are confirmed."""
        feeder = asyncio.create_task(self._feed(waiting), name="feeder")
        try:
            yield
            await feeder
        finally:
            feeder.cancel()
            await asyncio.wait({feeder})

    async def _feed(self, waiting: Sequence[Made]) -> None:
        began, fed = time.monotonic(), 0
        while fed < len(waiting):
            share = (time.monotonic() - began) / self.plan.seconds
            due = waiting[fed : int(len(waiting) * share)]
            singles = [each for each in due if isinstance(each, NewJob)]
            for at in range(0, len(singles), chaos_load.BATCH):
                self._world.enqueued += await self._enqueue(singles[at : at + chaos_load.BATCH])
            for made in due:
                if not isinstance(made, NewJob):
                    self._world.enqueued += await self._enqueue(made)
            fed += len(due)
            await asyncio.sleep(FEED_S)

    async def _enqueue(self, made: Sequence[NewJob] | Workflow | Run) -> list[int]:
        """Enqueue it until the database has confirmed it; it may then exist twice."""
        while True:
            with suppress(StoreUnavailable):
                if isinstance(made, Workflow | Run):
                    return list((await made.start(client=self._client)).jobs.values())
                return list(await jobs.enqueue(self._lane, made))
            await asyncio.sleep(FEED_S)

    # The harm.

    async def _harm(self) -> None:
        """Start a fault every few seconds; return when each fault has ended."""
        names = self.plan.faults or possible(self._world)
        ends_at = time.monotonic() + self.plan.seconds
        lasting: set[asyncio.Task[None]] = set()
        # Each kind once before any comes again, so that a short run meets as many as it can.
        bag: list[str] = []
        while time.monotonic() < ends_at:
            if not bag:
                bag = self._dice.sample(names, len(names))
            name = bag.pop()
            lasting.add(
                asyncio.create_task(strike(self._world, name, self._marks), name=f"fault:{name}")
            )
            await asyncio.sleep(self._dice.uniform(*self.plan.every_s))
            for fault in [each for each in lasting if each.done()]:
                lasting.discard(fault)
                fault.result()
        await asyncio.gather(*lasting)

    # The judgement.

    async def _judged(self, waiting: list[Made], began: float, drained_s: float) -> Report:
        connection = await asyncpg.connect(
            self._cluster.dsn(), server_settings={"application_name": "judge nemesis"}
        )
        try:
            await self._store_records(connection)
            entries = {
                app.books.name: "SELECT job FROM judge.ledger",
                app.transfers.name: "SELECT job FROM judge.transfer WHERE account = 2",
            }
            verdict = await self._judge.check(
                enqueued=self._world.enqueued,
                left_behind=[row[0] for row in await connection.fetch(LEFT_BEHIND)],
                ledgers={
                    name: [row[0] for row in await connection.fetch(text)]
                    for name, text in entries.items()
                },
                newest=chaos_load.newest(waiting),
            )
            unexpected = await connection.fetch(
                chaos_report.UNEXPECTED, [hopeless.name, app.stubborn.name]
            )
            missing = set() if self.plan.faults else set(FAULTS) - set(possible(self._world))
            return Report(
                self.plan,
                verdict,
                time.monotonic() - began,
                drained_s,
                await connection.fetch(MARKS),
                sorted(missing),
                sum((host.codes for host in self._hosts), Counter()),
                [each for host in self._hosts for each in host.surprises],
                chaos_report.ended_wrongly(await connection.fetch(chaos_report.PILLS), unexpected),
                [chaos_report.described(row) for row in unexpected if row["reason"] == "crashed"],
                tuple(await connection.fetchrow(TICKS, app.SCHEDULE)),
                await connection.fetchval("SELECT count(*) FROM judge.withdrawal"),
                tuple(await connection.fetchrow(TRANSFERRED)),
                await connection.fetchval(DEADLOCKS),
            )
        finally:
            await connection.close()

    async def _store_records(self, connection: asyncpg.Connection) -> None:
        """What was done, and what the handlers wrote down, in the order of time."""
        await connection.executemany(
            "INSERT INTO judge.kill VALUES ($1, $2)",
            [(pid, _at(moment)) for pid, moment in self._notes.kills],
        )
        await connection.executemany(
            "INSERT INTO judge.pause VALUES ($1, $2, $3)",
            [(pid, _at(since), _at(until)) for pid, since, until in self._notes.pauses],
        )
        ahead_s = time.time() - time.monotonic()
        rows = [
            (_at(row[0] + ahead_s), *row[1:])
            for path in self._home.glob("*.records")
            for row in map(json.loads, path.read_text().splitlines())
        ]
        rows += [tuple(row) for row in await connection.fetch(RECORDED)]
        await connection.execute("TRUNCATE judge.record")
        await connection.executemany(RECORD, sorted(rows, key=lambda row: row[0]), timeout=600)
        await connection.execute(
            "CREATE TABLE judge.mark (name text, began timestamptz, ended timestamptz)"
        )
        await connection.executemany(
            "INSERT INTO judge.mark VALUES ($1, $2, $3)",
            [(mark.name, _at(mark.began), _at(mark.ended)) for mark in self._marks],
        )


def _at(moment: float) -> datetime:
    return datetime.fromtimestamp(moment, UTC)


SCHEDULES = (
    *(app.SCHEDULE, app.NEWER_SCHEDULE, app.ZONED_SCHEDULE),
    *(app.WAITING_SCHEDULE, app.CANCELLING_SCHEDULE),
)
# Schedules of the last 90 s are never withdrawn.
GROWN_UP = "UPDATE taskd.schedule SET created_at = created_at - interval '1 hour'"
UP = """
SELECT count(*) >= $1 FROM taskd.worker WHERE died_at IS NULL AND NOT draining
"""
ENDED = "SELECT count(*) FROM taskd.job_history"
EMPTY = "SELECT NOT EXISTS (SELECT FROM taskd.job)"
LEFT = """
SELECT task, state, gate, count(*), min(id) AS one_of_them, min(run_at) AS first_due
FROM taskd.job GROUP BY 1, 2, 3 ORDER BY 4 DESC LIMIT 20
"""
ALONE = """
SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()
AND backend_type = 'client backend' AND application_name NOT LIKE 'judge%'
"""
LEFT_BEHIND = "SELECT id FROM taskd.jobs WHERE task = 'stubborn'"
RECORDED = "SELECT at, job, attempt, fence, pid, phase FROM judge.record"
RECORD = (
    "INSERT INTO judge.record (at, job, attempt, fence, pid, phase) VALUES ($1, $2, $3, $4, $5, $6)"
)
# What jobs that came while a fault lasted waited for their first start, and how long after its end
# the next claim came.
MARKS = """
WITH born AS MATERIALIZED (
    SELECT event.at, claim.at - event.at AS waited
    FROM judge.event
    JOIN judge.claim ON claim.job = event.job AND claim.n = 1
    JOIN taskd.jobs AS job ON job.id = event.job
    WHERE event.kind = 'born' AND job.task = 'instant' AND event.new_state = 'queued'
)
SELECT mark.name, count(*) AS times,
       sum(date_part('epoch', mark.ended - mark.began)) AS seconds,
       max(waits.p99_s) AS wait_s, max(date_part('epoch', next.at - mark.ended)) AS recovery_s
FROM judge.mark AS mark
CROSS JOIN LATERAL (
    SELECT percentile_cont(0.99) WITHIN GROUP (ORDER BY date_part('epoch', waited)) AS p99_s
    FROM born WHERE born.at BETWEEN mark.began AND mark.ended
) AS waits
CROSS JOIN LATERAL (
    SELECT min(claim.at) AS at FROM judge.claim WHERE claim.at >= mark.ended
) AS next
GROUP BY mark.name ORDER BY mark.name
"""
TICKS = """
SELECT count(*)::integer,
       (count(*) - count(DISTINCT tick))::integer,
       (coalesce(date_part('epoch', max(tick) - min(tick)) + 1, 0) - count(DISTINCT tick))::integer
FROM taskd.jobs WHERE schedule = $1
"""
TRANSFERRED = """
SELECT coalesce(sum(amount) FILTER (WHERE account = 1), 0)::bigint,
       coalesce(sum(amount) FILTER (WHERE account = 2), 0)::bigint,
       (SELECT count(*) FROM taskd.job_history WHERE task = 'transfers' AND state = 'done')
FROM judge.transfer
"""
DEADLOCKS = "SELECT deadlocks::integer FROM pg_stat_database WHERE datname = current_database()"


async def play(plan: Plan, home: Path) -> Report:
    """A run from nothing to its report; logs and records stay in `home`."""
    async with AsyncExitStack() as stack:
        try:
            disk = await stack.enter_async_context(small_disk(plan.disk_megabytes))
        except pytest.skip.Exception:
            disk = None
        cluster = await stack.enter_async_context(private(SETTINGS, home=disk))
        return await Play(plan, home, cluster, disk).run()
