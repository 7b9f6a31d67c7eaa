"""Texts of other people are texts on every page."""

import asyncio
import re
from html.parser import HTMLParser
from urllib.parse import quote

import pytest

from taskd.core.humanize import printable
from tests.cli.conftest import Shell
from tests.security.hostile import fill
from tests.web.dashboard.test_pages import HOSTILE, enqueue, fail, ok


@pytest.mark.parametrize("place", ["task", "args", "error", "reason", "queue name", "result"])
async def test_hostile_texts_stay_inert(anybody, sql, place):
    task = HOSTILE.replace("\u202e", "").replace("\u2066", "")[:150] if place == "task" else "t"
    args = {HOSTILE: HOSTILE, "long": "x" * 100_000, "nul": "\\u0000"} if place == "args" else {}
    job_id = await enqueue(sql, task, **args)
    if place in ("error", "reason"):
        await fail(sql, job_id, error=HOSTILE, message=HOSTILE + "\n" + "y" * 50_000)
    if place == "result":
        await fail(sql, job_id, state="done")
        await sql.execute(
            "UPDATE taskd.job_history SET result = to_jsonb($1::text)", HOSTILE + "z" * 100_000
        )
    if place == "queue name":
        await sql.execute(
            "INSERT INTO taskd.queue (name, paused_at, pause_reason) VALUES ('q', now(), $1)",
            HOSTILE,
        )
    for path in ("/", "/jobs", f"/jobs/{job_id}", "/queues/email", "/queues/q"):
        text = await ok(anybody, path)
        assert "<script>alert" not in text
        assert "<img" not in text
        assert "onerror=alert(2)>" not in text
        assert "1234321" not in text
        assert "\u202e" not in text
        assert "\u2066" not in text
        assert len(text) < 150_000
    assert printable("\u202e") == "\\u202e"


async def test_every_answer_has_the_headers_that_keep_strangers_texts_inert(anybody):
    for path in ("/", "/nope", "/static/taskd.js", "/login", "/jobs/x"):
        headers = (await anybody.get(path)).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-frame-options"] == "DENY"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "same-origin"
        text = (await anybody.get(path)).text
        assert not re.search(r"\son\w+=|style=|javascript:", text) or path.endswith(".js")


MARK = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'><svg/onload=alert(3)>{{7*191}}"


class Elements(HTMLParser):
    """Collects what a text could have become in a page: elements, attributes and their URLs."""

    def __init__(self):
        super().__init__()
        self.tags, self.events, self.urls = set(), set(), set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag if tag != "script" or dict(attrs).get("src") else "script without src")
        for name, value in attrs:
            if name.startswith("on") or name == "style":
                self.events.add(name)
            if name in ("href", "src", "action"):
                self.urls.add(value)


async def test_a_crawl_of_every_page_finds_no_element_that_a_text_has_made(guarded, sql, dsn):
    filled = await asyncio.to_thread(fill, Shell(dsn), f"{MARK}\u202e\u2028", f"{MARK}\u202e\u2028")
    waiting = [
        "/",
        "/jobs/bulk?action=cancel&queue=email",
        f"/workflows/{filled['workflow']}/cancel",
    ]
    waiting += [f"/jobs?error={quote(MARK)}", f"/jobs?args={quote(MARK)}", f"/{quote(MARK)}"]
    seen, shown = set(), 0
    while waiting:
        path = waiting.pop()
        seen.add(path)
        answer = await guarded.get(path)
        assert answer.status_code < 500, path
        if not answer.headers.get("content-type", "").startswith("text/html"):
            continue
        assert "script-src 'self'" in answer.headers["content-security-policy"]
        page = Elements()
        page.feed(answer.text)
        assert not page.tags & {"img", "iframe", "object", "embed", "script without src"}, path
        assert not page.events, path
        assert not [url for url in page.urls if not url.startswith(("/", "#")) or url[:2] == "//"]
        assert "1337" not in answer.text
        # Values of fields come back with their form, so they stay as they are.
        visible = re.sub(r' value="[^"]*"', "", answer.text)
        assert not [c for c in visible if not c.isprintable() and c != "\n"], path
        shown += "&lt;svg/onload" in answer.text
        waiting += [url for url in page.urls - seen - set(waiting) if url.startswith("/")]
    assert {f"/jobs/{filled['failed']}", "/limits", "/schedules", "/workers"} <= seen
    assert shown > 10


@pytest.mark.parametrize(
    "path",
    [
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/%2e%2e/app.py",
        "/static/....//app.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/static/..\\app.py",
        "/static/taskd.css%00",
        "/static/taskd.css/../../app.py",
        "//etc/passwd",
        "/../../../../etc/passwd",
        "http://127.0.0.1/static/../app.py",
        "/templates/base.html",
    ],
)
async def test_no_path_leads_to_another_file(serve, path):
    site = await serve()
    host, _, port = site.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b" 404 " in head.splitlines()[0]
    assert b"import " not in body
    assert b"root:" not in body
    assert b"{% " not in body
