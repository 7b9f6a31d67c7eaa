"""Chaos: workers under a mixed load, killed at random and started again, and the judge afterwards.

    python -m tests.system.chaos --jobs 200000 --minutes 10 --workers 4 --seed 7

The seed decides the load and the order of the kills, so a run can be repeated as far as chaos goes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg

from taskd import Client
from taskd.core.job import NewJob
from taskd.store import jobs
from taskd.store.database import Database, Lane
from taskd.workflows import Workflow, chain, group
from tests.servers import add_dsn, database, server
from tests.system import chaos_app as app
from tests.system.judge import Judge, Verdict

ROOT = Path(__file__).parents[2]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.chaos_app"),
    *("--queue", "fast:50", "--queue", "mixed:20", "--queue", "things:2", "--threads", "4"),
)
BATCH = 1000
MAX_CRASHES = 3
WHY = "chaos"
START_S = 30.0
STOP_S = 45.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run consists of.

    Attributes:
        kills: SIGKILLs, each at a random moment of its share of the jobs, to a random worker.
        restarts: SIGTERMs, as in a deployment; the worker must drain and exit with 0.
        seconds: over how long the shares are spread; 0 enqueues the next one at once.
        pills: jobs that kill their process.
        pauses: SIGSTOPs, each until the worker has been buried and a job of it runs elsewhere.
        lease_s: of the workers; a pause takes a little longer than this.
        idle_within_s: how long after the last blow everything must have ended.
    """

    jobs: int
    kills: int
    seconds: float
    workers: int
    seed: int
    pills: int = 2
    restarts: int = 0
    pauses: int = 0
    lease_s: float = 30.0
    idle_within_s: float = 90.0


@dataclass(slots=True)
class Report:
    """What came of it."""

    plan: Plan
    verdict: Verdict
    took_s: float
    drained_s: float
    exit_codes: list[int]
    pills: list[Any]
    unexpected: list[Any]

    def problems(self) -> list[str]:
        """Everything that breaks a promise; empty when all is well."""
        found = [str(breach) for breach in self.verdict.breaches]
        # Ended by the signal itself: it came before the worker had installed its handlers, and so
        # before it had claimed anything.
        found += [
            f"a worker ended with {code} after SIGTERM"
            for code in self.exit_codes
            if code not in {0, -signal.SIGTERM}
        ]
        return found + ended_wrongly(self.pills, self.unexpected)

    def __str__(self) -> str:
        plan = self.plan
        head = (
            f"seed {plan.seed}: {plan.jobs:,} jobs, {plan.workers} workers, {plan.kills} kills, "
            f"{plan.restarts} restarts, {plan.pauses} pauses and {plan.pills} pills; "
            f"{self.took_s:.1f} s, {self.drained_s:.1f} s after the last blow"
        )
        unlucky = [told(row) for row in self.unexpected]
        return "\n".join([head, str(self.verdict), *unlucky])


def ended_wrongly(pills: list[Any], unexpected: list[Any]) -> list[str]:
    """What is wrong about the rows of PILLS and of UNEXPECTED.

    Three deaths of its workers may meet one job: that is what its crash budget says. Those of
    pills count when the pill was in its first, ordinary run; pills alone must not fail it.
    """
    found = [
        f"pill {row['id']} ran {row['runs']} times and ended {row['state']} ({row['reason']})"
        for row in pills
        if row["runs"] > MAX_CRASHES or (row["state"], row["reason"]) != ("failed", "crashed")
    ]
    return found + [
        told(row)
        for row in unexpected
        if row["reason"] != "crashed"
        or not row["blows"] + row["lapses"]
        or row["blows"] + row["pills"] + row["lapses"] < MAX_CRASHES
    ]


def told(row: Any) -> str:
    """A row of UNEXPECTED in words."""
    return (
        f"{row['task']} {row['id']} ended {row['state']}: {row['reason']} "
        f"(crashed by {row['blows']} kills or pauses, {row['pills']} pills and "
        f"{row['lapses']} leases that ran out)"
    )


