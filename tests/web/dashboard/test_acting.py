"""Which users can act, what an action requires, and that it equals the command line's."""

import html
import re
from ipaddress import ip_network

import pytest
from click.testing import CliRunner

from taskd import events
from taskd.cli import cli
from taskd.config import Settings, load
from taskd.errors import ConfigError
from taskd.store.connections.database import Database
from taskd.web.access import login, login_limits
from taskd.web.access.guard import check_reach
from taskd.web.access.login import hashed, read_passwords
from taskd.web.app import BODY_BYTES_MAX
from taskd.web.routes import mounted
from tests.web import busy_database
from tests.web.dashboard.conftest import PASSWORD
from tests.web.dashboard.test_pages import enqueue, fail

ACTIONS = (
    *("/workflows/1/cancel", "/workflows/1/retry", "/workflows/1/restart"),
    *("/jobs/1/retry", "/jobs/1/cancel", "/jobs/bulk", "/queues/email/pause"),
    *("/queues/email/resume", "/schedules/run", "/schedules/pause", "/schedules/resume", "/logout"),
)


@pytest.fixture
def emitted():
    """The events that were emitted."""
    found = []
    end = events.subscribe(lambda name, fields: found.append((name, dict(fields))))
    yield found
    end()


async def state(sql, job_id):
    return await sql.fetchval("SELECT state FROM taskd.jobs WHERE id = $1", job_id)


async def test_who_knows_the_password_is_in_and_goes_on(serve, emitted):
    site = await serve(PASSWORD)
    async with site.browser() as browser:
        wrong = await browser.log_in("wrong horse")
        assert wrong.status_code == 403
        assert "Wrong password" in wrong.text
        answer = await browser.post("/login?next=/jobs", data={"password": PASSWORD})
        assert answer.headers["location"] == "/jobs"
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie
        assert "secure" not in cookie
        assert (await browser.get("/")).status_code == 200
        assert (await browser.act("/logout")).headers["location"] == "/login"
        assert (await browser.get("/")).status_code == 303
    assert [name for name, _ in emitted if name.startswith("login")] == [
        "login.refused",
        "login.accepted",
    ]
    assert PASSWORD not in str(emitted)


async def test_behind_tls_the_cookie_is_for_tls_alone(serve):
    site = await serve(PASSWORD, web_url="https://jobs.example.org")
    async with site.browser(headers={"host": "jobs.example.org"}) as browser:
        answer = await browser.log_in()
        cookie = answer.headers["set-cookie"]
        assert cookie.startswith("__Host-taskd=")
        assert "Secure" in cookie


def test_the_address_is_the_last_that_no_proxy_has():
    proxies = [ip_network("127.0.0.1"), ip_network("10.0.0.0/8")]
    for peer, forwarded, address in (
        ("192.0.2.1", "203.0.113.9", "192.0.2.1"),
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9", "203.0.113.9"),
        ("127.0.0.1", "1.1.1.1, 203.0.113.9, 10.0.0.3", "203.0.113.9"),
        ("127.0.0.1", "10.0.0.3", "10.0.0.3"),
        ("127.0.0.1", "<script>", "127.0.0.1"),
        ("127.0.0.1", "203.0.113.9, nonsense", "127.0.0.1"),
        ("?", "203.0.113.9", "?"),
    ):
        assert login_limits.client_of(peer, forwarded, proxies) == address, forwarded
    assert login_limits.network_of("2001:db8:0:1:2::3") == "2001:db8:0:1::/64"
    assert login_limits.network_of("::ffff:192.0.2.1") == "192.0.2.1"
    with pytest.raises(ConfigError, match="--web-proxies"):
        load({"web_proxies": "nginx"}, environ={})


async def test_two_dashboards_of_one_host_have_cookies_of_their_own(serve):
    first, second = await serve(PASSWORD), await serve(PASSWORD)
    async with first.browser() as browser:
        await browser.log_in()
        assert (await browser.get("/")).status_code == 200
        # Browsers send all cookies of a host to each of its ports.
        answer = await browser.post(second.url + "/login", data={"password": PASSWORD})
        assert answer.status_code == 303
        assert len(browser.cookies) == 2
        assert (await browser.get(second.url + "/")).status_code == 200
        assert (await browser.get("/")).status_code == 200


