"""What the pages of the dashboard show, and what they cost."""

import asyncio
import html
import json
import re

import asyncpg

from tests.web import busy_database

PAGES = (
    "/",
    "/jobs",
    "/jobs?state=failed",
    "/workflows",
    "/schedules",
    "/limits",
    "/workers",
    "/queues/email",
)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{1111*1111}} \u202eevil\u2066"


async def ok(browser, path, status=200):
    answer = await browser.get(path)
    assert answer.status_code == status, answer.text
    return answer.text


async def enqueue(sql, task="send_report", queue="email", **args):
    return await sql.fetchval(
        "SELECT taskd.enqueue($1, $2::text::jsonb, queue => $3)", task, json.dumps(args), queue
    )


async def fail(sql, job_id, *, error="ValueError", message="no such user", state="failed"):
    await sql.execute(
        """
        WITH ended AS (DELETE FROM taskd.job WHERE id = $1 RETURNING *)
        INSERT INTO taskd.job_history (id, enqueued_at, run_at, started_at, finished_at, expires_at,
            fence, state, priority, attempt, crashes, interrupts, queue, task, reason, args, errors)
        SELECT id, enqueued_at, run_at, now() - interval '2 s', now() - interval '1 s',
            now() + interval '1 day', 1, $4::text::taskd.job_state, priority, 1, 0, 0, queue, task,
            $2 || ': ' || $3, args, jsonb_build_array(jsonb_build_object('attempt', 1,
            'worker', '1', 'started', now() - interval '2 s',
            'ended', now() - interval '1 s', 'type', $2::text,
            'message', $3::text, 'traceback', 'Traceback: ' || $3))
        FROM ended
        """,
        job_id, error, message, state,
    )  # fmt: skip


async def test_every_page_of_an_empty_database_says_what_to_do_next(anybody):
    for path in PAGES:
        text = await ok(anybody, path)
        assert "<code>taskd" in text or "Nothing" in text, path
    assert "No queue yet" in await ok(anybody, "/")
    assert "taskd enqueue" in await ok(anybody, "/jobs")


async def test_every_page_of_a_busy_database_is_shown(anybody, sql):
    await busy_database.history(sql, 600)
    ids = await busy_database.live(sql) | await busy_database.workflow(sql)
    for path in (*PAGES, *(f"/jobs/{ids[name]}" for name in ("running", "retrying", "merge"))):
        assert "<h1" in await ok(anybody, path)
    overview = await ok(anybody, "/")
    assert "No live worker serves" in overview
    assert "provider is down" in overview
    assert len(re.findall(r'<rect class="done"', overview)) >= 55
    graph = await ok(anybody, f"/workflows/{ids['workflow']}")
    assert graph.count('<path class="edge"') == 5
    assert f'href="/jobs/{ids["merge"]}"' in graph


async def test_a_job_shows_its_whole_story(anybody, sql):
    ids = await busy_database.live(sql)
    text = await ok(anybody, f"/jobs/{ids['retrying']}")
    assert "Attempt 3 of 5 failed; the next one is due" in text
    assert text.count("ConnectTimeout") >= 6
    assert "attempt 4 is due" in text
    assert "&#34;token&#34;: &#34;***&#34;" in text
    assert "hunter2" not in text
    assert "37 of 120 (31 %): importing accounts" in await ok(anybody, f"/jobs/{ids['running']}")


async def test_a_job_says_why_it_has_no_result_and_why_its_arguments_do_not_fit(anybody, sql):
    done, unfit = await enqueue(sql), await enqueue(sql)
    await fail(sql, done, error="its result was not stored", message="NaN", state="done")
    await sql.execute("UPDATE taskd.job_history SET errors = '[]'")
    await sql.execute(
        "UPDATE taskd.job SET state = 'scheduled', fence = 1, run_at = now() + interval '5 min', "
        "errors = jsonb_build_array(jsonb_build_object('type', 'ArgsDoNotFit', 'message', 'odd',"
        " 'traceback', '', 'attempt', 1, 'started', now(), 'ended', now()))"
    )
    assert "its result was not stored: NaN" in await ok(anybody, "/jobs")
    assert "But its result was not stored: NaN." in await ok(anybody, f"/jobs/{done}")
    text = await ok(anybody, f"/jobs/{unfit}")
    assert "Its arguments do not fit the code of the worker that claimed it last: odd." in text
    assert "its arguments did not fit, so no attempt began" in text
    assert "attempt 1 failed" not in text


