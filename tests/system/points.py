"""Crash at every point: a worker is struck at one named point, recovers or is replaced; the judge.

    python -m tests.system.points --how kill --at-once 2
    python -m tests.system.points --point ack_done

Each trial has a database, a worker and one strike: kill -9, a cancellation of whoever waits there,
or a connection that is cut before the statement is heard or before its reply comes back. What the
load is made of, and what is struck, tells tests/system/points_list.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from taskd import Client
from taskd.core.job import NewJob
from taskd.store import jobs, migrations
from taskd.store.database import Database, Lane
from taskd.testing.server import with_database
from taskd.workflows import Pipeline, Workflow
from tests.servers import add_dsn, server
from tests.system import chaos, points_app
from tests.system import chaos_app as app
from tests.system.judge import Judge
from tests.system.points_list import (
    AT_START,
    TICKS_AT_START,
    WAYS,
    Hands,
    Trial,
    scene_of,
    small,
    trials,
)
from tests.system.points_strike import Plan

ROOT = Path(__file__).parents[2]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.points_app"),
    *("--queue", "fast:10", "--queue", "mixed:10", "--queue", "things:2", "--threads", "2"),
)
# Short waits: a claim whose reply nobody heard is found six seconds later.
SETTINGS = {"lease_s": 4, "statement_timeout_s": 1, "poll_s": 0.5, "process_slots": 1}
TUNED = {
    "taskd.worker.upkeep.RECONCILE_EVERY_S": 0.2,
    "taskd.worker.upkeep.IDLE_LOOK_EVERY_S": 1.0,
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
SELECT EXISTS (SELECT FROM taskd.worker WHERE pid = $1 AND died_at IS NULL AND beat_at > $2)
"""
TICKED = "SELECT EXISTS (SELECT FROM taskd.jobs WHERE schedule = 'ticking' AND enqueued_at > $1)"
TICKS = """
SELECT count(*) AS jobs, count(DISTINCT tick) AS ticks,
       date_part('epoch', max(tick) - min(tick)) + 1 AS wanted
FROM taskd.jobs WHERE schedule = 'ticking'
HAVING count(*) <> $1 * count(DISTINCT tick)
    OR count(DISTINCT tick) < date_part('epoch', max(tick) - min(tick)) + 1
"""
# What it said when it had done its part is not true of an attempt that could not be completed.
UNSAID = "UPDATE judge.record SET phase = 'raised' WHERE job = $1 AND fence = $2 AND phase = 'done'"
NOT_COMPLETED = (
    "SELECT EXISTS (SELECT FROM judge.claim WHERE job = $1 AND fence = $2 AND closed_as = 'retry')"
)


@dataclass
class Outcome:
    """What came of a trial.

    Attributes:
        recovery_s: from the strike until every job had ended.
        problems: what broke a promise.
    """

    trial: Trial
    recovery_s: float = 0.0
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        word = "BROKEN" if self.problems else "ok"
        told = f"{word:<7}{self.recovery_s:6.2f} s  {self.trial.name}"
        return "\n".join([told, *(f"        {problem}" for problem in self.problems)])


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
        """Strike, wait until all has recovered, judge."""
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
                hands.told += await jobs.enqueue(hands.lane, [made])
            elif isinstance(made, Pipeline):
                hands.told += (await made.start(7, client=hands.client)).jobs.values()
            else:
                hands.told += (await made.start(client=hands.client)).jobs.values()

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
        """Start a worker and wait until it is struck; another one follows if that was its end."""
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
        """Whoever lives on works and beats as before."""
        await self._enqueue(hands, small())
        await _until(over, ENDED_WITHIN_S, "every job that came later has ended")
        now = await hands.sql.fetchval("SELECT clock_timestamp()")
        beats = partial(hands.sql.fetchval, BEATS, self._workers[-1].pid, now)
        await _until(beats, STRUCK_WITHIN_S, "it has beaten again")

    def _may_end(self, worker: asyncio.subprocess.Process) -> bool:
        """Whether it had a reason to end by itself, and did so well."""
        return bool(self._scene.at_stop or self._scene.flags) and worker.returncode == 0

    async def _stop(self, hands: Hands) -> None:
        """Ask the last worker to leave, and look at its exit code."""
        worker = self._workers[-1]
        if worker.returncode is None:
            # A signal that comes before its handlers are there would tell nothing.
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
        """Everything that the judge can know."""
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
            enqueued=hands.told,
            ledgers=booked,
            newest=chaos.newest([each for each in self._load if isinstance(each, NewJob)]),
            sessions=2,
        )
        found += [str(breach).strip() for breach in verdict.breaches]
        found += [
            f"ended: {dict(row)}" for row in await hands.sql.fetch(chaos.UNEXPECTED, HOPELESS)
        ]
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


