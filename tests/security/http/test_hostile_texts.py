"""Texts of other people are texts on every page."""

import re

import pytest

from taskd.core.humanize import printable
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
