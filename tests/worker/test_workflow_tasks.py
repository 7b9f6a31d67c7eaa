"""Tasks that make workflows of their arguments (`@workflow`)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd import Client, Context
from taskd.schedules import every, schedule
from taskd.workflows import Workflow, chain, group, workflow
from tests.worker.conftest import Desk, until
from tests.worker.test_workflows import ran


async def run_of(desk: Desk, job_id: int) -> int:
    await desk.settled(job_id)
    return int((await desk.row(job_id))["workflow_id"])


def tasks(desk: Desk) -> tuple[Any, Any]:
    @desk.task()
    async def square(n: int) -> int:
        return n * n

    @desk.task()
    async def total(ctx: Any) -> int:
        return sum((await ctx.results()).values())

    return square, total


async def test_sql_starts_a_workflow_with_arguments_by_its_name(desk: Desk) -> None:
    square, total = tasks(desk)

    @workflow(registry=desk.registry)
    def squares(numbers: list[int]) -> Workflow:
        return group([square.job(n) for n in numbers], then=total.job(), name="squares")

    await desk.start()
    job_id = await desk.sql.fetchval("""SELECT taskd.enqueue('squares', '{"numbers": [3, 4]}')""")
    run = await run_of(desk, job_id)
    rows = await ran(desk, run)
    assert [row[:3] for row in rows] == [
        ("squares", "done", None), ("square[0]", "done", "9"), ("square[1]", "done", "16"),
        ("total", "done", "25"),
    ]  # fmt: skip
    of = "SELECT name FROM taskd.workflow WHERE id = $1"
    assert await desk.sql.fetchval(of, run) == "squares"


async def test_an_async_builder_reads_what_it_needs_and_its_context(desk: Desk) -> None:
    square, _ = tasks(desk)

    @workflow(registry=desk.registry, name="from-rows")
    async def from_rows(ctx: Context, table: str) -> Workflow:
        async with Client(desk.dsn) as client:
            rows = await client.pause([table, "other"])
        return chain(*(square.job(n + ctx.attempt) for n, _ in enumerate(rows, 1)))

    [job_id] = await desk.enqueue(from_rows.job(table="some"))
    await desk.start()
    rows = await ran(desk, await run_of(desk, job_id))
    assert [row[2] for row in rows] == [None, "4", "9"]


async def test_the_overlap_of_a_schedule_counts_the_whole_workflow(desk: Desk) -> None:
    hold = asyncio.Event()

    @desk.task()
    async def held() -> None:
        await hold.wait()

    @workflow(registry=desk.registry)
    def flow() -> Workflow:
        return chain(held.job())

    schedule("s", flow, every("1h"), overlap="skip", registry=desk.registry)
    await desk.start()
    async with Client(desk.dsn) as client:
        [job_id] = await client.schedules.run("s") or []
        await desk.settled(job_id)
        assert await client.schedules.run("s") is None
        hold.set()
        await until(lambda: desk.sql.fetchval("SELECT count(*) = 0 FROM taskd.job"))
        assert await client.schedules.run("s")


async def test_a_builder_that_returns_something_else_fails(desk: Desk) -> None:
    @workflow(registry=desk.registry, max_attempts=1)
    def odd() -> Workflow:
        return 5  # type: ignore[return-value]

    [job_id] = await desk.enqueue(odd.job())
    await desk.start()
    [row] = await desk.settled(job_id)
    assert (row["state"], row["workflow_id"]) == ("failed", None)
    assert "in place of a Workflow" in row["errors"]


def test_options_of_handlers_that_run_elsewhere_are_refused() -> None:
    with pytest.raises(TypeError, match="process"):
        workflow(process=True)
