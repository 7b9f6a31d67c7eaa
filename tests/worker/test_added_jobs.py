"""Running jobs add jobs to their own workflow, which waits for them (ctx.workflow)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd import Context
from taskd.config import Settings
from taskd.core.jobs.backoff import Fixed
from taskd.errors import InvalidWorkflow, LeaseLost
from taskd.store import workflows
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.schema import migrations
from taskd.web.pages.workflow_graph import graph as graph_of
from taskd.worker import Worker
from taskd.workflows import Workflow, chain, group, pipeline, stage
from tests.worker.conftest import Desk, Started, until
from tests.worker.test_workflows import ran

SOON = Fixed(0.01)
WAITS = "SELECT state::text, waits_for FROM taskd.job WHERE id = $1"


class Split:
    """`split` adds a job for each chunk; `merge` follows it; `fails` are the chunks that fail."""

    def __init__(self, desk: Desk) -> None:
        self.fails: set[int] = set()
        self.attempts = 0
        self.begun, self.go = asyncio.Event(), asyncio.Event()
        self.go.set()

        @desk.task(max_attempts=1)
        async def chunk(n: int) -> int:
            if n in self.fails:
                raise RuntimeError("no")
            return n * n

        @desk.task(backoff=SOON)
        async def split(ctx: Context, chunks: int) -> str:
            for n in range(chunks):
                await ctx.workflow.add(chunk.job(n), name=f"chunk-{n}")
            self.begun.set()
            self.attempts += 1
            await self.go.wait()
            if self.attempts == 1 and chunks > 3:
                raise RuntimeError("once more")
            return "split"

        @desk.task()
        async def merge(ctx: Any) -> dict[str, Any]:
            return await ctx.results()

        self.split, self.merge, self.chunk = split, merge, chunk


@pytest.fixture
async def split(desk: Desk) -> Split:
    return Split(desk)


async def test_what_waits_for_the_member_waits_for_the_added_jobs(desk: Desk, split: Split) -> None:
    split.go.clear()
    run = await chain(split.split.job(3), split.merge.job()).start(conn=desk.sql)
    worker = await desk.start(concurrency=1)  # the chunks cannot run yet
    await split.begun.wait()
    assert tuple(await desk.sql.fetchrow(WAITS, run.jobs["merge"])) == ("blocked", 4)
    split.go.set()
    rows = await ran(desk, run.id)
    assert [row[:2] for row in rows] == [
        ("split", "done"), ("merge", "done"),
        ("chunk-0", "done"), ("chunk-1", "done"), ("chunk-2", "done"),
    ]  # fmt: skip
    assert rows[1][2] == '{"split": "split", "chunk-0": 0, "chunk-1": 1, "chunk-2": 4}'
    assert await worker.stop() == 0


async def test_the_graph_shows_added_jobs_between_their_adder_and_what_waits(
    desk: Desk, split: Split
) -> None:
    run = await chain(split.split.job(2), split.merge.job()).start(conn=desk.sql)
    await desk.start()
    await ran(desk, run.id)
    rows = await workflows.parts(desk.lane, run.id, 100)
    assert [(row["part"], row["after"]) for row in rows] == [
        ("split", []), ("chunk-0", ["split"]), ("chunk-1", ["split"]),
        ("merge", ["chunk-0", "chunk-1", "split"]),
    ]  # fmt: skip
    drawn = {box.name: box.x for box in graph_of(rows).boxes}
    assert drawn["split"] < drawn["chunk-0"] == drawn["chunk-1"] < drawn["merge"]


async def test_a_later_attempt_adds_nothing_twice(desk: Desk, split: Split) -> None:
    run = await chain(split.split.job(5), split.merge.job()).start(conn=desk.sql)
    await desk.start()
    rows = await ran(desk, run.id)
    assert split.attempts == 2
    assert [row[0] for row in rows] == ["split", "merge", *(f"chunk-{n}" for n in range(5))]
    assert {row[1] for row in rows} == {"done"}


async def test_a_failed_added_job_counts_as_a_failed_parent(desk: Desk, split: Split) -> None:
    split.fails = {1}
    made = Workflow("flow")
    made.add(split.split.job(3), name="split")
    made.add(split.merge.job(), name="merge", after=["split"])
    made.on_failure(split.merge.job())
    made.on_completion(split.merge.job())
    run = await made.start(conn=desk.sql)
    await desk.start()
    rows = {row[0]: row for row in await ran(desk, run.id)}
    assert rows["merge"][1] == "cancelled"
    assert rows["merge"][3] == "dependency"
    assert rows["on_failure"][1] == "done"
    assert rows["on_completion"][1] == "done"


async def test_a_retry_of_the_workflow_runs_the_failed_chunk_and_then_the_rest(
    desk: Desk, split: Split
) -> None:
    split.fails = {1}
    run = await chain(split.split.job(3), split.merge.job()).start(conn=desk.sql)
    await desk.start()
    rows = {row[0]: row for row in await ran(desk, run.id)}
    assert rows["merge"][1] == "cancelled"
    split.fails = set()
    failed = await desk.sql.fetchval("SELECT id FROM taskd.jobs WHERE state = 'failed'")
    await jobs.retry(desk.lane, [failed])
    rows = {row[0]: row for row in await ran(desk, run.id)}
    assert rows["merge"][2] == '{"split": "split", "chunk-0": 0, "chunk-1": 1, "chunk-2": 4}'


async def test_added_jobs_wait_for_each_other_and_for_the_member(desk: Desk, split: Split) -> None:
    @desk.task()
    async def begin(ctx: Context) -> str:
        first = await ctx.workflow.add(split.chunk.job(1), name="first")
        flow = group([split.chunk.job(n) for n in (2, 3)], then=split.merge.job())
        ids = await ctx.workflow.add_all(flow)
        await ctx.workflow.add(split.merge.job(), name="all", after=["first", "merge", ctx.job_id])
        assert first < min(ids.values())
        assert ctx.workflow.id is not None
        return "begun"

    run = await chain(begin.job()).start(conn=desk.sql)
    await desk.start()
    rows = {row[0]: row for row in await ran(desk, run.id)}
    assert rows["merge"][2] == '{"chunk[0]": 4, "chunk[1]": 9}'
    assert rows["all"][2] == (
        '{"begin": "begun", "first": 1, "merge": {"chunk[0]": 4, "chunk[1]": 9}}'
    )


async def test_a_job_without_a_workflow_makes_one(desk: Desk, split: Split) -> None:
    [job_id] = await desk.enqueue(split.split.job(2))
    await desk.start()
    await desk.settled(job_id)
    run = (await desk.row(job_id))["workflow_id"]
    rows = await ran(desk, run)
    assert [row[0] for row in rows] == ["split", "chunk-0", "chunk-1"]
    of = "SELECT name FROM taskd.workflow WHERE id = $1"
    assert await desk.sql.fetchval(of, run) == "split"


async def test_a_plain_function_adds_jobs_without_names(desk: Desk, split: Split) -> None:
    @desk.task()
    def begin(ctx: Context) -> list[int]:
        return [ctx.workflow.add_sync(split.chunk.job(n)) for n in range(2)]

    run = await chain(begin.job()).start(conn=desk.sql)
    await desk.start()
    rows = await ran(desk, run.id)
    assert [row[0] for row in rows] == ["begin", "chunk", "chunk-2"]


async def test_jobs_are_added_in_the_transaction_of_the_handler(desk: Desk, split: Split) -> None:
    @desk.task(transaction=True, backoff=SOON)
    async def begin(ctx: Any) -> str:
        await ctx.workflow.add(split.chunk.job(7), conn=ctx.conn)
        if ctx.attempt == 1:
            raise RuntimeError("rolled back")
        return "begun"

    run = await chain(begin.job(), split.merge.job()).start(conn=desk.sql)
    await desk.start()
    rows = await ran(desk, run.id)
    assert [row[0] for row in rows] == ["begin", "merge", "chunk"]
    assert rows[1][2] == '{"begin": "begun", "chunk": 49}'


async def test_the_transaction_of_the_handler_adds_jobs_in_another_schema(
    desk: Desk, split: Split
) -> None:
    blue = Database({"dsn": desk.dsn}, schema="jobs_blue")
    await migrations.migrate(blue)

    @desk.task(transaction=True)
    async def begin(ctx: Any) -> None:
        await ctx.workflow.add(split.chunk.job(7), conn=ctx.conn)

    lane = Lane(blue, "test")
    [job_id] = await jobs.enqueue(lane, [begin.job()])
    await lane.close()
    settings = Settings(dsn=desk.dsn, schema="jobs_blue")
    worker = Started(Worker(settings, desk.registry, blue, app="app"))
    desk.started.append(worker)
    await desk.emitted.wait("job.done", 2)
    nodes = "SELECT node FROM jobs_blue.jobs WHERE id <> $1"
    assert await desk.sql.fetch(nodes, job_id) == [("chunk",)]
    assert await worker.stop() == 0


async def test_an_add_that_is_repeated_after_an_error_keeps_its_name(
    desk: Desk, split: Split, other: Any
) -> None:
    @desk.task(max_attempts=1)
    async def begin(ctx: Context) -> None:
        stopped = "UPDATE taskd.workflow SET stopped_at = "
        await other.execute(stopped + "now()")
        for n in (1, 2):
            with pytest.raises(InvalidWorkflow):
                await ctx.workflow.add(split.chunk.job(n))
        await other.execute(stopped + "NULL")
        with pytest.raises(InvalidWorkflow, match="on_failed"):
            await ctx.workflow.add(split.chunk.job(3), on_failed="retry")
        for n in (2, 3, 1):
            await ctx.workflow.add(split.chunk.job(n))

    run = await chain(begin.job()).start(conn=desk.sql)
    await desk.start()
    added = {row[0]: row[2] for row in (await ran(desk, run.id))[1:]}
    assert added == {"chunk-2": "4", "chunk-3": "9", "chunk": "1"}


async def test_blocking_calls_on_the_event_loop_are_refused(desk: Desk, split: Split) -> None:
    refused: list[str] = []

    @desk.task(max_attempts=1)
    async def begin(ctx: Context) -> None:
        flow = group([split.chunk.job(1)])
        calls = (
            lambda: ctx.workflow.add_sync(split.chunk.job(1)),
            lambda: ctx.workflow.add_all_sync(flow),
            ctx.results_sync,
        )
        for call in calls:
            with pytest.raises(RuntimeError, match="would block the event loop") as error:
                call()
            refused.append(str(error.value).partition("Await ")[2])

    run = await chain(begin.job()).start(conn=desk.sql)
    await desk.start()
    assert [row[:2] for row in await ran(desk, run.id)] == [("begin", "done")]
    assert refused == [
        f"{name}() instead" for name in ("ctx.workflow.add", "ctx.workflow.add_all", "ctx.results")
    ]


async def told(desk: Desk, act: Any) -> Any:
    """The error of a handler that acts on its context."""
    raised: list[BaseException] = []

    @desk.task(max_attempts=1)
    async def acting(ctx: Any) -> None:
        try:
            await act(ctx)
        except Exception as error:
            raised.append(error)
            raise

    run = await chain(acting.job(), acting.job().after(600)).start(conn=desk.sql)
    await desk.start()
    await until(lambda: raised)
    return raised[0], run


async def test_a_name_of_another_job_is_refused(desk: Desk, split: Split) -> None:
    error, _ = await told(desk, lambda ctx: ctx.workflow.add(split.chunk.job(1), name="acting-2"))
    assert isinstance(error, InvalidWorkflow)
    assert 'already has a job named "acting-2"' in str(error)


async def test_a_job_that_would_wait_for_itself_is_refused(desk: Desk, split: Split) -> None:
    below = "SELECT id FROM taskd.job WHERE node = 'acting-2'"

    async def act(ctx: Context) -> None:
        await ctx.workflow.add(split.chunk.job(1), after=[await desk.sql.fetchval(below)])

    error, _ = await told(desk, act)
    assert "would wait for a job that waits for it" in str(error)


async def test_a_cancelled_workflow_takes_no_more_jobs(desk: Desk, split: Split) -> None:
    async def act(ctx: Context) -> None:
        await desk.sql.execute("UPDATE taskd.workflow SET stopped_at = now()")
        await ctx.workflow.add(split.chunk.job(1))

    error, run = await told(desk, act)
    assert f"nothing was added: workflow {run.id} was cancelled" in str(error)


async def test_an_attempt_that_lost_its_lease_adds_nothing(desk: Desk, split: Split) -> None:
    async def act(ctx: Context) -> None:
        await desk.sql.execute("UPDATE taskd.job SET fence = fence + 1 WHERE id = $1", ctx.job_id)
        await ctx.workflow.add(split.chunk.job(1))

    error, run = await told(desk, act)
    assert isinstance(error, LeaseLost)
    count = "SELECT count(*) FROM taskd.jobs WHERE workflow_id = $1"
    assert await desk.sql.fetchval(count, run.id) == 2


async def test_a_stage_of_a_pipeline_adds_no_jobs(desk: Desk, split: Split) -> None:
    raised: list[BaseException] = []

    @desk.task(max_attempts=1)
    async def first(ctx: Context) -> None:
        try:
            await ctx.workflow.add(split.chunk.job(1))
        except InvalidWorkflow as error:
            raised.append(error)

    line = pipeline("line", stage("first", first), registry=desk.registry)
    run = await line.start(conn=desk.sql)
    await desk.start()
    assert [row[0] for row in await ran(desk, run.id)] == ["first"]
    assert 'a run of the pipeline "line"' in str(raised[0])
