"""The connections of a producer: shared, bounded, and none is lost when its user is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskd.errors import StoreUnavailable
from taskd.store.connections import pool as pools
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import Silence
from taskd.store.connections.pool import Pool
from tests.store.helpers import held_up, workers_locked

# What anybody may run.
ASK = "draw_xid"


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[Pool]:
    made = Pool(Database({"dsn": dsn}), size_max=2)
    yield made
    await made.close()


@pytest.fixture
async def held(sql: Any) -> AsyncIterator[None]:
    """Statements that read taskd.worker wait until the test ends."""
    async with workers_locked(sql):
        yield


def ask(pool: Pool) -> asyncio.Task[Any]:
    return asyncio.create_task(pool.fetch(ASK))


def wait(pool: Pool) -> asyncio.Task[Any]:
    """Begin a statement that ends when nobody holds the table."""
    return asyncio.create_task(pool.fetch("set_busy_mark", "default", 1, 1.0, False))


async def sessions(sql: Any) -> int:
    query = """
        SELECT count(*) FROM pg_stat_activity
        WHERE application_name = 'taskd client' AND datname = current_database()
    """
    number: int = await sql.fetchval(query)
    return number


async def test_many_share_the_connections_there_may_be(pool: Pool, sql: Any) -> None:
    answers = await asyncio.gather(*(ask(pool) for _ in range(50)))
    assert len({row[0][0] for row in answers}) == 50
    assert await sessions(sql) == 2


async def test_one_after_the_other_needs_one_connection(pool: Pool, sql: Any) -> None:
    for _ in range(5):
        await pool.fetch(ASK)
    assert await sessions(sql) == 1


async def test_who_is_cancelled_while_the_server_works_costs_one_connection(
    pool: Pool, sql: Any, held: None
) -> None:
    stuck = [wait(pool), wait(pool)]
    await held_up(sql, 2)
    next_ones = [ask(pool) for _ in range(3)]
    for each in stuck:
        each.cancel()
    assert len(await asyncio.gather(*next_ones)) == 3
    await held_up(sql, 0)


async def test_who_is_cancelled_while_waiting_for_a_connection_takes_none(
    pool: Pool, sql: Any
) -> None:
    async with workers_locked(sql):
        stuck = [wait(pool), wait(pool)]
        await held_up(sql, 2)
        in_line = [ask(pool) for _ in range(3)]
        await asyncio.sleep(0)
        in_line[0].cancel()
    # A connection that was just handed to it goes to the next.
    await stuck[0]
    in_line[1].cancel()
    await in_line[2]
    assert await asyncio.gather(ask(pool), ask(pool))


async def test_what_the_server_refuses_leaves_the_connection_usable(pool: Pool, sql: Any) -> None:
    pool._database.statement_timeout_s = 0.1
    pid = """
        SELECT pid FROM pg_stat_activity
        WHERE application_name = 'taskd client' AND datname = current_database()
    """
    await pool.fetch(ASK)
    before = await sql.fetch(pid)
    async with workers_locked(sql):
        with pytest.raises(StoreUnavailable, match="lock timeout"):
            await wait(pool)
    await pool.fetch(ASK)
    assert await sql.fetch(pid) == before


async def test_a_connection_that_takes_no_writes_any_more_is_not_used_again(pool: Pool) -> None:
    """As after a failover: another host of the DSN may take them."""
    await pool.open()
    await pool._idle[0][0].execute("SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable, match="read-only"):
        await pool.fetch("retire_worker", 1)
    assert await pool.fetch("retire_worker", 1) == []


async def test_a_connection_that_was_given_to_somebody_cancelled_is_closed_with_the_pool(
    pool: Pool,
) -> None:
    given = [await pool._awaited(), await pool._awaited()]
    late = ask(pool)
    await asyncio.sleep(0)
    for each in given:
        pool._give(each)
    late.cancel()
    await pool.close()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert not pool._idle
    await pool.close()
    assert all(each.is_closed() for each in given)


async def test_connections_that_nobody_needs_are_closed(
    pool: Pool, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "IDLE_S", 0.0)
    monkeypatch.setattr(pools, "CHECK_IDLE_EVERY_S", 0.05)
    await asyncio.gather(ask(pool), ask(pool))
    while await sessions(sql):
        await asyncio.sleep(0.01)
    await pool.fetch(ASK)


async def test_a_connection_that_was_cut_is_not_used_again(pool: Pool, sql: Any) -> None:
    await pool.fetch(ASK)
    await sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = "
        "'taskd client' AND datname = current_database()"
    )
    while not pool._idle[0][0].is_closed():
        await asyncio.sleep(0.005)
    await pool.fetch(ASK)


async def test_a_statement_without_an_answer_is_given_up_and_costs_one_connection(
    pool: Pool, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "CHECK_SILENCE_EVERY_S", 0.02)
    async with workers_locked(sql):
        # One after the other: two that connect at once may be ready in either order.
        stuck = wait(pool)
        await held_up(sql, 1)
        longer = wait(pool)
        await held_up(sql, 2)
        first, second = pool._busy
        pool._busy = {first: 0.0, second: time.monotonic()}  # `stuck` has been so for long
        with pytest.raises(Silence, match="did not answer in time"):
            await stuck
        assert await ask(pool)
        assert not longer.done()
    assert await longer


async def test_a_statement_that_is_under_way_for_less_than_the_limit_is_awaited(
    pool: Pool, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "CHECK_SILENCE_EVERY_S", 0.01)
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        Pool._check_silence(pool)

    monkeypatch.setattr(pool, "_check_silence", look)
    async with workers_locked(sql):
        running = wait(pool)
        await held_up(sql, 1)
        while looks < 5:
            await asyncio.sleep(0.01)
    assert await running
    # Nobody looks where nothing is under way.
    while pool._silence_timer is not None:
        await asyncio.sleep(0.01)
    seen = looks
    await asyncio.sleep(0.05)
    assert looks == seen


async def test_a_failed_connect_gives_its_place_to_the_next(dsn: str) -> None:
    nowhere = Pool(Database({"dsn": "postgresql://127.0.0.1:9/x"}), size_max=1)
    answers = await asyncio.gather(*(ask(nowhere) for _ in range(3)), return_exceptions=True)
    assert [type(each).__name__ for each in answers] == ["Down"] * 3
    await nowhere.close()


async def test_closing_waits_for_statements_and_refuses_whoever_waits_for_a_connection(
    pool: Pool, sql: Any
) -> None:
    async with workers_locked(sql):
        running = [wait(pool), wait(pool)]
        await held_up(sql, 2)
        late = ask(pool)
        await asyncio.sleep(0)
        closing = asyncio.create_task(pool.close())
        with pytest.raises(StoreUnavailable, match="closed"):
            await late
        assert not closing.done()
    await closing
    assert [await each for each in running]
    assert await sessions(sql) == 0
    with pytest.raises(StoreUnavailable, match="closed"):
        await pool.fetch(ASK)


async def test_who_is_still_connecting_when_the_pool_closes_writes_nothing(
    pool: Pool, sql: Any
) -> None:
    late = ask(pool)
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        await late
    while await sessions(sql):
        await asyncio.sleep(0.005)


async def test_closing_does_not_wait_for_ever(
    pool: Pool, sql: Any, held: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pools, "CLOSE_TIMEOUT_S", 0.05)
    running = wait(pool)
    await held_up(sql, 1)
    await pool.close()
    with pytest.raises(StoreUnavailable):
        await running
