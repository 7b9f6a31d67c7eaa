"""Fixtures of the store's tests: workers, and any number of connections for races."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from taskd.store.connections.lanes import Lane
from tests.schema import PlainConnection
from tests.store.helpers import Connect, new_worker


@pytest.fixture
async def connect(dsn: str) -> AsyncIterator[Connect]:
    """Open plain connections, and close those that a test left open."""
    opened: list[asyncpg.Connection] = []

    async def one(**settings: str) -> Any:
        connection = await asyncpg.connect(
            dsn, server_settings=settings, connection_class=PlainConnection
        )
        opened.append(connection)
        return connection

    yield one
    for connection in opened:
        connection.terminate()


@pytest.fixture
async def me(lane: Lane) -> int:
    """The id of a live worker."""
    return await new_worker(lane)


@pytest.fixture
async def other(lane: Lane) -> int:
    """The id of another live worker."""
    return await new_worker(lane)
