"""Several hosts in one DSN: each is tried with a time limit of its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from urllib.parse import urlsplit

import asyncpg
import pytest

from taskd.errors import StoreUnavailable
from taskd.store.connections import database as databases
from taskd.store.connections.database import Database
from taskd.store.connections.driver_args import addresses, parameters_of
from taskd.store.connections.error_translation import Silence


@pytest.mark.parametrize(
    ("dsn", "found"),
    [
        ("postgresql://u@/d", [{}]),
        ("postgresql://u:p,q@a/d", [{"host": "a"}]),
        ("postgresql://u@[::1]:2/d", [{"host": "::1", "port": 2}]),
        (
            "postgresql://u:x%2Cy@a:1,[::1]:2/d?sslmode=allow",
            [{"host": "a", "port": 1}, {"host": "::1", "port": 2}],
        ),
        ("postgresql://[::1],b:7/d", [{"host": "::1"}, {"host": "b", "port": 7}]),
        ("postgresql://u@a,b/d?port=7", [{"host": "a", "port": 7}, {"host": "b", "port": 7}]),
        ("postgresql://u@a,b/d", [{"host": "a"}, {"host": "b"}]),
        (
            "postgresql://u:x%2Cy@a:1,b:2/d",
            [{"host": "a", "port": 1}, {"host": "b", "port": 2}],
        ),
        (
            "postgresql://u@/d?host=/s/a,/s/b&port=1,2",
            [{"host": "/s/a", "port": 1}, {"host": "/s/b", "port": 2}],
        ),
        (
            "postgresql://u@/d?host=/s/a,b&port=7",
            [{"host": "/s/a", "port": 7}, {"host": "b", "port": 7}],
        ),
    ],
)
def test_the_hosts_of_a_dsn(dsn: str, found: list[dict[str, object]]) -> None:
    assert addresses(parameters_of({"dsn": dsn})) == found


async def test_each_host_is_tried() -> None:
    dsn = "postgresql://u@127.0.0.1:1,[::1]:2/d"
    with pytest.raises(
        StoreUnavailable, match=r"host 127\.0\.0\.1, port 1 or host \[::1\], port 2"
    ):
        await Database({"dsn": dsn}).connect("test")


def test_random_order_of_hosts_keeps_each_port_with_its_host() -> None:
    words = parameters_of({"dsn": "postgresql://u@a:1,b:2,c:3/d?load_balance_hosts=random"})
    ports = {"a": 1, "b": 2, "c": 3}
    orders = [addresses(words) for _ in range(60)]
    assert all({each["host"]: each["port"] for each in order} == ports for order in orders)
    assert len({tuple(each["host"] for each in order) for order in orders}) > 1


@pytest.fixture
async def silent_port() -> AsyncIterator[int]:
    """A server that accepts connections and never answers, like a machine that has vanished."""
    gone = asyncio.Event()

    async def wait(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await gone.wait()
        writer.close()

    listening = await asyncio.start_server(wait, "127.0.0.1", 0)
    yield listening.sockets[0].getsockname()[1]
    gone.set()
    listening.close()
    await asyncio.sleep(0)


async def _tcp(dsn: str) -> tuple[str, str]:
    """Where this run's server listens by TCP, and the database."""
    parts = urlsplit(dsn)
    if not parts.port:
        pytest.skip("this run's server has no TCP port")
    return f"{parts.hostname}:{parts.port}", parts.path


async def test_a_first_host_that_is_silent_does_not_keep_from_the_second(
    dsn: str, silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "CONNECT_TIMEOUT_S", 0.5)
    there, path = await _tcp(dsn)
    database = Database(
        {"dsn": f"postgresql://taskd@127.0.0.1:{silent_port},{there}{path}?sslmode=disable"}
    )
    async with database.connection("test") as connection:
        assert await connection.fetchval("SELECT 1") == 1
    began = time.monotonic()
    async with database.connection("test"):
        # From then on the host that answered is tried first.
        assert time.monotonic() - began < 0.5


async def test_a_host_that_refuses_proves_nothing_about_one_that_is_silent(
    silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "CONNECT_TIMEOUT_S", 0.2)
    dsn = f"postgresql://taskd@127.0.0.1:{silent_port},127.0.0.1:1/d?sslmode=disable"
    with pytest.raises(Silence):
        await Database({"dsn": dsn}).connect("test")


async def test_a_direct_connection_is_not_taken_for_a_pooler(dsn: str) -> None:
    database = Database({"dsn": dsn})
    async with database.connection("test") as connection:
        assert isinstance(connection, asyncpg.Connection)
    assert database.pooled is False