async def test_a_job_shows_what_its_attempts_have_logged(serve, anybody, logins, sql):
    job_id = await enqueue(sql)
    lines = [
        {"at": "2026-11-22T15:33:46.974313+00:00", "level": "info", "text": HOSTILE},
        {"at": "2026-11-22T15:33:47.100+00:00", "level": "error", "text": "b", "fields": {"n": "1"},
         "traceback": "Traceback: here"},
    ]  # fmt: skip
    await sql.execute(
        "INSERT INTO taskd.job_log (job_id, fence, worker_id, expires_at, attempt, ended, first, "
        "left_out, lines) VALUES ($1, 1, 1, now() + interval '1 day', 1, true, 1, 5, "
        "$2::text::jsonb)",
        job_id, json.dumps(lines),
    )  # fmt: skip
    text = await ok(anybody, f"/jobs/{job_id}")
    assert "15:33:46.974 UTC</time> info    &lt;script&gt;" in text
    assert re.search(r"\[5 lines omitted\]\n<time [^>]*>2026-11-22 15:33:47.100 UTC<", text)
    assert "error   b n=1\nTraceback: here" in text
    site = await serve("correct horse", as_=logins.dsn("observer"))
    async with site.browser() as browser:
        await browser.log_in()
        assert "Traceback: here" not in await ok(browser, f"/jobs/{job_id}")


async def test_what_is_not_there_is_not_found(anybody):
    for path in (
        "/jobs/99",
        "/workflows/99",
        "/nope",
        "/jobs/99999999999999999999",
        "/static/../x",
    ):
        assert "Not found" in await ok(anybody, path, 404), path
    for path in (
        "/jobs?state=odd",
        "/jobs?since=x",
        "/queues/A%20B",
        "/jobs?q=abc",
        "/jobs?queue=A",
        "/jobs?tag=acme",
        "/jobs?older_than=yesterday",
        "/jobs?workflow=0",
    ):
        assert "not possible" in await ok(anybody, path, 400), path
    for odd in ("error=%00", "args=%00", "error=%ff", "before=5&at=2026-01-01", "before=x"):
        assert (await anybody.get(f"/jobs?{odd}")).status_code in (200, 400, 404), odd
    for odd in ("since=9999999999999d", "state=failed&since=9999999999999d", "key=%00"):
        assert (await anybody.get(f"/jobs?{odd}")).status_code in (200, 400), odd
    assert (await anybody.get("/jobs?q=12")).headers["location"] == "/jobs/12"


async def test_limits_say_who_holds_their_places_and_how_many_wait(anybody, sql):
    await sql.execute(
        "INSERT INTO taskd.job_limit (name, concurrency, by_hand) VALUES ('per <account>', 2, true)"
    )
    await sql.execute(
        """
        INSERT INTO taskd.job (queue, task, state, worker_id, attempt, fence, started_at, limit_name, limit_key)
        SELECT 'q', 't', (CASE WHEN n % 3 = 0 THEN 'running' ELSE 'blocked' END)::taskd.job_state,
            CASE WHEN n % 3 = 0 THEN 1 END, (n % 3 = 0)::int, (n % 3 = 0)::int,
            CASE WHEN n % 3 = 0 THEN now() END, 'per <account>', 'key ' || lpad((n / 3)::text, 3, '0')
        FROM generate_series(0, 359) AS n
        """  # noqa: E501
    )
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, limit_name, limit_key) "
        "VALUES ('q', 't', 'blocked', 'per <account>', $1)",
        HOSTILE,
    )
    listed = await ok(anybody, "/limits")
    assert 'href="/limits/keys?name=per+%3Caccount%3E"' in listed
    assert ">120<" in listed
    assert ">241<" in listed
    path, seen = "/limits/keys?name=per+%3Caccount%3E", []
    while path:
        page = await ok(anybody, path)
        assert "<img" not in page
        seen += re.findall(r'<span class="cut">(key \d{3})', page)
        found = re.search(r'rel="next" href="([^"]+)"', page)
        path = found and html.unescape(found[1])
    assert seen == [f"key {n:03}" for n in range(120)]
    assert page.count("running</span>") >= 20
    await ok(anybody, "/limits/keys?name=none", 404)


async def test_pages_go_on_by_key_through_all_jobs_and_none_comes_twice(anybody, sql):
    for number in range(120):
        await enqueue(sql, n=number)
    for job_id in range(20, 90):
        await fail(sql, job_id, state="failed" if job_id % 2 else "cancelled")
    for path, all_ids in (
        ("/jobs", set(range(1, 121))),
        ("/jobs?state=failed&state=cancelled", set(range(20, 90))),
        ("/jobs?state=failed", {n for n in range(20, 90) if n % 2}),
        (
            "/jobs?state=queued&queue=email&task=send_report",
            set(range(1, 20)) | set(range(90, 121)),
        ),
    ):
        seen: list[int] = []
        page: str | None = path
        while page:
            text = await ok(anybody, page)
            seen += map(int, re.findall(r'class="go" href="/jobs/(\d+)"', text))
            match = re.search(r'rel="next" href="([^"]+)"', text)
            page = match[1].replace("&amp;", "&") if match else None
        assert sorted(seen) == sorted(all_ids)


