"""What the store's tests share: workers, and as many connections as a race needs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from taskd.store.connections.database import Lane
from tests.store.helpers import Connect, new_worker


@pytest.fixture
async def connect(dsn: str) -> AsyncIterator[Connect]:
    """Opens plain connections; what a test left open ends with it."""
    opened: list[asyncpg.Connection] = []

    async def one(**settings: str) -> Any:
        connection = await asyncpg.connect(dsn, server_settings=settings)
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
