"""Whatever a producer calls a queue or a limit, it has a page, and no command runs its name."""

from __future__ import annotations

import html
import re
import shlex
from typing import Any

import asyncpg
import pytest

from tests.web.dashboard.conftest import Browser

NAMES = (
    "..", ".", "a/../b", "/", "a?b=c#d", "%2e%2e", "x; touch owned", "$(touch owned)",
    "'; touch owned; '", "<script>alert(1)</script>", "\u202eevil",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
async def test_every_limit_has_a_page_and_its_commands_quote_its_name(
    anybody: Browser, sql: Any, name: str
) -> None:
    job_id = await sql.fetchval(
        "INSERT INTO taskd.job (queue, task, args, state, limit_name, limit_key) "
        "VALUES ('q', 't', '{}', 'blocked', $1, 'k') RETURNING id",
        name,
    )
    await sql.execute("INSERT INTO taskd.job_limit (name, concurrency) VALUES ($1, 1)", name)
    for path in ("/limits", f"/jobs/{job_id}"):
        page = (await anybody.get(path)).text
        found = re.search(r'href="(/limits/[^"]+)"', page)
        assert found, path
        # As browsers do, httpx resolves `..` in paths.
        answer = await anybody.get(html.unescape(found[1]))
        assert answer.status_code == 200
        assert '<span class="cut">k</span>' in answer.text
        assert "<script>alert" not in answer.text
    commands = re.findall(r"<code>(taskd limits [^<]+)</code>", answer.text)
    assert len(commands) == 2
    assert {len(shlex.split(html.unescape(each))) for each in commands} == {4}


@pytest.mark.parametrize("name", [".", "..", "...."])
async def test_no_queue_is_named_by_dots_alone(sql: Any, name: str) -> None:
    with pytest.raises(asyncpg.CheckViolationError):
        await sql.execute("SELECT $1::text::taskd.queue_name", name)
    for fine in ("..a", "a..", ".-.", "a", "0", "a" * 48):
        await sql.execute("SELECT $1::text::taskd.queue_name", fine)


async def test_the_overview_names_few_of_many_queues_that_nobody_serves(
    anybody: Browser, sql: Any
) -> None:
    await sql.execute(
        "INSERT INTO taskd.job (queue, task) SELECT 'q' || g, 't' FROM generate_series(1, 3000) g"
    )
    page = (await anybody.get("/")).text
    assert page.count("No live worker serves <a") == 10
    assert "No live worker serves 990 more queues" in page
