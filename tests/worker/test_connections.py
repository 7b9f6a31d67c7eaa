"""How many connections a worker holds, idle and busy, and what it does when it gets no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.worker_status import decode
from taskd.store.connections import lanes, transactions
from tests.logins import Logins
from tests.worker.conftest import Desk, until

HELD = """
SELECT application_name FROM pg_stat_activity
WHERE datname = current_database()
  AND application_name ~ '^taskd (work|lease|listen|history|transaction)'
ORDER BY application_name
"""
STATUS = "SELECT status::text FROM taskd.worker WHERE status::text LIKE '%connections%'"


@pytest.fixture(autouse=True)
def soon_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "IDLE_S", 0.5)
    monkeypatch.setattr(transactions, "IDLE_S", 0.5)


@pytest.fixture
def short(desk: Desk) -> Any:
    @desk.task()
    async def short() -> None:
        await asyncio.sleep(0.001)

    return short


async def holds(desk: Desk, *names: str) -> None:
    """Wait until the workers hold exactly these connections."""
    held: list[str] = []

    async def exactly() -> bool:
        held[:] = [row[0].removeprefix("taskd ") for row in await desk.sql.fetch(HELD)]
        return held == sorted(names)

    try:
        await until(exactly)
    except AssertionError:
        assert held == sorted(names)
        raise


async def test_an_idle_worker_of_one_queue_holds_three_connections(desk: Desk, short: Any) -> None:
    await desk.start()
    await holds(desk, "lease", "listen default", "work")
    # It opens more while it is busy, and gives them back.
    ids = await desk.enqueue(*(short.job() for _ in range(3000)))
    await desk.settled(*ids)
    await holds(desk, "lease", "listen default", "work")


async def test_an_idle_worker_of_three_queues_holds_five_connections(
    desk: Desk, short: Any
) -> None:
    await desk.start(queues=("a", "b", "c"))
    ids = await desk.enqueue(*(NewJob("short", queue=queue) for queue in "abc" * 300))
    await desk.settled(*ids)
    await holds(desk, "lease", "listen a", "listen b", "listen c", "work")


async def test_connections_of_transactions_are_closed_when_they_are_idle(desk: Desk) -> None:
    @desk.task(transaction=True)
    async def pays(ctx: Any) -> None:
        await ctx.conn.execute("SELECT pg_sleep(0.01)")

    await desk.start()
    for _ in range(2):
        ids = await desk.enqueue(*(pays.job() for _ in range(30)))
        await desk.settled(*ids)
        await holds(desk, "lease", "listen default", "work")


@pytest.fixture
async def limited(logins: Logins, sql: Any) -> AsyncIterator[str]:
    """A login whose limit of connections is lifted again: other tests have the same login."""
    login = f"{logins.role('worker')}_login"
    yield login
    await sql.execute(f"ALTER ROLE {login} CONNECTION LIMIT -1")


async def test_a_worker_that_gets_no_further_connection_works_with_those_that_it_has(
    desk: Desk, short: Any, logins: Logins, limited: str
) -> None:
    desk.dsn = logins.dsn("worker")
    await desk.start()
    await holds(desk, "lease", "listen default", "work")
    await desk.sql.execute(f"ALTER ROLE {limited} CONNECTION LIMIT 3")
    ids = await desk.enqueue(*(short.job() for _ in range(2000)))
    rows = await desk.settled(*ids)
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
    assert not desk.emitted.of("service.crashed")
    assert not desk.emitted.of("job.lost")
    await holds(desk, "lease", "listen default", "work")


async def test_a_worker_publishes_how_many_connections_it_opens_when_it_is_busy(
    desk: Desk, short: Any
) -> None:
    await desk.start(queues=("a", "b"), lease_s=1.0)
    text = await until(lambda: desk.sql.fetchval(STATUS))
    [started] = desk.emitted.of("worker.started")
    assert decode(text).connections == started["connections"] == 9
