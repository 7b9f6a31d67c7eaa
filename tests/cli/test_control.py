"""`taskd jobs set`, changes in bulk, `taskd tasks pause`, `taskd queues set`, what is hidden."""

from __future__ import annotations

import json

import pytest

from taskd.cli.jobs import bulk
from taskd.client.operations import bulk as client_bulk
from taskd.store.jobs import changes

ERROR = {"type": "Timeout", "message": "order 17 took 3.2 s", "worker": "1", "attempt": 1}


def states(taskd):
    rows = taskd.sql("SELECT id, state FROM taskd.jobs ORDER BY id")
    return {row["id"]: row["state"] for row in rows}


def failed(taskd, count, task="send", message="order 17 took 3.2 s"):
    ids = [taskd.enqueue(task, f"n:={n}", "--queue", "email") for n in range(count)]
    for job_id in ids:
        taskd.finish(
            job_id,
            "failed",
            reason=f"Timeout: {message}",
            errors=json.dumps([ERROR | {"message": message}]),
        )
    return ids


def test_set_answers_for_each_job(taskd):
    one = taskd.enqueue("send", "to=ada", "--queue", "email")
    two = taskd.enqueue("send", "--queue", "email")
    taskd.finish(two, "done")
    changed = taskd("jobs", "set", one, two, "--priority", 1, "--in", "1h", code=1)
    assert changed.stdout.splitlines() == [f"{one}\tchanged", f"{two}\tfinished"]
    assert f"finished: {two}; only waiting jobs can be changed" in changed.stderr
    [shown] = taskd.json("jobs", "show", one)
    assert (shown["priority"], shown["state"]) == (1, "scheduled")
    result = taskd("jobs", "set", one, 77, "--arg", "n:=3", "--json", code=3)
    assert json.loads(result.stdout) == {
        "changed": [one], "running": [], "finished": [], "unknown": [77]
    }  # fmt: skip
    assert taskd.json("jobs", "show", one)[0]["args"] == {"to": "ada", "n": 3}


def test_set_moves_and_sets_and_takes_away_a_deadline(taskd):
    one = taskd.enqueue("send", "--queue", "email", "--deadline", "2h")
    assert taskd.json("jobs", "show", one)[0]["deadline"]
    taskd("jobs", "set", one, "--no-deadline", "--move-to", "slow", "--args", '{"a": 1}')
    [shown] = taskd.json("jobs", "show", one)
    assert (shown["deadline"], shown["queue"], shown["args"]) == (None, "slow", {"a": 1})
    taskd("jobs", "set", one, "--deadline", "2030-01-01T00:00:00Z")
    assert taskd.json("jobs", "show", one)[0]["deadline"].startswith("2030-01-01")


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["set", 1], "give at least one change"),
        (["set", "--priority", 1], "give ids, or options that choose jobs"),
        (["set", 1, "--task", "x", "--priority", 1], "give ids, or options that choose jobs"),
        (["set", 1, "--args", "{}", "--arg", "a=1"], "give either --args or --arg"),
        (["set", 1, "--priority", 3000000000], "priority 3000000000 is not"),
        (["retry", "--failed", "--at", "2030-01-01T00:00:00Z", "--in", "5m"], "--in or --at"),
        (["cancel"], "give ids, or options that choose jobs"),
    ],
)
def test_what_makes_no_sense_is_refused(taskd, args, why):
    assert why in taskd("jobs", *args, code=2).stderr


def test_failed_jobs_are_retried_by_the_text_that_stats_errors_shows(taskd):
    mine = failed(taskd, 3)
    others = failed(taskd, 2, message="no such host")
    failed(taskd, 1, task="fetch")
    [first, *_] = taskd.json("stats", "errors", "--task", "send")
    assert first["error"] == "Timeout: order # took # s"
    choice = ["--failed", "--task", "send", "--error", first["error"]]
    dry = taskd("jobs", "retry", *choice, "--dry-run")
    assert dry.stdout.split() == [str(job_id) for job_id in mine]
    assert dry.stderr == "3 jobs would be retried\n"
    assert set(states(taskd).values()) == {"failed"}
    result = taskd("jobs", "retry", *choice, "--in", "5m")
    assert result.stdout.split() == [str(job_id) for job_id in mine]
    assert [states(taskd)[job_id] for job_id in mine + others] == ["scheduled"] * 3 + ["failed"] * 2


