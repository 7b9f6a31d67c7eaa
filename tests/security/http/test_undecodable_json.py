"""No value in a row takes a page from the operator."""

from __future__ import annotations

import html
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from taskd.web.pages.render import TEXT_CHARS_MAX
from tests.logins import Logins
from tests.security.undecodable import DEEP, SECRET, VALUES, producers_job, publish, run
from tests.web.dashboard.conftest import Browser


@pytest.fixture
async def producer(logins: Logins) -> AsyncIterator[Any]:
    """A connection that may do nothing but enqueue."""
    connection = await asyncpg.connect(logins.dsn("producer"))
    yield connection
    await connection.close()


async def shown(browser: Browser, path: str) -> str:
    answer = await browser.get(path)
    assert answer.status_code == 200, (path, answer.text)
    assert SECRET not in answer.text
    return html.unescape(answer.text)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
async def test_a_job_is_shown_and_cancelled_whatever_its_arguments_are(
    guarded: Browser, producer: Any, sql: Any, value: str
) -> None:
    await publish(sql)
    one, two = [await producers_job(producer, value) for _ in range(2)]
    page = await shown(guarded, f"/jobs/{one}")
    assert '"***"' in page
    assert ("[" * 9000 in page) or ("1" + "0" * 9000 in page)
    assert "more characters" in page
    assert len(page) < 2 * TEXT_CHARS_MAX
    await shown(guarded, "/jobs?args=text")
    assert f'href="/jobs/{two}"' in await shown(guarded, "/jobs/bulk?action=cancel&queue=email")
    fields = {"action": "cancel", "queue": "email", "state": "queued", "asked_at": "0"}
    assert (await guarded.act("/jobs/bulk", **fields)).status_code == 303
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") in (0, 2)
    assert (await guarded.act(f"/jobs/{one}/cancel")).status_code == 303
    assert await sql.fetchval("SELECT state FROM taskd.jobs WHERE id = $1", one) == "cancelled"


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
async def test_a_result_errors_and_log_lines_of_any_form_leave_the_page_of_their_job(
    guarded: Browser, producer: Any, sql: Any, value: str
) -> None:
    await publish(sql)
    job_id = await producers_job(producer, value)
    await run(sql, job_id, value)
    page = await shown(guarded, f"/jobs/{job_id}")
    assert "errors in an unknown form" in page
    assert "lines in an unknown form" in page
    await shown(guarded, "/")
    assert "it failed" in await shown(guarded, "/jobs/bulk?action=retry&queue=email")


@pytest.mark.parametrize("stages", [f"[{DEEP}]", '[{"name": [1e131071]}, 7]', '{"a": 1}'])
async def test_a_plan_of_any_form_leaves_the_page_of_its_workflow(
    guarded: Browser, producer: Any, sql: Any, stages: str
) -> None:
    run_id, job_id = await producer.fetchval(
        """
        SELECT taskd.enqueue_workflow('w', 'pipeline', $1::text::jsonb, '{t}', '{email}', '{"{}"}',
            '{100}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}',
            '{NULL}', '{a}', '{}', '{}', '{}', '{}')
        """,
        stages,
    )
    for path in (f"/workflows/{run_id}", f"/jobs/{job_id}", "/workflows"):
        await shown(guarded, path)


async def test_json_of_many_levels_is_not_indented_to_a_page_of_megabytes(
    guarded: Browser, producer: Any, sql: Any
) -> None:
    await publish(sql)
    value = "[" * 900 + ",".join("1" * 60_000) + "]" * 900
    job_id = await producers_job(producer, value)
    assert len(await shown(guarded, f"/jobs/{job_id}")) < 2 * TEXT_CHARS_MAX
