"""The soak: a steady mixed load for an hour, in which nothing may grow, slow down or get lost.

    python -m tests.system.soak --minutes 60 --rate 2000 --out soak.jsonl

A private PostgreSQL with default fsync and autovacuum, workers with default settings that keep
their history, and one producer process. soak_bounds.py has the bounds of the figures. Exits with 4
when a bound is exceeded.

Jobs are counted by sums over the live table and the history, and not by the triggers of judge.py,
which would write several rows for each change of millions of jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import asyncpg

from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from tests.system.faults.cluster import private
from tests.system.soak_bounds import judge, table
from tests.system.soak_figures import Sample, Sampler

ROOT = Path(__file__).parents[2]
WORKER = (sys.executable, "-m", "taskd", "run", "--app", "tests.system.soak_app")
PRODUCER = (sys.executable, "-m", "tests.system.soak_producer")
# As a server comes from its package, and not as tests have theirs.
SERVER = {
    "fsync": "on",
    "autovacuum": "on",
    "shared_buffers": "128MB",
    "max_wal_size": "1GB",
    "min_wal_size": "80MB",
    "log_min_messages": "warning",
}
SAMPLES, SAMPLE_EVERY_S_LEAST = 360, 1.0
START_S, DRAIN_S, STOP_S = 60.0, 120.0, 60.0

# How each kind must have ended, and after how many attempts. Fences grow with each claim, attempts
# may be given back: `given_back` are claims whose job was not started.
ACCOUNT = """
SELECT count(*) AS jobs,
       sum(attempt)::bigint AS attempts,
       sum(fence - attempt)::bigint AS given_back,
       count(*) FILTER (WHERE state = 'done') AS done,
       count(*) FILTER (WHERE state = 'failed') AS failed,
       count(*) FILTER (WHERE state = 'cancelled') AS cancelled,
       count(*) FILTER (WHERE
           state <> CASE task WHEN 'soak.hopeless' THEN 'failed' ELSE 'done' END::taskd.job_state
           OR attempt <> CASE task WHEN 'soak.hopeless' THEN 2
                                   WHEN 'soak.flaky' THEN (args ->> 'fails')::integer + 1
                                   ELSE 1 END
           OR crashes > 0 OR interrupts > 0
       ) AS unexplained
