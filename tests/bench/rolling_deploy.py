"""A rolling deploy: how long jobs of a new task wait beside workers with older code.

    python -m tests.bench.rolling_deploy [--runs 3] [--dsn postgresql://...]

Real `taskd run` processes serve one queue: 1, 3 or 6 whose app has the task `old`, and one whose
app has `old` and `new`. All are idle when 20 jobs of `new` are enqueued, one at a time. The figure
is the longest time from the commit of a job to the start of its handler, by the database's clock.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import asyncpg

from taskd import Client
from taskd.core.jobs.job import NewJob
from tests.bench.idle import fresh_database, worker
from tests.servers import server

OLD_WORKERS = (1, 3, 6)
JOBS = 20
WITHIN_S = 300.0
OLD = "from taskd import task\n@task(queue='deploy')\nasync def old() -> None: ...\n"
NEW = OLD + "@task(queue='deploy')\nasync def new() -> None: ...\n"
WAITS = """
SELECT max(date_part('epoch', started_at - enqueued_at)) FROM taskd.jobs
WHERE task = 'new' HAVING count(*) FILTER (WHERE state = 'done') = $1
"""


async def longest_wait_s(monitor: asyncpg.Connection, admin_dsn: str, old_workers: int) -> float:
    """Return the longest wait of a job of the new task."""
    with tempfile.TemporaryDirectory(prefix="taskd-deploy-") as home:
        for name, code in (("app_old", OLD), ("app_new", NEW)):
            (Path(home) / f"{name}.py").write_text(code)
        async with AsyncExitStack() as stack:
            dsn = await stack.enter_async_context(fresh_database(monitor, admin_dsn))
            apps = ["app_old"] * old_workers + ["app_new"]
            for number, app in enumerate(apps):
                log = Path(home) / f"log{number}"
                started = worker(dsn, ["deploy"], log, app=app, path=home)
                await stack.enter_async_context(started)
            client = await stack.enter_async_context(Client(dsn))
            jobs = await asyncpg.connect(dsn)
            try:
                for _ in range(JOBS):
                    await client.enqueue(NewJob("new", queue="deploy"))
                    await asyncio.sleep(0.1)
                async with asyncio.timeout(WITHIN_S):
                    while (waited_s := await jobs.fetchval(WAITS, JOBS)) is None:
                        await asyncio.sleep(0.1)
            finally:
                await jobs.close()
            return float(waited_s)


async def measure(admin_dsn: str, runs: int) -> None:
    """Print a row for each number of old workers."""
    monitor = await asyncpg.connect(admin_dsn)
    try:
        print("old workers, and the longest wait of each run in seconds")
        for old_workers in OLD_WORKERS:
            waits = [await longest_wait_s(monitor, admin_dsn, old_workers) for _ in range(runs)]
            print(f"{old_workers:11}  {'  '.join(f'{each:.3f}' for each in waits)}", flush=True)
    finally:
        await monitor.close()


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.rolling_deploy")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--dsn", help="a database of the server to use; it must allow new ones")
    given = parser.parse_args(args)
    with server(given.dsn) as dsn:
        asyncio.run(measure(dsn, given.runs))


if __name__ == "__main__":
    main()
