"""Pipelines that workers publish: runs start by the name, from SQL, the shell and schedules."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from taskd import Client, Unique
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import EnqueueError, InvalidArgs, UnknownTask
from taskd.schedules import every, schedule
from taskd.workflows import Pipeline, pipeline, stage
from tests.cli.conftest import Shell
from tests.worker.conftest import Desk, until
from tests.worker.test_schedules import BRISK, late
from tests.worker.test_workflows import ran


def ingest(desk: Desk, **stages: Any) -> Pipeline:
    @desk.task(queue="io")
    async def fetch(url: str, depth: int = 1) -> dict[str, str]:
        return {"doc": f"text of {url}"}

    @desk.task()
    async def parse(doc: str) -> int:
        return len(doc)

    first = stage("get", fetch, priority=7, **stages)
    return pipeline("ingest", first, stage("parse", parse), registry=desk.registry)


async def start(desk: Desk) -> None:
    await desk.start(queues=("io", "default"), **BRISK)


async def run_of(desk: Desk, job_id: int) -> int:
    return int((await desk.row(job_id))["workflow_id"])


async def test_sql_starts_a_run_by_the_name_of_the_pipeline(desk: Desk) -> None:
    ingest(desk, max_attempts=3)
    await start(desk)
    job_id = await desk.sql.fetchval(
        "SELECT taskd.enqueue('ingest', '{\"url\": \"a\"}', metadata => '{\"tag\": 1}')"
    )
    row = await desk.row(job_id)
    assert (row["task"], row["queue"], row["priority"], row["node"]) == ("fetch", "io", 7, "get")
    assert (row["max_attempts"], row["metadata"]) == (3, '{"tag": 1}')
    rows = await ran(desk, row["workflow_id"])
    assert [each[:3] for each in rows] == [
        ("get", "done", '{"doc": "text of a"}'), ("parse", "done", "9")
    ]  # fmt: skip
    of = "SELECT name, kind FROM taskd.workflow WHERE id = $1"
    assert tuple(await desk.sql.fetchrow(of, row["workflow_id"])) == ("ingest", "pipeline")


async def test_options_of_the_run_replace_those_of_its_first_stage(desk: Desk) -> None:
    ingest(desk, max_attempts=3)
    await start(desk)
    job_id = await desk.sql.fetchval(
        "SELECT taskd.enqueue('ingest', '{\"url\": \"a\"}', queue => 'other', priority => 1, "
        "max_attempts => 9, timeout_s => 5, delay_s => 600, deadline_s => 900)"
    )
    row = await desk.row(job_id)
    assert (row["queue"], row["priority"], row["max_attempts"]) == ("other", 1, 9)
    assert (row["timeout_s"], row["state"]) == (5, "scheduled")
    assert row["deadline"] > row["run_at"]


async def test_the_client_starts_runs_by_name_alone_and_in_batches(desk: Desk) -> None:
    line = ingest(desk)
    await start(desk)
    async with Client(desk.dsn) as client:
        one = await client.enqueue_named("ingest", {"url": "one"})
        batch = await client.enqueue_many([line.job(f"u{n}") for n in range(3)])
        mixed = await client.enqueue_many([line.job("m"), desk.registry.get("parse").job("d")])
    ids = [one, *batch, mixed[0]]
    runs = [await run_of(desk, each) for each in ids]
    assert len(set(runs)) == 5
    args = [(await desk.row(each))["args"] for each in ids]
    assert args == [f'{{"url": "{each}"}}' for each in ("one", "u0", "u1", "u2", "m")]
    assert (await desk.row(mixed[1]))["workflow_id"] is None
    for run in runs:
        assert [row[1] for row in await ran(desk, run)] == ["done", "done"]


async def test_the_shell_starts_a_run_with_pairs_or_an_object(desk: Desk) -> None:
    ingest(desk)
    await start(desk)
    shell = Shell(desk.dsn)
    one = '{"url": "x"}'
    for args in (["url=x"], [one], ["--json", one], [one, "depth:=2"]):
        job_id = int((await asyncio.to_thread(shell, "enqueue", "ingest", *args)).stdout)
        assert [row[1] for row in await ran(desk, await run_of(desk, job_id))] == ["done", "done"]
    odd = await asyncio.to_thread(shell, "enqueue", "ingest", '{"url": 5}', code=2)
    assert "ingest" in odd.stderr
    near = await asyncio.to_thread(shell, "enqueue", "ingset", "url=x", code=2)
    assert "Did you mean 'ingest'?" in near.stderr


async def test_arguments_are_checked_before_a_run_exists(desk: Desk) -> None:
    ingest(desk)
    await start(desk)
    async with Client(desk.dsn) as client:
        with pytest.raises(InvalidArgs, match="it takes depth, url"):
            await client.enqueue_named("ingest", {"uri": "a"})
        with pytest.raises(UnknownTask, match="Did you mean 'ingest'"):
            await client.enqueue_named("inges", {"url": "a"})
        waiting = Unique("k", scope="waiting")
        with pytest.raises(EnqueueError, match="key_scope is live"):
            await client.enqueue_named("ingest", {"url": "a"}, unique=waiting)
    with pytest.raises(
        asyncpg.InvalidParameterValueError, match='"ingest" needs the argument "url"'
    ):
        await desk.sql.execute("SELECT taskd.enqueue('ingest')")
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.workflow") == 0


async def test_a_run_that_waits_for_other_jobs_is_refused_in_a_workflow(desk: Desk) -> None:
    from taskd.workflows import chain

    line = ingest(desk)
    await start(desk)
    async with Client(desk.dsn) as client:
        with pytest.raises(EnqueueError, match="cannot be a job of a workflow"):
            await chain(line.job("a"), line.job("b")).start(client=client)


async def test_a_schedule_starts_runs_and_skips_while_a_later_stage_is_live(desk: Desk) -> None:
    hold = asyncio.Event()

    @desk.task()
    async def fetch(url: str) -> str:
        return url

    @desk.task()
    async def parse(doc: str) -> None:
        await hold.wait()

    line = pipeline("ingest", stage("f", fetch), stage("p", parse), registry=desk.registry)
    schedule(
        "hourly", line.job("x"), every("1h"), overlap="skip", ends_by_s=60.0, registry=desk.registry
    )
    rows = "SELECT 'q' || n AS url FROM generate_series(1, 2) AS n"
    schedule("rows", line, every("2h"), query=rows, registry=desk.registry)
    await desk.start(**BRISK)
    await late(desk.sql)
    await desk.emitted.wait("schedule.fired", 2)
    of = "SELECT args FROM taskd.jobs WHERE node = 'f' AND schedule = $1 ORDER BY args"
    made = [each[0] for each in await desk.sql.fetch(of, "rows")]
    assert made == ['{"url": "q1"}', '{"url": "q2"}']
    second = (
        "SELECT count(*) FROM taskd.job "
        "WHERE node = 'p' AND state = 'running' AND schedule = 'hourly'"
    )
    await until(lambda: desk.sql.fetchval(second))
    ends = "SELECT DISTINCT ends_by - tick FROM taskd.jobs WHERE schedule = 'hourly'"
    assert [each[0].total_seconds() for each in await desk.sql.fetch(ends)] == [60.0]
    async with Client(desk.dsn) as client:
        assert await client.schedules.run("hourly") is None  # skipped
        hold.set()
        await until(lambda: desk.sql.fetchval("SELECT count(*) = 0 FROM taskd.job"))
        [job_id] = await client.schedules.run("hourly") or []
    assert [row[1] for row in await ran(desk, await run_of(desk, job_id))] == ["done", "done"]


async def test_overlap_cancel_ends_the_whole_run(desk: Desk) -> None:
    began, hold = asyncio.Event(), asyncio.Event()

    @desk.task()
    async def fetch() -> None:
        began.set()
        try:
            await hold.wait()
        except asyncio.CancelledError:
            return  # the handler ends as if it were done

    @desk.task()
    async def parse() -> None: ...

    line = pipeline("two", stage("f", fetch), stage("p", parse), registry=desk.registry)
    schedule("s", line, every("1h"), overlap="cancel", registry=desk.registry)
    await desk.start(**BRISK)
    async with Client(desk.dsn) as client:
        [first] = await client.schedules.run("s") or []
        await began.wait()
        await client.schedules.run("s")
        assert [row[0] for row in await ran(desk, await run_of(desk, first))] == ["f"]
        hold.set()


async def test_the_newest_declaration_counts_for_new_runs_only(desk: Desk) -> None:
    @desk.task()
    async def one() -> None: ...

    @desk.task()
    async def two() -> None: ...

    pipeline("line", stage("a", one), registry=desk.registry)
    worker = await desk.start(**BRISK)
    await worker.stop()
    old = await desk.sql.fetchval("SELECT taskd.enqueue('line')")
    newer = Registry()
    for each in (one, two):
        newer.add(each)
    pipeline("line", stage("a", one), stage("b", two), registry=newer)
    await desk.start(newer, **BRISK)
    new = await desk.sql.fetchval("SELECT taskd.enqueue('line')")
    assert [row[0] for row in await ran(desk, await run_of(desk, old))] == ["a"]
    assert [row[0] for row in await ran(desk, await run_of(desk, new))] == ["a", "b"]


async def test_a_pipeline_is_listed_with_its_arguments_and_is_not_paused(desk: Desk) -> None:
    ingest(desk)
    await start(desk)
    shell = Shell(desk.dsn)
    listed = {row["name"]: row for row in await asyncio.to_thread(shell.json, "tasks", "list")}
    assert listed["ingest"]["kind"] == "pipeline"
    assert "url" in listed["ingest"]["args_schema"]["properties"]
    refused = await asyncio.to_thread(shell, "tasks", "pause", "ingest", code=2)
    assert "Pause the tasks of its stages: fetch, parse" in refused.stderr
    kept = await asyncio.to_thread(shell, "tasks", "forget", "ingest", code=1)
    assert "1 live worker has the task" in kept.stderr


def test_one_name_is_a_task_or_one_pipeline() -> None:
    async def send() -> None: ...

    registry = Registry()
    task = Task(send)
    registry.add(task)
    with pytest.raises(ValueError, match="a task and a pipeline are both named 'send'"):
        pipeline("send", stage("a", task), registry=registry)
    pipeline("line", stage("a", task), registry=registry)
    with pytest.raises(ValueError, match="two pipelines are named 'line'"):
        pipeline("line", stage("b", task), registry=registry)
    for _ in range(2):  # code that is run again
        pipeline("other", stage("a", task), registry=registry)
    pipeline("line", stage("b", task), registry=None)
    with pytest.raises(ValueError, match="a task and a pipeline are both named 'line'"):
        registry.add(Task(send, name="line"))