FROM taskd.job_history
"""


@dataclass(slots=True)
class Soak:
    """A run and its result.

    Attributes:
        minutes: how long jobs are enqueued.
        rate: jobs per second.
        exit_codes: of the workers, which were requested to stop when every job had ended.
    """

    minutes: float
    rate: float
    workers: int = 2
    seed: int = 0
    home: Path | None = None
    out: TextIO | None = None
    samples: list[Sample] = field(default_factory=list)
    account: dict[str, int] = field(default_factory=dict)
    exit_codes: list[int] = field(default_factory=list)
    drained_s: float = 0.0

    async def run(self) -> None:
        """Let it run, drain it, and count.

        Raises:
            RuntimeError: a process ended by itself.
            TimeoutError: the workers did not come up.
        """
        async with private(SERVER, home=self.home) as cluster:
            await migrations.migrate(Database({"dsn": cluster.dsn()}))
            sql = await asyncpg.connect(
                cluster.dsn(), server_settings={"application_name": "soak sampler"}
            )
            try:
                async with self._processes(cluster.home, cluster.dsn()) as fleet:
                    await self._ready(sql)
                    await self._load(sql, fleet, cluster.home, cluster.dsn(), cluster.pid)
                await self._count(sql)
            finally:
                await sql.close()

    @asynccontextmanager
    async def _processes(
        self, home: Path, dsn: str
    ) -> AsyncIterator[dict[str, asyncio.subprocess.Process]]:
        """The workers, by name; all workers in the dict are killed at the end."""
        fleet: dict[str, asyncio.subprocess.Process] = {}
        try:
            for number in range(self.workers):
                name = f"worker {number + 1}"
                fleet[name] = await self._start(home, dsn, name, *WORKER)
            yield fleet
        finally:
            for each in fleet.values():
                if each.returncode is None:
                    each.kill()
                await each.wait()

    async def _start(
        self, home: Path, dsn: str, name: str, *command: str
    ) -> asyncio.subprocess.Process:
        environ = os.environ | {"TASKD_DSN": dsn, "SOAK_DIR": str(home)}
        with (home / f"{name.replace(' ', '-')}.log").open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=environ, stdout=log, stderr=log
            )

    async def _ready(self, sql: asyncpg.Connection) -> None:
        async with asyncio.timeout(START_S):
            while await sql.fetchval("SELECT count(*) FROM taskd.worker") < self.workers:
                await asyncio.sleep(0.05)

    async def _load(
        self,
        sql: asyncpg.Connection,
        fleet: dict[str, asyncio.subprocess.Process],
        home: Path,
        dsn: str,
        postmaster: int,
    ) -> None:
        """Produce and measure, then wait until all jobs have ended, and stop the workers."""
        seconds = self.minutes * 60
        workers = list(fleet.values())
        producer = fleet["producer"] = await self._start(
            home, dsn, "producer", *PRODUCER,
            *("--rate", str(self.rate), "--seconds", str(seconds), "--seed", str(self.seed)),
        )  # fmt: skip
        sampler = Sampler(sql, home, {name: each.pid for name, each in fleet.items()}, postmaster)
        every_s = max(seconds / SAMPLES, SAMPLE_EVERY_S_LEAST)
        due = time.monotonic()
        while producer.returncode is None:
            self._take(await sampler.look())
            self._check(fleet, home)
            due += every_s
            await _ended(producer, due - time.monotonic())
        self._check(fleet, home)
        began = time.monotonic()
        while (live := await sql.fetchval("SELECT count(*) FROM taskd.job")) and (
            time.monotonic() < began + DRAIN_S
        ):
            await asyncio.sleep(0.1)
        self.drained_s = time.monotonic() - began
        for each in workers:
            each.send_signal(signal.SIGTERM)
        async with asyncio.timeout(STOP_S):
            self.exit_codes = [await each.wait() for each in workers]
        last = await sampler.look()
        self.account |= {"created": last.created, "left": live, "runs": sampler.runs.total()}

    def _take(self, sample: Sample) -> None:
        # The processes come up one after the other: a figure is there when all of them are.
        if len(sample.processes) == self.workers + 1:
            self.samples.append(sample)
        if self.out:
            self.out.write(sample.as_line() + "\n")
            self.out.flush()

    @staticmethod
    def _check(fleet: dict[str, asyncio.subprocess.Process], home: Path) -> None:
        for name, each in fleet.items():
            if each.returncode not in {None, 0} or (each.returncode == 0 and name != "producer"):
                said = (home / f"{name.replace(' ', '-')}.log").read_text()[-3000:]
                raise RuntimeError(f"{name} ended by itself with {each.returncode}:\n{said}")

    async def _count(self, sql: asyncpg.Connection) -> None:
        [row] = await sql.fetch(ACCOUNT, timeout=600)
        self.account |= {name: value or 0 for name, value in row.items()}

    def problems(self) -> list[str]:
        """Every bound that is broken, and every job that is not explained."""
        found = lost(self.account)
        found += [
            f"{line.what}: {line.last:,.2f} in the end, {line.first:,.2f} at first ({line.bound})"
            for line in judge(self.samples, self.rate)
            if line.holds is False
        ]
        found += [f"a worker ended with {code}" for code in self.exit_codes if code]
        return found

    def __str__(self) -> str:
        counts = ", ".join(f"{name} {number:,}" for name, number in self.account.items())
        return (
            f"{self.minutes:g} minutes at {self.rate:,.0f} jobs/s, {self.workers} workers, "
            f"seed {self.seed}\n{table(judge(self.samples, self.rate))}\n"
            f"jobs: {counts}; drained {self.drained_s:.1f} s after the last was enqueued"
        )


def lost(account: dict[str, int]) -> list[str]:
    """What is wrong with the sums: jobs that are not there, or stuck, or ran too often."""
    found = []
    ended = account["done"] + account["failed"] + account["cancelled"]
    if account["left"]:
        found.append(f"{account['left']:,} jobs are stuck")
    if ended + account["left"] != account["created"]:
        found.append(f"{account['created']:,} jobs were made, and {ended:,} have ended")
    if account["unexplained"]:
        found.append(f"{account['unexplained']:,} jobs ended otherwise than their kind does")
    if account["runs"] != account["attempts"]:
        found.append(f"{account['runs']:,} attempts ran, and {account['attempts']:,} are written")
    return found


async def _ended(process: asyncio.subprocess.Process, within_s: float) -> None:
    """Wait for its end, but not longer."""
    try:
        async with asyncio.timeout(max(0.0, within_s)):
            await process.wait()
    except TimeoutError:
        return


def main() -> None:
    """The long form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=2000.0, help="jobs per second")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, help="a file for the samples, one line of JSON each")
    parser.add_argument(
        "--home", type=Path, help="an empty directory for the server and the logs, which stays"
    )
    options = parser.parse_args()
    soak = Soak(options.minutes, options.rate, options.workers, options.seed, options.home)
    if options.out:
        soak.out = options.out.open("w")
    try:
        asyncio.run(soak.run())
    finally:
        if soak.out:
            soak.out.close()
    problems = soak.problems()
    print(soak, *problems, sep="\n")
    sys.exit(4 if problems else 0)


if __name__ == "__main__":
    main()
