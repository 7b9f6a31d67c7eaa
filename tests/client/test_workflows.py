"""Workflows as producers make them:

all or nothing, and errors are raised before anything is written.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from taskd import Client, NewJob, Unique, task
from taskd.client import configure
from taskd.core.tasks.registry import Registry
from taskd.errors import InvalidArgs, InvalidWorkflow, JobNotFound, UnknownTask
from taskd.workflows import Workflow, chain, group, pipeline, stage

JOB = NewJob("t", queue="q")
ROWS = "SELECT node, state::text FROM taskd.job ORDER BY id"


async def rows(sql: Any) -> list[tuple[Any, ...]]:
    return [tuple(row) for row in await sql.fetch(ROWS)]


async def test_a_workflow_starts_over_the_default_client(dsn: str, sql: Any, send: Any) -> None:
    async with configure(dsn):
        run = await chain(send.job("a"), send.job("b")).start()
    assert await rows(sql) == [("send", "queued"), ("send-2", "blocked")]
    assert await sql.fetchval("SELECT id FROM taskd.workflow") == run.id
    assert run.jobs.keys() == {"send", "send-2"}


def test_a_workflow_starts_without_a_loop(dsn: str, send: Any) -> None:
    client = configure(dsn)
    try:
        run = group([send.job("a"), send.job("b")], then=send.job("c")).start_sync()
        assert list(run.jobs) == ["send[0]", "send[1]", "send"]
    finally:
        client.close_sync()


async def test_a_sync_start_does_not_block_a_loop(client: Client) -> None:
    with pytest.raises(RuntimeError, match="block the event loop"):
        chain(JOB).start_sync(client=client)


async def test_one_refused_job_leaves_nothing(client: Client, sql: Any) -> None:
    with pytest.raises(UnknownTask):
        await chain(JOB, NewJob("nobody")).start(client=client)
    with pytest.raises(Exception, match="object"):
        await chain(JOB, NewJob("t", "[]", queue="q")).start(client=client)
    assert await rows(sql) == []
    assert await sql.fetchval("SELECT count(*) FROM taskd.workflow") == 0


async def test_a_job_waits_for_one_that_exists(client: Client, sql: Any) -> None:
    parent = await client.enqueue(JOB)
    made = Workflow("after")
    made.add(JOB, name="child", after=[parent])
    await made.start(client=client)
    assert await rows(sql) == [(None, "queued"), ("child", "blocked")]
    made = Workflow("after")
    made.add(JOB, after=[10**15])
    for conn in (None, sql):
        with pytest.raises(JobNotFound, match=r"^no job has the id 1000000000000000"):
            await made.start(client=client, conn=conn)
    assert len(await rows(sql)) == 2


async def test_a_group_of_ten_thousand_is_one_statement(client: Client, sql: Any) -> None:
    run = await group([JOB] * 10_000, then=JOB).start(client=client)
    assert len(run.jobs) == 10_001
    last = await sql.fetchrow("SELECT state::text, waits_for FROM taskd.job WHERE node = 't'")
    assert tuple(last) == ("blocked", 10_000)


def test_who_puts_a_large_workflow_together_does_not_hold_up_a_loop() -> None:
    began = time.process_time()
    made = group([JOB] * 10_000)
    for _ in range(9_999):
        made.add(JOB)
    assert (
        time.process_time() - began < 3.0
    )  # 0.2 s; it was 20 s when each name was searched in a list
    assert len(made) == 19_999


def circle() -> Workflow:
    made = Workflow("w")
    made.add(JOB, name="a", after=["c"])
    made.add(JOB, name="b", after=["a"])
    made.add(JOB, name="c", after=["b"])
    return made


def unknown() -> Workflow:
    made = Workflow("w")
    made.add(JOB, name="a", after=["nobody"])
    return made


def doubled() -> Workflow:
    made = Workflow("w")
    made.add(JOB, name="a")
    made.add(JOB, name="a")
    return made


def text() -> Workflow:
    made = Workflow("w")
    made.add(JOB, name="a", after="b")
    return made


KEYED = NewJob("t", queue="q", unique=Unique("k"))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (circle, "wait for each other: "),
        (unknown, "a waits for 'nobody', which is not a node of the workflow"),
        (doubled, "two jobs are named 'a'"),
        (text, "after='b' is not a list"),
        (lambda: Workflow("w"), "it has no job"),
        (lambda: Workflow(""), "use printable characters, 1 to 100 bytes"),
        (lambda: chain(JOB, KEYED), "has a unique key"),
        (lambda: chain(JOB, JOB, on_failed="explode"), "none of cancel, wait, continue, only"),
        (lambda: group([JOB] * 20_001), "20,001 jobs; at most 20,000"),
        (lambda: group([NewJob("t", f'"{"x" * 200_000}"', queue="q")] * 100), "characters"),
        (lambda: Workflow("w").add(JOB, name="a b"), "the name 'a b'"),
    ],
)
async def test_what_is_wrong_is_reported_before_anything_is_written(
    client: Client, sql: Any, make: Any, words: str
) -> None:
    with pytest.raises(InvalidWorkflow, match=words):
        await make().start(client=client)
    assert await rows(sql) == []


# Pipelines.


def tasks(registry: Registry) -> dict[str, Any]:
    @task(registry=registry)
    async def fetch(url: str) -> dict[str, str]: ...  # type: ignore[empty-body]

    @task(registry=registry)
    async def count(doc: str, lang: str) -> int: ...  # type: ignore[empty-body]

    @task(registry=registry)
    async def save(n: int, note: str = "") -> None: ...

    return {"fetch": fetch, "count": count, "save": save}


async def test_a_pipeline_checks_its_first_arguments(client: Client, registry: Registry) -> None:
    known = tasks(registry)
    stages = [stage("fetch", known["fetch"]), stage("save", known["save"])]
    line = pipeline("p", *stages, registry=None)
    assert [each.takes for each in line.stages] == ["url", "n"]
    with pytest.raises(InvalidArgs):
        await line.start(client=client)
    with pytest.raises(InvalidArgs):
        await line.start(url=5, client=client)
    run = await line.start(url="a", client=client)
    assert run.jobs.keys() == {"fetch"}


def test_a_stage_that_cannot_take_what_comes_is_reported_when_the_pipeline_is_made(
    registry,
) -> None:
    known = tasks(registry)
    pipeline("p", stage("fetch", known["fetch"]), stage("count", known["count"]), registry=None)
    with pytest.raises(InvalidWorkflow, match="'count' takes doc and lang, but 'n' returns"):
        pipeline("p", stage("n", known["count"]), stage("count", known["count"]))
    with pytest.raises(InvalidWorkflow, match="two stages are named 'a'"):
        pipeline("p", stage("a", known["fetch"]), stage("a", known["count"]))
    with pytest.raises(InvalidWorkflow, match="0 stages"):
        pipeline("p")


async def test_jobs_of_workflows_do_not_hold_up_each_others_transactions(
    client: Client, sql: Any
) -> None:
    runs = await asyncio.gather(*(chain(JOB, JOB).start(client=client) for _ in range(20)))
    assert len({run.id for run in runs}) == 20
    assert len(await rows(sql)) == 40