def test_a_filter_follows_arguments_and_a_limit(taskd):
    ids = failed(taskd, 4)
    [dry] = taskd.json("jobs", "retry", "--failed", "--where-arg", "n:=2", "--dry-run")
    assert dry == {"found": 1, "sample": [ids[2]], "dry_run": True}
    assert taskd("jobs", "retry", "--failed", "--limit", 3).stdout.split() == [*map(str, ids[:3])]
    assert taskd.json("jobs", "retry", "--failed")[0]["retried"] == ids[3:]


def test_a_cancel_in_bulk_goes_in_batches_and_says_how_many(taskd, monkeypatch):
    monkeypatch.setattr(client_bulk, "BATCH_JOBS", 2)
    monkeypatch.setattr(changes, "READ_MAX", 3)
    ids = [taskd.enqueue("send", "--queue", "email") for _ in range(7)]
    kept = taskd.enqueue("other", "--queue", "email")
    result = taskd("jobs", "cancel", "--task", "send", "--reason", "wrong list")
    assert result.stdout.split() == [str(job_id) for job_id in ids]
    assert result.stderr == "7 jobs cancelled\n"
    assert states(taskd)[kept] == "queued"
    assert taskd.json("jobs", "show", ids[0])[0]["reason"] == "wrong list"
    # The same again finds nothing more.
    assert taskd("jobs", "cancel", "--task", "send").stderr == "0 jobs cancelled\n"


def test_a_set_in_bulk_prints_what_it_changed(taskd):
    ids = [taskd.enqueue("send", "--queue", "email") for _ in range(3)]
    taskd("jobs", "set", "--queue", "email", "--state", "queued", "--in", "1h")
    assert {states(taskd)[job_id] for job_id in ids} == {"scheduled"}
    assert taskd("jobs", "set", "--task", "none", "--priority", 1).stdout == ""


def test_on_a_terminal_many_jobs_are_asked_about(taskd, monkeypatch):
    monkeypatch.setattr(bulk, "ASK_ABOVE_JOBS", 2)
    monkeypatch.setattr(bulk, "on_terminal", lambda: True)
    ids = failed(taskd, 3)
    asked = taskd("jobs", "retry", "--failed", stdin="n\n", code=130)
    assert "3 jobs will be retried. Continue?" in asked.stderr
    assert states(taskd)[ids[0]] == "failed"
    taskd("jobs", "retry", "--failed", "--limit", 2)
    assert states(taskd)[ids[1]] == "queued"
    assert taskd("jobs", "retry", "--failed", "--yes").stdout.split() == [str(ids[2])]


