"""`taskd actions`, and where the other commands show who has acted."""

from __future__ import annotations

import getpass
import socket

SHELL = f"shell {getpass.getuser()[:60]}@{socket.gethostname()[:60]}"


def test_actions_lists_who_did_what_and_why(taskd):
    job = taskd.enqueue("send", "--queue", "email")
    taskd("queues", "pause", "email", "--reason", "provider down")
    taskd("jobs", "cancel", job, "--reason", "withdrawn")
    cancelled, paused = taskd.json("actions")
    assert (cancelled["action"], cancelled["target"]) == ("cancel", f"job {job}")
    assert (paused["action"], paused["target"], paused["reason"]) == (
        "pause", "queue email", "provider down",
    )  # fmt: skip
    assert paused["actor"] == SHELL
    assert paused["by"] == f"{paused['login']} ({SHELL})"
    assert taskd.json("actions", "--target", "queue email") == [paused]
    assert taskd.json("actions", "--by", "nobody") == []
    assert len(taskd.json("actions", "--limit", "1")) == 1
    table = taskd("actions").stdout.splitlines()
    assert table[1].split("\t")[1:3] == ["cancel", f"job {job}"]


def test_the_lists_say_who_has_paused(taskd):
    job = taskd.enqueue("send", "--queue", "email")
    taskd("queues", "pause", "email", "--reason", "provider down")
    [queue] = taskd.json("queues", "list")
    assert queue["paused_by"].endswith(f"({SHELL})")
    by = queue["paused_by"]
    assert f"yes, by {by}: provider down" in taskd("queues", "list").stdout
    assert f"until it is resumed, by {by}: provider down" in taskd("why", job).stdout


def test_show_names_who_acted_on_a_job(taskd):
    job = taskd.enqueue("send", "--queue", "email")
    taskd("jobs", "set", job, "--priority", "3")
    taskd("jobs", "cancel", job, "--reason", "withdrawn")
    shown = taskd("jobs", "show", job).stdout
    assert "change (priority 3) by" in shown
    assert f"({SHELL}): withdrawn" in shown
    [row] = taskd.json("jobs", "show", job)
    assert [each["action"] for each in row["actions"]] == ["change", "cancel"]


def test_the_user_behind_sudo_is_named(taskd):
    taskd("queues", "pause", "email", SUDO_USER="ada")
    [action] = taskd.json("actions")
    assert action["actor"] == f"shell ada@{socket.gethostname()[:60]}, as {getpass.getuser()}"