async def test_jobs_are_found_by_error_arguments_and_key(anybody, sql):
    one, other = await enqueue(sql, to="ada"), await enqueue(sql, to="bob")
    await fail(sql, one, message="no such user 4711")
    await fail(sql, other, message="timed out")
    keyed = await sql.fetchval(
        "SELECT job_id FROM taskd.enqueue_unique('t', '{}', 'k1', queue => 'email')"
    )
    await sql.execute(
        "UPDATE taskd.job SET schedule = 'nightly', metadata = '{\"tenant\": \"acme\"}' "
        "WHERE unique_key = 'k1'"
    )
    for path, ids in (
        ("/jobs?error=user", [one]),
        ("/jobs?state=failed&error=no+such+user+%23", [one]),
        ("/jobs?args=bob", [other]),
        ("/jobs?key=k1", [keyed]),
        ("/jobs?error=nothing+like+it", []),
        ("/jobs?tag=tenant%3Dacme", [keyed]),
        ("/jobs?schedule=nightly&older_than=0s", [keyed]),
        ("/jobs?worker=4711", []),
        ("/jobs?worker=nobody", []),
        ("/jobs?workflow=import", []),
        ("/jobs?running_for=1h", []),
        ("/jobs?running_for=0s&state=failed", [other, one]),
    ):
        found = re.findall(r'class="go" href="/jobs/(\d+)"', await ok(anybody, path))
        assert list(map(int, found)) == ids, path


async def test_what_a_task_redacts_is_not_searched(anybody, sql):
    await busy_database.live(sql)
    assert "No match so far" in await ok(anybody, "/jobs?args=hunter2") or "No job matches" in (
        await ok(anybody, "/jobs?args=hunter2")
    )
    assert 'class="go"' in await ok(anybody, "/jobs?args=4711")


async def test_a_search_reads_so_much_and_says_how_to_go_on(anybody, sql, monkeypatch):
    from taskd.store.reading import job_pages

    monkeypatch.setattr(job_pages, "READ_MAX", 10)
    for number in range(35):
        await enqueue(sql, n=number)
    await fail(sql, 3, message="rare")
    path, looks = "/jobs?error=rare", 0
    while path:
        text = await ok(anybody, path)
        looks += 1
        if 'href="/jobs/3"' in text:
            break
        assert "No match so far" in text
        path = re.search(r'rel="next" href="([^"]+)"', text)[1].replace("&amp;", "&")
    assert looks == 4


async def test_the_chart_counts_what_finished_in_its_window(sql):
    await busy_database.history(sql, 6000, hours=3)
    rows = await sql.fetch("SELECT * FROM taskd.finished_recently(NULL, 3600, 60, 2048)")
    whole = await sql.fetchval(
        "SELECT count(*) FROM taskd.job_history WHERE finished_at >= $1 AND finished_at < $2",
        rows[0]["since"], rows[0]["until"],
    )  # fmt: skip
    assert sum(row["done"] + row["failed"] + row["cancelled"] for row in rows) == whole
    assert 1900 < whole < 2100
    assert len(rows) in (59, 60, 61)
    email = await sql.fetch("SELECT * FROM taskd.finished_recently('email', 3600, 60, 2048)")
    assert 300 < sum(row["done"] + row["failed"] + row["cancelled"] for row in email) < 350
    # With this few blocks the window becomes shorter, and the page says so.
    short = await sql.fetch("SELECT * FROM taskd.finished_recently(NULL, 10800, 60, 16)")
    assert (short[0]["until"] - short[0]["since"]).total_seconds() < 3600


async def test_an_empty_history_has_an_empty_chart(sql):
    [row] = await sql.fetch("SELECT * FROM taskd.finished_recently(NULL, 3600, 60, 2048)")
    assert (row["step"], row["done"], row["failed"]) == (None, 0, 0)


async def test_a_statement_that_takes_too_long_is_a_page_that_says_so(serve, sql):
    site = await serve(timeout_s=0.5)
    async with site.browser() as browser:
        async with sql.transaction():
            await sql.execute("LOCK TABLE taskd.job IN ACCESS EXCLUSIVE MODE")
            text = await ok(browser, "/jobs/1", 503)
        assert "That took too long" in text
        assert "A statement is limited to 500ms" in text
        await ok(browser, "/")


