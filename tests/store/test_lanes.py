"""A lane: one connection, one statement at a time, which nobody's cancellation breaks off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from taskd.store.database import Database, Lane

# Waits for whoever holds taskd.worker.
WAITS = ("attend", "default", 1, 1.0)


@asynccontextmanager
async def held(sql: Any) -> AsyncIterator[None]:
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.worker IN ACCESS EXCLUSIVE MODE")
        yield


async def waiting(sql: Any, number: int) -> None:
    """Until so many sessions wait for the table."""
    query = (
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'taskd.worker'::regclass"
    )
    async with asyncio.timeout(30):
        while await sql.fetchval(query) != number:
            await asyncio.sleep(0.005)


def begin(lane: Lane, *statement: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(lane.fetch(*statement))


async def test_a_statement_ends_before_its_caller_hears_that_he_was_cancelled(
    sql: Any, lane: Lane, me: int
) -> None:
    async with held(sql):
        task = begin(lane, "attend", "default", me, 60.0)
        await waiting(sql, 1)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        assert lane.busy
    await asyncio.wait({task})
    assert task.cancelled()
    assert not lane.busy
    assert await sql.fetchval("SELECT count(*) FROM taskd.attendance") == 1


async def test_closing_tells_who_waits_for_an_answer_and_who_waits_for_his_turn(
    sql: Any, lane: Lane
) -> None:
    async with held(sql):
        tasks = {begin(lane, *WAITS), begin(lane, "draw_xid")}
        await waiting(sql, 1)
        await lane.close()
        await asyncio.wait(tasks, timeout=30)
        assert all(each.cancelled() for each in tasks)
    assert not lane.busy
    assert await lane.fetch("draw_xid"), "and it may be used again"


async def test_closing_ends_an_attempt_to_connect() -> None:
    connected = asyncio.Event()

    async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await asyncio.sleep(600)
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    lane = Lane(Database({"dsn": f"postgresql://me@127.0.0.1:{port}/x?sslmode=disable"}), "test")
    task = begin(lane, "draw_xid")
    async with asyncio.timeout(30):
        await connected.wait()
    await lane.close()
    await asyncio.wait({task}, timeout=2.0)
    assert task.cancelled()
    server.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_who_is_cancelled_while_it_connects_hears_of_it_then(
    sql: Any, lane: Lane, times: int
) -> None:
    await lane.close()
    task = begin(lane, *WAITS)
    for _ in range(times):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert not lane.busy
