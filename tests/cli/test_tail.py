"""`taskd tail`: what happens, as it happens."""

from __future__ import annotations

import json
import signal
from datetime import UTC, datetime

import pytest

from taskd.cli.reports.tail import line
from taskd.core.jobs.job import JobState
from taskd.core.watching.tail import Event
from tests.cli.screens import Tty
from tests.store.test_watching import FINISH


def read(stream, events):
    """Read `count` events."""
    return [json.loads(stream.readline()) for _ in range(events)]


def finish(taskd, job_id, state, reason=None):
    taskd.sql(FINISH, [job_id], state, reason)


def name_and_job(events):
    return [(each["event"], each["job_id"]) for each in events]


def test_what_happens_is_reported_until_ctrl_c(taskd, process, server):
    before = taskd.enqueue("send_report", "--queue", "email")
    tail = process("tail", "--json", "--interval", "200ms", "--since", "1h", dsn=taskd.dsn)
    assert name_and_job(read(tail.stdout, 1)) == [("enqueued", before)]
    after = taskd.enqueue("send_report", "--queue", "email")
    assert name_and_job(read(tail.stdout, 1)) == [("enqueued", after)]
    finish(taskd, before, "failed", "no\nsecond line")
    claimed, failed = read(tail.stdout, 2)
    assert name_and_job([claimed, failed]) == [("claimed", before), ("failed", before)]
    assert failed["error"] == "no\nsecond line"
    assert (failed["queue"], failed["task"], failed["state"]) == ("email", "send_report", "failed")
    # The end of a job during an outage is printed after it.
    [[name]] = taskd.sql("SELECT current_database()")
    server.admin(
        f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS false',
        f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'",
    )
    assert "retrying" in tail.stderr.readline()
    server.admin(f'ALTER DATABASE "{name}" ALLOW_CONNECTIONS true')
    finish(taskd, after, "done")
    assert name_and_job(read(tail.stdout, 1)) == [("claimed", after)]
    assert name_and_job(read(tail.stdout, 1)) == [("done", after)]
    assert "answers again" in tail.stderr.readline()
    tail.send_signal(signal.SIGINT)
    assert tail.wait(30) == 0
    assert tail.stderr.read() == ""


def test_on_a_terminal_it_says_that_it_follows_while_nothing_happens(taskd):
    tail = Tty(["tail"], taskd.dsn)
    try:
        tail.until("Ctrl-C to stop")
        job_id = taskd.enqueue("send_report", "--queue", "email")
        tail.until(f"{job_id}  email send_report")
        tail.press("\x03")
        assert tail.process.wait(30) == 0
    finally:
        tail.close()


def test_only_what_was_asked_for_is_reported(taskd):
    email = taskd.enqueue("send_report", "--queue", "email")
    finish(taskd, taskd.enqueue("send_report", "--queue", "email"), "failed", "no")
    web = taskd.enqueue("render", "--queue", "web")
    past = ("tail", "--since", "1h", "--count")
    assert name_and_job(taskd.json(*past, 1, "--queue", "web")) == [("enqueued", web)]
    assert name_and_job(taskd.json(*past, 1, "--task", "send_report")) == [("enqueued", email)]
    [failed] = taskd.json(*past, 1, "--state", "failed")
    assert failed["error"] == "no"
    assert len(taskd.json(*past, 4)) == 4


def test_the_story_of_a_job_ends_with_the_job(taskd, process):
    job = taskd.enqueue("send_report", "--queue", "email")
    tail = process("tail", "--json", "--interval", "200ms", "--job", str(job), dsn=taskd.dsn)
    assert name_and_job(read(tail.stdout, 1)) == [("enqueued", job)]
    finish(taskd, job, "done")
    assert tail.wait(30) == 0
    assert [json.loads(each)["event"] for each in tail.stdout] == ["claimed", "done"]
    assert taskd("tail", "--job", job).stdout.splitlines()[-1].split()[1] == "done"
    assert "no job" in taskd("tail", "--job", 99, code=3).stderr.lower()
    assert "leave out --since" in taskd("tail", "--job", 1, "--since", "1h", code=2).stderr


def test_a_reader_who_may_only_watch_may_follow(taskd, logins):
    job = taskd.enqueue("send_report", "--queue", "email")
    reader = type(taskd)(logins.dsn("observer"))
    assert name_and_job(reader.json("tail", "--since", "1h", "--count", 1)) == [("enqueued", job)]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        (
            {"event": "claimed", "attempt": 1, "worker": "h:1", "wait_s": 0.25},
            "claimed           7  email send  by h:1, waited 250ms",
        ),
        (
            {"event": "retried", "attempt": 1, "run_s": 2.0, "error": "E: x\x1b[2J\ny"},
            "retried           7  email send  attempt 1, running for 2s, E: x\\x1b[2J",
        ),
        (
            {"event": "enqueued", "state": JobState.SCHEDULED},
            "enqueued          7  email send  scheduled",
        ),
    ],
)
def test_a_line_says_what_a_person_wants_to_know(event, said):
    made = Event(datetime(2026, 1, 1, tzinfo=UTC), job_id=7, queue="email", task="send", **event)
    assert said in line(made).replace("\x1b[33m", "").replace("\x1b[0m", "")
