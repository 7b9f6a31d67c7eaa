"""Schedules under kill -9: one job for each tick, even if workers die."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
APP = """
from taskd import task
from taskd.schedules import every, schedule

@task
async def tick() -> None: ...

for n in range(5):
    schedule(f"s{n}", tick, every(1), catch_up="all")
"""
SECONDS = 4
WORKERS = 3


async def start(home: Path, dsn: str) -> asyncio.subprocess.Process:
    environ = os.environ | {"TASKD_DSN": dsn, "PYTHONPATH": str(ROOT)}
    nowhere = asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "taskd", "run", "--app", "ticking",
        cwd=home, env=environ, stdout=nowhere, stderr=nowhere,
    )  # fmt: skip


async def test_each_tick_makes_one_job_while_workers_are_killed(
    home: Path, dsn: str, sql: Any
) -> None:
    (home / "ticking.py").write_text(APP)
    workers = [await start(home, dsn) for _ in range(WORKERS)]
    try:
        async with asyncio.timeout(60.0):
            while await sql.fetchval("SELECT count(*) FROM taskd.job_history") < 5:
                await asyncio.sleep(0.05)
        for _ in range(SECONDS):
            await asyncio.sleep(1 + random.uniform(-0.1, 0.1))
            victim = random.randrange(WORKERS)
            workers[victim].kill()
            await workers[victim].wait()
            workers[victim] = await start(home, dsn)
    finally:
        for each in workers:
            each.kill()
            await each.wait()
    ticks = await sql.fetch("SELECT schedule, tick, count(*) AS n FROM taskd.jobs GROUP BY 1, 2")
    assert {each["n"] for each in ticks} == {1}
    for each in await sql.fetch(
        "SELECT schedule, count(*) AS n, date_part('epoch', max(tick) - min(tick)) AS span_s "
        "FROM taskd.jobs GROUP BY 1"
    ):
        assert each["n"] == each["span_s"] + 1 >= 3, "no tick is missing"
