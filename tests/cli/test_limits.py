"""`taskd limits` and `taskd queues set`: what operators set, and what the commands print."""

import pytest


def test_a_limit_is_set_listed_and_cleared(taskd):
    [row] = taskd.json("limits", "set", "send", "--concurrency", 3, "--rate", "30/m")
    assert row == {
        "name": "send", "concurrency": 3, "concurrency_in_all": None, "rate": 0.5, "burst": 1,
    }  # fmt: skip
    assert "30/m, burst 1" in taskd("limits", "list").stdout
    [row] = taskd.json("limits", "set", "send", "--concurrency", "none", "--in-all", 9)
    assert (row["concurrency"], row["concurrency_in_all"], row["rate"]) == (None, 9, 0.5)
    assert taskd.json("limits", "clear", "send", "other") == [
        {"cleared": ["send"], "not_set": ["other"]}
    ]
    assert taskd.json("limits", "list") == []


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ((), "give one of --concurrency"),
        (("--rate", "10"), "Write for example 100/s, 30/m or 5/h"),
        (("--rate", "0/s"), "Write for example 100/s, 30/m or 5/h"),
        (("--concurrency", "0"), "1<=x<=10000"),
    ],
)
def test_what_no_limit_can_be_is_reported(taskd, args, said):
    assert said in taskd("limits", "set", "send", *args, code=2).stderr


def test_a_rate_that_its_burst_cannot_keep_up_with_is_refused(taskd):
    refused = taskd("limits", "set", "send", "--rate", "1000/s", "--burst", 1, code=2)
    assert "Give a burst of at least 50." in refused.stderr
    taskd("limits", "set", "send", "--rate", "1000/s")
    refused = taskd("limits", "set", "send", "--burst", 1, code=2)
    assert "Give a burst of at least 50." in refused.stderr
    [row] = taskd.json("limits", "set", "send", "--burst", 50)
    assert (row["rate"], row["burst"]) == (1000.0, 50)


@pytest.mark.parametrize("command", [("limits", "set", "send"), ("queues", "set", "email")])
def test_a_burst_without_a_rate_is_refused_and_changes_nothing(taskd, command):
    refused = taskd(*command, "--burst", 5, code=2)
    assert f"{command[0][:-1]} {command[2]} was given a burst, but has no rate" in refused.stderr
    assert taskd.json(command[0], "list") == []
    taskd(*command, "--rate", "10/s")
    [row] = taskd.json(*command, "--burst", 5)
    assert (row["rate"], row["burst"]) == (10.0, 5)
    assert "but has no rate" in taskd(*command, "--rate", "none", "--burst", 5, code=2).stderr


def test_who_sets_a_limit_that_no_task_has_is_reported(taskd):
    stderr = taskd("limits", "set", "sedn", "--concurrency", 5).stderr
    assert "no published task has the limit sedn yet" in stderr


def test_a_limit_says_how_many_wait_at_which_gate_and_for_which_key(taskd):
    taskd("limits", "set", "send", "--concurrency", 2, "--in-all", 3, "--rate", "1/h")
    for more in ("gate = 'parked'", "gate = 'parked'", "gate = 'next'", "gate = NULL"):
        blocked(taskd, more)
    taskd.sql(
        "UPDATE taskd.job SET state = 'queued', gate = NULL, limit_key = 'umbrella' WHERE id = $1",
        blocked(taskd),
    )
    taskd.sql("INSERT INTO taskd.bucket VALUES ('send', 'acme', 0, now())")
    [row] = taskd.json("limits", "list")
    counts = {"running": 0, "queued": 1, "next": 1, "parked": 2, "blocked": 4}
    assert counts.items() <= row.items()
    [shown] = taskd.json("limits", "show", "send")
    acme, umbrella = shown.pop("keys")
    assert shown == row
    assert 0 <= acme.pop("tokens") < 0.1
    assert acme == counts | {"queued": 0, "key": "acme"}
    assert (umbrella["queued"], umbrella["blocked"], umbrella["tokens"]) == (1, 0, 1)
    assert "umbrella" not in taskd("limits", "show", "send", "--limit", 1).stdout
    assert "no limit is named 'other'" in taskd("limits", "show", "other", code=3).stderr


