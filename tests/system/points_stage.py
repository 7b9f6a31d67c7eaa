"""One trial of a strike: a worker is hit, recovers or is replaced, and its history is checked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from taskd import Client
from taskd.core.jobs.job import NewJob
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.workflows import Pipeline, Workflow
from tests.system import chaos_app as app
from tests.system import points_app
from tests.system.chaos_load import newest
from tests.system.chaos_report import UNEXPECTED
from tests.system.judge import Judge
from tests.system.points_list import AT_START, TICKS_AT_START, Hands, Trial, scene_of, small
from tests.system.points_strike import Plan

ROOT = Path(__file__).parents[2]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.points_app"),
    *("--queue", "fast:10", "--queue", "mixed:10", "--queue", "things:2", "--threads", "2"),
)
# Short waits: a claim whose reply was lost is found six seconds later.
SETTINGS = {"lease_s": 4, "statement_timeout_s": 1, "poll_s": 0.5, "process_slots": 1}
TUNED = {
    "taskd.worker.upkeep.reconciler.RECONCILE_EVERY_S": 0.2,
    "taskd.worker.upkeep.reconciler.IDLE_CHECK_EVERY_S": 1.0,
}
STRUCK_WITHIN_S, ENDED_WITHIN_S, STOP_S = 60.0, 60.0, 45.0
NO_DATABASE = 69
HOPELESS = [app.hopeless.name]
EMPTY = "SELECT NOT EXISTS (SELECT 1 FROM taskd.job)"
# The harness's own sessions may stay.
ALONE = """
SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = current_database()
AND (application_name = 'judge app' OR application_name LIKE 'taskd %')
AND application_name NOT IN ('taskd points', 'taskd client')
"""
BOOKED = "SELECT task, id FROM judge.ledger JOIN taskd.jobs ON id = job"
SERVES = "SELECT EXISTS (SELECT FROM taskd.worker WHERE pid = $1)"
BEATS = """
SELECT EXISTS (SELECT FROM taskd.worker WHERE pid = $1 AND died_at IS NULL AND renewed_at > $2)
"""
TICKED = "SELECT EXISTS (SELECT FROM taskd.jobs WHERE schedule = 'ticking' AND enqueued_at > $1)"
TICKS = """
SELECT count(*) AS jobs, count(DISTINCT tick) AS ticks,
       date_part('epoch', max(tick) - min(tick)) + 1 AS wanted
FROM taskd.jobs WHERE schedule = 'ticking'
HAVING count(*) <> $1 * count(DISTINCT tick)
    OR count(DISTINCT tick) < date_part('epoch', max(tick) - min(tick)) + 1
