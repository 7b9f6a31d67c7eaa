"""`taskd jobs`."""

import json
from datetime import UTC, datetime

import pytest

from taskd.cli.shared.output import moment

TRACEBACK = 'Traceback (most recent call last):\n  File "app.py", line 3\nValueError: \x1b[2Jsuch'
ERROR = {
    "attempt": 5,
    "worker": "12",
    "started": "2026-01-01T00:00:00Z",
    "ended": "2026-01-01T00:00:01Z",
    "type": "ValueError",
    "message": "no \x1b[2Jsuch",
    "traceback": TRACEBACK,
}


@pytest.fixture
def some(taskd):
    """Jobs 1 queued, 2 scheduled, 3 done, 4 failed, 5 cancelled, 6 running."""
    for number in range(1, 7):
        options = ["--in", "1h"] if number == 2 else []
        queue = "email" if number < 5 else "web"
        taskd.enqueue("send" if number % 2 else "fetch", "--queue", queue, f"n:={number}", *options)
    taskd.finish(3, "done")
    taskd.finish(4, "failed", reason="attempts", errors=json.dumps([ERROR]), attempt=5)
    taskd.finish(5, "cancelled", reason="by hand")
    taskd.worker(12, "email")
    taskd.sql(
        "UPDATE taskd.job SET state = 'running', worker_id = 12, attempt = 1, started_at = now() "
        "WHERE id = 6"
    )
    return taskd


def ids(taskd, *args):
    return [int(line) for line in taskd("jobs", "list", "--ids", *args).stdout.splitlines()]


def test_newest_first(some):
    assert ids(some) == [6, 5, 4, 3, 2, 1]
    assert ids(some, "--limit", 2) == [6, 5]
    assert "more with --limit" in some("jobs", "list", "--limit", 2).stderr


def test_filters(some):
    for args, wanted in [
        (["--queue", "web"], [6, 5]),
        (["--task", "send"], [5, 3, 1]),
        (["--state", "failed"], [4]),
        (["--state", "failed", "--state", "done", "--state", "queued"], [4, 3, 1]),
        (["--state", "running"], [6]),
        (["--since", "1h"], [6, 5, 4, 3, 2, 1]),
        (["--since", "0s"], []),
        (["--since", "500ms", "--state", "failed"], []),
        (["--queue", "none"], []),
        (["--since", "2026-01-01"], [6, 5, 4, 3, 2, 1]),
        (["--since", "2999-01-01"], []),
        (["--older-than", "0s", "--state", "failed"], [4]),
        (["--older-than", "1h"], []),
        (["--error", "ATTEMPTS"], [4]),
        (["--error", "valueerror: no*such"], [4]),
        (["--where-arg", "n:=5"], [5]),
        (["--where-arg", "n=5"], []),
        (["--worker", "12"], [6]),
        (["--worker", "13"], []),
        (["--workflow", "none"], []),
        (["--schedule", "none"], []),
        (["--unique-key", "none"], []),
        (["--metadata", "tenant=acme"], []),
        (["--running-for", "0s"], [6]),
        (["--running-for", "1h"], []),
        (["--running-for", "500ms", "--state", "failed", "--state", "done"], [4, 3]),
    ]:
        assert ids(some, *args) == wanted, args


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--task", ""], "task '' must not be empty"),
        (["--since", "2026-13-01"], "'2026-13-01' is not a time"),
        (["--since", "2026-12-01T08:00"], "has no time zone"),
        (["--older-than", "-1s"], "'-1s'"),
        (["--where-arg", "n"], "'n' is neither key=text nor key:=json"),
        (["--metadata", "n:=x"], "n: 'x' is not JSON"),
        (["--workflow", "0"], "workflow 0 is not a whole number"),
        (["--worker", "0"], "worker 0 is not a whole number"),
    ],
)
def test_a_filter_that_is_none_says_why(taskd, args, why):
    assert why in taskd("jobs", "list", *args, code=2).stderr


def test_a_list_shows_the_attempts_of_the_task(some):
    some.sql(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
        "VALUES ('fetch', 'app', 'x', 'q', 7, '{}')"
    )
    assert {row["id"]: row["max_attempts"] for row in some.json("jobs", "list")} == {
        6: 7, 5: None, 4: 7, 3: None, 2: 7, 1: None
    }  # fmt: skip
    assert "\t5/7\t" in some("jobs", "list", "--state", "failed").stdout
    assert some.json("jobs", "show", 4)[0]["max_attempts"] == 7


