"""Recovery: how long jobs of a killed worker take until they are done.

    python -m tests.bench.recovery [--runs 3] [--jobs 1 40 1000] [--job-s 3] [--dsn postgresql://...]

One `taskd run` process has all jobs in flight, each of which takes 3 seconds, when it gets SIGKILL;
a second process is idle. The figure is the time from the kill to the end of the last job, by the
database's clock. The bound is twice the duration of a job, and ten seconds.

In the second row of each size, one more job hangs, and one more kills each process that starts it.
The first process dies by the latter, and both are started again a second after their death. The
killer must fail after three runs, and no other job.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import asyncpg

from taskd import Client
from taskd.core.jobs.job import NewJob
from tests.bench.idle import fresh_database
from tests.servers import server

RESTART_S = 1.0
WITHIN_S = 600.0
APP = """
import asyncio, os, signal
from taskd import Context, Task, task

@task(queue="recovery")
async def innocent(seconds: float) -> None:
    await asyncio.sleep(seconds)

@task(queue="recovery")
async def hangs() -> None:
    await asyncio.Event().wait()

@task(queue="recovery")
async def kills(ctx: Context, first_s: float) -> None:
    if ctx.attempt == 1:
        await asyncio.sleep(first_s)  # until all other jobs are in flight
    os.kill(os.getpid(), signal.SIGKILL)
"""
RUNNING = "SELECT count(*) FROM taskd.job WHERE state = 'running'"
DONE = """
SELECT count(*) FILTER (WHERE state = 'done') AS done,
       count(*) FILTER (WHERE state = 'failed') AS failed,
       date_part('epoch', max(finished_at) - $1) AS seconds
FROM taskd.job_history WHERE task = 'innocent'
"""
KILLER = "SELECT attempt FROM taskd.job_history WHERE task = 'kills' AND state = 'failed'"


class Workers:
    """Supervised workers: each is started again after its death, until stopped."""

    def __init__(self, dsn: str, home: Path, concurrency: int) -> None:
        self._dsn, self._home, self._concurrency = dsn, home, concurrency
        self._supervisors: list[asyncio.Task[None]] = []
        self.running: list[Process] = []

    def add(self, *, restarts: bool) -> None:
        """Start a worker."""
        self._supervisors.append(asyncio.create_task(self._supervise(restarts)))

    async def _supervise(self, restarts: bool) -> None:
        while True:
            with (self._home / "log").open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "taskd", "run", "--app", "recovery_app"),
                    *("--concurrency", str(self._concurrency)),
                    env=os.environ | {"TASKD_DSN": self._dsn, "PYTHONPATH": str(self._home)},
                    stdout=log,
                    stderr=log,
                )
            self.running.append(process)
            await process.wait()
            self.running.remove(process)
            if not restarts:
                return
            await asyncio.sleep(RESTART_S)

    async def stop(self) -> None:
        """Kill all workers."""
        for each in self._supervisors:
            each.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        for process in self.running:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def until(sql: asyncpg.Connection, query: str, wanted: int) -> None:
    """Wait until a query returns a number."""
    async with asyncio.timeout(WITHIN_S):
        while await sql.fetchval(query) != wanted:
            await asyncio.sleep(0.02)


async def recovery_s(
    monitor: asyncpg.Connection, admin_dsn: str, count: int, job_s: float, *, beside: bool
) -> tuple[float, int]:
    """Return the seconds until the last job was done, and the runs of the killer.

    Raises:
        RuntimeError: an innocent job failed.
    """
    async with fresh_database(monitor, admin_dsn) as dsn:
        with tempfile.TemporaryDirectory(prefix="taskd-recovery-") as home:
            (Path(home) / "recovery_app.py").write_text(APP)
            workers = Workers(dsn, Path(home), count + 10)
            sql = await asyncpg.connect(dsn)
            try:
                return await _measured(workers, sql, dsn, count, job_s, beside=beside)
            finally:
                await workers.stop()
                await sql.close()


async def _measured(
    workers: Workers, sql: asyncpg.Connection, dsn: str, count: int, job_s: float, *, beside: bool
) -> tuple[float, int]:
    jobs = [NewJob("innocent", f'{{"seconds": {job_s}}}', queue="recovery") for _ in range(count)]
    if beside:
        first_s = min(2.0, 0.7 * job_s)
        jobs.insert(count // 2, NewJob("kills", f'{{"first_s": {first_s}}}', queue="recovery"))
        jobs.insert(count // 4, NewJob("hangs", queue="recovery"))
    async with Client(dsn) as client:
        await client.enqueue_many(jobs)
    workers.add(restarts=beside)
    await until(sql, RUNNING, len(jobs))
    [first] = workers.running
    workers.add(restarts=beside)
    if not beside:
        await until(sql, "SELECT count(*) FROM taskd.worker WHERE died_at IS NULL", 2)
        first.send_signal(signal.SIGKILL)
    await first.wait()
    killed_at = await sql.fetchval("SELECT clock_timestamp()")
    async with asyncio.timeout(WITHIN_S):
        while True:
            row = await sql.fetchrow(DONE, killed_at)
            runs = await sql.fetchval(KILLER) if beside else 0
            if row["failed"]:
                raise RuntimeError(f"{row['failed']} innocent jobs failed")
            if row["done"] == count and runs is not None:
                return row["seconds"], runs
            await asyncio.sleep(0.1)


async def measure(admin_dsn: str, runs: int, sizes: Sequence[int], job_s: float) -> None:
    """Print two rows for each number of jobs."""
    monitor = await asyncpg.connect(admin_dsn)
    try:
        print(f"jobs of {job_s:g} s, and the seconds of each run; bound {2 * job_s + 10:g} s")
        for count in sizes:
            for beside in (False, True):
                found = [
                    await recovery_s(monitor, admin_dsn, count, job_s, beside=beside)
                    for _ in range(runs)
                ]
                text = "  ".join(f"{seconds:5.1f}" for seconds, _ in found)
                if beside:
                    text += f"  killer: {max(runs for _, runs in found)} runs"
                print(f"{count:5}  {'beside' if beside else 'alone':6}  {text}", flush=True)
    finally:
        await monitor.close()


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.recovery")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--jobs", type=int, nargs="+", default=[1, 40, 1000])
    parser.add_argument("--job-s", type=float, default=3.0)
    parser.add_argument("--dsn", help="a database of the server to use; it must allow new ones")
    given = parser.parse_args(args)
    with server(given.dsn) as dsn:
        asyncio.run(measure(dsn, given.runs, given.jobs, given.job_s))


if __name__ == "__main__":
    main()
