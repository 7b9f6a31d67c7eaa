"""What a client does by hand, on its own connections and on the caller's."""

from __future__ import annotations

import re
from typing import Any

import asyncpg
import psycopg
import pytest

from taskd import Client, JobFilter, NewJob, acting_as, every
from taskd.core.schedule import Schedule
from taskd.errors import InvalidJob, InvalidTransition, WorkerNotFound
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.helpers import FAILED, done, new_worker, run_one, settle, state_of


@pytest.fixture
async def me(lane: Lane) -> int:
    return await new_worker(lane)


@pytest.fixture
async def client(dsn: str) -> Any:
    async with Client(dsn) as made:
        yield made


async def test_a_client_completes_restarts_copies_and_deletes(
    client: Client, sql: Any, lane: Any, me: int
) -> None:
    run = await run_one(lane, me)
    with acting_as("ada"):
        assert await client.restart(run.id, "it hangs", delay_s=0) == {run.id: "queued"}
        assert await client.complete(run.id, {"sent": True}, reason="by post") == {run.id: "queued"}
        assert await client.result(run.id) == {"sent": True}
        copies = await client.run_again([run.id], "again")
        assert await client.delete([run.id, *copies.values()]) == {
            run.id: "deleted", copies[run.id]: "deleted",
        }  # fmt: skip
    actors = await sql.fetch("SELECT DISTINCT actor FROM taskd.action")
    assert [each["actor"] for each in actors] == ["ada"]
    assert await done(lane, run) == 0


async def test_a_filter_restarts_copies_and_deletes(
    client: Client, sql: Any, lane: Any, me: int
) -> None:
    hung = await run_one(lane, me)
    await sql.execute("UPDATE taskd.job SET started_at = now() - interval '2 hours'")
    young = await run_one(lane, me)
    long_running = JobFilter(queue="q", running_for_s=3600)
    assert await client.restart(long_running, "it hangs") == {hung.id: "scheduled"}
    assert await state_of(sql, young.id) == "running"
    await done(lane, young)
    assert [*await client.run_again(JobFilter(queue="q"))] == [young.id]
    waiting = JobFilter(queue="q", states=["scheduled", "done"])
    assert await client.delete(waiting) == {hung.id: "deleted", young.id: "deleted"}


async def test_a_filter_that_cannot_match_is_refused(client: Client) -> None:
    for act in (client.restart, client.run_again, client.delete):
        with pytest.raises(InvalidJob, match="an empty JobFilter selects all jobs") as error:
            await act(JobFilter())
        assert re.search(r"for example JobFilter\(states=\['\w+'\]\)$", str(error.value))
    for act in (client.run_again, client.delete):
        with pytest.raises(InvalidJob):
            await act(JobFilter(states=["running"]))
    with pytest.raises(InvalidJob):
        await client.restart(JobFilter(states=["queued"]))


async def test_schedules_are_changed_in_the_callers_transaction(client: Client, sql: Any) -> None:
    nightly = Schedule("nightly", NewJob("t", queue="q"), every("1d"))
    calls = client.schedules
    async with sql.transaction():
        assert await calls.set(nightly, conn=sql) == "created"
        assert await calls.list() == []
        assert await calls.pause(["nightly"], conn=sql) == ["nightly"]
        assert await calls.resume(["nightly"], conn=sql) == ["nightly"]
        [job_id] = await calls.run("nightly", conn=sql) or []
    assert [row["name"] for row in await calls.list()] == ["nightly"]
    assert await state_of(sql, job_id) == "queued"
    async with sql.transaction():
        assert await calls.delete(["nightly"], conn=sql) == ["nightly"]
        assert [row["name"] for row in await calls.list()] == ["nightly"]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_an_action_is_part_of_the_callers_transaction(
    client: Client, dsn: str, sql: Any, lane: Any, me: int, driver: str
) -> None:
    run = await run_one(lane, me)
    [job_id] = await jobs.enqueue(lane, [NewJob("t", queue="q")])
    conn: Any = (
        await asyncpg.connect(dsn)
        if driver == "asyncpg"
        else await psycopg.AsyncConnection.connect(dsn)
    )
    try:
        if driver == "asyncpg":
            await conn.execute("BEGIN")
        assert await client.restart(run.id, conn=conn) == {run.id: "scheduled"}
        assert await client.complete(job_id, conn=conn) == {job_id: "queued"}
        assert len(await client.run_again(job_id, conn=conn)) == 1
        assert await client.delete(job_id, conn=conn) == {job_id: "deleted"}
        await (conn.execute("ROLLBACK") if driver == "asyncpg" else conn.rollback())
    finally:
        await conn.close()
    assert await state_of(sql, run.id) == "running"
    assert await state_of(sql, job_id) == "queued"
    assert await sql.fetchval("SELECT count(*) FROM taskd.action") == 0


async def test_wrong_values_get_a_sentence(client: Client, lane: Any) -> None:
    with pytest.raises(InvalidJob, match="the jobs were not completed"):
        await client.complete(1, "x" * 300_000)
    with pytest.raises(InvalidJob, match="delay_s"):
        await client.restart(1, delay_s=-1)
    with pytest.raises(WorkerNotFound, match="no worker has the id 4711"):
        await client.declare_dead(4711)
    me = await new_worker(lane)
    with pytest.raises(InvalidTransition, match="renews its lease, so it lives"):
        await client.declare_dead(me)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_cancels_retries_changes_and_pauses_take_the_callers_connection(
    client: Client, dsn: str, sql: Any, lane: Lane, me: int, driver: str
) -> None:
    failed = await run_one(lane, me)
    await settle(lane, failed, FAILED)
    changed, cancelled = await jobs.enqueue(lane, [NewJob("t", queue="q")] * 2)
    conn: Any = (
        await asyncpg.connect(dsn)
        if driver == "asyncpg"
        else await psycopg.AsyncConnection.connect(dsn)
    )
    try:
        if driver == "asyncpg":
            await conn.execute("BEGIN")
        assert await client.retry(failed.id, conn=conn) == [failed.id]
        assert await client.change(changed, priority=3, conn=conn) == {changed: "changed"}
        assert await client.cancel([cancelled], "odd", conn=conn) == {cancelled: "cancelled"}
        waiting = JobFilter(queue="q", states=["queued"])
        assert await client.cancel(waiting, conn=conn) == {
            failed.id: "cancelled", changed: "cancelled",
        }  # fmt: skip
        assert await client.pause(["q"], conn=conn) == ["q"]
        assert await client.resume(["q"], conn=conn) == ["q"]
        await (conn.execute("ROLLBACK") if driver == "asyncpg" else conn.rollback())
    finally:
        await conn.close()
    assert await state_of(sql, failed.id) == "failed"
    assert await state_of(sql, changed) == await state_of(sql, cancelled) == "queued"
    assert await sql.fetchval("SELECT count(*) FROM taskd.action") == 0
