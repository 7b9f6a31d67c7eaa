"""Runs of pipelines that start at a chosen stage, or start again where they have ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd import Client, acting_as
from taskd.errors import InvalidJob, InvalidWorkflow, QueueFull
from taskd.store import workflows
from taskd.store.jobs import jobs
from taskd.workflows import Pipeline, pipeline, stage
from tests.cli.conftest import Shell
from tests.worker.conftest import Desk
from tests.worker.test_workflows import ran

STATS = """
SELECT part, state, sum(jobs)::int FROM taskd.workflow_parts WHERE workflow = 'line'
GROUP BY part, state ORDER BY part, state
"""


class Line:
    """A pipeline a, b, c; `fails` are the stages whose handlers fail."""

    def __init__(self, desk: Desk) -> None:
        self.fails: set[str] = set()
        self.got: list[tuple[str, Any]] = []

        def says(name: str, value: Any) -> None:
            self.got.append((name, value))
            if name in self.fails:
                raise RuntimeError(name)

        @desk.task(max_attempts=1)
        async def a(n: int) -> int:
            says("a", n)
            return n + 1

        @desk.task(max_attempts=1)
        async def b(n: int) -> dict[str, int]:
            says("b", n)
            return {"left": n, "right": n + 1}

        @desk.task(max_attempts=1)
        async def c(left: int, right: int) -> int:
            says("c", (left, right))
            return left + right

        self.line: Pipeline = pipeline(
            "line", stage("a", a), stage("b", b), stage("c", c), registry=desk.registry
        )


@pytest.fixture
async def line(desk: Desk) -> Line:
    return Line(desk)


async def counts(desk: Desk) -> dict[tuple[str, str], int]:
    return {(row[0], row[1]): row[2] for row in await desk.sql.fetch(STATS)}


async def begin(desk: Desk, line: Line, *fails: str) -> int:
    line.fails = set(fails)
    run = await line.line.start(1, conn=desk.sql)
    if not desk.started:
        await desk.start()
    await ran(desk, run.id)
    line.fails, line.got = set(), []
    return run.id


async def test_a_run_starts_at_a_named_stage(desk: Desk, line: Line) -> None:
    run = await line.line.start(left=3, right=4, stage="c", conn=desk.sql)
    await desk.start()
    assert [row[:3] for row in await ran(desk, run.id)] == [("c", "done", "7")]
    with pytest.raises(InvalidWorkflow, match="has no stage 'd'; its stages are a, b, c"):
        await line.line.start(1, stage="d", conn=desk.sql)
    async with Client(desk.dsn) as client:
        job_id = await client.start_at_stage("line", "b", {"n": 5})
        run_id = (await desk.row(job_id))["workflow_id"]
        assert [row[0] for row in await ran(desk, run_id)] == ["b", "c"]
        for stage_, args, why in (
            ("d", {}, "has no stage .d.. It has the stages a, b, c"),
            ("b", {}, "needs the argument .n."),
            ("b", {"n": 1, "m": 2}, "has no argument .m.; it takes n"),
            ("b", {"n": "1"}, "has a wrong type"),
        ):
            with pytest.raises(InvalidJob, match=why):
                await client.start_at_stage("line", stage_, args)


async def test_a_full_queue_refuses_a_run_that_starts_at_a_stage(desk: Desk, line: Line) -> None:
    worker = await desk.start()
    await worker.stop()
    await desk.sql.execute("UPDATE taskd.queue SET max_depth = 1 WHERE name = 'default'")
    async with Client(desk.dsn) as client:
        await client.start_at_stage("line", "b", {"n": 5})
        with pytest.raises(QueueFull, match='"default"'):
            await client.start_at_stage("line", "b", {"n": 5})
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.workflow") == 1


async def test_a_restarted_run_keeps_its_end_and_metadata_without_the_defaults_of_a_task(
    desk: Desk,
) -> None:
    @desk.task(metadata={"team": "first"})
    async def first() -> None: ...

    @desk.task(metadata={"b": 2}, max_attempts=1)
    async def second() -> None: ...

    flow = pipeline("flow", stage("one", first), stage("two", second), registry=desk.registry)
    run = await flow.start(conn=desk.sql)
    await desk.sql.execute(
        'UPDATE taskd.job SET metadata = \'{"team": "first", "run": 5}\', ends_by = now()'
    )
    worker = await desk.start()
    await ran(desk, run.id)
    await worker.stop()
    done = await workflows.restart(desk.lane, [run.id], "one", None, "")
    of = "SELECT metadata, ends_by IS NOT NULL FROM taskd.job"
    assert tuple(await desk.sql.fetchrow(of)) == ('{"run": 5, "team": "first"}', True)
    await desk.sql.execute("SELECT taskd.complete(ARRAY[$1::bigint])", done[run.id].job_id)
    assert tuple(await desk.sql.fetchrow(of)) == ('{"b": 2, "run": 5}', True)


async def test_a_failed_run_continues_where_it_ended(desk: Desk, line: Line) -> None:
    run_id = await begin(desk, line, "b")
    async with Client(desk.dsn) as client:
        done = await client.restart_runs([run_id])
    assert done[run_id].refusal is None
    rows = await ran(desk, run_id)
    assert [row[:2] for row in rows] == [("a", "done"), ("b", "done"), ("c", "done")]
    assert line.got == [("b", 2), ("c", (2, 3))]


async def test_a_finished_run_starts_again_at_an_earlier_stage(desk: Desk, line: Line) -> None:
    run_id = await begin(desk, line)
    async with Client(desk.dsn) as client:
        await client.restart_runs([run_id], "b")
        rows = await ran(desk, run_id)
        assert [row[0] for row in rows] == ["a", "b", "c", "b", "c"]
        assert line.got == [("b", 2), ("c", (2, 3))]
        assert await counts(desk) == {("a", "done"): 1, ("b", "done"): 1, ("c", "done"): 1}
        await client.restart_runs([run_id])  # its last stage, once more
        await ran(desk, run_id)
        assert line.got[2:] == [("c", (2, 3))]


async def test_arguments_can_be_given_and_are_checked(desk: Desk, line: Line) -> None:
    run_id = await begin(desk, line, "b")
    async with Client(desk.dsn) as client:
        done = await client.restart_runs([run_id], "b", {"m": 1})
        assert done[run_id].refusal == 'the stage "b" needs the argument "n"'
        done = await client.restart_runs([run_id], "b", {"n": 10})
        assert done[run_id].refusal is None
    await ran(desk, run_id)
    assert line.got == [("b", 10), ("c", (10, 11))]


async def test_who_starts_a_run_again_and_why_is_kept(desk: Desk, line: Line) -> None:
    run_id = await begin(desk, line, "b")
    async with Client(desk.dsn) as client:
        for stage_ in (None, "a"):
            with acting_as("ada"):
                await client.restart_runs([run_id], stage_, reason="the source is back")
            await ran(desk, run_id)
    kept = await desk.sql.fetch(
        "SELECT action, target, actor, reason, detail ->> 'stage' FROM taskd.action ORDER BY at"
    )
    failed = await desk.sql.fetchval("SELECT id FROM taskd.jobs WHERE node = 'b' ORDER BY id")
    assert [tuple(row) for row in kept] == [
        ("retry", f"job {failed}", "ada", "the source is back", None),
        ("restart", f"workflow {run_id}", "ada", "the source is back", None),
        ("restart", f"workflow {run_id}", "ada", "the source is back", "a"),
    ]


async def test_a_later_stage_gets_the_result_of_the_stage_before(desk: Desk, line: Line) -> None:
    run_id = await begin(desk, line, "b")
    async with Client(desk.dsn) as client:
        done = await client.restart_runs([run_id], "c")
        assert "has no arguments in this run" in str(done[run_id].refusal)
    await desk.started[0].stop()
    stopped = await line.line.start(1, conn=desk.sql)
    other = "SELECT state::text FROM taskd.jobs WHERE workflow_id = $1 AND node = 'b'"
    await desk.sql.execute("UPDATE taskd.workflow SET stopped_at = now() WHERE id = $1", stopped.id)
    await desk.start()
    assert [row[0] for row in await ran(desk, stopped.id)] == ["a"]
    assert await workflows.restart(desk.lane, [stopped.id], None, None, "")
    assert [row[0] for row in await ran(desk, stopped.id)] == ["a", "b", "c"]
    assert await desk.sql.fetchval(other, stopped.id) == "done"


async def test_a_run_that_went_back_counts_at_its_present_stage_only(
    desk: Desk, line: Line
) -> None:
    run_id = await begin(desk, line, "c")
    assert await counts(desk) == {("a", "done"): 1, ("b", "done"): 1, ("c", "failed"): 1}
    line.fails = {"b"}
    async with Client(desk.dsn) as client:
        await client.restart_runs([run_id], "a")
    await ran(desk, run_id)
    assert await counts(desk) == {("a", "done"): 1, ("b", "failed"): 1}
    # The failed job of the stage c is the past: only the last job of the run is retried.
    ids = await workflows.jobs_to_retry(desk.lane, run_id)
    assert len(ids) == 1
    old = "SELECT id FROM taskd.jobs WHERE node = 'c'"
    assert await jobs.retry(desk.lane, [await desk.sql.fetchval(old)]) == []


async def test_a_live_run_and_other_workflows_are_refused(desk: Desk, line: Line) -> None:
    from taskd.workflows import chain

    run = await line.line.start(1, conn=desk.sql)
    other = await chain(desk.registry.get("a").job(1)).start(conn=desk.sql)
    done = await workflows.restart(desk.lane, [run.id, other.id, 99], "b", None, "")
    assert done[run.id].refusal == "it has not ended: cancel it first"
    assert "no run of a pipeline" in str(done[other.id].refusal)
    assert done[99].refusal == "there is no such workflow"
    done = await workflows.restart(desk.lane, [run.id], "x", None, "")
    assert done[run.id].refusal == 'it has no stage "x"; its stages are a, b, c'


async def test_two_restarts_at_once_begin_one_job(desk: Desk, line: Line) -> None:
    run_id = await begin(desk, line, "c")
    await desk.started[0].stop()
    async with Client(desk.dsn) as client:
        done = await asyncio.gather(*(client.restart_runs([run_id], "a") for _ in range(5)))
    assert sorted(each[run_id].refusal is None for each in done) == [False] * 4 + [True]


async def test_the_shell_starts_thousands_by_a_filter(desk: Desk, line: Line) -> None:
    line.fails = {"b"}
    runs = [(await line.line.start(n, conn=desk.sql)).id for n in range(30)]
    done = await line.line.start(left=1, right=1, stage="c", conn=desk.sql)
    await desk.start()
    for run_id in (*runs, done.id):
        await ran(desk, run_id)
    line.fails = set()
    shell = Shell(desk.dsn)
    chosen = ("--name", "line", "--state", "failed", "--at", "b")
    [dry] = await asyncio.to_thread(shell.json, "workflows", "set", *chosen, "--dry-run")
    assert dry["ids"] == runs
    [row] = await asyncio.to_thread(
        shell.json, "workflows", "set", *chosen, "--stage", "a", "--limit", 20
    )
    assert (len(row["started"]), row["refused"]) == (20, {})
    for run_id in runs[:20]:
        assert [each[0] for each in await ran(desk, run_id)] == ["a", "b", "a", "b", "c"]
    [*stats] = await asyncio.to_thread(shell.json, "workflows", "stats", "line")
    by_part = {each["part"]: each for each in stats}
    assert (by_part["b"]["done"], by_part["b"]["failed"], by_part["c"]["done"]) == (20, 10, 21)
    wrong = await asyncio.to_thread(shell, "workflows", "set", runs[25], "--stage", "px", code=1)
    assert f'workflow {runs[25]}: it has no stage "px"; its stages are a, b, c' in wrong.stderr
    await asyncio.to_thread(shell, "workflows", "set", "--stage", "a", code=2)
    started = await asyncio.to_thread(
        shell, "workflows", "start", "line", "--stage", "c", "left:=1", "right:=2"
    )
    [ended] = await desk.settled(int(started.stdout))
    assert ended["result"] == "3"
