"""Probes are answered, however many clients request slow pages."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, Response

from taskd.web import server as web_server
from taskd.web.metrics.exposition import SCRAPES_MAX
from taskd.web.pages import views
from taskd.web.pages.live import VIEWERS_MAX
from taskd.web.routes import PAGES_MAX
from tests.web.conftest import Serve, Served


async def ask(served: Served, ends: AsyncExitStack, path: str) -> asyncio.Task[bytes]:
    """A request on a connection of its own; the first line of its answer will follow."""
    host, _, port = served.endpoint.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    ends.callback(writer.close)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
    return asyncio.create_task(reader.readline())


async def refused(asked: list[asyncio.Task[bytes]], number: int) -> set[asyncio.Task[bytes]]:
    """Wait until `count` requests were answered, all with 503; return the ones that still wait."""
    left = set(asked)
    async with asyncio.timeout(60):
        while len(asked) - len(left) < number:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                assert b" 503 " in each.result()
    return left


def test_what_takes_a_while_leaves_room_for_whoever_comes() -> None:
    room = web_server.CONNECTIONS_MAX - PAGES_MAX - SCRAPES_MAX
    assert room > web_server.BACKLOG
    assert VIEWERS_MAX < PAGES_MAX


async def test_a_flood_of_pages_is_asked_to_come_back_and_probes_are_answered(
    serve_worker: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = web_server.CONNECTIONS_MAX + 40
    gate = asyncio.Event()

    async def held_up(_board: object, _request: object) -> Response:
        await gate.wait()
        return PlainTextResponse("at last")

    monkeypatch.setattr(views, "jobs", held_up)
    async with serve_worker() as served, AsyncExitStack() as ends:
        # Refused connections become idle, and make room for others.
        asked = [await ask(served, ends, "/jobs") for _ in range(number)]
        left = await refused(asked, number - PAGES_MAX)
        assert len(left) == PAGES_MAX
        assert await served.get("/livez") == (200, "alive")
        assert (await served.get("/readyz"))[0] == 200
        assert (await served.get("/metrics?database=off"))[0] == 200
        busy = await served.client.get("/workers")
        assert (busy.status_code, busy.headers["retry-after"]) == (503, "5")
        assert "content-security-policy" in busy.headers
        gate.set()
        async with asyncio.timeout(60):
            assert all(b" 200 " in line for line in await asyncio.gather(*left))
        assert (await served.get("/workers"))[0] == 200


async def test_a_flood_of_streams_leaves_room_for_pages(serve_worker: Serve, sql: Any) -> None:
    async with serve_worker() as served, AsyncExitStack() as ends:
        asked = [await ask(served, ends, "/live?parts=tiles") for _ in range(VIEWERS_MAX + 80)]
        async with asyncio.timeout(60):
            lines = await asyncio.gather(*asked)
        assert sum(b" 200 " in line for line in lines) == VIEWERS_MAX
        assert sum(b" 503 " in line for line in lines) == 80
        assert (await served.get("/jobs"))[0] == 200
        assert await served.get("/livez") == (200, "alive")


async def test_forms_that_never_come_whole_keep_no_page_out(serve_worker: Serve, sql: Any) -> None:
    sent = b"POST /login HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\nabc"
    async with serve_worker(web_password="correct horse") as served, AsyncExitStack() as ends:
        host, _, port = served.endpoint.address.rpartition(":")
        for _ in range(PAGES_MAX + 20):
            _, writer = await asyncio.open_connection(host, int(port))
            ends.callback(writer.close)
            writer.write(sent)
        assert (await served.get("/login"))[0] == 200
        assert await served.get("/livez") == (200, "alive")
