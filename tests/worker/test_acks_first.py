"""Outcomes are written before new jobs are claimed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from taskd.core.jobs.job import Job
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.worker.finishing.acker import Acker

NOWHERE = "postgresql://nobody@127.0.0.1:1/none"


@pytest.fixture
async def acker() -> AsyncIterator[Acker]:
    """An acker whose database does not exist."""
    lane = Lane(Database({"dsn": NOWHERE}), "ack")
    made = Acker(lane)
    running = asyncio.create_task(made.run(), name="acker")
    yield made
    running.cancel()
    await asyncio.wait({running})
    await lane.close()


async def test_while_outcomes_cannot_be_written_nothing_is_claimed(acker: Acker) -> None:
    assert acker.has_room()
    acker.done(Job(1, 1, "t", "{}", 1, None, None, 100, 0, 0.0, 0.0, queue="default", worker_id=7))
    async with asyncio.timeout(10):
        while acker.has_room():
            await asyncio.sleep(0)
    # A consumer that waits for space must yield: otherwise it would loop for ever.
    began = asyncio.get_running_loop().time()
    await acker.room(0.05)
    assert asyncio.get_running_loop().time() - began >= 0.04  # its clock counts milliseconds
    assert acker.backlog == 1