async def test_a_form_that_is_too_large_is_reported_so(serve, guarded):
    large = {"reason": "x" * BODY_BYTES_MAX, "csrf": await guarded.csrf()}
    for path in ("/jobs/1/cancel", "/login"):
        answer = await guarded.post(path, data=large)
        assert answer.status_code == 413, path
        assert f"a request is limited to {BODY_BYTES_MAX} bytes" in answer.text
        assert "<!doctype html>" in answer.text
    answer = await guarded.get("/jobs/1/cancel")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


async def test_names_have_hashes_of_their_own(serve, tmp_path, emitted, sql):
    file = tmp_path / "passwords"
    file.write_text(f"ada:{hashed('ada has a password')}\nbob:{hashed('bob has another')}\n")
    job_id = await enqueue(sql)
    site = await serve(web_password_file=file)
    async with site.browser() as browser:
        assert 'name="name"' in (await browser.get("/login")).text
        assert (await browser.log_in("bob has another", name="ada")).status_code == 403
        assert (await browser.log_in("bob has another", name="nobody")).status_code == 403
        assert (await browser.log_in("bob has another", name="bob")).status_code == 303
        await browser.act(f"/jobs/{job_id}/cancel", reason="not needed")
    assert await sql.fetchval("SELECT reason FROM taskd.job_history") == (
        "cancelled by bob: not needed"
    )
    [acted] = [fields for name, fields in emitted if name == "action.taken"]
    assert (acted["who"], acted["action"], acted["job_ids"]) == ("bob", "jobs.cancel", [job_id])


def test_passwords_that_cannot_be_used_are_refused(tmp_path):
    file = tmp_path / "p"
    for text in ("short", "one\ntwo", "ada:scrypt:no", "scrypt:no:no-hash-at-all"):
        file.write_text(text)
        with pytest.raises(ConfigError):
            read_passwords(Settings(web_password_file=file))
    with pytest.raises(ConfigError, match="cannot be read"):
        read_passwords(Settings(web_password_file=tmp_path / "none"))
    assert read_passwords(Settings()) == {}


def test_sessions_are_bounded_and_end(monkeypatch):
    sessions = login.Sessions()
    first, _ = sessions.begin("ada")
    for _ in range(login.SESSIONS_MAX):
        last, _ = sessions.begin("bob")
    assert sessions.find(first) is None
    assert sessions.find(last).who == "bob"
    monkeypatch.setattr(login, "IDLE_S", -1.0)
    assert sessions.find(last) is None
    assert sessions.find(None) is None


async def test_jobs_are_retried_and_cancelled(guarded, sql, emitted):
    waiting, failed = await enqueue(sql), await enqueue(sql)
    await fail(sql, failed)
    answer = await guarded.act(f"/jobs/{failed}/retry")
    assert answer.headers["location"] == f"/jobs/{failed}"
    assert f"job {failed} was retried" in (await guarded.get(f"/jobs/{failed}")).text
    assert await state(sql, failed) == "queued"
    await guarded.act(f"/jobs/{waiting}/cancel")
    assert await sql.fetchrow("SELECT state, reason FROM taskd.job_history") == (
        "cancelled",
        "cancelled by admin",
    )
    await guarded.act(f"/jobs/{waiting}/cancel")
    assert "cancelled already" in (await guarded.get(f"/jobs/{waiting}")).text
    assert [fields["action"] for name, fields in emitted if name == "action.taken"] == [
        "jobs.retry",
        "jobs.cancel",
    ]


