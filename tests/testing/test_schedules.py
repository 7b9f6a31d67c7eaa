"""Schedules under test: what travelling makes due, and what a tick makes."""

from __future__ import annotations

from typing import Any

from taskd.schedules import PER_ROW, cron, every, schedule
from taskd.testing import TaskdDB


async def test_travelling_brings_a_declared_schedule_to_its_tick(db: TaskdDB, task: Any) -> None:
    @task()
    async def report(of: str) -> str:
        return of

    registry = db._registry
    schedule("nightly", report.job(of="sales"), cron("0 3 * * *"), registry=registry)
    schedule("later", report.job(of="stock"), every("7d"), registry=registry)
    assert await db.run_all(check=True) == []
    db.travel(86400)
    [job] = await db.run_all(check=True)
    assert (job.task, job.result) == ("report", "sales")
    db.travel(6 * 86400)
    assert sorted(job.result for job in await db.run_all(check=True)) == ["sales", "stock"]


async def test_travelling_brings_each_time_zone_to_its_next_day(db: TaskdDB, task: Any) -> None:
    @task()
    async def report(of: str) -> str:
        return of

    query = "SELECT 'sales' AS of, 'Asia/Tokyo' AS \"job.timezone\""
    schedule("nightly", report, cron("0 3 * * *", PER_ROW), query=query, registry=db._registry)
    for _ in range(3):
        db.travel(86400)
        assert [job.result for job in await db.run_all(check=True)] == ["sales"]


async def test_travel_alone_declares_what_no_worker_has_yet(db: TaskdDB, task: Any) -> None:
    @task()
    async def tidy() -> None: ...

    schedule("tidy", tidy, every("1h"), catch_up="all", registry=db._registry)
    db.travel(3 * 3600 + 1)
    assert len(await db.run_all(check=True)) == 3


async def test_a_query_sees_the_database_of_the_test(db: TaskdDB, task: Any) -> None:
    @task()
    async def double(number: int) -> int:
        return 2 * number

    query = "SELECT n AS number FROM generate_series(1, 3) AS n"
    schedule("all", double, every("1h"), query=query, registry=db._registry)
    db.travel(3600)
    assert [job.result for job in await db.run_all(check=True)] == [2, 4, 6]
