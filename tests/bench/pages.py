"""How long the pages of the dashboard take beside a large history: `python -m tests.bench.pages`.

Makes a database on the server of TASKD_TEST_DSN (or an embedded one), fills it, serves the
dashboard in this process and requests each page over HTTP, and a scrape of /metrics. Times are
those of a browser that gets the whole page; the part that all viewers share (`overview`) is
requested cold, too. Besides them it prints the CPU of the sessions of this database, where their
server runs on this machine, and the CPU of this process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx

from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.reading import metrics
from taskd.store.schema import migrations
from taskd.testing.server import with_database
from taskd.web.app import make_app
from taskd.web.metrics.database_metrics import Reading
from taskd.web.metrics.exposition import write
from taskd.web.pages.dashboard import Dashboard
from taskd.web.routes import routes
from taskd.web.server import Server
from tests.web import busy_database

NAME = "taskd_bench_pages"
CHUNK_JOBS = 100_000
HOURS = 20
QUEUED = """
INSERT INTO taskd.job (queue, task, args, state, run_at)
SELECT ($2::text[])[1 + n % 6], ($3::text[])[1 + n % 6], jsonb_build_object('account', n), 'queued',
    now() - interval '5 min' * random()
FROM generate_series(1, $1::int) AS n
"""
# Jobs of yesterday expire on a day whose partition a worker would have made then.
PARTITION = """
DO $$
DECLARE
    day date := (now() AT TIME ZONE 'UTC')::date + 6;
BEGIN
    EXECUTE format('CREATE TABLE IF NOT EXISTS taskd.job_history_%s PARTITION OF taskd.job_history'
                   ' FOR VALUES FROM (%L) TO (%L)', to_char(day, 'YYYYMMDD'),
                   day || ' 00:00:00+00', day + 1 || ' 00:00:00+00');
END $$
"""
BACKENDS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND backend_type = 'client backend'
"""


def pages(middle: int, waiting: int) -> dict[str, str]:
    return {
        "overview": "/",
        "a queue": "/queues/email",
        "jobs, the newest": "/jobs",
        "jobs, a page in the middle": f"/jobs?before={middle}",
        "jobs, failed": "/jobs?state=failed&since=24h",
        "jobs, by queue and state": "/jobs?queue=email&state=done",
        "jobs, by error": "/jobs?state=failed&error=did+not+answer",
        "jobs, by an error that none has": "/jobs?error=no+such+thing",
        "jobs, by arguments": "/jobs?args=user77",
        "a finished job": f"/jobs/{middle}",
        "a waiting job": f"/jobs/{waiting}",
        "workflows": "/workflows",
        "schedules": "/schedules",
        "limits": "/limits",
        "workers": "/workers",
    }


