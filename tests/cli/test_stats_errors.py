"""`taskd stats errors`: what goes wrong, by task and kind of error."""

import json

import pytest

from taskd.cli.reports import stats
from tests.cli.conftest import Shell


def fail(taskd, task, reason, *, queue="email", ago="1 s", **more):
    """A job that failed this long ago."""
    made = taskd.enqueue(task, "--queue", queue)
    taskd.finish(made, "failed", reason=reason, **more)
    taskd.sql(
        "UPDATE taskd.job_history SET finished_at = now() - $2::text::interval WHERE id = $1",
        made,
        ago,
    )
    return made


def retry_later(taskd, task, message, *, queue="email", ago="1 s", crashes=0):
    """A job that waits for another attempt."""
    made = taskd.enqueue(task, "--queue", queue, "--in", "1h")
    taskd.sql(
        """
        UPDATE taskd.job SET fence = 1, attempt = 1, crashes = $2, errors = jsonb_build_array(
            jsonb_build_object('attempt', 1, 'type', 'ValueError', 'message', 'the first one'),
            jsonb_build_object('attempt', 2, 'type', 'ValueError', 'message', $3::text,
                               'ended', now() - $4::text::interval))
        WHERE id = $1
        """,
        made,
        crashes,
        message,
        ago,
    )
    return made


def errors_of(taskd, *args):
    """Task and error of each line, with how many failed and how many are tried again."""
    rows = taskd.json("stats", "errors", *args)
    return {(row["task"], row["error"]): (row["failed"], row["retrying"]) for row in rows}


@pytest.fixture
def some(taskd):
    fail(taskd, "send", "ValueError: no user 17", ago="2 hours")
    fail(taskd, "send", "ValueError: no user 4711\nand more", ago="1 minute")
    fail(taskd, "send", "ValueError: no order 17", ago="3 days")
    fail(taskd, "fetch", "ValueError: no user 17", queue="web")
    retry_later(taskd, "send", "no user 23")
    retry_later(taskd, "send", "no user 24", crashes=1)
    return taskd


def test_errors_are_counted_by_task_and_by_what_they_have_in_common(some):
    assert errors_of(some) == {
        ("send", "ValueError: no user #"): (2, 2),
        ("fetch", "ValueError: no user #"): (1, 0),
    }


def test_a_kind_of_error_has_its_first_and_last_time_and_an_example(taskd):
    fail(taskd, "send", "no user 1", ago="2 hours")
    last = fail(taskd, "send", "no user 2", ago="1 minute")
    fail(taskd, "send", "no user 2", ago="1 hour")
    retry_later(taskd, "other", "no user 3")
    row = taskd.json("stats", "errors", "--task", "send")[0]
    assert 7200 <= row["first_ago_s"] < 7300
    assert 60 <= row["last_ago_s"] < 160
    assert row["first_at"] < row["last_at"]
    assert row["job_id"] == last


def test_only_what_went_wrong_lately(some):
    assert errors_of(some, "--since", "7d")["send", "ValueError: no order #"] == (1, 0)
    assert errors_of(some, "--since", "1h")["send", "ValueError: no user #"] == (1, 2)
    assert errors_of(some, "--since", "1ms") == {}
    assert some("stats", "errors", "--since", "1ms").stderr == ""
    retry_later(some, "send", "no house", ago="2 days")
    assert ("send", "ValueError: no house") not in errors_of(some)


def test_filters(some):
    assert errors_of(some, "--queue", "web") == {("fetch", "ValueError: no user #"): (1, 0)}
    assert errors_of(some, "--task", "send") == {("send", "ValueError: no user #"): (2, 2)}
    assert errors_of(some, "--task", "send", "--queue", "web") == {}


def test_jobs_that_did_not_fail_are_no_errors(taskd):
    for state in ("done", "cancelled"):
        taskd.finish(taskd.enqueue("t", "--queue", "email"), state, reason="by hand")
    taskd.enqueue("t", "--queue", "email", "--in", "1h")
    assert errors_of(taskd) == {}


def test_a_failed_job_without_a_reason_shows_its_last_error(taskd):
    errors = json.dumps([{"message": "first"}, {"message": "last one"}])
    fail(taskd, "t", None, errors=errors)
    assert errors_of(taskd) == {("t", "last one"): (1, 0)}


def test_errors_as_lines(some):
    lines = [line.split("\t") for line in some("stats", "errors").stdout.splitlines()]
    assert lines[0] == [
        "FAILED", "RETRYING", "LAST AGO", "FIRST AGO", "EXAMPLE", "TASK", "ERROR",
    ]  # fmt: skip
    assert [line[0] for line in lines[1:]] == ["2", "1"]
    assert lines[1][3] == "2h"
    assert lines[1][5:] == ["send", "ValueError: no user #"]


def test_the_most_frequent_kinds_are_shown_first_and_the_rest_is_reported(some):
    result = some("stats", "errors", "--limit", "1")
    assert len(result.stdout.splitlines()) == 2
    assert "send" in result.stdout
    assert result.stderr == "these are the 1 most frequent of 2 kinds; see more with --limit\n"


def test_it_says_when_not_all_was_read(some, monkeypatch):
    assert some("stats", "errors").stderr == ""
    monkeypatch.setattr(stats, "ERRORS_READ_MAX", 2)
    result = some("stats", "errors", "--task", "send")
    assert "only the newest 2 failed jobs were read, which failed in the last 1m" in result.stderr
    assert "RETRYING counts only the 2 scheduled jobs that are due first" in result.stderr
    assert "\tValueError: no user #\n" in result.stdout
    assert errors_of(some, "--task", "nobody") == {}
    assert "newest 2" in some("stats", "errors", "--task", "nobody").stderr


def test_options_before_the_command_are_not_lost(taskd):
    error = taskd("stats", "--queue", "email", "errors", code=2).stderr
    assert "write --queue after errors: taskd stats errors --queue ..." in error
    assert "No such command 'x'" in taskd("stats", "x", code=2).stderr


def test_an_observer_may_ask(some, logins):
    assert errors_of(Shell(logins.dsn("observer"))) == errors_of(some)
    Shell(logins.dsn("producer"))("stats", "errors", code=77)
