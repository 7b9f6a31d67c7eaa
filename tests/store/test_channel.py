"""One connection receives the notifications of many queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Channels
from taskd.store.schema_text import channel_prefix
from tests.schema import SCHEMA

# All characters that a name can have, and the maximal length.
QUEUES = ["default", "a.b-c_0", "-", "q" * 48, *(f"q{n}" for n in range(46))]


class Counters(Database):
    """A database that keeps its last connection, and the text of each statement there."""

    async def connect(self, purpose: str, **settings: str) -> Any:
        self.ran: list[str] = []
        self.last = await super().connect(purpose, **settings)
        self.last.add_query_logger(lambda query: self.ran.append(query.query))
        return self.last


@pytest.fixture
async def database(dsn: str) -> Counters:
    return Counters({"dsn": dsn}, schema=SCHEMA)


@pytest.fixture
async def notified() -> asyncio.Queue[str]:
    return asyncio.Queue()


@pytest.fixture
async def channels(database: Counters, notified: asyncio.Queue[str]) -> AsyncIterator[Channels]:
    made = Channels(database, QUEUES, notified.put_nowait, lambda _payload: None, lambda: None)
    await made.open()
    yield made
    made.drop()


async def test_each_notification_is_received_with_its_queue(
    channels: Channels, notified: asyncio.Queue[str], sql: Any
) -> None:
    for queue in (*QUEUES, "not_served"):
        await sql.execute("SELECT pg_notify('taskd_' || $1, 'forged')", queue)
    await sql.execute("SELECT pg_notify('taskd_' || 'default', '')")
    said = [await asyncio.wait_for(notified.get(), 5.0) for _ in range(len(QUEUES) + 1)]
    assert said == [*QUEUES, "default"]


async def test_so_many_channels_cost_one_round_trip(channels: Channels, database: Counters) -> None:
    # This fails if asyncpg stores its listeners elsewhere: then each is a statement of its own.
    [listen] = [text for text in database.ran if "LISTEN" in text]
    assert listen.count("LISTEN") == 51  # and the channel of all workers


async def test_a_channel_that_is_no_longer_listened_to_is_noticed(
    channels: Channels, database: Counters
) -> None:
    await channels.probe()
    channel = f"{channel_prefix(SCHEMA)}_q7"
    await database.last.execute(f'UNLISTEN "{channel}"')
    with pytest.raises(StoreUnavailable, match=f"no longer listens to {channel}"):
        await channels.probe()