"""
# The record `done` of a handler does not hold for an attempt that could not be completed.
UNSAID = "UPDATE judge.record SET phase = 'raised' WHERE job = $1 AND fence = $2 AND phase = 'done'"
NOT_COMPLETED = (
    "SELECT EXISTS (SELECT FROM judge.claim WHERE job = $1 AND fence = $2 AND closed_as = 'retry')"
)


@dataclass
class Outcome:
    """The result of a trial.

    Attributes:
        recovery_s: from the strike until every job had ended.
        problems: the broken promises.
    """

    trial: Trial
    recovery_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        word = "BROKEN" if self.problems else "ok"
        head = f"{word:<7}{self.recovery_s:6.2f} s  {self.trial.name}"
        return "\n".join([head, *(f"        {problem}" for problem in self.problems)])


class Stage:
    """One trial in a migrated database of its own, in which the judge is installed.

    Args:
        home: a directory for marks and logs.
    """

    def __init__(self, trial: Trial, dsn: str, home: Path) -> None:
        self._trial, self._dsn, self._home = trial, dsn, home
        self._scene = scene_of(trial)
        self._judge = Judge(dsn)
        self._outcome = Outcome(trial)
        self._workers: list[asyncio.subprocess.Process] = []
        self._mark = home / str(len(self._scene.preludes))

    async def play(self) -> Outcome:
        """Hit the worker, wait until all has recovered, check the history."""
        async with self._ready() as hands:
            meanwhile = asyncio.create_task(self._scene.meanwhile(hands), name="meanwhile")
            try:
                await self._strike(hands)
                began = time.monotonic()
                await meanwhile
                await self._recover(hands)
                self._outcome.recovery_s = time.monotonic() - began
                await self._stop(hands)
                await self._judged(hands)
            except Exception as error:  # noqa: BLE001 - the other trials go on
                self._outcome.problems.append(f"{error!r}; see {self._home}")
            finally:
                meanwhile.cancel()
                for worker in self._workers:
                    if worker.returncode is None:
                        worker.kill()
                        await worker.wait()
        return self._outcome

    @asynccontextmanager
    async def _ready(self) -> AsyncIterator[Hands]:
        sql = await asyncpg.connect(self._dsn, server_settings={"application_name": "judge points"})
        lane, client = Lane(Database({"dsn": self._dsn}), "points"), Client(self._dsn)
        hands = Hands(client, lane, sql, [])
        try:
            self._load = self._scene.load()
            await self._enqueue(hands, self._load)
            await self._scene.prepare(hands)
            yield hands
        finally:
            await lane.close()
            await client.close()
            await sql.close()

    async def _enqueue(self, hands: Hands, load: list[NewJob | Workflow | Pipeline]) -> None:
        for made in load:
            if isinstance(made, NewJob):
                hands.enqueued += await jobs.enqueue(hands.lane, [made])
            elif isinstance(made, Pipeline):
                hands.enqueued += (await made.start(7, client=hands.client)).jobs.values()
            else:
                hands.enqueued += (await made.start(client=hands.client)).jobs.values()

    async def _start(self, *strikes: Any) -> asyncio.subprocess.Process:
        plan = Plan(strikes, str(self._home), TUNED | dict(self._scene.tuned), self._scene.ticks)
        environ = {
            **os.environ,
            **{f"TASKD_{name.upper()}": str(value) for name, value in SETTINGS.items()},
            "TASKD_DSN": self._dsn,
            "TASKD_LOG_FORMAT": "json",
            "TASKD_LOG_LEVEL": "debug",
            "POINTS_PLAN": msgspec.json.encode(plan).decode(),
        }
        flags = self._scene.flags if strikes else ()
        with (self._home / f"worker-{len(self._workers)}.log").open("ab") as log:
            worker = await asyncio.create_subprocess_exec(
                *COMMAND, *flags, cwd=ROOT, env=environ, stdout=log, stderr=log
            )
        self._workers.append(worker)
        return worker

    async def _strike(self, hands: Hands) -> None:
        """Start a worker and wait until it is hit; start another one if that was its end."""
        worker = await self._start(*self._scene.preludes, self._trial.strike)

        async def over() -> bool:
            if self._scene.at_stop and await hands.sql.fetchval(EMPTY) and not stopped:
                stopped.append(True)
                worker.send_signal(signal.SIGTERM)
            return self._mark.exists() or worker.returncode is not None

        stopped: list[bool] = []
        await _until(over, STRUCK_WITHIN_S, "the point was reached")
        assert self._mark.exists(), f"the point was not reached: it ended with {worker.returncode}"
        if self._trial.strike.way == "kill":
            assert await worker.wait() == -signal.SIGKILL
            await hands.sql.execute("INSERT INTO judge.kill (pid) VALUES ($1)", worker.pid)
            await self._start()

    async def _recover(self, hands: Hands) -> None:
        """Wait until every job has ended; a worker that cannot start is started again."""
        worker = self._workers[-1]
        cannot_start = self._trial.strike.point in (*AT_START, *TICKS_AT_START)

        async def over() -> bool:
            empty = bool(await hands.sql.fetchval(EMPTY))
            if worker is self._workers[-1] and worker.returncode is not None:
                if cannot_start and worker.returncode == NO_DATABASE:
                    await self._start()
                else:
                    assert self._may_end(worker), f"it ended with {worker.returncode}"
                    assert empty, "it ended, and jobs were left"
            return empty

        lives_on = self._trial.strike.way != "kill" and not self._scene.at_stop
        if self._scene.ticks:
            struck_at = await hands.sql.fetchval("SELECT clock_timestamp()")

            async def ticked() -> bool:
                await over()  # starts another worker where that is called for
                return bool(await hands.sql.fetchval(TICKED, struck_at))

            await _until(ticked, ENDED_WITHIN_S, "another tick was fired")
            await hands.client.schedules.pause(["ticking"])
        await _until(over, ENDED_WITHIN_S, "every job has ended")
        if lives_on and worker.returncode is None:
            await self._is_well(hands, over)

    async def _is_well(self, hands: Hands, over: Callable[[], Awaitable[bool]]) -> None:
        """Wait until the surviving worker works and renews its lease as before."""
        await self._enqueue(hands, small())
        await _until(over, ENDED_WITHIN_S, "every job that came later has ended")
        now = await hands.sql.fetchval("SELECT clock_timestamp()")
        worker = self._workers[-1]

        async def beats() -> bool:
            """Or the worker has ended because the queues are empty, if it runs with
            --until-empty."""
            ended = worker.returncode is not None and self._may_end(worker)
            return ended or bool(await hands.sql.fetchval(BEATS, worker.pid, now))

        await _until(beats, STRUCK_WITHIN_S, "it has beaten again")

    def _may_end(self, worker: asyncio.subprocess.Process) -> bool:
        """Whether it had a reason to end by itself, and did so well."""
        return bool(self._scene.at_stop or self._scene.flags) and worker.returncode == 0

    async def _stop(self, hands: Hands) -> None:
        """Request the last worker to stop, and check its exit code."""
        worker = self._workers[-1]
        if worker.returncode is None:
            # A signal that arrives before its handlers are installed would prove nothing.
            await _until(lambda: self._serves(hands, worker.pid), STOP_S, "it serves its queues")
            if worker.returncode is None:
                worker.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            code = await worker.wait()
        if code != 0:
            self._outcome.problems.append(f"it ended with {code} after SIGTERM; see {self._home}")

    async def _serves(self, hands: Hands, pid: int) -> bool:
        ended = self._workers[-1].returncode is not None
        return ended or bool(await hands.sql.fetchval(SERVES, pid))

    async def _judged(self, hands: Hands) -> None:
        """Pass everything that is known to the judge."""
        found = self._outcome.problems
        await _until(lambda: hands.sql.fetchval(ALONE), STOP_S, "the sessions are gone")
        seen = json.loads(self._mark.read_text(encoding="utf-8"))
        if "job" in seen and self._trial.strike.way != "kill":
            await hands.sql.execute("SELECT judge.build()")
            if await hands.sql.fetchval(NOT_COMPLETED, seen["job"], seen["fence"]):
                await hands.sql.execute(UNSAID, seen["job"], seen["fence"])
        rows = await hands.sql.fetch(BOOKED)
        booked = {
            task: [row["id"] for row in rows if row["task"] == task]
            for task in (app.books.name, points_app.pays.name)
        }
        verdict = await self._judge.check(
            enqueued=hands.enqueued,
            ledgers=booked,
            newest=newest([each for each in self._load if isinstance(each, NewJob)]),
            sessions=2,
        )
        found += [str(breach).strip() for breach in verdict.breaches]
        found += [f"ended: {dict(row)}" for row in await hands.sql.fetch(UNEXPECTED, HOPELESS)]
        ticks = await hands.sql.fetch(TICKS, self._scene.ticks)
        found += [f"too many of a tick, or too few: {dict(row)}" for row in ticks]


async def _until(true: Callable[[], Awaitable[Any]], within_s: float, what: str) -> None:
    deadline = time.monotonic() + within_s
    while not await true():
        assert time.monotonic() < deadline, f"not within {within_s:.0f} s: {what}"
        await asyncio.sleep(0.02)


async def play(trial: Trial, dsn: str, home: Path) -> Outcome:
    """Play one trial in a migrated database of its own."""
    judge = Judge(dsn)
    await judge.install()
    connection = await asyncpg.connect(dsn)
    await connection.execute(app.LEDGER)
    await connection.close()
    return await Stage(trial, dsn, home).play()
