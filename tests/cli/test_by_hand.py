"""`taskd jobs complete|restart|run-again|delete`, `taskd workers declare-dead`."""

from __future__ import annotations

RUN = """
UPDATE taskd.job SET state = 'running', worker_id = 7, attempt = 1, fence = 1, started_at = now()
WHERE id = $1
"""


def run(taskd, *ids):
    for job_id in ids:
        taskd.sql(RUN, job_id)


def test_complete_ends_a_job_with_a_result(taskd):
    job = taskd.enqueue("send", "--queue", "email")
    assert "it is not JSON" in taskd("jobs", "complete", job, "--result", "{x", code=2).stderr
    result = '{"sent": true}'
    done = taskd("jobs", "complete", job, "--result", result, "--reason", "sent by post")
    assert done.stdout == f"{job}\tqueued\n"
    [shown] = taskd.json("jobs", "show", job)
    assert (shown["state"], shown["result"], shown["reason"]) == ("done", {"sent": True}, None)
    assert [(each["action"], each["reason"]) for each in shown["actions"]] == [
        ("complete", "sent by post")
    ]
    again = taskd("jobs", "complete", job, 77, "--json", code=3)
    assert f"job {job} is done already" in again.stderr
    assert "no job has the id 77" in again.stderr


def test_restart_starts_running_jobs_again_and_says_what_to_do_with_others(taskd):
    one, two, three = (taskd.enqueue("send", "--queue", "email") for _ in range(3))
    run(taskd, one, two)
    taskd.finish(three, "failed")
    restarted = taskd("jobs", "restart", one, "--reason", "it hangs", "--in", "0s")
    assert restarted.stdout == f"{one}\tqueued\n"
    assert f"retry it: taskd jobs retry {three}" in taskd("jobs", "restart", three, code=1).stderr
    assert "only running jobs" in taskd("jobs", "restart", one, code=1).stderr
    assert taskd.json("jobs", "restart", two, "--dry-run") == [
        {"restarted": [two], "dry_run": True, "refused": []}
    ]
    by_filter = taskd("jobs", "restart", "--task", "send", "--reason", "it hangs")
    assert by_filter.stdout == f"{two}\n"
    assert "1 job restarted" in by_filter.stderr
    [shown] = taskd.json("jobs", "show", two)
    assert shown["state"] == "scheduled"
    assert shown["errors"][0]["type"] == "EndedByHand"
    assert "): it hangs" in shown["errors"][0]["message"]
    assert "restarted by " in taskd("jobs", "list").stdout


def test_run_again_copies_done_jobs(taskd):
    job = taskd.enqueue("send", "to=ada", "--queue", "email")
    refused = taskd("jobs", "run-again", job, code=1)
    assert f"job {job} is queued; only finished jobs can run again" in refused.stderr
    taskd.finish(job, "done")
    assert f"taskd jobs run-again {job}" in taskd("jobs", "retry", job, code=1).stderr
    copied = taskd("jobs", "run-again", job, "--reason", "wrong month")
    original, copy = map(int, copied.stdout.split())
    assert original == job
    [shown] = taskd.json("jobs", "show", copy)
    assert (shown["state"], shown["args"]) == ("queued", {"to": "ada"})
    assert shown["actions"][0]["detail"] == {"of": job}
    by_filter = taskd("jobs", "run-again", "--task", "send", "--state", "done")
    assert by_filter.stdout == f"{copy + 1}\n"
    assert "1 job copied" in by_filter.stderr


def test_delete_removes_jobs_and_says_why_it_does_not(taskd):
    one, two, three = (taskd.enqueue("send", "--queue", "email") for _ in range(3))
    run(taskd, two)
    assert taskd("jobs", "delete", one, "--reason", "test data").stdout == f"{one}\n"
    kept = taskd("jobs", "delete", two, code=1)
    assert f"running: {two}; cancel them first: taskd jobs cancel {two}" in kept.stderr
    assert "no job has the id 77" in taskd("jobs", "delete", 77, code=3).stderr
    assert taskd("jobs", "delete", "--task", "send").stdout == f"{three}\n"
    assert [row["id"] for row in taskd.json("jobs", "list")] == [two]
    deleted = [each["target"] for each in taskd.json("actions") if each["action"] == "delete"]
    assert deleted == [f"job {three}", f"job {one}"]


def test_a_worker_is_declared_dead_only_if_it_is_late(taskd):
    taskd.worker(7, "email")
    taskd.worker(8, "email")
    taskd.sql("UPDATE taskd.worker SET renewed_at = now() - interval '1 hour' WHERE id = 8")
    lives = taskd("workers", "declare-dead", 7, code=1)
    assert "worker 7 renews its lease, so it lives" in lives.stderr
    dead = taskd("workers", "declare-dead", 8, "--reason", "its host is off")
    assert "worker 8 is declared dead" in dead.stderr
    assert "declared dead before" in taskd("workers", "declare-dead", 8, code=1).stderr
    assert "no worker has the id 9" in taskd("workers", "declare-dead", 9, code=3).stderr
    states = {row["id"]: row["state"] for row in taskd.json("workers")}
    assert states == {"7": "live", "8": "dead"}
    [action] = taskd.json("actions")
    assert (action["action"], action["target"], action["detail"]) == (
        "declare dead", "worker 8", {"host": "host1", "pid": 4242},
    )  # fmt: skip
