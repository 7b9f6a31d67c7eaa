"""What a handler reads about its job: metadata, schedule, tick, crashes; default metadata."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskd import Client
from taskd.core.jobs.job import NewJob
from taskd.core.tasks.batch import Item
from taskd.core.workflows.workflow import Node, plan
from taskd.schedules import every, schedule
from taskd.store import workflows
from taskd.workflows import pipeline, stage
from tests.worker import process_app
from tests.worker.conftest import Desk

DEFAULTS = {"team": "ops", "tier": 1}
GIVEN = {"tier": 2, "request": "r-7"}
MERGED = {"team": "ops", "tier": 2, "request": "r-7"}


@dataclass
class One:
    n: int


def origin(ctx: Any) -> list[Any]:
    tick = ctx.tick and ctx.tick.isoformat()
    return [dict(ctx.metadata), ctx.schedule, tick, ctx.crashes]


async def told(desk: Desk, job: int) -> Any:
    (row,) = await desk.settled(job)
    assert row["state"] == "done", row["reason"]
    return json.loads(row["result"])


@pytest.fixture
def tells(desk: Desk) -> Any:
    @desk.task()
    async def tells(ctx: Any) -> list[Any]:
        return origin(ctx)

    return tells


async def test_every_kind_of_handler_reads_metadata(desk: Desk, tells: Any) -> None:
    @desk.task()
    def in_a_thread(ctx: Any) -> list[Any]:
        return origin(ctx)

    @desk.task(transaction=True)
    async def in_a_transaction(ctx: Any) -> list[Any]:
        return origin(ctx)

    @desk.task(batch=2, max_wait_s=0.01)
    async def in_a_batch(items: list[Item[One]]) -> list[Any]:
        return [origin(item.ctx) for item in items]

    tasks = (tells, in_a_thread, in_a_transaction)
    jobs = await desk.enqueue(
        *(NewJob(each.name, queue="default", metadata=GIVEN, checked=True) for each in tasks),
        NewJob("in_a_batch", '{"n": 1}', queue="default", metadata=GIVEN, checked=True),
    )
    await desk.start()
    for job in jobs:
        assert await told(desk, job) == [GIVEN, None, None, 0]


async def test_a_handler_in_a_process_reads_the_same(desk: Desk) -> None:
    job = process_app.REGISTRY.get("tells_origin").job()  # type: ignore[union-attr]
    (plain,) = await desk.enqueue(job)
    await desk.start(process_app.REGISTRY, process_slots=1)
    assert await told(desk, plain) == [{"team": "ops"}, None, None, 0]


async def test_a_job_without_metadata_reads_an_empty_mapping_that_cannot_change(
    desk: Desk,
) -> None:
    @desk.task()
    async def changes(ctx: Any) -> bool:
        assert dict(ctx.metadata) == {}
        with pytest.raises(TypeError):
            ctx.metadata["a"] = 1
        return True

    (job,) = await desk.enqueue(changes.job())
    await desk.start()
    assert await told(desk, job) is True


async def test_a_handler_reads_the_schedule_and_its_tick(desk: Desk, tells: Any) -> None:
    await desk.sql.execute(
        f"ALTER DATABASE {await desk.sql.fetchval('SELECT current_database()')} "
        "SET timezone = 'Asia/Kolkata'"
    )
    schedule("hourly", tells, every("1h"), registry=desk.registry)
    await desk.start()
    tick = datetime.now(UTC).replace(microsecond=0) - timedelta(seconds=1)
    await desk.sql.execute("UPDATE taskd.schedule SET next_at = $1", tick)
    [fired] = await desk.emitted.wait("schedule.fired")
    assert fired["schedule"] == "hourly"
    job = await desk.sql.fetchval("SELECT id FROM taskd.jobs WHERE schedule = 'hourly'")
    assert await told(desk, job) == [{}, "hourly", tick.isoformat(), 0]


async def test_a_handler_reads_the_crashes_of_its_job(desk: Desk, tells: Any) -> None:
    (job,) = await desk.enqueue(tells.job())
    await desk.sql.execute(
        "UPDATE taskd.job SET crashes = 2, state = 'scheduled', started_at = now()"
    )
    await desk.start()
    assert await told(desk, job) == [{}, None, None, 2]


# Default metadata of a task.


@pytest.fixture
async def tagged(desk: Desk) -> Any:
    """A task with default metadata, published by a worker that has ended."""

    @desk.task(metadata=DEFAULTS)
    async def tagged() -> None: ...

    worker = await desk.start()
    assert await worker.stop() == 0
    return tagged


async def metadata_of(desk: Desk, job: int) -> Any:
    found = await desk.sql.fetchval("SELECT metadata FROM taskd.jobs WHERE id = $1", job)
    return None if found is None else json.loads(found)


SQL = {
    "enqueue": "SELECT taskd.enqueue('tagged')",
    "later": "SELECT taskd.enqueue('tagged', delay_s => 60)",
    "unique": "SELECT job_id FROM taskd.enqueue_unique('tagged', '{}', 'k')",
    "after": "SELECT taskd.enqueue_after('tagged', after => ARRAY[taskd.enqueue('tagged')])",
}


@pytest.mark.parametrize("how", SQL)
async def test_sql_clients_get_the_default_metadata(desk: Desk, tagged: Any, how: str) -> None:
    assert await metadata_of(desk, await desk.sql.fetchval(SQL[how])) == DEFAULTS


@pytest.mark.parametrize("how", SQL)
async def test_what_sql_clients_give_overrides_the_defaults(
    desk: Desk, tagged: Any, how: str
) -> None:
    call = SQL[how].rpartition(")")[0] + f", metadata => '{json.dumps(GIVEN)}')"
    assert await metadata_of(desk, await desk.sql.fetchval(call.replace("(, ", "("))) == MERGED


UNPUBLISHED = (
    "SELECT taskd.enqueue('new', queue => 'q', metadata => $1)",
    "SELECT job_id FROM taskd.enqueue_unique('new', '{}', 'k', 'q', metadata => $1)",
    """SELECT taskd.enqueue_after('new', '{}', ARRAY[taskd.enqueue('new', queue => 'q')],
                                  queue => 'q', metadata => $1)""",
)


@pytest.mark.parametrize("text", UNPUBLISHED)
async def test_metadata_is_kept_if_no_worker_has_published_the_task(desk: Desk, text: str) -> None:
    job = await desk.sql.fetchval(text, json.dumps(GIVEN))
    assert await metadata_of(desk, job) == GIVEN


async def test_python_clients_get_the_default_metadata(desk: Desk, tagged: Any) -> None:
    client = Client(desk.dsn)
    try:
        plain = await client.enqueue(tagged.job())
        named = await client.enqueue_named("tagged", queue="other")
        both = await client.enqueue_named("tagged", metadata=GIVEN)
    finally:
        await client.close()
    assert await metadata_of(desk, plain) == await metadata_of(desk, named) == DEFAULTS
    assert await metadata_of(desk, both) == MERGED


async def test_a_replaced_job_keeps_the_default_metadata(desk: Desk, tagged: Any) -> None:
    again = "SELECT job_id FROM taskd.enqueue_unique('tagged', '{}', 'k', on_conflict => 'replace')"
    assert await desk.sql.fetchval(again) == await desk.sql.fetchval(again)
    assert await metadata_of(desk, await desk.sql.fetchval(again)) == DEFAULTS


async def test_schedules_and_workflows_get_the_default_metadata(desk: Desk, tagged: Any) -> None:
    client = Client(desk.dsn)
    try:
        schedule("tags", tagged, every("1h"), registry=desk.registry)
        worker = await desk.start()
        [scheduled] = await client.schedules.run("tags") or []
        assert await metadata_of(desk, scheduled) == DEFAULTS
        made = plan("flow", [Node("a", tagged.job(), ())])
        [_, job] = await workflows.start(desk.lane, made, [tagged.job()])
        assert await metadata_of(desk, job) == DEFAULTS
        assert await worker.stop() == 0
    finally:
        await client.close()


@pytest.mark.parametrize("how", ["python", "sql"])
async def test_the_stages_of_a_pipeline_have_the_metadata_of_the_run_and_their_own_defaults(
    desk: Desk, how: str
) -> None:
    @desk.task(metadata={"team": "first", "a": 1})
    async def first() -> dict[str, int]:
        return {"n": 1}

    @desk.task(metadata={"team": "second", "b": 2})
    async def second(ctx: Any, n: int) -> dict[str, Any]:
        return dict(ctx.metadata)

    flow = pipeline("flow", stage("one", first), stage("two", second), registry=desk.registry)
    await (await desk.start()).stop()
    if how == "python":
        client = Client(desk.dsn)
        await flow.start(client=client)
        await client.close()
    else:
        await desk.sql.execute("SELECT taskd.enqueue('flow')")
    assert json.loads(await desk.sql.fetchval("SELECT metadata FROM taskd.job")) == {
        "team": "first",
        "a": 1,
    }
    await desk.sql.execute("UPDATE taskd.job SET metadata = metadata || '{\"run\": 5}'")
    await desk.start()
    await desk.emitted.wait("job.done", task="second")
    job = await desk.sql.fetchval("SELECT id FROM taskd.jobs WHERE task = 'second'")
    assert await told(desk, job) == {"team": "second", "b": 2, "run": 5}