async def test_a_workflow_is_cancelled_and_brought_back_with_a_look_at_it_before(
    guarded, sql, emitted
):
    ids = await busy_database.workflow(sql)
    path = f"/workflows/{ids['workflow']}"
    await sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = 1, attempt = 1, fence = 1, "
        "started_at = now() WHERE id = $1",
        ids["extract"],
    )
    page = (await guarded.get(path)).text
    assert f'href="{path}/cancel"' in page
    assert f'href="{path}/retry"' not in page
    preview = (await guarded.get(f"{path}/cancel")).text
    assert "Cancel 6 jobs of nightly analytics?" in preview
    assert "1 running job is asked to stop" in preview
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 6
    assert (await guarded.post(f"{path}/cancel", data={"csrf": "x"})).status_code == 400
    answer = await guarded.act(f"{path}/cancel", reason="wrong month")
    assert answer.headers["location"] == path
    page = (await guarded.get(path)).text
    assert "5 jobs cancelled, 1 running job asked to stop" in page
    reasons = await sql.fetch("SELECT DISTINCT reason FROM taskd.job_history")
    assert "cancelled by admin: wrong month" in {row["reason"] for row in reasons}
    assert "Retry 5 jobs of" in (await guarded.get(f"{path}/retry")).text
    await guarded.act(f"{path}/retry")
    assert "5 jobs retried" in (await guarded.get(path)).text
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 6
    acted = [(each["action"], each["jobs"]) for name, each in emitted if name == "action.taken"]
    assert acted == [("workflows.cancel", 6), ("workflows.retry", 5)]
    assert (await guarded.get("/workflows/999/cancel")).status_code == 404
    assert (await guarded.act("/workflows/999/retry")).status_code == 404


async def test_an_ended_run_starts_again_at_a_chosen_stage(guarded, sql, emitted):
    run = await busy_database.ended_run(sql)
    path = f"/workflows/{run}"
    page = (await guarded.get(path)).text
    assert "<option>parse</option><option>save</option>" in page
    assert (await guarded.post(f"{path}/restart", data={"csrf": "x"})).status_code == 400
    for args in ("{", "[1]"):
        assert (await guarded.act(f"{path}/restart", args=args)).status_code == 400
    unknown = await guarded.act(f"{path}/restart", stage="print")
    assert unknown.status_code == 400
    assert "its stages are fetch, parse, save" in html.unescape(unknown.text)
    fields = {"stage": "parse", "args": '{"doc": "b text"}', "reason": "the source was wrong"}
    assert (await guarded.act(f"{path}/restart", **fields)).headers["location"] == path
    page = (await guarded.get(path)).text
    assert f"workflow {run}: started again at the stage parse, with job" in page
    assert "Start again" not in page, "the run is live"
    made = await sql.fetchrow("SELECT node, args, state::text FROM taskd.job")
    assert tuple(made) == ("parse", '{"doc": "b text"}', "queued")
    kept = await sql.fetchrow("SELECT action, actor, reason FROM taskd.action ORDER BY at DESC")
    assert tuple(kept) == ("restart", "dashboard admin", "the source was wrong")
    acted = [(each["action"], each["jobs"]) for name, each in emitted if name == "action.taken"]
    assert acted == [("workflows.restart", 1)]
    assert (await guarded.act("/workflows/999/restart")).status_code == 404


async def test_queues_are_paused_and_resumed(guarded, sql):
    await enqueue(sql)
    assert (await guarded.act("/queues/email/pause", **{"for": "x"})).status_code == 400
    await guarded.act("/queues/email/pause", **{"for": "30m", "reason": "<b>why</b>"})
    row = await sql.fetchrow(
        "SELECT pause_reason, paused_until - paused_at AS span FROM taskd.queue"
    )
    assert row["pause_reason"] == "<b>why</b>"
    assert 1790 < row["span"].total_seconds() < 1810
    text = (await guarded.get("/queues/email")).text
    assert "queue email: paused for 30m" in text
    assert "&lt;b&gt;why" in text
    await guarded.act("/queues/email/resume")
    assert "Pause…" in (await guarded.get("/queues/email")).text


async def test_a_withdrawn_schedule_is_shown_as_such(guarded, sql):
    await sql.execute(
        "INSERT INTO taskd.schedule (name, app, every_s, task, queue, withdrawn_at) "
        "VALUES ('nightly', 'shop', 3600, 'report', 'email', now())"
    )
    text = (await guarded.get("/schedules")).text
    assert '<span class="mark">withdrawn</span>' in text
    assert "No live worker of its app declares this schedule." in text