class Matrix:
    """Plays many trials, some at once, each in a copy of one database."""

    def __init__(self, server: str, logs: Path, at_once: int) -> None:
        self._server, self._logs = server, logs
        self._places = asyncio.Semaphore(at_once)
        self._template = f"taskd_points_{os.getpid()}"
        self.outcomes: list[Outcome] = []

    async def run(self, chosen: list[Trial]) -> None:
        """Play them all, and print a line for each."""
        self._admin = await asyncpg.connect(self._server)
        self._copying = asyncio.Lock()
        await self._admin.execute(f"CREATE DATABASE {self._template} TEMPLATE template0")
        try:
            dsn = with_database(self._server, self._template)
            await migrations.migrate(Database({"dsn": dsn}))
            async with asyncio.TaskGroup() as trials_played:
                for number, trial in enumerate(chosen):
                    trials_played.create_task(self._play(number, trial))
        finally:
            await self._admin.execute(f"DROP DATABASE {self._template}")
            await self._admin.close()

    async def _play(self, number: int, trial: Trial) -> None:
        name, home = f"{self._template}_{number}", self._logs / str(number)
        async with self._places:
            home.mkdir()
            async with self._copying:
                await self._admin.execute(f"CREATE DATABASE {name} TEMPLATE {self._template}")
            try:
                outcome = await play(trial, with_database(self._server, name), home)
            finally:
                async with self._copying:
                    await self._admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
        self.outcomes.append(outcome)
        print(f"{len(self.outcomes):>4} {outcome}", flush=True)

    def __str__(self) -> str:
        slowest = max(self.outcomes, key=lambda each: each.recovery_s)
        strikes = {
            (o.trial.strike.point, o.trial.strike.side, o.trial.strike.way) for o in self.outcomes
        }
        broken = sum(bool(outcome.problems) for outcome in self.outcomes)
        return (
            f"{len({point for point, _, _ in strikes})} points, {len(strikes)} with sides and "
            f"ways, {len(self.outcomes)} trials, {broken} broken; "
            f"slowest recovery {slowest.recovery_s:.2f} s ({slowest.trial.name})"
        )


async def _main(chosen: list[Trial], server: str, at_once: int) -> int:
    logs = Path(tempfile.mkdtemp(prefix="taskd-points-"))
    print(f"{len(chosen)} trials; logs in {logs}", flush=True)
    matrix = Matrix(server, logs, at_once)
    began = time.monotonic()
    await matrix.run(chosen)
    print(f"{matrix}; {time.monotonic() - began:.0f} s in all")
    return 4 if any(outcome.problems for outcome in matrix.outcomes) else 0


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--point", action="append", help="this one alone; repeatable")
    parser.add_argument("--scene", action="append", help="this kind of jobs or scene alone")
    parser.add_argument("--how", choices=WAYS, action="append", help="this way alone; repeatable")
    parser.add_argument("--seed", type=int, default=0, help="in which order")
    parser.add_argument("--most", type=int, help="so many of them, as the seed has it")
    parser.add_argument("--at-once", type=int, default=2, help="trials at the same time")
    add_dsn(parser)
    told = parser.parse_args()
    chosen = [
        trial
        for trial in trials()
        if (not told.point or trial.strike.point in told.point)
        and (not told.scene or trial.scene in told.scene)
        and (not told.how or trial.strike.way in told.how)
    ]
    random.Random(told.seed).shuffle(chosen)
    chosen = chosen[: told.most]
    if not chosen:
        parser.error("there is no such trial")
    with server(told.dsn, durable=False) as place:
        code = asyncio.run(_main(chosen, place, told.at_once))
    sys.exit(code)


if __name__ == "__main__":
    main()
