"""`taskd workflows`, and what other commands say of blocked jobs."""

from __future__ import annotations

from taskd import Client, task
from taskd.client.operations.bulk import BATCH_JOBS
from taskd.core.jobs.job import NewJob
from taskd.core.tasks.registry import Registry
from taskd.workflows import Workflow, chain, group, pipeline, stage

JOB = NewJob("t", queue="q")


def start(taskd, made, *args):
    client = Client(taskd.dsn)
    try:
        return made.start_sync(*args, client=client)
    finally:
        client.close_sync()


def diamond():
    made = Workflow("shop")
    made.add(JOB, name="begin")
    made.add(JOB, name="left", after=["begin"])
    made.add(JOB, name="right", after=["begin"], on_failed="wait")
    made.add(JOB, name="end", after=["left", "right"])
    return made


def test_a_list_says_how_the_jobs_stand(taskd):
    start(taskd, diamond())
    second = start(taskd, chain(JOB, JOB))
    taskd.finish(second.jobs["t"], "failed")
    rows = taskd.json("workflows", "list")
    assert [(row["name"], row["state"], row["jobs"], row["blocked"]) for row in rows] == [
        ("chain", "waiting", 1, 1),
        ("shop", "running", 4, 3),
    ]
    assert len(taskd.json("workflows", "list", "--name", "shop")) == 1
    head, first = taskd("workflows", "list", "--limit", 1).stdout.splitlines()
    assert head.split("\t")[:4] == ["ID", "NAME", "KIND", "STATE"]
    assert first.split("\t")[1:4] == ["chain", "workflow", "waiting"]


def test_a_workflow_is_drawn_as_a_tree(taskd):
    run = start(taskd, diamond())
    lines = taskd("workflows", "show", run.id).stdout.splitlines()
    assert lines[0].startswith(f"workflow {run.id}, shop, started ")
    ids = run.jobs
    assert lines[1:] == [
        f"begin      queued  job {ids['begin']}",
        f"├─ left    blocked  job {ids['left']}",
        f"└─ right   blocked  job {ids['right']}  (on failed: wait)",
        f"   └─ end  blocked  job {ids['end']}  also after left",
    ]
    assert all(len(line) <= 80 for line in lines)


def test_a_group_of_thousands_is_one_line(taskd):
    run = start(taskd, group([JOB] * 3000, then=NewJob("end", queue="q")))
    lines = taskd("workflows", "show", run.id).stdout.splitlines()
    assert len(lines) == 3
    assert "3,000 queued" in lines[1]
    [shown] = taskd.json("workflows", "show", run.id)
    assert [part["part"] for part in shown["parts"]] == ["t", "end"]
    assert shown["parts"][0]["jobs"] == 3000
    assert shown["parts"][1]["after"] == ["t"]


def ingest():
    @task(registry=Registry(), queue="io")
    async def fetch(url: str) -> dict[str, str]: ...

    @task(registry=Registry(), queue="cpu")
    async def parse(doc: str) -> None: ...

    return pipeline("ingest", stage("fetch", fetch), stage("parse", parse), registry=None)


def test_a_pipeline_shows_stages_that_have_not_begun_and_counts_its_runs(taskd):
    line = ingest()
    runs = [start(taskd, line, "a"), start(taskd, line, "b")]
    lines = taskd("workflows", "show", runs[0].id).stdout.splitlines()
    assert lines[1:] == [f"fetch     queued  job {runs[0].jobs['fetch']}", "└─ parse  -"]
    [row] = taskd.json("workflows", "stats", "ingest")
    assert (row["part"], row["queue"], row["jobs"], row["waiting"]) == ("fetch", "io", 2, 2)
    assert "fetch\tio" in taskd("workflows", "stats", "ingest").stdout
    assert "no workflow is named" in taskd("workflows", "stats", "other", code=3).stderr


def test_cancelling_a_workflow_ends_what_waits_and_asks_what_runs(taskd):
    assert BATCH_JOBS < 1500
    run = start(taskd, group([JOB] * 1500, then=JOB))
    taskd.worker(12, "q")
    taskd.sql("UPDATE taskd.job SET state = 'running', worker_id = 12 WHERE node = 't[0]'")
    [row] = taskd.json("workflows", "cancel", run.id)
    assert (row["stop_requested"], row["cancelled"] >= 1499) == (1, True)
    states = taskd.sql("SELECT state, count(*) FROM taskd.jobs GROUP BY state ORDER BY 1")
    assert [tuple(each) for each in states] == [("cancelled", 1500), ("running", 1)]
    assert "0 jobs cancelled" in taskd("workflows", "cancel", run.id).stderr
    assert "no workflow has the id" in taskd("workflows", "cancel", 99, code=3).stderr
    assert "no workflow has the id" in taskd("workflows", "show", 99, code=3).stderr


def test_a_cancelled_workflow_comes_back_as_a_whole(taskd):
    made = diamond()
    made.on_failure(JOB)
    run = start(taskd, made)
    taskd("workflows", "cancel", run.id)
    assert [row["state"] for row in taskd.json("workflows", "list")] == ["cancelled"]
    [retried] = taskd.json("workflows", "retry", run.id)
    assert (retried["retried"], retried["refused"]) == (list(run.jobs.values()), [])
    states = taskd.sql("SELECT node, state FROM taskd.jobs ORDER BY id")
    assert [tuple(each) for each in states] == [
        ("begin", "queued"), ("left", "blocked"), ("right", "blocked"), ("end", "blocked"),
        ("on_failure", "blocked"),
    ]  # fmt: skip
    assert [row["state"] for row in taskd.json("workflows", "list")] == ["running"]
    assert "0 jobs retried" in taskd("workflows", "retry", run.id).stderr
    assert "no workflow has the id" in taskd("workflows", "retry", 99, code=3).stderr


def test_a_callback_that_nobody_needed_does_not_come_back(taskd):
    made = Workflow("w")
    made.add(JOB, name="a")
    made.on_failure(JOB)
    run = start(taskd, made)
    taskd.finish(run.jobs["a"], "done")
    taskd.sql("SELECT taskd.unblock(ARRAY[$1::bigint], ARRAY['done'])", run.jobs["a"])
    [ended] = taskd.sql("SELECT id, reason FROM taskd.job_history WHERE workflow_id IS NOT NULL")
    assert tuple(ended) == (run.jobs["on_failure"], "nothing failed")
    assert taskd.json("workflows", "retry", run.id)[0]["retried"] == []


def test_why_names_the_jobs_that_a_blocked_one_waits_for(taskd):
    run = start(taskd, diamond())
    [row] = taskd.json("why", run.jobs["end"])
    assert [reason["why"] for reason in row["reasons"]] == ["unserved", "waits_for_jobs"]
    assert [parent["id"] for parent in row["parents"]] == [run.jobs["left"], run.jobs["right"]]
    text = taskd("why", run.jobs["end"]).stdout
    assert f"It waits for 2 jobs to end: job {run.jobs['left']} (left), which is blocked" in text
    assert f"next: taskd why {run.jobs['left']}" in text


def test_why_says_which_job_must_be_retried(taskd):
    run = start(taskd, diamond())
    taskd.finish(run.jobs["begin"], "failed")
    text = taskd("why", run.jobs["right"]).stdout
    assert f"next: taskd jobs retry {run.jobs['begin']}" in text


def test_blocked_jobs_are_counted_and_listed(taskd):
    start(taskd, diamond())
    [queue] = taskd.json("queues", "list")
    assert (queue["queued"], queue["blocked"]) == (1, 3)
    assert len(taskd.json("jobs", "list", "--state", "blocked")) == 3