def test_a_hung_job_is_cancelled_and_one_that_is_only_old_is_not(some):
    young = some.enqueue("send", "--queue", "web")
    some.sql(
        "UPDATE taskd.job SET state = 'running', worker_id = 12, fence = 1, attempt = 1, "
        "enqueued_at = now() - interval '1 day', started_at = now() WHERE id = $1", young
    )  # fmt: skip
    some.sql("UPDATE taskd.job SET started_at = now() - interval '2 h' WHERE id = 6")
    assert some("jobs", "cancel", "--running-for", "1h").stdout.split() == ["6"]
    assert some("jobs", "retry", "--running-for", "1h").stdout == ""


def test_a_bulk_action_counts_only_jobs_that_it_can_act_on(some):
    assert some.json("jobs", "retry", "--since", "1h", "--dry-run")[0]["sample"] == [4, 5]
    assert some.json("jobs", "cancel", "--since", "1h", "--dry-run")[0]["sample"] == [1, 2, 6]
    found = some.json("jobs", "set", "--since", "1h", "--priority", 5, "--dry-run")
    assert found[0]["sample"] == [1, 2]


def test_a_list_as_lines(some):
    lines = [line.split("\t") for line in some("jobs", "list").stdout.splitlines()]
    assert lines[0] == ["ID", "STATE", "QUEUE", "TASK", "ATTEMPT", "AGE", "NOTE"]
    by_id = {line[0]: line for line in lines[1:]}
    assert by_id["4"][1:5] == ["failed", "email", "fetch", "5/-"]
    assert by_id["4"][6] == "attempts"
    assert by_id["2"][6] in ("in 1h", "in 59m 59s", "in 59m 58s")


