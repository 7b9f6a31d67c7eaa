"""Nobody acts without a login, and no other site acts for a user who has one."""

import pytest

from tests.web.dashboard.conftest import PASSWORD
from tests.web.dashboard.test_acting import ACTIONS, state
from tests.web.dashboard.test_pages import enqueue


async def test_without_a_password_nobody_acts(anybody, sql):
    job_id = await enqueue(sql)
    for path in ACTIONS:
        answer = await anybody.post(path, data={"csrf": ""})
        assert answer.status_code == 400, path
        assert "no password is set" in answer.text
    assert await state(sql, job_id) == "queued"
    assert "Cancel" not in (await anybody.get(f"/jobs/{job_id}")).text
    assert "read-only" in (await anybody.get("/")).text


async def test_with_a_password_nothing_is_shown_or_done_without_a_login(serve, sql):
    job_id = await enqueue(sql)
    site = await serve(PASSWORD)
    async with site.browser() as browser:
        for path in (
            "/",
            "/jobs",
            f"/jobs/{job_id}",
            "/workers",
            "/live?parts=tiles",
            "/jobs/bulk",
        ):
            answer = await browser.get(path)
            assert answer.status_code == 303, path
            assert answer.headers["location"].startswith("/login?next=/")
        for path in ACTIONS:
            assert (await browser.post(path, data={})).status_code == 303, path
        assert (await browser.get("/static/taskd.css")).status_code == 200
    assert await state(sql, job_id) == "queued"


async def test_a_form_without_its_token_does_nothing(guarded, sql):
    job_id = await enqueue(sql)
    for csrf in ("", "x", "ä"):
        answer = await guarded.post(f"/jobs/{job_id}/cancel", data={"csrf": csrf})
        assert answer.status_code == 400
        assert "earlier login" in answer.text
    json = await guarded.post(f"/jobs/{job_id}/cancel", json={"csrf": await guarded.csrf()})
    assert json.status_code == 400
    assert (await guarded.get(f"/jobs/{job_id}/cancel")).status_code in (400, 404, 405)
    assert await state(sql, job_id) == "queued"


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "http://localhost:3000"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
async def test_a_form_of_another_site_does_nothing(guarded, sql, headers):
    job_id = await enqueue(sql)
    csrf = await guarded.csrf()
    answer = await guarded.post(f"/jobs/{job_id}/cancel", data={"csrf": csrf}, headers=headers)
    assert answer.status_code == 403
    assert await state(sql, job_id) == "queued"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost:8080", 200),
        ("[::1]:8080", 200),
        ("10.0.0.7", 200),
        ("rebound.example", 421),
        ("localhost.evil.example", 421),
        ("", 421),
        ("[", 421),
    ],
)
async def test_names_that_are_not_ours_are_refused(anybody, host, status):
    assert (await anybody.get("/", headers={"host": host})).status_code == status
