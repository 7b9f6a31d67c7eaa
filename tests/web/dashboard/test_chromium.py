"""The dashboard in a real browser: its own policy refuses nothing, keys work, it is live."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.web import busy_database
from tests.web.dashboard.conftest import PASSWORD
from tests.web.dashboard.test_pages import HOSTILE, enqueue, fail

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt install chromium)"),
    pytest.mark.timeout(240),
]

# The contrast of each visible text with its background, as WCAG computes it.
CONTRAST = r"""
() => {
  const channels = (text) => { const c = text.match(/[\d.]+/g).map(Number); return c.length > 3 ? c : [...c, 1]; };
  const over = (top, under) => [0, 1, 2].map((n) => top[n] * top[3] + under[n] * (1 - top[3])).concat(1);
  const light = (c) => { const [r, g, b] = c.map((v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; }); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (each) => { const all = []; for (let at = each; at; at = at.parentElement) all.push(channels(getComputedStyle(at).backgroundColor)); return all.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]); };
  const found = [];
  for (const each of document.querySelectorAll("body *:not(svg *)")) {
    const text = [...each.childNodes].filter((n) => n.nodeType === 3 && n.textContent.trim()).map((n) => n.textContent.trim()).join(" ");
    const box = each.getBoundingClientRect();
    if (!text || !box.width || box.height < 2 || getComputedStyle(each).visibility === "hidden") continue;
    const ground = behind(each), ink = over(channels(getComputedStyle(each).color), ground);
    const [a, b] = [light(ink), light(ground)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${ratio.toFixed(2)} ${each.className} ${text.slice(0, 40)}`);
  }
  return found;
}
"""  # noqa: E501


class Tab:
    """A tab, and what its console has complained about."""

    def __init__(self, page: Any, url: str) -> None:
        self.page, self.url = page, url
        self.trouble: list[str] = []
        page.on("console", lambda said: said.type == "error" and self.trouble.append(said.text))
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        page.on("dialog", lambda dialog: self.trouble.append(f"dialog {dialog.message}"))

    async def go(self, path: str) -> None:
        await self.page.goto(self.url + path)

    async def text(self) -> str:
        return str(await self.page.inner_text("body"))


@pytest.fixture
async def chromium() -> AsyncIterator[Any]:
    # A root has no sandbox of its own to run it in.
    options = ["--no-sandbox"] if os.getuid() == 0 else []
    async with playwright.async_playwright() as tool:
        browser = await tool.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        await browser.close()


@contextlib.asynccontextmanager
async def tab(chromium: Any, site: Any, **options: Any) -> AsyncIterator[Tab]:
    context = await chromium.new_context(**options)
    try:
        yield Tab(await context.new_page(), site.url)
    finally:
        await context.close()


async def test_pages_are_seen_on_a_desk_on_a_phone_and_in_the_dark(chromium, serve, sql):
    await busy_database.history(sql, 600)
    ids = await busy_database.live(sql) | await busy_database.workflow(sql)
    site = await serve()
    jobs = [f"/jobs/{ids[name]}" for name in ("retrying", "running", "merge")]
    paths = ["/", "/jobs?state=failed", "/queues/email", "/schedules", "/workers", *jobs]
    paths.append(f"/workflows/{ids['workflow']}")
    paths += await limits(sql)
    few = [paths[0], paths[1], paths[5], paths[7], *paths[-2:]]
    for width, scheme, which in ((1280, "light", paths), (360, "light", few), (1280, "dark", few)):
        size = {"width": width, "height": 800}
        async with tab(chromium, site, viewport=size, color_scheme=scheme) as each:
            for path in which:
                await each.go(path)
                wider = "document.documentElement.scrollWidth - innerWidth"
                assert await each.page.evaluate(wider) <= 0, (path, width)
                assert await each.page.evaluate(CONTRAST) == [], (path, scheme)
            assert each.trouble == []


async def limits(sql: Any) -> list[str]:
    """A limit with a key from untrusted input, a used one, and their pages."""
    await sql.execute(
        "INSERT INTO taskd.job_limit (name, concurrency, rate, burst, by_hand) "
        "VALUES ('provider', 2, 5, 10, true)"
    )
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, worker_id, started_at, limit_name, limit_key) "
        "VALUES ('email', 't', 'running', 7001, now(), 'provider', 'account 7'), "
        "('email', 't', 'blocked', NULL, NULL, 'provider', $1)",
        HOSTILE,
    )
    return ["/limits", "/limits/keys?name=provider"]


async def test_everything_but_what_is_live_works_without_script(chromium, serve, sql):
    await busy_database.history(sql, 200)
    site = await serve(PASSWORD)
    failed = await enqueue(sql)
    await fail(sql, failed)
    async with tab(chromium, site, java_script_enabled=False) as each:
        await each.go("/jobs?state=failed")
        await each.page.fill("input[name=password]", PASSWORD)
        await each.page.click("form.login button")
        assert each.page.url.endswith("/jobs?state=failed")
        await each.go(f"/jobs/{failed}")
        await each.page.click("text=Retry now")
        assert f"job {failed} was retried" in await each.text()
        await each.page.click("text=Cancel…")
        await each.page.click("text=Cancel the job")
        assert f"job {failed} was cancelled" in await each.text()


async def test_the_forms_of_actions_fit_on_a_phone(chromium, serve, sql):
    run = await busy_database.ended_run(sql)
    running = (await busy_database.live(sql))["running"]
    site = await serve(PASSWORD)
    async with tab(chromium, site, viewport={"width": 360, "height": 800}) as each:
        await each.go(f"/workflows/{run}")
        await each.page.fill("input[name=password]", PASSWORD)
        await each.page.click("form.login button")
        for path in (f"/workflows/{run}", f"/jobs/{running}"):
            await each.go(path)
            for act in await each.page.locator("details.act").all():
                await act.locator("summary").click()
                box = await act.locator("form").bounding_box()
                assert 0 <= box["x"] <= box["x"] + box["width"] <= 360, (path, box)
                await act.locator("summary").click()


async def test_hostile_texts_do_nothing_in_a_browser(chromium, serve, sql):
    job_id = await enqueue(sql, HOSTILE[:60], **{HOSTILE: HOSTILE})
    await fail(sql, job_id, error=HOSTILE, message=HOSTILE)
    await sql.execute(
        "INSERT INTO taskd.queue (name, paused_at, pause_reason) VALUES ('q', now(), $1)", HOSTILE
    )
    site = await serve()
    async with tab(chromium, site) as each:
        for path in ("/", "/jobs", f"/jobs/{job_id}", "/queues/q"):
            await each.go(path)
            assert await each.page.locator("img").count() == 0
        assert each.trouble == []
        # Nor would it if it got through: the policy runs no script that stands in the page.
        await each.page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.bad=1\">')"
        )
        await asyncio.sleep(0.2)
        assert await each.page.evaluate("window.bad") is None
        assert any("Content Security Policy" in said for said in each.trouble)


async def test_the_overview_is_live_and_a_job_too(chromium, serve, sql):
    site = await serve()
    async with tab(chromium, site) as each:
        await each.go("/")
        await each.page.wait_for_selector("#sign.good")
        job_id = await enqueue(sql, queue="fresh")
        await each.page.wait_for_selector("a.go:has-text('fresh')")
        assert "No live worker serves fresh" in await each.text()
        await each.go(f"/jobs/{job_id}")
        await each.page.wait_for_selector("#sign.good")
        await fail(sql, job_id)
        await each.page.wait_for_selector("h1 .state.failed")
        assert each.trouble == []


async def test_a_job_with_errors_is_live_and_what_is_folded_stays_folded(chromium, serve, sql):
    job_id = (await busy_database.live(sql))["retrying"]
    site = await serve()
    async with tab(chromium, site) as each:
        await each.go(f"/jobs/{job_id}")
        await each.page.click("#error-2 summary")
        await sql.execute(
            "UPDATE taskd.job SET state = 'running', worker_id = 7001, attempt = 4, fence = 4, "
            "started_at = now() WHERE id = $1",
            job_id,
        )
        # Rows under the reader's eyes are not removed.
        await each.page.wait_for_selector("#sign:has-text('changed: click')")
        assert await each.page.is_visible("h1 .state.scheduled")
        await each.page.click("h1")
        await each.page.wait_for_selector("h1 .state.running")
        opened = "[...document.querySelectorAll('details.error[open]')].map((each) => each.id)"
        assert await each.page.evaluate(opened) == ["error-3", "error-2"]
        assert each.trouble == []


async def test_a_page_with_an_open_form_says_that_the_form_must_be_closed(chromium, serve, sql):
    job_id = await enqueue(sql)
    site = await serve(PASSWORD)
    async with tab(chromium, site) as each:
        await each.go(f"/jobs/{job_id}")
        await each.page.fill("input[name=password]", PASSWORD)
        await each.page.keyboard.press("Enter")
        await each.page.click("summary:has-text('Cancel…')")
        await each.page.wait_for_selector("#sign.good")
        await fail(sql, job_id)
        await each.page.wait_for_selector("#sign:has-text('changed: close the form')")
        await each.page.click("summary:has-text('Cancel…')")
        await each.page.click("h1")
        await each.page.wait_for_selector("h1 .state.failed")
        assert each.trouble == []


async def test_keys_lead_everywhere(chromium, serve, sql):
    first = await enqueue(sql)
    second = await enqueue(sql)
    site = await serve()
    async with tab(chromium, site) as each:
        await each.go("/")
        await each.page.keyboard.press("Tab")
        assert await each.page.evaluate("document.activeElement.className") == "skip"
        await each.page.keyboard.press("Enter")
        assert await each.page.evaluate("document.activeElement.id") == "main"
        await each.page.keyboard.press("g")
        await each.page.keyboard.press("j")
        await each.page.wait_for_url(re.compile("/jobs$"))
        for _ in range(2):
            await each.page.keyboard.press("j")
        focus = "getComputedStyle(document.activeElement).outlineStyle"
        assert await each.page.evaluate(focus) == "solid"
        await each.page.keyboard.press("Enter")
        await each.page.wait_for_url(re.compile(f"/jobs/{min(first, second)}$"))
        await each.page.keyboard.press("?")
        assert await each.page.locator("dialog[open]").count() == 1
        await each.page.keyboard.press("Escape")
        await each.page.keyboard.press("/")
        await each.page.keyboard.type(str(second))
        await each.page.keyboard.press("Enter")
        await each.page.wait_for_url(re.compile(f"/jobs/{second}$"))
        assert each.trouble == []


async def test_a_login_in_a_browser_lasts_and_ends(chromium, serve, sql):
    job_id = await enqueue(sql)
    await busy_database.workflow(sql)
    site = await serve(PASSWORD)
    async with tab(chromium, site, viewport={"width": 360, "height": 700}) as each:
        await each.go(f"/jobs/{job_id}")
        await each.page.fill("input[name=password]", PASSWORD)
        await each.page.keyboard.press("Enter")
        # The page of the login has the address of this one in its own.
        await each.page.wait_for_selector("text=Log out")
        assert each.page.url.endswith(f"/jobs/{job_id}")
        [cookie] = await each.page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")
        # A link elsewhere, in the message of an alert, leads to the page and to no login.
        await each.page.goto(f"data:text/html,<a href={site.url}/jobs/{job_id}>job</a>")
        await each.page.click("a")
        await each.page.wait_for_selector("text=Log out")
        await each.page.click("summary:has-text('Cancel…')")
        await each.page.fill("form[action$='/cancel'] input[name=reason]", "<i>enough</i>")
        await each.page.click("text=Cancel the job")
        assert "cancelled by admin: <i>enough</i>" in await each.text()
        await each.go("/schedules")
        assert await each.page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
        await each.page.click("text=Run now >> nth=0")
        assert "enqueued 1 job" in await each.text()
        await each.page.click("text=Log out")
        await each.go("/")
        assert "Password" in await each.text()
