"""Jobs that a limit, a pause or another job holds back: they wait, and delay no run."""

from __future__ import annotations

from typing import Any

from taskd import Client, Limit
from taskd.testing import TaskdDB


async def test_a_job_that_its_limit_holds_back_is_enqueued(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task(limit=Limit(concurrency=1))
    async def call(n: int) -> None: ...

    await client.enqueue(call.job(7))
    assert db.assert_enqueued(call, n=7).state == "blocked"
    assert len(db.enqueued(call)) == 1
    assert [row.state for row in await db.run_all(check=True)] == ["done"]
    assert db.enqueued() == []


async def test_what_a_rate_does_not_let_through_stays_until_its_time(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task(limit=Limit(rate=1, per_s=3600))
    async def call(n: int) -> None: ...

    await client.enqueue_many([call.job(n) for n in range(2)])
    assert len(await db.run_all(check=True, timeout_s=5)) == 1
    assert len(db.enqueued(call)) == 1
    db.travel(3600)
    assert len(await db.run_all(check=True, timeout_s=5)) == 1


async def test_a_paused_task_stays_until_its_pause_is_over(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task()
    async def work() -> None: ...

    await client.enqueue(work.job())
    await db.run_all(check=True)
    await client.pause_tasks(["work"], for_s=3600)
    await client.enqueue(work.job())
    assert await db.run_all(check=True, timeout_s=5) == []
    db.travel(3600)
    assert [row.state for row in await db.run_all(check=True, timeout_s=5)] == ["done"]


async def test_what_a_rate_lets_through_within_a_second_belongs_to_the_run(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task(limit=Limit(rate=20, burst=1))
    async def call(n: int) -> None: ...

    await client.enqueue_many([call.job(n) for n in range(4)])
    assert len(await db.run_all(check=True)) == 4


async def test_what_the_rate_of_its_queue_holds_back_stays_until_its_time(
    db: TaskdDB, client: Client, task: Any, sql: Any
) -> None:
    @task(queue="slow")
    async def work(n: int) -> None: ...

    await sql.execute("INSERT INTO taskd.queue (name, rate, burst) VALUES ('slow', 1.0 / 3600, 1)")
    await client.enqueue_many([work.job(n) for n in range(2)])
    assert len(await db.run_all(check=True, timeout_s=5)) == 1
    db.travel(3600)
    assert len(await db.run_all(check=True, timeout_s=5)) == 1


async def test_jobs_of_one_place_run_one_after_the_other(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task(limit=Limit(concurrency=1, concurrency_in_all=1, by="shop"))
    async def call(shop: int) -> None: ...

    await client.enqueue_many([call.job(n % 2) for n in range(6)])
    assert len(await db.run_all(check=True, concurrency=4)) == 6
