"""Clients, tasks, a listener, and connections of the caller's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import psycopg
import pytest

from taskd.client import Client, set_default_client, task
from taskd.core.jobs.job import JobState
from taskd.core.outcomes.ack import Ack
from taskd.core.tasks.registry import Registry
from taskd.store import workers
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.worker.assembly import PLANS
from tests.store.helpers import SERVE

# The worker of the fixture of that name.
ME = 11
ROW = "SELECT * FROM taskd.job WHERE id = $1"


class Listener:
    """Listens to the channels of queues; `notified()` returns the notified ones so far."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._notified: list[str] = []
        self._echo: asyncio.Queue[str] = asyncio.Queue()

    async def listen(self, *queues: str) -> None:
        await self._connection.execute(SERVE, list(queues))
        for queue in queues:
            await self._connection.add_listener(f"taskd_{queue}", self._add)
        await self._connection.add_listener("echo", lambda *_: self._echo.put_nowait("echo"))

    def _add(self, _connection: Any, _pid: int, channel: str, _payload: str) -> None:
        self._notified.append(channel.removeprefix("taskd_"))

    async def notified(self) -> list[str]:
        # Notifications arrive in the order of the commits: earlier ones have arrived by then.
        await self._connection.execute("NOTIFY echo")
        await self._echo.get()
        notified, self._notified = self._notified, []
        return notified


@pytest.fixture
async def client(dsn: str) -> AsyncIterator[Client]:
    async with Client(dsn) as made:
        yield made


@pytest.fixture(autouse=True)
def no_default_client() -> Iterator[None]:
    yield
    set_default_client(Client())


@pytest.fixture
async def listener(dsn: str) -> AsyncIterator[Listener]:
    connection = await asyncpg.connect(dsn)
    made = Listener(connection)
    await made.listen("default", "email")
    yield made
    await connection.close()


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[Any]:
    """A second plain connection."""
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def send(registry: Registry) -> Any:
    @task(queue="email", registry=registry)
    async def send(to: str, copies: int = 1) -> None: ...

    return send


@pytest.fixture
async def published(lane: Lane, registry: Registry, send: Any) -> Registry:
    await workers.publish(lane, "app", registry, ["email"])
    return registry


@pytest.fixture
async def psycopg_async(dsn: str) -> AsyncIterator[Any]:
    connection = await psycopg.AsyncConnection.connect(dsn)
    yield connection
    await connection.close()


@pytest.fixture
def psycopg_sync(dsn: str) -> Iterator[Any]:
    connection = psycopg.connect(dsn)
    yield connection
    connection.close()


@pytest.fixture
async def worker(dsn: str, sql: Any) -> AsyncIterator[Lane]:
    """A lane of a worker that serves the queue `sync`, with the plans that workers' lanes have."""
    made = Lane(Database({"dsn": dsn}), "test", **PLANS)
    await sql.execute(
        """
        INSERT INTO taskd.worker (id, lease_until, pid, pid_started, host, boot_id, pid_namespace,
            version, app, queues, tasks)
        VALUES ($1, now() + interval '1 hour', 1, 1, 'h', 'b', 'n', '0', 'a', '{sync}', '{sync}')
        """,
        ME,
    )
    yield made
    await made.close()


async def claim(worker: Lane) -> Any:
    return (await jobs.claim(worker, ME, "sync", 10))[0]


async def end(worker: Lane, claimed: Any, state: JobState, **more: Any) -> None:
    if state is JobState.DONE:
        await jobs.ack_done(worker, ME, [claimed.id], [claimed.fence])
    else:
        await jobs.ack_outcomes(worker, ME, [Ack(claimed.id, ME, claimed.fence, state, **more)])
