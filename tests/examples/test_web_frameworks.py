"""The examples for web frameworks: served, and their jobs run by a real worker."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest
from psycopg.conninfo import conninfo_to_dict

EXAMPLES = Path(__file__).parent
DJANGO = EXAMPLES / "django_project"
WITHIN_S = 45.0


@pytest.fixture
def environ(dsn: str) -> dict[str, str]:
    """The variable with which each example finds its database, and no others."""
    parts = conninfo_to_dict(dsn)
    return os.environ | {
        "PGHOST": str(parts["host"]),
        "PGPORT": str(parts["port"]),
        "PGUSER": str(parts["user"]),
        "PGDATABASE": str(parts["dbname"]),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def run(*args: str, cwd: Path, environ: dict[str, str]) -> str:
    ended = subprocess.run(
        [sys.executable, *args],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# FastAPI.


@pytest.fixture
def shop(dsn: str, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of the FastAPI example, imported as its server would."""
    # SQLAlchemy passes every option to asyncpg, which does not accept this one.
    url = re.sub(r"&?sslmode=\w+", "", dsn).replace("postgresql://", "postgresql+asyncpg://")
    environ["DATABASE_URL"] = url
    monkeypatch.setenv("DATABASE_URL", url)
    monkeypatch.syspath_prepend(EXAMPLES)
    import fastapi_app

    yield fastapi_app
    del sys.modules["fastapi_app"]
    from taskd.core.tasks import registry

    for name in ("confirm", "remind"):
        registry.DEFAULT._tasks.pop(name)


async def test_the_fastapi_example_takes_orders_and_its_worker_confirms_them(
    shop: Any, environ: dict[str, str], sql: Any
) -> None:
    async with shop.app.router.lifespan_context(shop.app):
        async with shop.engine.begin() as connection:
            await connection.run_sync(shop.Base.metadata.create_all)
        await sql.execute("INSERT INTO stock VALUES ('lamp', 1)")
        transport = httpx.ASGITransport(shop.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as browser:
            placed = await browser.post("/orders", json={"item": "lamp"})
            assert (placed.status_code, placed.json()) == (201, {"order": 1})
            refused = await browser.post("/orders", json={"item": "lamp"})
            assert refused.status_code == 409
            reminded = await browser.post("/orders/1/reminder")
            assert reminded.status_code == 202
    jobs = await sql.fetch("SELECT task, args ->> 'order_id' FROM taskd.job ORDER BY id")
    assert [tuple(job) for job in jobs] == [("confirm", "1"), ("remind", "1")]
    worker = ("-m", "taskd", "run", "--app", "fastapi_app", "--until-empty")
    await asyncio.to_thread(run, *worker, cwd=EXAMPLES, environ=environ)
    orders = await sql.fetch("SELECT id, confirmed, reminders FROM shop_order")
    assert [tuple(order) for order in orders] == [(1, True, 1)]


# Django. Its settings are the process's: a process of its own for each.

VISIT = """
import json
from shop import worker  # what a WSGI server does in shop/wsgi.py
from django.core.management import call_command
from django.test import Client
from shop.models import Order, Stock

call_command("migrate", run_syncdb=True, verbosity=0)
Stock.objects.create(item="lamp", left=2)
answers = [Client().post("/orders", {"item": "lamp"}) for _ in range(3)]
print(json.dumps([[each.status_code, each.json()] for each in answers]))
"""
MINE = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


async def test_the_django_example_takes_orders_and_its_worker_confirms_them(
    environ: dict[str, str], sql: Any
) -> None:
    stdout = await asyncio.to_thread(run, "-c", VISIT, cwd=DJANGO, environ=environ)
    assert json.loads(stdout) == [
        [201, {"order": 1}],
        [201, {"order": 2}],
        [409, {"error": "sold out"}],
    ]
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 2
    worker = ("-m", "taskd", "run", "--app", "shop.worker", "--until-empty")
    await asyncio.to_thread(run, *worker, cwd=DJANGO, environ=environ)
    orders = await sql.fetch("SELECT id, confirmed FROM shop_order ORDER BY id")
    assert [tuple(order) for order in orders] == [(1, True), (2, True)]


@pytest.mark.parametrize("health_checks", [True, False])
@pytest.mark.parametrize("task", ["confirm", "confirm_in_process", "confirm_async"])
async def test_a_django_worker_outlives_its_connections(
    environ: dict[str, str], sql: Any, tmp_path: Path, task: str, health_checks: bool
) -> None:
    """Without health checks, each connection that is lost costs one attempt, and no second one."""
    costs_one = not health_checks or task == "confirm_async"
    await asyncio.to_thread(run, "-c", VISIT, cwd=DJANGO, environ=environ)
    (tmp_path / "own_settings.py").write_text(
        "from shop.settings import *\n"
        f"DATABASES['default']['CONN_HEALTH_CHECKS'] = {health_checks}\n"
    )
    (tmp_path / "own_worker.py").write_text(
        "from shop import worker\n"
        "from shop.models import Order\n"
        "from taskd import task\n"
        "@task(queue='orders', process=True)\n"
        "def confirm_in_process(order_id: int) -> None:\n"
        "    Order.objects.filter(pk=order_id).update(confirmed=True)\n"
        "@task(queue='orders')\n"
        "async def confirm_async(order_id: int) -> None:\n"
        "    await Order.objects.filter(pk=order_id).aupdate(confirmed=True)\n"
    )
    environ["PYTHONPATH"] += os.pathsep + str(tmp_path)
    environ["DJANGO_SETTINGS_MODULE"] = "own_settings"
    environ["TASKD_PROCESS_SLOTS"] = "1"
    # The views enqueued two jobs of `confirm`.
    await sql.execute("UPDATE taskd.job SET task = $1", task)
    worker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "taskd", "run", "--app", "own_worker", "--threads", "1"),
        cwd=DJANGO,
        env=environ,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            await done(sql, 2)
            # taskd's own connections name themselves; Django's has no name.
            killed = f"SELECT pg_terminate_backend(pid) {MINE} AND application_name = ''"
            assert [row[0] for row in await sql.fetch(killed)] == [True]
            while await sql.fetchval(f"SELECT count(*) {MINE} AND application_name = ''"):
                await asyncio.sleep(0.01)
            enqueue = "SELECT taskd.enqueue($1, '{\"order_id\": 1}', queue => 'orders')"
            attempts = "SELECT count(*) FROM taskd.jobs WHERE attempt = 1 AND errors <> '[]'"
            if costs_one:
                await sql.execute(enqueue, task)
                while not await sql.fetchval(attempts):
                    await asyncio.sleep(0.01)
            for _ in range(3):
                await sql.execute(enqueue, task)
            await done(sql, 5)
    finally:
        worker.terminate()
        await worker.wait()
    failed = "SELECT count(*) FROM taskd.jobs WHERE errors <> '[]'"
    assert await sql.fetchval(failed) == costs_one


async def done(sql: asyncpg.Connection, count: int) -> None:
    """Wait until `count` jobs are done."""
    while await sql.fetchval("SELECT count(*) FROM taskd.jobs WHERE state = 'done'") < count:
        await asyncio.sleep(0.02)