async def test_schedules_run_now_and_pause(guarded, sql):
    await sql.execute(
        "INSERT INTO taskd.schedule (name, every_s, task, queue) "
        "VALUES ('nightly <1>', 3600, 'report', 'email')"
    )
    await guarded.act("/schedules/run", name="nightly <1>")
    assert await sql.fetchval("SELECT schedule FROM taskd.job") == "nightly <1>"
    assert "enqueued 1 job" in (await guarded.get("/schedules")).text
    await guarded.act("/schedules/pause", name="nightly <1>")
    paused_by = await sql.fetchval("SELECT paused_by FROM taskd.schedule")
    assert paused_by.endswith(" (dashboard admin)")
    await guarded.act("/schedules/resume", name="nightly <1>")
    assert await sql.fetchval("SELECT paused_at FROM taskd.schedule") is None
    for action in ("run", "pause"):
        assert (await guarded.act(f"/schedules/{action}", name="none")).status_code == 404


async def test_in_bulk_one_sees_how_many_and_which_and_then_those_are_meant(guarded, sql, emitted):
    ids = [await enqueue(sql) for _ in range(14)]
    for job_id in ids[:12]:
        await fail(sql, job_id, message="timed out")
    await fail(sql, ids[12], message="other")
    preview = (await guarded.get("/jobs/bulk?action=retry&state=failed&error=timed+out")).text
    assert "Retry 12 jobs?" in preview
    assert preview.count('class="go"') == 10
    fields = dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', preview))
    assert fields["state"] == "failed"
    # A job that fails after the preview is left out.
    later = await enqueue(sql)
    await fail(sql, later, message="timed out")
    await sql.execute(
        "UPDATE taskd.job_history SET finished_at = now() + interval '1 s' WHERE id = $1", later
    )
    answer = await guarded.post("/jobs/bulk", data=fields)
    assert answer.status_code == 303
    assert "12 jobs retried" in (await guarded.get("/jobs")).text
    assert [await state(sql, job_id) for job_id in ids] == ["queued"] * 12 + ["failed", "queued"]
    assert await state(sql, later) == "failed"
    [acted] = [fields for name, fields in emitted if name == "action.taken"]
    assert (acted["jobs"], acted["job_ids"]) == (12, ids[:12])


async def test_what_cannot_be_done_in_bulk_is_refused(guarded, sql):
    job_id = await enqueue(sql)
    for query in (
        "action=delete&queue=email",
        "action=retry&state=done",
        "action=retry&running_for=1h",
        "",
    ):
        assert (await guarded.get(f"/jobs/bulk?{query}")).status_code == 400, query
    csrf = await guarded.csrf()
    for fields in ({"action": "cancel"}, {"action": "cancel", "asked_at": "nan", "state": "done"}):
        answer = await guarded.post("/jobs/bulk", data={"csrf": csrf} | fields)
        assert answer.status_code == 400
    assert await state(sql, job_id) == "queued"
    assert "no job" in (await guarded.get("/jobs/bulk?action=retry&state=failed")).text.lower()


async def test_arguments_choose_the_jobs_of_a_bulk_action(guarded, sql):
    await enqueue(sql, to="ada")
    await enqueue(sql, to="bob")
    assert "Cancel 1 job?" in (await guarded.get("/jobs/bulk?action=cancel&args=ada")).text


async def test_waiting_jobs_are_cancelled_in_bulk(guarded, sql):
    ids = [await enqueue(sql, queue="email" if n % 2 else "other") for n in range(6)]
    preview = (await guarded.get("/jobs/bulk?action=cancel&queue=email")).text
    assert "Cancel 3 jobs?" in preview
    csrf, asked = await guarded.csrf(), re.search(r'name="asked_at" value="([^"]+)"', preview)[1]
    await guarded.post(
        "/jobs/bulk",
        data={
            "csrf": csrf,
            "asked_at": asked,
            "action": "cancel",
            "queue": "email",
            "state": ["queued", "scheduled"],
            "reason": "too many",
        },
    )
    states = [await state(sql, job_id) for job_id in ids]
    assert states == ["queued", "cancelled"] * 3


def test_what_others_reach_asks_for_a_login():
    for address in ("0.0.0.0:80", "10.0.0.1:8080", "[::]:8080", "example.org:8080"):
        with pytest.raises(ConfigError, match="TASKD_WEB_PASSWORD_FILE"):
            check_reach(address, guarded=False)
        check_reach(address, guarded=True)
    for address in ("127.0.0.1:8080", "[::1]:8080", "localhost:8080"):
        check_reach(address, guarded=False)