class Fleet:
    """Worker processes that are started again when they die, as systemd would."""

    def __init__(
        self, dsn: str, judge: Judge, lease_s: float, logs: Path, **settings: object
    ) -> None:
        self._judge = judge
        self._logs = logs
        self._environ = {
            **os.environ,
            "TASKD_DSN": dsn,
            "TASKD_LEASE_S": str(lease_s),
            "TASKD_LOG_FORMAT": "json",
            "TASKD_JOB_LINES_PER_S": "0",
            **{f"TASKD_{name.upper()}": str(value) for name, value in settings.items()},
        }
        self._slots: dict[int, asyncio.subprocess.Process] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._leaving: set[int] = set()
        self._stopping = False
        self.exit_codes: dict[int, int] = {}

    async def start(self, workers: int) -> None:
        for slot in range(workers):
            await self._spawn(slot)
            self._keepers.append(asyncio.create_task(self._keep(slot)))

    async def _spawn(self, slot: int) -> None:
        with (self._logs / f"worker-{slot}.log").open("ab") as log:
            self._slots[slot] = await asyncio.create_subprocess_exec(
                *COMMAND, cwd=ROOT, env=self._environ, stdout=log, stderr=log
            )
        if self._stopping:
            self._slots[slot].kill()

    async def _keep(self, slot: int) -> None:
        while True:
            process = self._slots[slot]
            code = self.exit_codes[process.pid] = await process.wait()
            if self._stopping:
                return
            drained = code == 0 and process.pid in self._leaving
            if not drained and code != -signal.SIGKILL:
                raise RuntimeError(f"worker {slot} ended by itself with {code}; see {self._logs}")
            await self._spawn(slot)

    def check(self) -> None:
        """Raise what a keeper found: a worker ends by being killed, or well when it was asked."""
        for keeper in self._keepers:
            if keeper.done():
                keeper.result()

    async def kill_one(self, dice: random.Random, connection: asyncpg.Connection) -> None:
        """Kill a worker; it is started again at once."""
        with suppress(ProcessLookupError):  # a pill was faster
            await self._judge.kill(await self._any(dice, connection))

    async def restart_one(self, dice: random.Random, connection: asyncpg.Connection) -> None:
        """Ask a worker to stop; another takes its place when it has drained."""
        self.restart(await self._any(dice, connection))

    def restart(self, pid: int) -> None:
        """Ask this one to stop."""
        self._leaving.add(pid)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)

    async def pause_one(self, dice: random.Random, connection: asyncpg.Connection) -> None:
        """Stop a worker until others have taken its jobs over, then let it go on."""
        pid = await self._any(dice, connection)
        with suppress(ProcessLookupError):
            await self._judge.stop(pid)
            await until(partial(_taken_over, connection, pid), START_S, self, "it was buried")
            await self._judge.resume(pid)

    async def _any(self, dice: random.Random, connection: asyncpg.Connection) -> int:
        """One that works: a process that has only just been started has nothing to lose."""
        await until(partial(_someone_works, connection, self), START_S, self, "somebody works")
        return dice.choice(await _at_work(connection, self))

    def pids(self) -> list[int]:
        """The processes that are there now."""
        return [each.pid for each in self._slots.values()]

    async def stop(self) -> list[int]:
        """SIGTERM for all; their exit codes."""
        self._stopping = True
        for process in self._slots.values():
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            return [await process.wait() for process in self._slots.values()]

    async def close(self) -> None:
        """The end, whatever happened."""
        self._stopping = True
        for process in self._slots.values():
            if process.returncode is None:
                process.kill()
        await asyncio.gather(*self._keepers, return_exceptions=True)


Kinds = dict[Callable[[], NewJob | Workflow], int]


