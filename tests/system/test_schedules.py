"""Schedules under kill -9: one job for each tick, even if workers die."""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

from tests.system.judge import Judge

ROOT = Path(__file__).parents[2]
APP = """
from taskd import task
from taskd.schedules import every, schedule

@task
async def tick() -> None: ...

for n in range(5):
    schedule(f"s{n}", tick, every(1), catch_up="all")
"""
# Two versions of an app, each with a schedule that the other does not declare.
VERSIONS = """
import os
from taskd import task
from taskd.schedules import every, schedule

@task
async def tick() -> None: ...

for name in ("both", "only" + os.environ["VERSION"]):
    schedule(name, tick, every(1), catch_up="all")
"""
ZONED = """
from taskd import task
from taskd.schedules import PER_ROW, cron, schedule

@task
async def nightly(account: int, zone: str) -> None: ...

schedule("nightly", nightly, cron("1 0 * * *", PER_ROW), catch_up="all",
         query='SELECT id AS account, zone, zone AS "job.timezone" FROM public.account')
"""
WAITING = """
import asyncio
from taskd import every, schedule, task

@task
async def slow() -> None:
    await asyncio.sleep(0.8)

schedule("waits", slow, every(1), overlap="wait", catch_up_max=1000)
schedule("cancels", slow, every(1), overlap="cancel")
"""
SECONDS = 4
WORKERS = 3


async def start(home: Path, dsn: str, version: str = "1") -> asyncio.subprocess.Process:
    environ = os.environ | {"TASKD_DSN": dsn, "PYTHONPATH": str(ROOT), "VERSION": version}
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
    assert await fired_once(sql) == {f"s{n}" for n in range(5)}


async def test_each_account_has_one_job_per_local_day_while_workers_are_killed_and_clocks_jump(
    home: Path, dsn: str, sql: Any
) -> None:
    (home / "ticking.py").write_text(ZONED)
    await sql.execute(
        "CREATE TABLE public.account AS SELECT n AS id, zones[1 + n % 4] AS zone "
        "FROM generate_series(1, 200) AS n, (SELECT ARRAY['Europe/Berlin', 'Asia/Kolkata', "
        "'America/New_York', 'Pacific/Auckland'] AS zones) AS z"
    )
    workers = [await start(home, dsn) for _ in range(WORKERS)]
    try:
        await until(sql, "SELECT count(*) = 1 FROM taskd.schedule")
        for n in range(SECONDS):
            # The ticks of the last days are due again, as after a clock was set back.
            await sql.execute(
                "UPDATE taskd.schedule SET next_at = clock_timestamp() - $1 * interval '12 h'", n
            )
            await asyncio.sleep(random.uniform(0.2, 1.0))
            victim = n % WORKERS
            workers[victim].kill()
            await workers[victim].wait()
            workers[victim] = await start(home, dsn)
        await until(sql, "SELECT bool_and(next_at > now()) FROM taskd.schedule")
        await until(sql, "SELECT count(*) = 0 FROM taskd.job")
    finally:
        for each in workers:
            each.kill()
            await each.wait()
    days = await sql.fetch(
        "SELECT args, (tick AT TIME ZONE (args ->> 'zone'))::date AS day, count(*) AS n "
        "FROM taskd.jobs GROUP BY 1, 2"
    )
    assert {each["n"] for each in days} == {1}
    assert len({each["args"] for each in days}) == 200, "no account is left out"


async def test_waiting_ticks_run_one_at_a_time_and_none_is_lost_while_workers_are_killed(
    home: Path, dsn: str, sql: Any
) -> None:
    (home / "ticking.py").write_text(WAITING)
    judge = Judge(dsn)
    await judge.install()
    workers = [await start(home, dsn) for _ in range(WORKERS)]
    try:
        await until(sql, "SELECT count(DISTINCT schedule) = 2 FROM taskd.job_history")
        for n in range(SECONDS):
            await asyncio.sleep(random.uniform(0.5, 1.5))
            victim = n % WORKERS
            await judge.kill(workers[victim].pid)
            await workers[victim].wait()
            workers[victim] = await start(home, dsn)
        ended = await sql.fetchval("SELECT count(*) FROM taskd.job_history")
        await until(sql, f"SELECT count(*) > {ended + 4} FROM taskd.job_history")
        await sql.execute("UPDATE taskd.schedule SET paused_at = now()")
        await until(sql, "SELECT count(*) = 0 FROM taskd.job")
    finally:
        for each in workers:
            each.kill()
            await each.wait()
    (await judge.check(records=False)).require()


async def until(sql: Any, true: str) -> None:
    """Wait until a query returns true."""
    async with asyncio.timeout(60.0):
        while not await sql.fetchval(true):
            await asyncio.sleep(0.05)


async def fired_once(sql: Any) -> set[str]:
    """Check that each tick of each schedule has made one job; return the names of the schedules."""
    ticks = await sql.fetch("SELECT schedule, tick, count(*) AS n FROM taskd.jobs GROUP BY 1, 2")
    assert {each["n"] for each in ticks} == {1}
    found = await sql.fetch(
        "SELECT schedule, count(*) AS n, date_part('epoch', max(tick) - min(tick)) AS span_s "
        "FROM taskd.jobs GROUP BY 1"
    )
    for each in found:
        assert each["n"] == each["span_s"] + 1 >= 3, "no tick is missing"
    return {each["schedule"] for each in found}


async def test_no_tick_is_lost_while_two_versions_of_an_app_run_side_by_side_and_are_killed(
    home: Path, dsn: str, sql: Any
) -> None:
    (home / "ticking.py").write_text(VERSIONS)
    versions = ["1", "2", "2"]
    workers = [await start(home, dsn, each) for each in versions]
    try:
        await until(sql, "SELECT count(DISTINCT schedule) = 3 FROM taskd.job_history")
        # They are not protected by their age.
        await sql.execute("UPDATE taskd.schedule SET created_at = now() - interval '1 hour'")
        for number, victim in enumerate((0, 1, 0), 1):
            await until(sql, "SELECT count(*) = 3 FROM taskd.worker WHERE died_at IS NULL")
            workers[victim].kill()
            await workers[victim].wait()
            # Until other workers have declared it dead, and have looked around since.
            dead = "FROM taskd.worker WHERE died_at < now() - interval '3 s'"
            await until(sql, f"SELECT count(*) = {number} {dead}")
            workers[victim] = await start(home, dsn, versions[victim])
        await until(sql, "SELECT count(*) = 3 FROM taskd.worker WHERE died_at IS NULL")
        assert await sql.fetchval("SELECT count(*) FROM taskd.schedule WHERE stopped") == 0
    finally:
        for each in workers:
            if each.returncode is None:
                each.kill()
            await each.wait()
    assert await fired_once(sql) == {"both", "only1", "only2"}