def test_the_age_says_whose_age_it_is(taskd):
    jobs = [taskd.enqueue("t", "--queue", "q") for _ in range(3)]
    taskd.sql("UPDATE taskd.job SET enqueued_at = now() - interval '1 h', attempt = 1, "
              "started_at = now() - interval '5 min'")  # fmt: skip
    taskd.sql("UPDATE taskd.job SET state = 'running', worker_id = 12 WHERE id = $1", jobs[1])
    taskd.finish(jobs[2], "done")
    rows = {row["id"]: row for row in taskd.json("jobs", "list")}
    assert [rows[each]["age_of"] for each in jobs] == ["enqueued", "started", "finished"]
    # A job that was given back after an attempt waits since it was enqueued.
    assert [round(rows[each]["age_s"]) // 60 for each in jobs] == [60, 5, 0]
    lines = [line.split("\t") for line in taskd("jobs", "list").stdout.splitlines()]
    assert [line[5].split()[0] for line in reversed(lines[1:])] == [
        "enqueued",
        "started",
        "finished",
    ]


def test_ids_beyond_those_of_javascript_are_exact(taskd):
    taskd.sql("ALTER SEQUENCE taskd.job_id_seq RESTART 9007199254740993")
    job = taskd.enqueue("t", "--queue", "q")
    assert job == 2**53 + 1
    assert taskd.json("jobs", "list")[0]["id"] == job
    assert taskd.json("jobs", "show", job)[0]["id"] == job


def test_show_shows_everything(some):
    [job] = some.json("jobs", "show", 4)
    assert job["args"] == {"n": 4}
    assert job["errors"] == [ERROR]
    assert job["state"] == "failed"
    text = some("jobs", "show", 4).stdout
    began = moment(datetime(2026, 1, 1, tzinfo=UTC))
    assert f"attempt 5 on host1 (pid 4242), claimed {began}, running for 1s\n" in text
    assert 'File "app.py", line 3' in text
    assert "\x1b" not in text
    assert some.json("jobs", "show", 6)[0]["host"] == "host1"


def test_show_of_an_unknown_job(taskd):
    assert "no job has the id 77" in taskd("jobs", "show", 77, code=3).stderr


def test_retry_by_id(some):
    assert some("jobs", "retry", 4, 5).stdout.split() == ["4", "5"]
    assert ids(some, "--state", "queued") == [5, 4, 1]


def test_retry_of_what_cannot_be_retried(some):
    result = some("jobs", "retry", 4, 3, 1, code=1)
    assert result.stdout.split() == ["4"]
    assert "job 1 is queued; only failed and cancelled jobs can be retried" in result.stderr
    assert "job 3 is done" in result.stderr
    error = some("jobs", "retry", 77, 3, code=3).stderr
    assert "no job has the id 77" in error
    assert "job 3 is done" in error


def test_retry_as_json(some):
    [dry] = some.json("jobs", "retry", 4, 5, "--dry-run")
    assert dry == {"retried": [4, 5], "dry_run": True, "refused": []}
    result = some("jobs", "retry", 4, 1, 77, "--json", code=3)
    assert json.loads(result.stdout) == {
        "retried": [4],
        "dry_run": False,
        "refused": [{"id": 1, "state": "queued"}, {"id": 77, "state": None}],
    }
    assert "job 1 is queued" in result.stderr
    [filtered] = some.json("jobs", "retry", "--state", "cancelled")
    assert filtered == {"retried": [5], "dry_run": False, "refused": []}


def test_retry_by_filter(some):
    assert some("jobs", "retry", "--state", "failed", "--task", "send").stdout == ""
    dry = some("jobs", "retry", "--state", "failed", "--state", "cancelled", "--dry-run")
    assert sorted(dry.stdout.split()) == ["4", "5"]
    assert "2 jobs would be retried" in dry.stderr
    assert ids(some, "--state", "failed") == [4]
    result = some("jobs", "retry", "--state", "failed", "--queue", "email", "--since", "1h")
    assert result.stdout.split() == ["4"]
    assert result.stderr == "1 job retried\n"


def test_cancel(some):
    result = some("jobs", "cancel", 1, 2, 6, 1, "--reason", "no longer wanted")
    assert result.stdout.splitlines() == ["1\tcancelled", "2\tcancelled", "6\trunning"]
    assert some.json("jobs", "show", 1)[0]["reason"] == "no longer wanted"
    assert some.json("jobs", "show", 6)[0]["cancel_requested"] is True


def test_cancel_as_json(some):
    result = some("jobs", "cancel", 1, 3, 2, 6, "--json", code=1)
    assert json.loads(result.stdout) == {
        "cancelled": [1, 2],
        "running": [6],
        "dry_run": False,
        "refused": [{"id": 3, "state": "done"}],
    }


def test_cancel_of_what_cannot_be_cancelled(some):
    assert "job 3 is done already" in some("jobs", "cancel", 3, code=1).stderr
    assert "no job has the id 77" in some("jobs", "cancel", 77, 3, code=3).stderr


def test_ids_fit_into_a_pipe(some):
    found = some("jobs", "list", "--state", "failed", "--ids").stdout.split()
    assert some("jobs", "retry", *found).stdout.split() == found


def test_show_prints_what_was_logged_by_attempt(some):
    lines = [
        {
            "at": "2026-01-01T00:00:00.5+00:00",
            "level": "info",
            "text": "a\x1b[2J",
            "logger": "shop",
        },
        {"at": "", "level": "error", "text": "odd", "fields": {"n": "a b"}, "traceback": "Trace\n"},
    ]
    some.sql(
        "INSERT INTO taskd.job_log (job_id, fence, worker_id, expires_at, attempt, ended, first, "
        "left_out, lines) SELECT 6, fence, 12, now() + interval '1 h', fence, fence = 1, 1, 7, "
        "$1::text::jsonb FROM generate_series(0, 1) AS fence",
        json.dumps(lines),
    )
    shown = some("jobs", "show", 6, "--logs").stdout
    assert "log of attempt 0 on worker 12; the attempt is still running" in shown
    assert "log of attempt 1 on worker 12; times in " in shown
    assert "info    a?[2J logger=shop\n[7 lines omitted]\n error   odd n='a b'\nTrace\n" in (
        shown.replace("\N{REPLACEMENT CHARACTER}", "?").replace("\\x1b", "?")
    )
    assert "\x1b[2J" not in shown
    [row] = some.json("jobs", "show", 6, "--logs")
    assert [each["lines"] for each in row["logs"]] == [lines, lines]
    assert "logs" not in some.json("jobs", "show", 6)[0]


def test_show_says_when_nothing_was_kept(some):
    assert "keep_logs" in some("jobs", "show", 3, "--logs").stderr
