"""Results that cannot be stored: the job is done, the log has the reason, its dependants fail."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import asyncpg
import numpy as np
import pytest

from taskd import Client, Fixed
from taskd.errors import ResultNotStored
from taskd.handlers import Item
from taskd.workflows import Workflow, chain, pipeline, stage
from tests.worker import process_app
from tests.worker.conftest import Desk
from tests.worker.test_workflows import ran

NOW = Fixed(0.01)
WHY = "its result was not stored: complex has no JSON form"


@dataclass
class Named:
    name: str


def _task(desk: Desk, kind: str) -> Any:
    """A task of this kind whose handler returns a complex number."""

    async def asynchronous(ctx: Any) -> Any:
        return 1j

    def thread() -> Any:
        return 1j

    async def batch(items: list[Item[Named]]) -> Any:
        return [1j]

    async def transaction(ctx: Any) -> Any:
        return 1j

    async def completes(ctx: Any) -> Any:
        connection = await asyncpg.connect(desk.dsn)
        async with connection.transaction():
            await ctx.complete(connection, 1j)
        await connection.close()

    handlers: dict[str, tuple[Any, dict[str, Any]]] = {
        "async": (asynchronous, {}),
        "thread": (thread, {}),
        "batch": (batch, {"batch": 1}),
        "transaction": (transaction, {"transaction": True}),
        "complete": (completes, {}),
    }
    handler, options = handlers[kind]
    return desk.task(name="odd", max_attempts=1, **options)(handler)


@pytest.mark.parametrize("kind", ["async", "thread", "batch", "transaction", "complete"])
async def test_the_job_is_done_and_the_log_says_once_why(desk: Desk, kind: str) -> None:
    task = _task(desk, kind)
    (job,) = await desk.enqueue(task.job(Named("a")) if kind == "batch" else task.job())
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], row["result"]) == ("done", 1, None)
    assert row["reason"].startswith(WHY)
    (told,) = await desk.emitted.wait("job.result_unstored")
    assert (told["job_id"], told["task"], told["reason"]) == (job, "odd", row["reason"])
    async with Client(desk.dsn) as client:
        with pytest.raises(ResultNotStored, match=WHY) as raised:
            await client.result(job)
    assert raised.value.job_id == job


async def test_a_process_reports_why_its_result_was_not_stored(desk: Desk) -> None:
    (job,) = await desk.enqueue(process_app.returns_no_json.job())
    await desk.start(process_app.REGISTRY, process_slots=1)
    (row,) = await desk.settled(job)
    assert (row["state"], row["result"]) == ("done", None)
    assert row["reason"].startswith(WHY)
    await desk.emitted.wait("job.result_unstored", job_id=job)


async def test_a_number_of_numpy_is_a_number_for_the_next_stage(desk: Desk) -> None:
    @desk.task()
    async def measure() -> Any:
        return np.int64(3)

    @desk.task()
    async def double(n: int) -> int:
        return n * 2

    two = [stage("measure", measure), stage("double", double)]
    run = await pipeline("two", *two, registry=desk.registry).start(conn=desk.sql)
    await desk.start()
    assert [(row[0], row[1], row[2]) for row in await ran(desk, run.id)] == [
        ("measure", "done", "3"),
        ("double", "done", "6"),
    ]


async def test_a_job_that_needs_a_result_that_was_not_stored_fails_at_once(desk: Desk) -> None:
    @desk.task()
    async def odd() -> Any:
        return 1j

    @desk.task(max_attempts=5, backoff=NOW)
    async def needs(ctx: Any) -> Any:
        return await ctx.results()

    @desk.task(max_attempts=5, backoff=NOW)
    def needs_in_thread(ctx: Any) -> Any:
        return ctx.results_sync()

    @desk.task()
    async def needs_nothing() -> str:
        return "fine"

    flow = Workflow("needs")
    first = flow.add(odd.job())
    children = [
        flow.add(each.job(), after=[first]) for each in (needs, needs_in_thread, needs_nothing)
    ]
    run = await flow.start(conn=desk.sql)
    await desk.start()
    rows = await desk.settled(*(run.jobs[each] for each in children))
    assert [(row["state"], row["attempt"]) for row in rows] == [
        ("failed", 1),
        ("failed", 1),
        ("done", 1),
    ]
    for row in rows[:2]:
        assert row["reason"].startswith(
            f"ResultNotStored: job {run.jobs[first]} is done, but {WHY}"
        )


async def test_a_last_stage_and_a_choice_of_the_next_one_need_no_stored_result(desk: Desk) -> None:
    @desk.task()
    async def last() -> Any:
        return float("nan")

    run = await chain(last.job()).start(conn=desk.sql)
    await desk.start()
    [row] = await ran(desk, run.id)
    assert (row[1], row[2]) == ("done", None)
    assert "NaN" in row[3]


async def test_a_result_that_only_looks_unstored_is_a_result(desk: Desk) -> None:
    @desk.task()
    async def mine() -> Any:
        return {"unstored": "parcels"}

    (job,) = await desk.enqueue(mine.job())
    await desk.start()
    (row,) = await desk.settled(job)
    assert json.loads(row["result"]) == {"unstored": "parcels"}
    assert not desk.emitted.of("job.result_unstored")
