"""How long the pages of the dashboard take beside a large history: `python -m tests.bench.pages`.

Makes a database on the server of TASKD_TEST_DSN (or an embedded one), fills it, serves the
dashboard in this process and asks for each page over HTTP. Times are those of a browser that gets
the whole page; what is shared by all who look (`overview`) is asked cold, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Callable

import asyncpg
import httpx

from taskd.config import Settings
from taskd.store import migrations
from taskd.store.database import Database
from taskd.testing.server import with_database
from taskd.web.app import make_app
from taskd.web.dashboard import Dashboard
from taskd.web.server import Server
from taskd.web.site import routes
from tests.web import scene

NAME = "taskd_bench_pages"
QUEUED = """
INSERT INTO taskd.job (queue, task, args, state, run_at)
SELECT ($2::text[])[1 + n % 6], ($3::text[])[1 + n % 6], jsonb_build_object('account', n), 'queued',
    now() - interval '5 min' * random()
FROM generate_series(1, $1::int) AS n
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
        "workers": "/workers",
    }


async def measure(dsn: str, times: int) -> None:
    connection = await asyncpg.connect(dsn)
    newest = await connection.fetchval("SELECT max(id) FROM taskd.job")
    await connection.close()
    dashboard = Dashboard(Database({"dsn": dsn}), Settings())
    server = Server(make_app(routes(dashboard)), "127.0.0.1:0")
    running = asyncio.create_task(server.run())
    asked = pages(newest // 2, newest - 5)
    print(f"| {'page':31} |  p50 ms |  p95 ms |      KB |")
    print(f"| {'-' * 31} | ------: | ------: | ------: |")
    async with httpx.AsyncClient(base_url=f"http://{server.address}", timeout=60) as browser:
        for name, path in asked.items():
            await told(browser, name, path, times)
        await told(browser, "overview, read anew", "/", times, before=lambda: cold(dashboard))
    await dashboard.live.close()
    server.stop()
    await running
    await dashboard.close()


def cold(dashboard: Dashboard) -> None:
    dashboard.live.forget()
    dashboard.live._chart.read_at = float("-inf")


async def told(
    browser: httpx.AsyncClient,
    name: str,
    path: str,
    times: int,
    before: Callable[[], None] = lambda: None,
) -> None:
    took, size = [], 0
    for _ in range(times):
        before()
        began = time.perf_counter()
        answer = await browser.get(path)
        took.append((time.perf_counter() - began) * 1000)
        assert answer.status_code == 200, (path, answer.status_code)
        size = len(answer.content)
    took.sort()
    p50, p95 = took[len(took) // 2], took[int(len(took) * 0.95)]
    print(f"| {name:31} | {p50:7.0f} | {p95:7.0f} | {size / 1024:7.0f} |", flush=True)


async def fill(dsn: str, finished: int, queued: int) -> None:
    await migrations.migrate(Database({"dsn": dsn}, statement_timeout_s=60))
    connection = await asyncpg.connect(dsn)
    await scene.history(connection, finished, hours=20)
    await scene.live(connection)
    await connection.execute(QUEUED, queued, list(scene.QUEUES), list(scene.TASKS))
    await connection.execute("VACUUM ANALYZE taskd.job")
    await connection.execute("ANALYZE taskd.job_history")
    await connection.close()


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
    await admin.execute(f"DROP DATABASE IF EXISTS {NAME}")
    await admin.execute(f"CREATE DATABASE {NAME}")
    try:
        dsn = with_database(admin_dsn, NAME)
        await fill(dsn, options.finished, options.queued)
        await measure(dsn, options.times)
    finally:
        await admin.execute(f"DROP DATABASE {NAME} WITH (FORCE)")
        await admin.close()
        if server is not None:
            server.close()


if __name__ == "__main__":
    asyncio.run(main())
