"""Every route of the dashboard, with hostile paths, queries, forms and headers: no 500, no secret."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.routing import Mount, Route

from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.web.access import login
from taskd.web.app import make_app
from taskd.web.pages import live
from taskd.web.pages.dashboard import Dashboard
from taskd.web.routes import routes
from taskd.web.server import Server
from tests.conftest import TestServer
from tests.fuzz import strategies as odd
from tests.fuzz.conftest import Ground
from tests.fuzz.test_roles import SECRET, SEEDS
from tests.fuzz.test_sql import MOMENTS, NUMBERS

PASSWORD = "correct horse"
BODY_BYTES_MAX = 2 * 1024 * 1024
# A stream without an end; tests/security tries it.
STREAM = "/live"
FIELDS = [
    "action", "after", "before", "csrf", "error", "every", "for", "for_s", "key", "limit", "name", "next", "older_than",
    "page", "parts", "password", "queue", "reason", "since", "stage", "state", "task", "to", "until", "x",
]  # fmt: skip

texts = st.one_of(
    odd.storable_texts,
    st.sampled_from(["private", "1", "1000001", "queued", "failed", *NUMBERS, *MOMENTS]),
    st.sampled_from(["x" * 5000, "%00", "%ff", "../../etc/passwd", "//evil.example", "1h"]),
)
fields = st.dictionaries(st.one_of(st.sampled_from(FIELDS), odd.storable_texts), texts, max_size=5)
headers = st.dictionaries(
    st.sampled_from(["Origin", "Referer", "Cookie", "X-Forwarded-For", "Accept", "Range", "If-Modified-Since"]),
    st.sampled_from(["null", "http://evil.example", "taskd_session=x", "bytes=0-99999999999", "\x80", "x" * 500]),
    max_size=2,
)  # fmt: skip


class Site:
    """A dashboard with rows of somebody, a stranger and a user who has logged in."""

    def __init__(self, ground: Ground) -> None:
        self.ground = ground
        database = Database({"dsn": ground.dsn}, statement_timeout_s=5.0)
        self.board = Dashboard(database, Settings(web_password=PASSWORD))
        [mount] = routes(self.board)
        assert isinstance(mount, Mount)
        self.routes = [
            (method, route.path)
            for route in mount.routes
            if isinstance(route, Route) and route.path != STREAM
            for method in sorted(route.methods or ())
        ]
        ground.run(ground.sql.execute(SEEDS))
        ground.run(self._start())

    async def _start(self) -> None:
        self.server = Server(make_app(routes(self.board)), "127.0.0.1:0")
        self.running = asyncio.create_task(self.server.run(), name="served")
        url = f"http://{self.server.address}"
        self.stranger = httpx.AsyncClient(base_url=url, timeout=30.0)
        self.user = httpx.AsyncClient(base_url=url, timeout=30.0)
        answer = await self.user.post("/login", data={"password": PASSWORD})
        assert answer.status_code == 303
        page = await self.user.get("/schedules")
        [self.csrf] = set(re.findall(r'name="csrf" value="([^"]+)"', page.text))

    async def close(self) -> None:
        await self.stranger.aclose()
        await self.user.aclose()
        await self.board.live.close()
        self.server.stop()
        await self.running
        await self.board.close()


@pytest.fixture(scope="module")
def site(server: TestServer, ground: Ground) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(login, "SCRYPT_N", 2)
        patch.setattr(live, "EVERY_S", 0.05)
        made = Site(ground)
        yield made
        ground.run(made.close())


@pytest.mark.parametrize("who", ["stranger", "user"])
@odd.examples(60)
@given(data=st.data())
def test_a_request_gets_an_answer_that_tells_nothing(
    site: Site, who: str, data: st.DataObject
) -> None:
    method, template = data.draw(st.sampled_from(site.routes))
    path = re.sub(r"\{[^}]*\}", lambda _: quote(data.draw(texts), safe="/"), template)
    form = data.draw(fields)
    if who == "user" and data.draw(st.booleans()):
        form["csrf"] = site.csrf
    sent: dict[str, Any] = {"params": data.draw(fields)}
    if method == "POST":
        sent["data"] = form
    more = {name: value.encode("latin-1") for name, value in data.draw(headers).items()}
    client = site.user if who == "user" else site.stranger
    if who == "user":
        more.pop("Cookie", None)
    try:
        answer = site.ground.run(client.request(method, path, headers=more, **sent))
    except httpx.InvalidURL:
        return
    assert answer.status_code < 500, (method, path, answer.text[:500])
    assert "Traceback" not in answer.text
    assert len(answer.content) <= BODY_BYTES_MAX
    assert SECRET not in answer.text, "the task redacts it, and strangers see no page"
    to = answer.headers.get("location", "/")
    assert to.startswith("/")
    assert not to.startswith(("//", "/\\"))
