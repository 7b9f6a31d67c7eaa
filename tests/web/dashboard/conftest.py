"""A dashboard on a free port of this machine, and a browser without eyes."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.web.access import login
from taskd.web.app import make_app
from taskd.web.pages import live
from taskd.web.pages.dashboard import Dashboard
from taskd.web.routes import routes
from taskd.web.server import Server

PASSWORD = "correct horse"


class Browser(httpx.AsyncClient):
    """A client that sends forms as browsers do."""

    async def log_in(self, password: str = PASSWORD, **fields: str) -> httpx.Response:
        return await self.post("/login", data={"password": password} | fields)

    async def csrf(self) -> str:
        page = await self.get("/schedules")
        match = re.search(r'name="csrf" value="([^"]+)"', page.text)
        assert match, "nobody is logged in"
        return match[1]

    async def act(self, path: str, **fields: Any) -> httpx.Response:
        return await self.post(path, data={"csrf": await self.csrf()} | fields)


class Site:
    """A dashboard that is served."""

    def __init__(self, dashboard: Dashboard, server: Server) -> None:
        self.dashboard = dashboard
        self.address = server.address
        self.url = f"http://{server.address}"

    def browser(self, **options: Any) -> Browser:
        return Browser(base_url=self.url, timeout=30.0, **options)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live data is read often here, and passwords are hashed fast."""
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    monkeypatch.setattr(live, "REST", 1.0)
    monkeypatch.setattr(login, "SCRYPT_N", 2)


@pytest.fixture
async def serve(dsn: str) -> AsyncIterator[Callable[..., Any]]:
    """Serves a dashboard: `await serve(password=...)`."""
    async with contextlib.AsyncExitStack() as ends:

        async def start(
            password: str | None = None, *, as_: str = dsn, timeout_s: float = 5.0, **settings: Any
        ) -> Site:
            database = Database({"dsn": as_}, statement_timeout_s=timeout_s)
            dashboard = Dashboard(database, Settings(web_password=password, **settings))
            server = Server(make_app(routes(dashboard)), "127.0.0.1:0")
            running = asyncio.create_task(server.run(), name="served")

            async def stop() -> None:
                await dashboard.live.close()
                server.stop()
                await running
                await dashboard.close()

            ends.push_async_callback(stop)
            return Site(dashboard, server)

        yield start


@pytest.fixture
async def guarded(serve: Callable[..., Any]) -> AsyncIterator[Browser]:
    """A user who has logged in."""
    site = await serve(PASSWORD)
    async with site.browser() as browser:
        answer = await browser.log_in()
        assert answer.status_code == 303
        yield browser


@pytest.fixture
async def anybody(serve: Callable[..., Any]) -> AsyncIterator[Browser]:
    """Anybody, at a dashboard without a password."""
    site = await serve()
    async with site.browser() as browser:
        yield browser
