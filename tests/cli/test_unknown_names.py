"""Filters with an unknown name."""

import pytest

from taskd.cli.shared.name_hints import unknown

COMMANDS = [
    ("jobs", "list"),
    ("stats",),
    ("stats", "errors"),
    ("jobs", "cancel", "--dry-run"),
    ("top", "--once"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_queue_that_nobody_knows_is_named_with_those_that_there_are(taskd, command):
    taskd.worker(1, "email", "web")
    result = taskd(*command, "--queue", "emial")
    said = "taskd: no queue 'emial' is known; did you mean 'email'? There are: email, web\n"
    assert said in result.stderr
    assert "emial' is known" not in result.stdout


def test_a_task_that_nobody_knows(taskd):
    taskd.publish("send_report")
    for command in COMMANDS[:-1]:
        said = taskd(*command, "--task", "send_rapport").stderr
        assert "taskd: no task 'send_rapport' is known; did you mean 'send_report'?" in said


def test_json_stays_clean_and_quiet_is_quiet(taskd):
    assert taskd.json("jobs", "list", "--queue", "nope") == []
    stderr = taskd("stats", "--queue", "nope").stderr
    assert "no queue 'nope' is known, and no other queue either" in stderr
    assert taskd("-q", "jobs", "list", "--queue", "nope").stderr == ""


def test_what_a_worker_serves_or_a_job_bears_is_known(taskd):
    taskd.worker(1, "served")
    cancelled = taskd.enqueue("old", "--queue", "past")
    taskd.finish(cancelled, "cancelled")
    taskd.enqueue("new", "--queue", "waiting", "--in", "1h")
    for queue in ("served", "past", "waiting"):
        assert taskd("jobs", "list", "--queue", queue, "--state", "failed").stderr == ""
    for task in ("old", "new"):
        assert taskd("jobs", "list", "--task", task, "--state", "failed").stderr == ""


def test_a_filter_that_finds_something_asks_nothing_more(taskd):
    taskd.enqueue("x", "--queue", "email")
    assert taskd("jobs", "list", "--queue", "email").stderr == ""


def test_many_names_are_counted():
    said = unknown("queue", "q7x", [f"q{number}" for number in range(30)])
    assert said.startswith("no queue 'q7x' is known; did you mean 'q7'? There are: q7, q0, ")
    assert said.endswith(" and 20 more")
