"""`taskd keys`: who holds a unique key, and keys that are freed by hand."""


def test_the_shell_shows_who_holds_a_key(taskd):
    job = taskd.enqueue(
        "sync", "--queue", "q", "--unique-key", '["X", 1.0]', "--key-scope", "forever"
    )
    shown = taskd("keys", "show", "sync", '["X",1]').stdout
    assert f"{job}" in shown
    assert "the key is forgotten by hand" in shown
    (held,) = taskd.json("keys", "show", "sync", '[ "X", 1 ]')
    assert (held["job_id"], held["state"], held["scope"]) == (job, "queued", "forever")
    assert held["unique_key"] == '["X",1]'
    assert taskd.json("jobs", "show", job)[0]["key_scope"] == "forever"
    taskd("jobs", "cancel", job)
    assert taskd.json("jobs", "show", job)[0]["key_scope"] == "forever"


def test_the_shell_shows_a_key_that_is_held_for_a_time(taskd):
    job = taskd.enqueue("sync", "--queue", "q", "--unique-key", "k", "--key-for", "1h")
    assert "it has ended, at least until" in taskd("keys", "show", "sync", "k").stdout
    taskd.finish(job, "done")
    assert "held until" in taskd("keys", "show", "sync", "k").stdout
    (held,) = taskd.json("keys", "show", "sync", "k")
    assert held["scope"] is None


def test_a_key_that_nobody_holds_is_not_found(taskd):
    said = taskd("keys", "show", "sync", "k", code=3).stderr
    assert "no job of task 'sync' holds the key 'k'" in said
    assert "no job of task 'sync' holds" in taskd("keys", "forget", "sync", "k", code=3).stderr


def test_the_shell_forgets_a_key_after_the_end_of_its_job(taskd):
    add = ("enqueue", "sync", "--queue", "q", "--unique-key", "k", "--key-scope", "history")
    job = int(taskd(*add).stdout)
    held = taskd("keys", "forget", "sync", "k", code=2).stderr
    assert f"job {job} of task" in held
    taskd("jobs", "cancel", job)
    assert "holds the unique key, so no job was added" in taskd(*add).stderr
    assert "a new job can take it" in taskd("keys", "forget", "sync", "k", "--reason", "odd").stderr
    [action] = taskd.json("actions", "--limit", "1")
    assert (action["action"], action["target"], action["reason"]) == (
        "forget key", f"job {job}", "odd",
    )  # fmt: skip
    assert int(taskd(*add).stdout) != job