def test_the_command_refuses_with_what_to_do(dsn, home):
    run = CliRunner().invoke(cli, ["web", "--listen", "0.0.0.0:0"], env={"TASKD_DSN": dsn})
    assert run.exit_code == 78
    assert "TASKD_WEB_PASSWORD_FILE" in run.stderr
    made = CliRunner().invoke(cli, ["web", "--hash-password"], input="correct horse\n")
    assert re.fullmatch(login.HASH, made.stdout.strip())
    short = CliRunner().invoke(cli, ["web", "--hash-password"], input="x\n")
    assert short.exit_code == 2


async def test_a_workers_port_has_it_where_nobody_else_reaches_it_or_with_a_login(dsn):
    database = Database({"dsn": dsn})
    assert mounted(database, Settings(), "127.0.0.1:9090") is not None
    assert mounted(database, Settings(), "0.0.0.0:9090") is None
    assert mounted(database, Settings(web_password=PASSWORD), "0.0.0.0:9090") is not None
    with pytest.raises(ConfigError):
        mounted(database, Settings(web_password="short"), "127.0.0.1:9090")


async def test_jobs_are_completed_restarted_and_run_again(guarded, sql, emitted):
    job_id = await enqueue(sql)
    assert (await guarded.act(f"/jobs/{job_id}/restart")).status_code == 303
    page = (await guarded.get(f"/jobs/{job_id}")).text
    assert f"job {job_id} is queued: only running jobs can be restarted" in page
    await sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = 1, attempt = 1, fence = 1, "
        "started_at = now()"
    )
    assert "End the attempt and start the job again" in (await guarded.get(f"/jobs/{job_id}")).text
    await guarded.act(f"/jobs/{job_id}/restart", reason="it hangs")
    assert await state(sql, job_id) == "scheduled"
    page = (await guarded.get(f"/jobs/{job_id}")).text
    assert "(dashboard admin): it hangs" in page
    refused = await guarded.act(f"/jobs/{job_id}/complete", result="{no")
    assert refused.status_code == 400
    assert "the result is not JSON" in refused.text
    assert (await guarded.post(f"/jobs/{job_id}/complete", data={"csrf": "x"})).status_code == 400
    await guarded.act(f"/jobs/{job_id}/complete", result='{"sent": true}', reason="by post")
    assert await state(sql, job_id) == "done"
    page = (await guarded.get(f"/jobs/{job_id}")).text
    assert "complete by " in page
    assert "Run again as a copy" in page
    answer = await guarded.act(f"/jobs/{job_id}/run-again")
    copy = int(answer.headers["location"].rpartition("/")[2])
    assert f"job {copy} is a copy of job {job_id}" in (await guarded.get(f"/jobs/{copy}")).text
    assert await state(sql, copy) == "queued"
    await guarded.act(f"/jobs/{copy}/run-again")
    assert "only finished jobs can run again" in (await guarded.get(f"/jobs/{copy}")).text
    acted = [fields["action"] for name, fields in emitted if name == "action.taken"]
    assert acted == ["jobs.restart", "jobs.complete", "jobs.run-again"]


async def test_only_a_worker_that_is_late_can_be_declared_dead(guarded, sql):
    await sql.execute(
        "INSERT INTO taskd.worker (id, renewed_at, lease_until, pid, pid_started, host, boot_id, "
        "pid_namespace, version, app, queues, tasks) VALUES "
        "(77, now(), now() + interval '30 s', 1, 1, 'h', '', '', '', 'a', '{}', '{}'), "
        "(78, now() - interval '15 s', now() + interval '15 s', 1, 1, 'h', '', '', '', 'a', '{}', "
        "'{}')"
    )
    page = (await guarded.get("/workers")).text
    assert "/workers/78/declare-dead" in page
    assert "/workers/77/declare-dead" not in page
    await guarded.act("/workers/77/declare-dead")
    assert "renews its lease, so it lives" in (await guarded.get("/workers")).text
    await guarded.act("/workers/78/declare-dead", reason="its host is off")
    assert "worker 78 is declared dead" in (await guarded.get("/workers")).text
    rows = await sql.fetch("SELECT id FROM taskd.worker WHERE died_at IS NOT NULL")
    assert [each["id"] for each in rows] == [78]