class Measured(NamedTuple):
    """A line of the table; times in milliseconds, each time of asking one."""

    name: str
    took: list[float]
    server: float | None
    own: float
    kib: float

    def line(self) -> str:
        """It as a row."""
        took = sorted(self.took)
        p50, p95 = took[len(took) // 2], took[int(len(took) * 0.95)]
        server = "?" if self.server is None else f"{self.server:.1f}"
        return (
            f"| {self.name:31} | {p50:7.0f} | {p95:7.0f} | {server:>10} | {self.own:7.1f} | "
            f"{self.kib:7.0f} |"
        )


HEAD = (
    f"| {'Page':31} |  p50 ms |  p95 ms | server CPU | own CPU |     KiB |\n"
    f"| {'-' * 31} | ------: | ------: | ---------: | ------: | ------: |"
)


class Bench:
    """Requests pages repeatedly, and counts the CPU of the processes that answer."""

    def __init__(self, sql: asyncpg.Connection[Any], times: int) -> None:
        self._sql, self._times = sql, times
        self.found: list[Measured] = []

    async def ask(self, name: str, once: Callable[[], Awaitable[int]]) -> None:
        """Request it `times` times; `once` returns how many bytes came."""
        # Not the first time: connections are made then, and statements are planned.
        size = await once()
        before, own = await self._server_ms(), time.process_time()
        took = []
        for _ in range(self._times):
            began = time.perf_counter()
            size = await once()
            took.append((time.perf_counter() - began) * 1000)
        own = (time.process_time() - own) * 1000 / self._times
        after = await self._server_ms()
        both = before is not None and after is not None
        server = (after - before) / self._times if both else None  # type: ignore[operator]
        self.found.append(Measured(name, took, server, own, size / 1024))
        print(f"measured: {name}", flush=True)

    async def _server_ms(self) -> float | None:
        total = 0
        for row in await self._sql.fetch(BACKENDS):
            try:
                total += int(Path(f"/proc/{row[0]}/schedstat").read_text().split()[0])
            except OSError:
                # It has ended, or runs elsewhere.
                return None
        return total / 1e6


async def measure(dsn: str, times: int) -> list[Measured]:
    connection = await asyncpg.connect(dsn)
    newest = await connection.fetchval("SELECT max(id) FROM taskd.job")
    bench = Bench(connection, times)
    dashboard = Dashboard(Database({"dsn": dsn}), Settings())
    server = Server(make_app(routes(dashboard)), "127.0.0.1:0")
    running = asyncio.create_task(server.run())
    lane = Lane(Database({"dsn": dsn}), "bench")
    async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=60) as browser:

        async def page(path: str) -> int:
            answer = await browser.get(path)
            assert answer.status_code == 200, (path, answer.status_code)
            return len(answer.content)

        async def cold() -> int:
            dashboard.live.forget()
            dashboard.live._chart.read_at = float("-inf")
            return await page("/")

        async def scrape() -> int:
            return len(write([], Reading(True, await metrics.read(lane), 0.0)))

        for name, path in pages(newest // 2, newest - 5).items():
            await bench.ask(name, partial(page, path))
        await bench.ask("overview, read anew", cold)
        await bench.ask("/metrics, read anew", scrape)
    await lane.close()
    await dashboard.live.close()
    server.stop()
    await running
    await dashboard.close()
    await connection.close()
    return bench.found


async def fill(dsn: str, finished: int, queued: int) -> None:
    began = time.perf_counter()
    await migrations.migrate(Database({"dsn": dsn}, statement_timeout_s=60))
    connection = await asyncpg.connect(dsn, server_settings={"synchronous_commit": "off"})
    await connection.execute(PARTITION)
    for first in range(1, finished + 1, CHUNK_JOBS):
        last = min(first + CHUNK_JOBS - 1, finished)
        await busy_database.history(connection, finished, HOURS, first, last)
        print(f"{last:,} finished jobs, {time.perf_counter() - began:.0f} s", flush=True)
    await busy_database.live(connection)
    await connection.execute(QUEUED, queued, list(busy_database.QUEUES), list(busy_database.TASKS))
    await connection.execute("VACUUM ANALYZE taskd.job")
    await connection.execute("VACUUM ANALYZE taskd.job_history")
    await connection.close()
    print(f"{queued:,} queued jobs, {time.perf_counter() - began:.0f} s", flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--finished", type=int, default=1_000_000)
    parser.add_argument("--queued", type=int, default=100_000)
    parser.add_argument("--times", type=int, default=40, help="each page")
    options = parser.parse_args()
    server = None
    admin_dsn = os.environ.get("TASKD_TEST_DSN")
    if admin_dsn is None:
        from taskd import embedded

        server = embedded.start(durable=False)
        admin_dsn = server.dsn("postgres")
    admin = await asyncpg.connect(admin_dsn)
    await admin.execute(f"DROP DATABASE IF EXISTS {NAME} WITH (FORCE)")
    await admin.execute(f"CREATE DATABASE {NAME}")
    try:
        dsn = with_database(admin_dsn, NAME)
        await fill(dsn, options.finished, options.queued)
        found = await measure(dsn, options.times)
        print(f"\n{options.finished:,} finished and {options.queued:,} queued jobs:\n\n{HEAD}")
        print("\n".join(each.line() for each in found))
    finally:
        await admin.execute(f"DROP DATABASE {NAME} WITH (FORCE)")
        await admin.close()
        if server is not None:
            server.close()


if __name__ == "__main__":
    asyncio.run(main())
