"""A real HTTP server that answers as a test wants, and records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass
class Asked:
    method: str
    path: str
    headers: Any
    body: bytes


@dataclass
class Server:
    """Answers with `answer`, by default 200 and nothing."""

    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def url(self, path: str = "/hook", host: str = "localhost") -> str:
        return f"http://{host}:{self.port}{path}"

    def answers(self, status: int, text: str = "", **headers: str) -> None:
        async def answer(_request: web.Request) -> web.StreamResponse:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return web.Response(status=status, text=text, headers=named)

        self.answer = answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.asked.append(Asked(request.method, request.path_qs, request.headers.copy(), body))
        if self.answer is None:
            return web.Response()
        try:
            return await self.answer(request)
        except asyncio.CancelledError:
            self.gone.set()
            raise


@asynccontextmanager
async def serving() -> AsyncIterator[Server]:
    made = Server()
    server = web.Server(made.handle, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
    try:
        yield made
    finally:
        await runner.cleanup()
