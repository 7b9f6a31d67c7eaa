"""A database that refuses DDL: workers run none. And one that refuses busy marks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from taskd.worker.claiming import busy_mark
from tests.store.helpers import MARKED, REFUSE_DDL, Ears
from tests.worker.conftest import Desk, until

# The body of a function about the mark; what it has written to a sequence stays.
BREAK = """
CREATE OR REPLACE FUNCTION taskd.{name} LANGUAGE plpgsql SECURITY DEFINER AS
$$ BEGIN {written} RAISE EXCEPTION 'not today' USING ERRCODE = '{code}'; END $$
"""
SET = (
    "set_busy_mark(queue text, worker_id bigint, for_s double precision, gives_way boolean) "
    "RETURNS boolean"
)
CLEAR = "clear_busy_mark(queue text, worker_id bigint) RETURNS void"
WRITTEN = """PERFORM setval(taskd.busy_mark_sequence(queue, 0),
    taskd.busy_mark_until(queue, clock_timestamp() + make_interval(secs => for_s))
    | (worker_id & 1023));"""


@pytest.fixture(autouse=True)
def _marks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(busy_mark, "MARK_AFTER_S", 0.0)
    monkeypatch.setattr(busy_mark, "FEW_FOR_S", 0.5)


@asynccontextmanager
async def busy(desk: Desk, job: Any) -> AsyncIterator[None]:
    """Keep the worker busy during the block."""
    enough = asyncio.Event()

    async def enqueue() -> None:
        while not enough.is_set():
            await desk.enqueue(*[job] * 50)

    enqueueing = asyncio.create_task(enqueue())
    yield
    enough.set()
    await enqueueing


async def test_a_busy_worker_runs_no_ddl(desk: Desk) -> None:
    await desk.sql.execute(REFUSE_DDL)

    @desk.task()
    async def work() -> None: ...

    worker = await desk.start()
    async with busy(desk, work.job()):
        await desk.emitted.wait("queue.polled")
        await until(lambda: desk.sql.fetchval(MARKED, "default"))
    await desk.emitted.wait("queue.unpolled")
    (last,) = await desk.enqueue(work.job())
    await desk.settled(last)
    for name in ("service.crashed", "queue.mark_refused"):
        assert desk.emitted.of(name) == []
    assert await worker.stop() == 0


@pytest.mark.parametrize("code", ["P0001", "42501", "42P01"])
@pytest.mark.parametrize("broken", [(SET,), (CLEAR,), (SET, CLEAR)], ids=["set", "clear", "both"])
async def test_a_mark_that_the_database_refuses_means_that_producers_notify(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, broken: tuple[str, ...], code: str
) -> None:
    monkeypatch.setattr(busy_mark, "MARK_S", 0.5)
    monkeypatch.setattr(busy_mark, "WRITTEN_LATER_S", 0.1)
    for name in broken:
        written = WRITTEN if name == SET else ""
        await desk.sql.execute(BREAK.format(name=name, written=written, code=code))

    @desk.task()
    async def work() -> None: ...

    worker = await desk.start(poll_s=600)
    mine = worker.worker.parts.consumers["default"].busy_mark
    async with busy(desk, work.job()):
        await desk.emitted.wait("queue.mark_refused" if SET in broken else "queue.polled")
    # It sleeps only when the mark has expired, even if it cannot be cleared.
    await until(lambda: not (mine.marked or mine.must_poll))
    await desk.emitted.wait("queue.mark_refused")
    assert not await desk.sql.fetchval(MARKED, "default")
    listener = await asyncpg.connect(desk.dsn)
    ears = Ears(listener)
    await ears.listen("taskd_default")
    (last,) = await desk.enqueue(work.job())
    await desk.settled(last)
    assert await ears.so_far() == ["taskd_default"]
    assert desk.emitted.of("service.crashed") == []
    await listener.close()
    assert await worker.stop() == 0
