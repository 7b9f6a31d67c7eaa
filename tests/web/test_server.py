"""The HTTP server: limits for unknown clients, clear errors, an end in time."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from taskd import events
from taskd.config import load
from taskd.errors import ConfigError
from taskd.web import check_installed
from taskd.web import server as web_server
from taskd.web.app import make_app
from taskd.web.server import Server, listen
from taskd.worker.services.supervisor import Supervisor


async def hello(_request: Request) -> Response:
    return PlainTextResponse("hello\n")


async def echo(request: Request) -> Response:
    return Response(await request.body())


async def boom(_request: Request) -> Response:
    raise ZeroDivisionError("oops")


async def endless(_request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536
            await asyncio.sleep(0)

    return StreamingResponse(parts())


ROUTES = [
    Route("/", hello),
    Route("/echo", echo, methods=["POST"]),
    Route("/boom", boom),
    Route("/endless", endless),
]


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    server = Server(make_app(ROUTES), "127.0.0.1:0")
    running = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        server.stop()
        async with asyncio.timeout(10):
            await running


@asynccontextmanager
async def connected(
    server: Server,
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = server.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


def client_of(server: Server) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://{server.address}", trust_env=False)


async def get(server: Server, path: str = "/") -> httpx.Response:
    async with client_of(server) as client:
        return await client.get(path)


async def test_it_answers_and_names_neither_its_software_nor_the_time() -> None:
    async with serving() as server:
        answer = await get(server)
    assert answer.text == "hello\n"
    assert not {"server", "date"} & set(answer.headers)


async def test_no_answer_waits_until_its_head_was_acknowledged() -> None:
    accepted: list[int] = []

    made = web_server._Connection.connection_made

    def connected(self: Any, transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        accepted.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(web_server._Connection, "connection_made", connected)
        async with serving() as server:
            await get(server)
    assert accepted
    assert all(accepted)


async def test_after_a_stop_nobody_listens() -> None:
    async with serving() as server:
        pass
    with pytest.raises(httpx.ConnectError):
        await get(server)


async def test_a_stop_waits_for_no_endless_answer() -> None:
    async with serving() as server, connected(server) as (reader, writer):
        writer.write(b"GET /endless HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readline()
    # serving() has ended, within its timeout.


async def test_the_loop_sleeps_while_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as server:
        await get(server)
        loop = asyncio.get_running_loop()
        timers: list[object] = []
        call_at = loop.call_at
        monkeypatch.setattr(loop, "call_at", lambda *a, **k: timers.append(a) or call_at(*a, **k))
        await asyncio.sleep(0.5)
        assert len(timers) == 1, "more than the test's own sleep"


async def test_a_mistake_in_a_page_is_a_500_and_an_event_and_no_traceback_for_strangers(
    capsys: pytest.CaptureFixture[str],
) -> None:
    emitted: list[tuple[str, object]] = []
    done = events.subscribe(lambda name, fields: emitted.append((name, fields)))
    try:
        async with serving() as server:
            answer = await get(server, "/boom")
            assert (await get(server, "/nowhere")).status_code == 404
    finally:
        done()
    assert answer.status_code == 500
    assert "oops" not in answer.text
    wanted = {"method": "GET", "path": "/boom", "error": "ZeroDivisionError: oops", "times": 1}
    assert ("request.failed", wanted) in emitted
    assert capsys.readouterr().err == ""


async def test_one_that_crashes_is_started_again_on_the_same_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crashed = asyncio.Event()
    serve = web_server._Uvicorn.serve

    async def crash(self: web_server._Uvicorn, sockets: list[socket.socket]) -> None:
        monkeypatch.setattr(web_server._Uvicorn, "serve", serve)
        crashed.set()
        for each in sockets:
            each.close()
        raise ZeroDivisionError

    monkeypatch.setattr(web_server._Uvicorn, "serve", crash)
    server = Server(make_app(ROUTES), "127.0.0.1:0")
    supervisor = Supervisor([[server]])
    supervisor.start()
    await crashed.wait()
    assert (await get(server)).text == "hello\n"
    await supervisor.stop_tier(5.0)


def test_localhost_is_served_on_a_machine_without_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux without IPv6 refuses to create the socket."""
    make = socket.socket

    def without_ipv6(family: int = -1, *args: Any, **kwargs: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return make(family, *args, **kwargs)

    found = [
        (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0)),
        (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0)),
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(socket, "socket", without_ipv6)
    [made] = listen("localhost:0")
    monkeypatch.undo()
    assert made.getsockname()[0] == "127.0.0.1"
    made.close()


def test_a_port_in_use_is_an_error_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"{address}: another process listens there"):
            Server(make_app(), address)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("nohost.invalid:9090", "there is no host"),
        ("192.0.2.1:9090", "this is not an address of this machine"),
    ],
)
def test_a_host_that_is_not_here_is_an_error_of_its_own(address: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Server(make_app(), address)


@pytest.mark.parametrize(
    ("said", "address"),
    [
        ("9090", "127.0.0.1:9090"),
        (9090, "127.0.0.1:9090"),
        (":9090", "127.0.0.1:9090"),
        ("0.0.0.0:9090", "0.0.0.0:9090"),
        ("[::1]:9090", "[::1]:9090"),
        ("localhost:0", "localhost:0"),
        ("off", "off"),
    ],
)
def test_the_setting_is_a_port_of_loopback_or_host_and_port(said: object, address: str) -> None:
    assert load({"http": said}, environ={}).settings.http == address


@pytest.mark.parametrize(
    "said", ["on", "70000", "host", "a b:1", "http://x:1", "::1:9090", "x:", "x:-1", "u@x:1", ""]
)
def test_nonsense_for_the_setting_says_what_is_right(said: str) -> None:
    with pytest.raises(ConfigError, match=r"--http: .* is neither off, a port such as 9090, nor"):
        load({"http": said}, environ={})


def test_a_missing_extra_gives_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    find: Callable[[str], object] = lambda name: None if name == "uvicorn" else object()  # noqa: E731
    monkeypatch.setattr("taskd.web.find_spec", find)
    with pytest.raises(ConfigError, match=r"--http needs uvicorn: pip install 'pgtaskd\[web\]'"):
        check_installed("--http")
