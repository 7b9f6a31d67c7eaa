"""Guesses of passwords end soon, fill no log and keep nobody out."""

import asyncio

import pytest

from taskd.web import line_limit
from taskd.web.access import login
from tests.web.dashboard.conftest import PASSWORD


async def test_guessing_ends_soon(serve):
    site = await serve(PASSWORD)
    async with site.browser() as browser:
        answers = [(await browser.log_in(f"guess {n}")).status_code for n in range(6)]
        assert answers == [403] * 5 + [429]
        # Also the right password: a guesser learns nothing more.
        assert (await browser.log_in()).status_code == 429


async def test_who_guesses_behind_a_proxy_keeps_nobody_else_out(serve):
    site = await serve(PASSWORD, web_proxies=("127.0.0.0/8", "10.0.0.7"))
    async with site.browser() as stranger, site.browser() as owner:
        for n in range(6):
            # What the client itself writes there comes before the addresses that the proxies add.
            stranger.headers["x-forwarded-for"] = f"10.1.1.{n}, 203.0.113.9, 10.0.0.7"
            last = await stranger.log_in(f"guess {n}")
        assert last.status_code == 429
        owner.headers["x-forwarded-for"] = "198.51.100.4"
        assert (await owner.log_in()).status_code == 303


async def test_nobody_is_believed_to_be_elsewhere_but_by_a_proxy_that_is_named(serve):
    site = await serve(PASSWORD, web_proxies=("10.0.0.7",))
    async with site.browser() as browser:
        for n in range(6):
            browser.headers["x-forwarded-for"] = f"203.0.113.{n}"
            last = await browser.log_in(f"guess {n}")
        assert last.status_code == 429


async def test_who_has_logged_in_from_an_address_is_heard_while_strangers_guess_from_many(serve):
    site = await serve(PASSWORD, web_proxies=("127.0.0.1",))
    async with site.browser() as browser:
        browser.headers["x-forwarded-for"] = "198.51.100.4"
        assert (await browser.log_in()).status_code == 303
        for n in range(login.FAILURES_IN_ALL_MAX):
            browser.headers["x-forwarded-for"] = f"2001:db8:0:{n // 4:x}::{n}"
            assert (await browser.log_in(f"guess {n}")).status_code == 403
        browser.headers["x-forwarded-for"] = "2001:db8:ffff::1"
        assert (await browser.log_in()).status_code == 429
        browser.headers["x-forwarded-for"] = "198.51.100.4"
        assert (await browser.log_in()).status_code == 303


async def test_guesses_fill_no_log(serve, emitted, monkeypatch):
    monkeypatch.setattr(line_limit, "LINES_S", 0.5)
    monkeypatch.setattr(line_limit, "LINES_MAX", 3)
    site = await serve(PASSWORD)
    async with site.browser() as browser:
        for n in range(9):
            await browser.log_in(f"guess {n}")
        async with asyncio.timeout(30):
            while sum(fields["times"] for name, fields in emitted if name == "login.refused") < 9:
                await asyncio.sleep(0.05)
    lines = [fields["times"] for name, fields in emitted if name == "login.refused"]
    assert lines[:3] == [1, 1, 1]
    assert len(lines) < 9
    site.dashboard.refusals.log("a", "b", "c")
    for _ in range(9):
        site.dashboard.refusals.log("a", "b", "c")
    # The rest is logged at the end, too.
    site.dashboard.refusals.log_rest()
    assert sum(fields["times"] for name, fields in emitted if name == "login.refused") == 19


@pytest.mark.parametrize("to", ["//evil.example", "/\\evil.example", "https://evil.example", "x"])
async def test_a_login_leads_nowhere_else(serve, to):
    site = await serve(PASSWORD)
    async with site.browser() as browser:
        answer = await browser.post("/login", params={"next": to}, data={"password": PASSWORD})
        assert answer.headers["location"] == "/"
