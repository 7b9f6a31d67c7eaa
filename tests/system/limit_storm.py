"""A storm of limited jobs: workers die, operators change limits, and the limits hold.

python -m tests.system.limit_storm --seconds 120 --seed 7 --dsn DSN-OF-A-MIGRATED-DATABASE

Handlers record when they begin and end, by one clock of the machine; the attempts of a killed
worker have ended with it. Afterwards no job may stay blocked.
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg

from taskd.core.jobs.job_changes import Change
from taskd.store import queues
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, jobs, limits
from tests.system import limit_storm_app as app

ROOT = Path(__file__).parents[2]
COMMAND = (
    *(sys.executable, "-m", "taskd", "run", "--app", "tests.system.limit_storm_app"),
    *("--queue", "free:20", "--queue", "bound:20"),
)
HOWS = ("done",) * 6 + ("fail", "raise", "retry", "later", "snooze")
QUEUE_RUNS = 6  # of `bound`, all workers together
WAITING_MOST = 300

LEFT = """
SELECT limit_name, limit_key, state::text, gate::text, count(*), min(id) AS one_of_them
FROM taskd.job GROUP BY 1, 2, 3, 4 ORDER BY 1, 2, 3, 4
"""


class Run(NamedTuple):
    """One attempt: what limits it, and from when to when it ran."""

    limit: str
    key: str
    queue: str
    begin: float
    end: float


@dataclass(slots=True)
class Storm:
    """The observations of a run.

    Attributes:
        seconds: how long workers are killed and operators change limits.
        died: when each process was killed, by pid.
    """

    dsn: str
    home: Path
    seed: int
    seconds: float
    workers: int = 3
    died: dict[int, float] = field(default_factory=dict)
    did: Counter[str] = field(default_factory=Counter)
    enqueued: int = 0
    drained_s: float = 0.0

    async def run(self) -> list[Run]:
        """Let it blow, wait until it is over, and read what the handlers wrote down.

        Raises:
            AssertionError: jobs are left when it has been calm for long.
        """
        dice = random.Random(self.seed)
        sql = await asyncpg.connect(self.dsn)
        lane = Lane(Database({"dsn": self.dsn}), "storm")
        fleet = [await self._start() for _ in range(self.workers)]
        try:
            await self._published(sql)
            await limits.limit_queue(lane, "bound", max_running=QUEUE_RUNS)
            ends_at = time.monotonic() + self.seconds
            kill_at = time.monotonic() + 1
            while time.monotonic() < ends_at:
                await self._meddle(dice, sql, lane)
                if time.monotonic() > kill_at:
                    await self._kill(fleet, dice)
                    kill_at = time.monotonic() + dice.uniform(0.5, 2.5)
                await asyncio.sleep(dice.uniform(0.01, 0.06))
            await queues.resume(lane, ["free", "bound"])
            await limits.clear(lane, list(app.LIMITS))
            await self._drain(sql)
        finally:
            for each in fleet:
                each.kill()
                await each.wait()
            await lane.close()
            await sql.close()
        return self._read()

    async def _start(self) -> asyncio.subprocess.Process:
        environ = os.environ | {
            "TASKD_DSN": self.dsn, "PYTHONPATH": str(ROOT), "STORM_DIR": str(self.home),
        }  # fmt: skip
        log = (self.home / "workers.txt").open("ab")
        try:
            return await asyncio.create_subprocess_exec(
                *COMMAND, cwd=ROOT, env=environ, stdout=log, stderr=log
            )
        finally:
            log.close()

    async def _published(self, sql: Any) -> None:
        async with asyncio.timeout(30):
            while await sql.fetchval("SELECT count(*) FROM taskd.job_limit") < len(app.LIMITS):
                await asyncio.sleep(0.05)

    async def _kill(self, fleet: list[asyncio.subprocess.Process], dice: random.Random) -> None:
        victim = dice.randrange(len(fleet))
        self.died[fleet[victim].pid] = time.monotonic()
        fleet[victim].kill()
        await fleet[victim].wait()
        fleet[victim] = await self._start()
        self.did["kill"] += 1

    async def _meddle(self, dice: random.Random, sql: Any, lane: Lane) -> None:
        """Enqueue some, or do what an operator does."""
        acts = ("enqueue", "cancel", "change", "later", "limit", "clear", "pause", "resume")
        act = dice.choices(acts, weights=(24, 4, 4, 3, 4, 3, 1, 2))[0]
        self.did[act] += 1
        rows = await sql.fetch("SELECT id FROM taskd.job ORDER BY id")
        some = sorted(dice.sample([row[0] for row in rows], min(len(rows), dice.randint(1, 5))))
        match act:
            case "enqueue" if len(rows) < WAITING_MOST:
                made = [self._job(dice) for _ in range(dice.randint(1, 30))]
                self.enqueued += len(await jobs.enqueue(lane, made))
            case "cancel":
                await jobs.cancel(lane, some, "storm")
            case "change":
                key = json.dumps({"key": f"k{dice.randrange(4)}"})
                await changes.change(lane, some, Change(update_args={}), key)
            case "later":
                await changes.change(lane, some, Change(delay_s=dice.uniform(0, 0.3), priority=5))
            case "limit":
                # Never more than the code declares: the records of the handlers are checked against
                # that.
                await limits.set_limit(lane, "keyed", dice.randint(1, 2), None, None, None, [])
                await limits.set_limit(lane, "keyed", None, dice.randint(2, 5), None, None, [])
                await limits.set_limit(lane, "both", 1, None, None, None, [])
            case "clear":
                await limits.clear(lane, ["keyed", "both"])
            case "pause":
                await queues.pause(lane, [dice.choice(["free", "bound"])], 0.5, "storm")
            case "resume":
                await queues.resume(lane, ["free", "bound"])

    def _job(self, dice: random.Random) -> Any:
        made = dice.choice(app.TASKS).job(
            key=f"k{dice.randrange(4)}", ms=dice.randint(0, 15), how=dice.choice(HOWS)
        )
        return made.after(dice.uniform(0, 0.5)) if dice.random() < 0.2 else made

    async def _drain(self, sql: Any, within_s: float = 60.0) -> None:
        calm = time.monotonic()
        while await sql.fetchval("SELECT EXISTS (SELECT FROM taskd.job)"):
            if time.monotonic() > calm + within_s:
                left = "\n".join(map(str, await sql.fetch(LEFT)))
                raise AssertionError(f"seed {self.seed}: left after {within_s:.0f} s:\n{left}")
            await asyncio.sleep(0.05)
        self.drained_s = time.monotonic() - calm

    def _read(self) -> list[Run]:
        found = []
        for path in self.home.glob("*.log"):
            begun: dict[str, float] = {}
            for line in path.read_text().splitlines():
                at, what, name = line.split(" ", 2)
                if what == "begin":
                    begun[name] = float(at)
                else:
                    found.append(_run(name, begun.pop(name), float(at)))
            died = self.died.get(int(path.stem), time.monotonic())
            found += [_run(name, at, died) for name, at in begun.items()]
        return found


def _run(name: str, begin: float, end: float) -> Run:
    limit, key, queue, _, _ = name.split(" ")
    return Run(limit, key, queue, begin, end)


def together(runs: Iterable[Run]) -> int:
    """How many ran at the same time, at most."""
    ends = [(run.end, -1) for run in runs]
    found = most = 0
    for _, step in sorted(ends + [(run.begin, 1) for run in runs]):
        found += step
        most = max(most, found)
    return most


def beyond(runs: Iterable[Run], rate: float) -> float:
    """How many began within any time beyond what the rate gives in it, at most."""
    begun = sorted(run.begin for run in runs)
    return max(
        (
            bisect.bisect_right(begun, last) - first - rate * (last - begun[first])
            for first in range(len(begun))
            for last in begun[first : first + 200]
        ),
        default=0.0,
    )


def problems(runs: list[Run]) -> list[str]:
    """Return which limits were exceeded, and by how much; empty when all have held."""
    found = []
    for name, limit in app.LIMITS.items():
        mine = [run for run in runs if run.limit == name]
        of_key = {key: [run for run in mine if run.key == key] for key in {r.key for r in mine}}
        concurrency, in_all, rate, burst = limit.bounds
        if in_all is not None and together(mine) > in_all:
            found.append(f"{name}: {together(mine)} ran in all, and {in_all} may")
        for key, some in of_key.items():
            if concurrency is not None and together(some) > concurrency:
                found.append(f"{name} {key}: {together(some)} ran, and {concurrency} may")
            # A burst that was saved, and one that was admitted and had not begun.
            if rate is not None and beyond(some, rate) > 2 * (burst or 0) + 0.5:
                found.append(
                    f"{name} {key}: {beyond(some, rate):.1f} more began than the rate gives"
                )
    bound = together([run for run in runs if run.queue == "bound"])
    if bound > QUEUE_RUNS:
        found.append(f"queue bound: {bound} ran, and {QUEUE_RUNS} may")
    return found


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--dsn", required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="taskd-storm-") as home:
        storm = Storm(options.dsn, Path(home), options.seed, options.seconds, options.workers)
        runs = asyncio.run(storm.run())
    print(report(storm, runs))
    sys.exit(4 if problems(runs) else 0)


def report(storm: Storm, runs: list[Run]) -> str:
    """Return the figures of a storm, and its problems, as text."""
    most = {name: together([run for run in runs if run.limit == name]) for name in app.LIMITS}
    return (
        f"seed {storm.seed}: {storm.enqueued:,} jobs, {len(runs):,} attempts, "
        f"{dict(storm.did)}; at most together {most}; drained in {storm.drained_s:.1f} s\n"
        + "\n".join(problems(runs))
    )


if __name__ == "__main__":
    main()
