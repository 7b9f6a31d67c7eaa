"""Clients that send or read slowly, too much or nonsense hold no socket that others need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from taskd.web import app as web_app
from taskd.web import server as web_server
from tests.web.test_server import client_of, connected, get, serving


@pytest.mark.parametrize(
    "sent", [b"", b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"]
)
async def test_many_sockets_that_say_nothing_more_do_not_keep_a_probe_out(sent: bytes) -> None:
    async with serving() as server:
        host, _, port = server.address.rpartition(":")
        silent = []
        for _ in range(web_server.CONNECTIONS_MAX + 20):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            silent.append((reader, writer))
        assert (await get(server)).text == "hello\n"
        # The oldest connections were closed for it.
        assert await silent[0][0].read() == b""
        for _, writer in silent:
            writer.close()


@pytest.mark.parametrize(
    "sent", [b"", b"GET / HT", b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\nabc"]
)
async def test_a_request_that_does_not_come_whole_in_time_is_cut_off(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web_server, "REQUEST_S_MAX", 0.2)
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(sent)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_the_second_request_of_a_connection_has_to_come_whole_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(web_server, "REQUEST_S_MAX", 0.2)
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in await reader.readuntil(b"hello\n")
        writer.write(b"GET / HT")
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)


async def test_an_idle_connection_is_closed_and_not_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert web_server.KEEP_ALIVE_S < web_server.REQUEST_S_MAX
    monkeypatch.setattr(web_server, "KEEP_ALIVE_S", 0.1)
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"200" in await reader.readuntil(b"hello\n")
        assert await asyncio.wait_for(reader.read(), 5.0) == b""


async def test_a_client_that_reads_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "WRITE_S_MAX", 0.2)
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.sleep(1.0)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1 << 30)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x00\xff\n\r\n" * 10,
        b"GET / HTTP/1.1\r\nhost: x\r\nlong: " + b"x" * 40_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
        b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
async def test_nonsense_and_heads_that_are_too_long_are_refused(sent: bytes) -> None:
    async with serving() as server:
        async with connected(server) as (reader, writer):
            writer.write(sent)
            with suppress(ConnectionResetError):  # closed with some of it unread
                assert b" 400 " in await reader.readline()
        assert (await get(server)).status_code == 200


async def test_a_body_that_is_too_large_is_refused_whether_or_not_its_length_was_given() -> None:
    async def parts() -> AsyncIterator[bytes]:
        for _ in range(web_app.BODY_BYTES_MAX // 1000 + 2):
            yield b"x" * 1000

    async with serving() as server, client_of(server) as client:
        small = await client.post("/echo", content=b"x" * 1000)
        large = await client.post("/echo", content=b"x" * (web_app.BODY_BYTES_MAX + 1))
        suppressed = await client.post("/echo", content=parts())
    assert (small.status_code, len(small.content)) == (200, 1000)
    assert (large.status_code, suppressed.status_code) == (413, 413)