def test_an_interrupted_bulk_says_how_far_it_got(taskd, monkeypatch):
    from taskd.store.jobs import jobs

    monkeypatch.setattr(client_bulk, "BATCH_JOBS", 2)
    ids = failed(taskd, 4)
    real, calls = jobs.retry, []

    async def interrupted(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return await real(*args)

    monkeypatch.setattr(jobs, "retry", interrupted)
    result = taskd("jobs", "retry", "--failed", code=130)
    assert "2 jobs retried so far" in result.stderr
    assert [states(taskd)[job_id] for job_id in ids] == ["queued"] * 2 + ["failed"] * 2


def test_tasks_are_paused_and_resumed(taskd):
    taskd.publish()
    job_id = taskd.enqueue("send_report", "to=ada")
    taskd.worker(5, "email")
    paused = taskd("tasks", "pause", "send_report", "--reason", "source down", "--for", "10m")
    assert paused.stderr == "paused for 10m: send_report\n"
    [row] = taskd.json("tasks", "list")
    assert (row["paused"], row["pause_reason"]) == (True, "source down")
    assert "source down" in taskd("tasks", "list").stdout
    stdout = taskd("why", job_id).stdout
    assert "The task send_report is paused, since" in stdout
    assert "source down" in stdout
    assert "next: taskd tasks resume send_report" in stdout
    assert taskd("tasks", "resume", "send_report").stderr == "resumed: send_report\n"
    assert taskd.json("tasks", "resume", "send_report") == [
        {"resumed": [], "not_paused": ["send_report"]}
    ]
    assert (
        "no worker has published a task named 'nope'"
        in taskd("tasks", "pause", "nope", code=2).stderr
    )


def test_the_concurrency_of_a_queue_is_set_and_given_back(taskd):
    assert "email\t5" in taskd("queues", "set", "email", "--concurrency", 5).stdout
    assert taskd.json("queues", "list")[0]["concurrency"] == 5
    [row] = taskd.json("queues", "set", "email", "--concurrency", "default")
    assert (row["name"], row["concurrency"]) == ("email", None)
    assert taskd.json("queues", "list") == []
    taskd("queues", "set", "email", "--concurrency", 0, code=2)


def test_why_shows_of_deadlines_newer_arguments_and_keys(taskd):
    taskd.publish()
    one = taskd.enqueue("send_report", "to=ada", "--deadline", "1h", "--unique-key", "k")
    stdout = taskd("why", one).stdout
    assert "It expires if no attempt has started by" in stdout
    assert f"next: taskd jobs set {one} --no-deadline" in stdout
    taskd.sql("UPDATE taskd.job SET args_version = 3")
    assert "have version 3; the workers' code knows version 1" in taskd("why", one).stdout
    taskd.sql("UPDATE taskd.job SET deadline = now() - interval '1 s'")
    assert "has passed: it is about to fail as expired" in taskd("why", one).stdout
    taskd("jobs", "cancel", one)
    two = taskd.enqueue("send_report", "to=ada", "--unique-key", "k")
    assert f"Job {two} holds its unique key now" in taskd("why", one).stdout
    refused = taskd("jobs", "retry", one, code=1).stderr
    assert "another job holds its unique key" in refused


def test_hidden_arguments_are_shown_only_to_who_says_so(taskd):
    taskd.publish()
    taskd.sql("UPDATE taskd.task SET redact = '{to}'")
    job_id = taskd.enqueue("send_report", "to=ada@example.org", "n:=1")
    assert taskd.json("jobs", "show", job_id)[0]["args"] == {"to": "***", "n": 1}
    assert "ada@" not in taskd("jobs", "show", job_id).stdout
    [open_] = taskd.json("jobs", "show", job_id, "--unredacted")
    assert open_["args"] == {"to": "ada@example.org", "n": 1}
    refused = taskd("enqueue", "send_report", "to:=12345", code=2).stderr
    assert "12345" not in refused
    assert "the value does not fit the task - at `$.to`" in refused


def test_lines_of_stdin_have_deadlines(taskd):
    lines = "\n".join(
        json.dumps({"task": "t", "queue": "q"} | each)
        for each in ({"deadline": "2030-01-01T00:00:00Z"}, {"deadline_s": 60}, {})
    )
    taskd("enqueue", "-", "--deadline", "1d", stdin=lines)
    rows = taskd.sql("SELECT deadline - now() AS left FROM taskd.job ORDER BY id")
    days = [row["left"].total_seconds() / 86400 for row in rows]
    assert days[0] > 1000
    assert days[1] < 0.1
    assert 0.9 < days[2] <= 1.0
    wrong = '{"task": "t", "queue": "q", "deadline": "2030-01-01T00:00:00Z", "deadline_s": 1}'
    assert "either deadline or deadline_s" in taskd("enqueue", "-", stdin=wrong, code=2).stderr


def test_blocked_jobs_wait_as_well(taskd):
    ids = [taskd.enqueue("send", "--queue", "email") for _ in range(2)]
    taskd.sql("UPDATE taskd.job SET state = 'blocked', limit_name = 'narrow', limit_key = ''")
    [row] = taskd.json("jobs", "set", "--task", "send", "--state", "blocked", "--priority", 7)
    assert row["changed"] == ids
    [row] = taskd.json("jobs", "cancel", ids[0], "--dry-run")
    assert (row["cancelled"], row["refused"]) == ([ids[0]], [])
    [row] = taskd.json("jobs", "cancel", "--state", "blocked")
    assert row["cancelled"] == ids