async def test_observers_look_and_see_no_arguments(serve, logins, sql):
    job_id = await enqueue(sql, to="somebody")
    site = await serve("correct horse", as_=logins.dsn("observer"))
    async with site.browser() as browser:
        await browser.log_in()
        for path in PAGES:
            await ok(browser, path)
        text = await ok(browser, f"/jobs/{job_id}")
        assert "Not shown" in text
        assert "somebody" not in text
        assert 'name="args"' not in await ok(browser, "/jobs")
        assert "Not permitted" in await ok(browser, "/jobs?args=somebody", 403)
        denied = await browser.act(f"/jobs/{job_id}/cancel")
        assert denied.status_code == 403
        assert "taskd_admin" in denied.text


async def test_admins_look_and_act(serve, logins, sql):
    job_id = await enqueue(sql, to="somebody")
    site = await serve("correct horse", as_=logins.dsn("admin"))
    async with site.browser() as browser:
        await browser.log_in()
        for path in (
            *PAGES,
            f"/jobs/{job_id}",
            "/jobs?args=some",
            "/jobs/bulk?action=cancel&queue=email",
        ):
            await ok(browser, path)
        assert (await browser.act(f"/jobs/{job_id}/cancel")).status_code == 303
    assert await sql.fetchval("SELECT state FROM taskd.jobs WHERE id = $1", job_id) == "cancelled"


async def test_pages_are_live_for_all_who_look_by_one_reading(serve, sql):
    site = await serve()
    live = site.dashboard.live

    async def news(browser, parts):
        async with browser.stream("GET", f"/live?parts={parts}") as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            async for line in stream.aiter_lines():
                if line.startswith("data:"):
                    yield json.loads(line[5:])

    async with site.browser() as browser, site.browser() as other:
        one, two = news(browser, "tiles,queues,nonsense"), news(other, "tiles")
        first, second = await asyncio.gather(anext(one), anext(two))
        assert set(first["parts"]) == {"tiles", "queues"}
        assert "No queue yet" in first["parts"]["queues"]
        await enqueue(sql)
        while "email" not in (await anext(one))["parts"]["queues"]:
            pass
        # What one reading gave is for both.
        assert not live.closed
        assert second["parts"]["tiles"] == first["parts"]["tiles"]
        await asyncio.gather(one.aclose(), two.aclose())
    # No viewer is left, so nothing is read.
    await asyncio.wait_for(live._polling, 20)
    assert not live._viewers


async def test_whoever_watches_a_job_learns_that_it_changed(serve, sql):
    job_id = await enqueue(sql)
    site = await serve()
    async with (
        site.browser() as browser,
        browser.stream("GET", f"/live?job={job_id}") as stream,
    ):
        changed = False
        moved = False
        async for line in stream.aiter_lines():
            if not line.startswith("data:"):
                continue
            changed = json.loads(line[5:])["changed"]
            if not moved:
                assert not changed
                await fail(sql, job_id)
                moved = True
            if changed:
                break
        assert changed


async def test_a_job_that_went_on_before_its_page_was_followed_is_asked_to_have_changed(serve, sql):
    job_id = await enqueue(sql)
    site = await serve()
    async with site.browser() as browser:
        page = await ok(browser, f"/jobs/{job_id}")
        stage = re.search(r'data-stage="([^"]+)"', page)[1]
        changed = []
        for _ in range(2):
            async with browser.stream("GET", f"/live?job={job_id}&stage={stage}") as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("data:"):
                        changed.append(json.loads(line[5:])["changed"])
                        break
            await sql.execute(
                "UPDATE taskd.job SET state = 'running', worker_id = 1, attempt = 1, fence = 1, "
                "started_at = now() WHERE id = $1",
                job_id,
            )
        assert changed == [False, True]


async def test_so_many_may_look_and_no_more(serve, monkeypatch):
    from taskd.web.pages import live

    monkeypatch.setattr(live, "VIEWERS_MAX", 1)
    site = await serve()
    async with site.browser() as browser, browser.stream("GET", "/live?parts=tiles") as stream:
        lines = stream.aiter_lines()
        while not (await anext(lines)).startswith("data:"):
            pass
        async with site.browser() as other:
            assert (await other.get("/live?parts=tiles")).status_code == 503


async def test_a_database_that_is_gone_is_a_page_and_no_more(serve):
    site = await serve(as_="postgresql://taskd@127.0.0.1:1/none")
    async with site.browser() as browser:
        text = await ok(browser, "/", 503)
        assert "PostgreSQL does not answer" in text


async def test_a_schema_that_is_missing_is_reported(serve, empty_dsn):
    site = await serve(as_=empty_dsn)
    async with site.browser() as browser:
        assert "taskd db migrate" in await ok(browser, "/", 503)
    await (await asyncpg.connect(empty_dsn)).close()