def test_a_queue_is_limited_and_listed_with_that(taskd):
    [row] = taskd.json(
        "queues", "set", "email", "--max-running", 10, "--rate", "100/s", "--max-depth", 100000
    )
    assert row == {
        "name": "email", "concurrency": None, "max_running": 10, "max_depth": 100000,
        "rate": 100.0, "burst": 100,
    }  # fmt: skip
    assert "10 running; 100,000 deep; 100/s, burst 100" in taskd("queues", "list").stdout
    nothing = ("--max-running", "none", "--rate", "none", "--max-depth", "none")
    taskd("queues", "set", "email", *nothing)
    assert taskd.json("queues", "list") == []


def test_enqueuing_into_a_full_queue_fails_and_says_what_to_do(taskd):
    taskd("queues", "set", "email", "--max-depth", 1)
    taskd.enqueue("send_report", "--queue", "email")
    refused = taskd("enqueue", "send_report", "--queue", "email", code=1)
    assert 'the queue "email" is full: 1 jobs wait in it, the limit is 1' in refused.stderr


BLOCK = "state = 'blocked', limit_name = 'send', limit_key = 'acme'"


def why(taskd, job_id):
    [row] = taskd.json("why", job_id)
    return [reason["why"] for reason in row["reasons"]], taskd("why", job_id).stdout


def blocked(taskd, more="gate = 'parked'"):
    made = taskd.enqueue("send_report", "--queue", "email")
    taskd.sql(f"UPDATE taskd.job SET {BLOCK}, {more} WHERE id = $1", made)
    return made


def test_a_job_of_a_full_limit_names_who_has_the_places(taskd):
    taskd("limits", "set", "send", "--concurrency", 1)
    holder, parked = taskd.enqueue("send_report", "--queue", "email"), blocked(taskd)
    taskd.sql(
        "UPDATE taskd.job SET state = 'running', worker_id = 12, fence = 1, attempt = 1, "
        "started_at = now(), limit_name = 'send', limit_key = 'acme' WHERE id = $1",
        holder,
    )
    words, text = why(taskd, parked)
    assert words[-1] == "limit_full"
    assert f"lets 1 job with its key run at a time. Jobs in the slots: {holder}." in text
    assert f"next: taskd why {holder}" in text


def test_a_job_of_a_limit_without_tokens_is_reported_when_the_next_one_comes(taskd):
    taskd("limits", "set", "send", "--rate", "1/h")
    parked = blocked(taskd)
    taskd.sql(
        "INSERT INTO taskd.opening (limit_name, limit_key, at) "
        "VALUES ('send', 'acme', now() + interval '30 min')"
    )
    words, text = why(taskd, parked)
    assert words[-1] == "limit_closed"
    assert "The limit send lets jobs with its key start at 1/h; the next one can start in" in text


def test_a_job_behind_a_burst_that_nobody_begins_names_those(taskd):
    taskd("limits", "set", "send", "--rate", "10/s", "--burst", 1)
    first, parked = blocked(taskd), blocked(taskd)
    taskd.sql("UPDATE taskd.job SET state = 'queued', gate = NULL WHERE id = $1", first)
    taskd.sql("INSERT INTO taskd.opening (limit_name, limit_key) VALUES ('send', 'acme')")
    words, text = why(taskd, parked)
    assert words[-1] == "limit_full"
    assert "has admitted 1 job with its key that no worker has started yet" in text
    assert f"Jobs in the slots: {first}." in text


def test_a_job_of_a_limit_that_nobody_has_published(taskd):
    words, text = why(taskd, blocked(taskd))
    assert "limit_unknown" in words
    assert "Its limit send is not published" in text


def test_a_job_of_a_limited_queue(taskd):
    taskd("queues", "set", "email", "--rate", "5/m")
    words, text = why(taskd, taskd.enqueue("send_report", "--queue", "email"))
    assert "queue_limited" in words
    assert "The queue email is limited: it allows jobs to start at 5/m." in text
