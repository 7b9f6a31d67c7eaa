"""A lane: one connection, one statement at a time, which no cancellation interrupts."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from tests.store.helpers import MARKED, held_up, workers_locked

# Waits for the lock of taskd.worker.
WAITS = ("set_busy_mark", "default", 1, 1.0, False)


def begin(lane: Lane, *statement: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(lane.fetch(*statement))


async def test_a_statement_ends_before_its_caller_hears_that_he_was_cancelled(
    sql: Any, lane: Lane, me: int
) -> None:
    async with workers_locked(sql):
        task = begin(lane, "set_busy_mark", "q", me, 60.0, False)
        await held_up(sql, 1)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        assert lane.busy
    await asyncio.wait({task})
    assert task.cancelled()
    assert not lane.busy
    assert await sql.fetchval(MARKED, "q")


async def test_closing_fails_callers_that_wait_for_an_answer_and_callers_in_the_queue(
    sql: Any, lane: Lane
) -> None:
    async with workers_locked(sql):
        tasks = {begin(lane, *WAITS), begin(lane, "draw_xid")}
        await held_up(sql, 1)
        await lane.close()
        await asyncio.wait(tasks, timeout=30)
        assert all(each.cancelled() for each in tasks)
    assert not lane.busy
    assert await lane.fetch("draw_xid"), "and it may be used again"


async def test_closing_ends_an_attempt_to_connect() -> None:
    connected, left = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()
        left.set()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    lane = Lane(Database({"dsn": f"postgresql://me@127.0.0.1:{port}/x?sslmode=disable"}), "test")
    task = begin(lane, "draw_xid")
    async with asyncio.timeout(30):
        await connected.wait()
        await lane.close()
        await asyncio.wait({task})
        await left.wait()
    assert task.cancelled()
    server.close()


@pytest.mark.parametrize("times", [1, 3])
async def test_a_caller_that_is_cancelled_during_the_connect_learns_of_it_afterwards(
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


async def test_a_connection_that_was_just_made_when_its_lane_is_closed_is_dropped(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    connect = database.connect

    async def connected(purpose: str, **settings: str) -> Any:
        made.append(await connect(purpose, **settings))
        # After this has returned, and before the lane goes on with it.
        asyncio.get_running_loop().call_soon(close)
        return made[0]

    def close() -> None:
        with suppress(StopIteration):
            lane.close().send(None)

    lane = Lane(database, "late")
    monkeypatch.setattr(database, "connect", connected)
    with pytest.raises(asyncio.CancelledError):
        await lane.open()
    assert made[0].is_closed()
