"""`taskd queues`: all queues at once, and what a queue keeps."""

import pytest


def paused(taskd):
    return [
        row["name"]
        for row in taskd.sql("SELECT name FROM taskd.queue WHERE paused_at IS NOT NULL ORDER BY 1")
    ]


def test_all_queues_are_paused_and_resumed(taskd):
    taskd.enqueue("send", "--queue", "with-a-job")
    taskd("queues", "set", "with-a-row", "--max-running", 3)
    said = taskd("queues", "pause", "--all", "--reason", "maintenance").stderr
    assert "with-a-job, with-a-row" in said
    assert "is new" not in said
    assert paused(taskd) == ["with-a-job", "with-a-row"]
    assert "resumed: with-a-job\nresumed: with-a-row\n" in taskd("queues", "resume", "--all").stderr
    assert paused(taskd) == []
    assert "no queue was paused" in taskd("queues", "resume", "--all").stderr
    (answer,) = taskd.json("queues", "pause", "--all", "--for", "1h")
    assert (answer["paused"], answer["new"]) == (["with-a-job", "with-a-row"], [])
    (answer,) = taskd.json("queues", "resume", "--all")
    assert answer == {"resumed": ["with-a-job", "with-a-row"], "not_paused": []}


def test_no_queue_can_be_paused(taskd):
    assert "no queue" in taskd("queues", "pause", "--all").stderr


@pytest.mark.parametrize("command", ["pause", "resume"])
@pytest.mark.parametrize("names", [(), ("email", "--all")])
def test_names_and_all_exclude_each_other(taskd, command, names):
    assert "either names of queues, or --all" in taskd("queues", command, *names, code=2).stderr


def test_keep_alone_shows_what_is_kept(taskd):
    assert taskd.json("queues", "keep", "email") == [
        {"name": "email", "keep_done_s": 604800, "keep_failed_s": 2592000}
    ]
    assert not taskd.sql("SELECT FROM taskd.queue")
    taskd("queues", "keep", "email", "--done", "1h")
    shown = taskd("queues", "keep", "email").stdout
    assert "1h" in shown
    assert "30d" in shown


@pytest.mark.parametrize(
    ("queues", "why"),
    [
        ("email:x", "'email:x' is not a queue: write name or name:concurrency"),
        ("email:0", "is not a queue"),
        ("email,Reports", "'Reports' is not a queue"),
        ("email;reports", "is not a queue"),
        ("email,email:4", "the queue 'email' is named twice"),
    ],
)
def test_a_wrong_list_of_queues_is_refused_with_its_source(taskd, queues, why):
    said = taskd("config", code=78, TASKD_QUEUES=queues).stderr
    assert "TASKD_QUEUES: " in said
    assert why in said


def test_the_format_of_the_list_of_queues_is_written_where_it_is_set(taskd):
    rows = taskd.json("config", TASKD_QUEUES="email, reports:4,tenant-*:2")
    (row,) = [each for each in rows if each["name"] == "queues"]
    assert row["value"] == ["email", "reports:4", "tenant-*:2"]
    assert "email,reports:4,tenant-*" in row["help"]
