"""Who has no login can neither fill the log nor guess passwords for long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from taskd.web import line_limit
from taskd.web.access import login
from taskd.web.access.login import hashed
from taskd.web.pages import views
from tests.web.dashboard.conftest import PASSWORD

CLIENTS = 300


async def leave_early(address: str, sent: bytes) -> None:
    """Send the beginning of a request, and close the connection."""
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("path", ["/login", "/jobs/1/cancel", "/logout", "/nowhere"])
async def test_clients_that_go_away_are_no_failures(
    serve: Callable[..., Any], emitted: list[Any], path: str
) -> None:
    site = await serve(PASSWORD)
    head = f"POST {path} HTTP/1.1\r\nhost: {site.address}\r\ncontent-length: 9\r\n"
    form = "content-type: application/x-www-form-urlencoded\r\n\r\na"
    for _ in range(CLIENTS):
        await leave_early(site.address, (head + form).encode())
    async with site.browser() as browser:
        # The server has read the ends of all connections when it answers a later one.
        assert (await browser.get("/login")).status_code == 200
        assert (await browser.log_in()).status_code == 303
    assert [name for name, _ in emitted] == ["http.listening", "login.accepted"]


async def test_pages_that_fail_for_everybody_fill_no_log(
    serve: Callable[..., Any], emitted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(_board: object, _request: object) -> Any:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(views, "jobs", fails)
    monkeypatch.setattr(line_limit, "LINES_S", 0.5)
    site = await serve()
    async with site.browser() as browser:
        for _ in range(30):
            assert (await browser.get("/jobs")).status_code == 500
        async with asyncio.timeout(30):
            while sum(of["times"] for name, of in emitted if name == "request.failed") < 30:
                await asyncio.sleep(0.05)
    failed = [of for name, of in emitted if name == "request.failed"]
    assert len(failed) < 30
    assert {of["path"] for of in failed} == {"/jobs"}


async def test_who_must_wait_is_told_for_how_long(serve: Callable[..., Any]) -> None:
    site = await serve(PASSWORD)
    async with site.browser() as browser:
        for n in range(login.FAILURES_MAX):
            assert "retry-after" not in (await browser.log_in(f"guess {n}")).headers
        answer = await browser.log_in("guess")
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= login.FAILURES_S


async def test_a_user_cannot_guess_anothers_password_between_logins(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    file = tmp_path / "passwords"
    file.write_text(f"ada:{hashed('ada has a password')}\nbob:{hashed('bob has another')}\n")
    site = await serve(web_password_file=file)
    checked = 0
    async with site.browser() as bob:
        for n in range(60):
            if n % 4 == 0:
                await bob.log_in("bob has another", name="bob")
            checked += (await bob.log_in(f"guess {n}", name="ada")).status_code == 403
    assert checked == login.FAILURES_MAX


async def test_refused_addresses_displace_no_failures(
    serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(login, "ADDRESSES_MAX", login.FAILURES_IN_ALL_MAX + 10)
    site = await serve(PASSWORD, web_proxies=("127.0.0.1",))
    began = time.monotonic()
    checked = 0
    async with site.browser() as browser:
        browser.headers["x-forwarded-for"] = "198.51.100.4"
        assert (await browser.log_in()).status_code == 303
        for _ in range(3):
            for n in range(200):
                browser.headers["x-forwarded-for"] = f"2001:db8:0:{n:x}::1"
                checked += (await browser.log_in("guess")).status_code == 403
            for _ in range(10):
                browser.headers["x-forwarded-for"] = "198.51.100.4"
                checked += (await browser.log_in("guess")).status_code == 403
    assert time.monotonic() - began < login.FAILURES_S
    assert checked == login.FAILURES_IN_ALL_MAX + login.FAILURES_MAX