def load(plan: Plan, dice: random.Random) -> list[NewJob | Workflow]:
    """The jobs of a plan, pills early among them: a pill needs its backoffs to run three times."""
    made = drawn(kinds(dice), plan.jobs - plan.pills, dice)
    for _ in range(plan.pills):
        made.insert(dice.randint(0, len(made) // 5), app.pill.job())
    return made


def drawn(weights: Kinds, jobs: int, dice: random.Random) -> list[NewJob | Workflow]:
    """So many of these kinds, by their weights."""
    return [make() for make in dice.choices([*weights], [*weights.values()], k=jobs)]


def kinds(dice: random.Random) -> Kinds:
    """What makes a job of each kind, and how many of a hundred are of it."""
    revision = count(1)
    return {
        app.instant.job: 60,
        lambda: app.waits.job(ms=dice.randint(10, 500)): 6,
        lambda: app.works_in_thread.job(ms=dice.randint(1, 50)): 4,
        lambda: app.flaky.job(fails=dice.randint(1, 2)): 5,
        app.hopeless.job: 2,
        lambda: app.odd.job(kind=dice.choice(list(app.ODDITIES))): 4,
        lambda: app.odd_in_thread.job(kind=dice.choice(list(app.ODDITIES))): 2,
        app.books.job: 12,
        lambda: app.instant.job().after(dice.uniform(0.1, 3.0)): 5,
        # A few are offered late, as producers that overtake each other do.
        lambda: app.syncs.job(
            dice.randint(1, 6), max(1, next(revision) - dice.choice((0, 0, 9)))
        ): 6,
        lambda: app.polls.job(account=dice.randint(1, 6), note=dice.randint(1, 9)): 3,
        lambda: app.refreshes.job(account=dice.randint(1, 6), fails=dice.randint(0, 1)): 3,
        lambda: app.imports.job(tenant=dice.randint(1, 4), fails=dice.choice((0, 0, 1))): 6,
        lambda: app.instant.options(
            deadline_s=dice.uniform(0.0, 3.0), delay_s=dice.choice((0, 1))
        ).job(): 4,
        lambda: app.computes.job(below=dice.randint(1, 50_000)): 3,
        lambda: app.stores.job(app.Thing(fails=dice.choice((0, 0, 0, 1)))): 6,
        lambda: flow(dice): 2,
    }


def flow(dice: random.Random) -> Workflow:
    """A small workflow: a group with its fan-in, a chain, or one of which a part fails."""
    numbers = list(range(dice.randint(2, 6)))
    members = [app.member.job(number) for number in numbers]
    kind = dice.randint(1, 3)
    if kind == 1:
        made = group(members, then=app.gathers.job(numbers=numbers))
    elif kind == 2:
        made = chain(*members, app.gathers.job(numbers=numbers[-1:]))
    else:
        made = group([*members, app.hopeless.job()], then=app.gathers.job(numbers=[]))
        made.add(app.instant.job(), name="behind", after=["gathers"])
    made.on_failure(app.instant.job())
    made.on_completion(app.imports.job(tenant=dice.randint(1, 4), fails=0))
    return made


async def run(plan: Plan, dsn: str, logs: Path) -> Report:
    """Play the plan in a migrated database of its own."""
    began = time.monotonic()
    dice = random.Random(plan.seed)
    judge = Judge(dsn)
    await judge.install()
    connection = await asyncpg.connect(dsn, server_settings={"application_name": "judge chaos"})
    await connection.execute(app.LEDGER)
    fleet = Fleet(dsn, judge, plan.lease_s, logs)
    try:
        await fleet.start(plan.workers)
        everyone = partial(_all_work, connection, fleet)
        await until(everyone, START_S, fleet, "the workers have started")
        waiting = load(plan, dice)
        enqueued = await _play(plan, waiting, dice, connection, dsn, fleet)
        calm = time.monotonic()
        await until(partial(_empty, connection), plan.idle_within_s, fleet, "every job has ended")
        drained_s = time.monotonic() - calm
        # The last pill's worker has just been started again; a signal would find it half awake.
        await until(everyone, START_S, fleet, "the workers are back")
        exit_codes = await fleet.stop()
        await until(partial(_alone, connection), START_S, fleet, "the workers' sessions are gone")
        ledger = [row[0] for row in await connection.fetch("SELECT job FROM judge.ledger")]
        verdict = await judge.check(
            enqueued=enqueued, ledgers={app.books.name: ledger}, newest=newest(waiting)
        )
        return Report(
            plan,
            verdict,
            time.monotonic() - began,
            drained_s,
            exit_codes,
            await connection.fetch(PILLS),
            await connection.fetch(UNEXPECTED, [app.hopeless.name]),
        )
    finally:
        await fleet.close()
        await connection.close()


def newest(made: list[NewJob | Workflow]) -> list[tuple[str, str, int]]:
    """Of each key with versions, the highest one."""
    found: dict[tuple[str, str], int] = {}
    for job in made:
        if isinstance(job, NewJob) and job.unique and job.unique.version is not None:
            key = job.task, job.unique.key
            found[key] = max(found.get(key, 0), job.unique.version)
    return [(*key, version) for key, version in found.items()]


async def _enqueue(lane: Lane, client: Client, part: list[NewJob | Workflow]) -> list[int]:
    """Plain jobs by the thousand, the others as they come; the ids."""
    told: list[int] = []
    singles = [job for job in part if isinstance(job, NewJob)]
    for at in range(0, len(singles), BATCH):
        told += await jobs.enqueue(lane, singles[at : at + BATCH])
    for made in part:
        if isinstance(made, Workflow):
            told += (await made.start(client=client)).jobs.values()
    return told


async def _meddle(client: Client, dice: random.Random, told: list[int]) -> None:
    """What operators do while it runs: cancel, change, retry, pause, resize."""
    for paused in (client.pause(["fast"], 0.3, WHY), client.pause_tasks(["waits"], 0.3, WHY)):
        await paused
    await client.cancel(dice.sample(told, k=len(told) // 50), WHY)
    await client.change(dice.sample(told, k=len(told) // 20), priority=dice.randint(1, 200))
    await client.change(dice.sample(told, k=len(told) // 20), delay_s=dice.choice((0.0, 0.5)))
    await client.retry(dice.sample(told, k=len(told) // 20))
    await client.limit("mixed", dice.choice((5, 20, None)))


async def _play(
    plan: Plan,
    waiting: list[NewJob | Workflow],
    dice: random.Random,
    connection: asyncpg.Connection,
    dsn: str,
    fleet: Fleet,
) -> list[int]:
    """Enqueue a share, strike a worker while it is being worked off, and so on; the ids."""
    loop = asyncio.get_running_loop()
    blows = [fleet.kill_one] * plan.kills + [fleet.restart_one] * plan.restarts
    dice.shuffle(blows)
    # Pauses come last: to bury by the lease, the others must have been steady for as long.
    blows += [fleet.pause_one] * plan.pauses
    share = -(-len(waiting) // (len(blows) + 1))
    enqueued: list[int] = []
    lane, client = Lane(Database({"dsn": dsn}), "chaos"), Client(dsn)
    began = loop.time()
    for number in range(len(blows) + 1):
        part = waiting[number * share : (number + 1) * share]
        records = await connection.fetchval(RECORDS)
        enqueued += await _enqueue(lane, client, part)
        await _meddle(client, dice, sorted(set(enqueued)))
        if number < len(blows):
            # Two records for a job: at this one a part of the share has ended, and much of it runs.
            fatal = records + int(len(part) * dice.uniform(0.2, 1.6))
            reached = partial(_recorded, connection, fatal)
            await until(reached, START_S, fleet, "the share is worked on")
            await blows[number](dice, connection)
        # The load is spread over the run's length; nothing is waited for here.
        await asyncio.sleep(
            max(0.0, began + plan.seconds * (number + 1) / (len(blows) + 1) - loop.time())
        )
    await lane.close()
    await client.close()
    return enqueued


async def until(
    true: Callable[[], Awaitable[bool]], within_s: float, fleet: Fleet, what: str
) -> None:
    """Wait for a condition of the database."""
    deadline = time.monotonic() + within_s
    while not await true():
        fleet.check()
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within_s:.0f} s: {what}")
        await asyncio.sleep(0.01)


async def _taken_over(connection: asyncpg.Connection, pid: int) -> bool:
    """Whether the worker is buried and its jobs have been rescued, or there were none.

    Not all of them: one that it was just completing in a transaction stays locked while it stands.
    """
    return bool(await connection.fetchval(TAKEN_OVER, pid))


async def _at_work(connection: asyncpg.Connection, fleet: Fleet) -> list[int]:
    """The processes of the fleet that have registered and are not buried."""
    rows = await connection.fetch(
        "SELECT DISTINCT pid FROM judge.worker "
        "WHERE died_at IS NULL AND pid = ANY ($1::integer[]) ORDER BY pid",
        fleet.pids(),
    )
    return [row["pid"] for row in rows]


async def _someone_works(connection: asyncpg.Connection, fleet: Fleet) -> bool:
    return bool(await _at_work(connection, fleet))


async def _all_work(connection: asyncpg.Connection, fleet: Fleet) -> bool:
    return len(await _at_work(connection, fleet)) == len(fleet.pids())


async def _recorded(connection: asyncpg.Connection, least: int) -> bool:
    return bool(await connection.fetchval(RECORDS) >= least)


async def _empty(connection: asyncpg.Connection) -> bool:
    return not await connection.fetchval("SELECT EXISTS (SELECT 1 FROM taskd.job)")


async def _alone(connection: asyncpg.Connection) -> bool:
    # The server notices a killed client when it next reads from it or writes to it.
    return not await connection.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
    )


TAKEN_OVER = """
SELECT bool_and(worker.died_at IS NOT NULL AND (
    NOT EXISTS (SELECT 1 FROM taskd.job WHERE worker_id = worker.id AND state = 'running')
    OR EXISTS (SELECT 1 FROM judge.event WHERE old_worker = worker.id AND crashes > old_crashes)
))
FROM judge.worker AS worker WHERE pid = $1
"""

RECORDS = "SELECT coalesce(max(seq), 0) FROM judge.record"

PILLS = """
SELECT job.id, job.state, job.reason, count(run.job) AS runs
FROM taskd.jobs AS job
LEFT JOIN judge.run AS run ON run.job = job.id AND run.started_at > (
    -- An operator who retries one that has failed gives it its runs anew.
    SELECT max(step.at) FROM judge.step
    WHERE step.job = job.id AND step.old_state IN ('-', 'failed', 'cancelled')
)
WHERE job.task = 'pill' AND job.reason <> 'chaos'
GROUP BY job.id, job.state, job.reason
"""

# Every task but $1, which must fail, and pills must end well, however often its neighbours die,
# unless its deadline is over, somebody cancelled it, or a job failed that it needs: the judge looks
# at that. What its workers died of: a blow of ours; a pill that ran there; or a lease that ran out
# on a machine too busy to beat, which counts as a death, too.
UNEXPECTED = """
SELECT job.id, job.task, job.state, job.reason,
       count(*) FILTER (WHERE crash.ours) AS blows,
       count(*) FILTER (WHERE NOT crash.ours AND crash.pill) AS pills,
       count(*) FILTER (WHERE NOT crash.ours AND NOT crash.pill) AS lapses
FROM taskd.jobs AS job
LEFT JOIN (
    SELECT claim.job,
           worker.pid IN (SELECT pid FROM judge.kill UNION SELECT pid FROM judge.pause) AS ours,
           EXISTS (
               SELECT FROM judge.claim AS other JOIN taskd.jobs AS pill ON pill.id = other.job
               WHERE pill.task = 'pill' AND other.worker = worker.id AND other.closed_as = 'rescue'
           ) AS pill
    FROM judge.claim JOIN judge.worker ON worker.id = claim.worker
    WHERE claim.closed_as = 'rescue'
) AS crash ON crash.job = job.id
WHERE job.state <> CASE WHEN job.task = ANY ($1) THEN 'failed' ELSE 'done' END
  AND job.task <> 'pill'
  AND NOT (job.state = 'failed' AND job.reason = 'expired' AND job.deadline < job.finished_at)
  AND NOT (job.state = 'cancelled' AND job.reason IN ('dependency', 'nothing failed', 'chaos'))
GROUP BY job.id, job.task, job.state, job.reason
ORDER BY job.id
"""


async def _main(plan: Plan, place: str, *, keep: bool) -> int:
    async with database(place, "chaos", keep=keep) as dsn:
        logs = Path(tempfile.mkdtemp(prefix="taskd-chaos-"))
        print(f"seed {plan.seed}; {dsn}; logs in {logs}", flush=True)
        report = await run(plan, dsn, logs)
        print(report)
        return 4 if report.problems() else 0


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=200_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--kills", type=int, help="one per 5 s by default")
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--pauses", type=int, default=0, help="needs a short --lease")
    parser.add_argument("--lease", type=float, default=30.0)
    parser.add_argument("--pills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    add_dsn(parser)
    parser.add_argument("--keep", action="store_true", help="keep the database")
    told = parser.parse_args()
    seconds = told.minutes * 60
    plan = Plan(
        jobs=told.jobs,
        kills=told.kills or max(1, int(seconds / 5)),
        seconds=seconds,
        workers=told.workers,
        seed=told.seed,
        pills=told.pills,
        restarts=told.restarts,
        pauses=told.pauses,
        lease_s=told.lease,
        idle_within_s=600.0,
    )
    with server(told.dsn) as place:
        code = asyncio.run(_main(plan, place, keep=told.keep))
    sys.exit(code)


if __name__ == "__main__":
    main()
