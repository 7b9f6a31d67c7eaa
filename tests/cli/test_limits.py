"""`taskd limits` and `taskd queues set`: what operators allow, and what is said of it."""

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
        (("--rate", "10"), "write 100/s, 30/m or 5/h"),
        (("--rate", "0/s"), "write 100/s, 30/m or 5/h"),
        (("--concurrency", "0"), "1<=x<=10000"),
    ],
)
def test_what_no_limit_can_be_is_said(taskd, args, said):
    assert said in taskd("limits", "set", "send", *args, code=2).stderr


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
    assert 'the queue "email" is full: 1 jobs wait in it, no more than 1 may' in refused.stderr


BLOCK = "state = 'blocked', limit_name = 'send', limit_key = 'acme'"


def why(taskd, job_id):
    [told] = taskd.json("why", job_id)
    return [reason["why"] for reason in told["reasons"]], taskd("why", job_id).stdout


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
    assert f"lets 1 job of its key run at a time. The places have: {holder}." in text
    assert f"next: taskd why {holder}" in text


def test_a_job_of_a_limit_without_tokens_is_told_when_the_next_one_comes(taskd):
    taskd("limits", "set", "send", "--rate", "1/h")
    parked = blocked(taskd)
    taskd.sql(
        "INSERT INTO taskd.opening (limit_name, limit_key, at) "
        "VALUES ('send', 'acme', now() + interval '30 min')"
    )
    words, text = why(taskd, parked)
    assert words[-1] == "limit_closed"
    assert "The limit send lets 1/h of its key begin; the next one may in" in text


def test_a_job_of_a_limit_that_nobody_has_published(taskd):
    words, text = why(taskd, blocked(taskd))
    assert "limit_unknown" in words
    assert "Nobody has published its limit send" in text


def test_a_job_of_a_limited_queue(taskd):
    taskd("queues", "set", "email", "--rate", "5/m")
    words, text = why(taskd, taskd.enqueue("send_report", "--queue", "email"))
    assert "queue_limited" in words
    assert "The queue email is limited: it allows 5/m to begin." in text
