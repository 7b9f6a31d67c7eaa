"""What teams have built by hand around a table of jobs, each in a few lines of taskd."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

from taskd import Client, Context, Fail, Item, Linear, Unique, cron, schedule, task
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.store.connections.database import Database
from taskd.worker.worker import Worker

REPORT = """
SELECT date_trunc('hour', finished_at) AS hour, task, count(*) AS jobs,
       count(*) FILTER (WHERE state = 'failed') AS failed, max(finished_at - started_at) AS longest
FROM taskd.jobs
WHERE finished_at > now() - interval '1 day'
GROUP BY 1, 2
"""


@dataclass
class Event:
    n: int


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as made:
        yield made


async def work(dsn: str, registry: Registry, failed: int = 0) -> None:
    """As `taskd run --until-empty`, which exits with 1 when a job has failed."""
    worker = Worker(Settings(dsn=dsn), registry, Database({"dsn": dsn}), until_empty=True)
    assert await worker.run() == min(failed, 1)


async def test_a_call_is_tried_again_after_five_minutes_times_the_attempt_and_a_fatal_error_never(
    client: Client, dsn: str, sql: Any, registry: Registry
) -> None:
    @task(registry=registry, backoff=Linear(300), on_error={PermissionError: Fail})
    async def call(ctx: Context, host: str) -> None:
        if host == "forbidden":
            raise PermissionError("not for us")
        raise ConnectionError(f"{host} is away, attempt {ctx.attempt}")

    away, never = await client.enqueue_many([call.job("away"), call.job("forbidden")])
    for attempt in (1, 2):
        await work(dsn, registry, failed=int(attempt == 1))
        [row] = await sql.fetch(
            "SELECT *, run_at - now() AS wait FROM taskd.jobs WHERE id = $1", away
        )
        assert (row["state"], row["attempt"]) == ("scheduled", attempt)
        assert (
            timedelta(0) <= timedelta(seconds=300 * attempt) - row["wait"] < timedelta(seconds=60)
        )
        assert f"away, attempt {attempt}" in row["errors"]
        await client.change([away], delay_s=0)  # now, before its time
    [row] = await sql.fetch("SELECT state, attempt, reason FROM taskd.jobs WHERE id = $1", never)
    assert (row["state"], row["attempt"]) == ("failed", 1)
    assert "not for us" in row["reason"]


async def test_a_reminder_says_what_is_true_when_it_is_sent(
    client: Client, dsn: str, sql: Any, registry: Registry
) -> None:
    sent = []

    @task(registry=registry, unique=Unique(by=("account",), scope="waiting"))
    async def remind(account: int) -> None:
        sent.append(await sql.fetchval("SELECT items FROM cart WHERE account = $1", account))

    await sql.execute("CREATE TABLE cart (account int, items int)")
    await sql.execute("INSERT INTO cart VALUES (7, 0)")
    for _ in range(3):
        async with sql.transaction():
            await sql.execute("UPDATE cart SET items = items + 1 WHERE account = 7")
            await client.enqueue(remind.job(7), conn=sql)
    await work(dsn, registry)
    assert sent == [3]


async def test_work_whose_source_changed_while_it_ran_is_done_again(
    client: Client, dsn: str, registry: Registry
) -> None:
    seen = []

    @task(registry=registry, unique=Unique(by=("page",), version_by="version"))
    async def index(page: int, version: int) -> None:
        seen.append(version)
        if version == 1:
            enqueued = [await client.enqueue(index.job(page, newer)) for newer in (2, 4, 3)]
            assert [each.outcome for each in enqueued] == ["follows", "follows", "ignored"]

    await client.enqueue(index.job(1, 1))
    await work(dsn, registry)
    assert (await client.enqueue(index.job(1, 4))).outcome == "ignored"
    assert seen == [1, 4]


async def test_every_account_has_its_report_each_night_or_none(
    client: Client, dsn: str, sql: Any, registry: Registry
) -> None:
    reported = []

    @task(registry=registry)
    async def report(account: int) -> None:
        reported.append(account)

    await sql.execute("CREATE TABLE public.account (id int)")
    await sql.execute("INSERT INTO public.account SELECT generate_series(1, 5)")
    schedule(
        "reports", report, cron("0 3 * * *", timezone="Europe/Berlin"),
        query="SELECT id AS account FROM public.account", deadline_s=5 * 3600, registry=registry,
    )  # fmt: skip
    await work(dsn, registry)  # a worker of the app declares it
    ids = await client.schedules.run("reports") or []
    await sql.execute("UPDATE taskd.job SET deadline = now() WHERE id = $1", ids[0])
    await work(dsn, registry, failed=1)
    assert sorted(reported) == [2, 3, 4, 5]
    rows = await sql.fetch("SELECT state, reason FROM taskd.jobs ORDER BY id")
    assert [tuple(each) for each in rows] == [("failed", "expired"), *[("done", None)] * 4]


async def test_events_of_a_busy_api_are_stored_by_the_hundred(
    client: Client, dsn: str, registry: Registry
) -> None:
    batches = []

    @task(registry=registry, batch=100, max_wait_s=0.2)
    async def store(items: list[Item[Event]]) -> None:
        batches.append([each.args.n for each in items])

    async with client.buffered() as buffer:
        for n in range(500):
            buffer.enqueue(store.job(Event(n)))
    await work(dsn, registry)
    assert sorted(n for batch in batches for n in batch) == list(range(500))
    assert max(map(len, batches)) == 100


async def test_what_is_urgent_may_be_put_before_the_others_and_the_hours_are_reported(
    client: Client, dsn: str, sql: Any, registry: Registry
) -> None:
    order = []

    @task(registry=registry)
    async def draw(n: int) -> None:
        order.append(n)

    ids = await client.enqueue_many(draw.job(n) for n in range(4))
    await client.change([ids[3]], priority=1)
    await work(dsn, registry)
    assert order == [3, 0, 1, 2]
    [row] = await sql.fetch(REPORT)
    assert (row["task"].endswith("draw"), row["jobs"], row["failed"]) == (True, 4, 0)
