"""Waiting for results:

a notification at the end of the job wakes the caller; otherwise it polls.
"""

from __future__ import annotations

import asyncio
import pickle
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pydantic
import pytest

from taskd import Client, NewJob, task
from taskd.client import results, set_default_client
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import JobState
from taskd.core.tasks.registry import Registry
from taskd.errors import InvalidResult, JobCancelled, JobFailed, JobNotFound, PermissionDenied
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import load
from taskd.store.jobs import jobs
from tests.client.conftest import ME, claim, end
from tests.logins import Logins

AWAITED = "SELECT awaited FROM taskd.job WHERE id = $1"
ERROR = '{"type": "ValueError", "message": "too big"}'


def job(**options: Any) -> NewJob:
    return NewJob("sync", queue="sync", **options)


@pytest.fixture
def no_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waiting caller is woken, or none is."""
    monkeypatch.setattr(results, "LISTENED_S", 600.0)
    monkeypatch.setattr(results, "LISTENED_S_MAX", 600.0)


async def waiting_caller(client: Client, job_id: int, sql: Any) -> asyncio.Task[Any]:
    """A caller that waits, when notifications reach it and the row has its mark."""
    task = asyncio.create_task(client.result(job_id, 10.0))
    await asyncio.sleep(0)
    while not await sql.fetchval(AWAITED, job_id):
        await asyncio.sleep(0.005)
    while not any(each._listens for each in client._waiters.values()):
        await asyncio.sleep(0.005)
    await asyncio.sleep(0.05)  # the check that follows the LISTEN
    assert not task.done()
    return task


async def test_a_result_comes_by_notification(
    client: Client, worker: Lane, sql: Any, no_polls: None
) -> None:
    job_id = await client.enqueue(job())
    waits = await waiting_caller(client, job_id, sql)
    claimed = await claim(worker)
    await end(worker, claimed, JobState.SCHEDULED, delay_s=0.001, error=ERROR)
    assert not waits.done()  # a retry is no end
    await sql.execute("UPDATE taskd.job SET state = 'queued'")
    await jobs.ack_outcomes(worker, ME, [ack(await claim(worker), JobState.DONE, '{"pages": 3}')])
    assert await waits == {"pages": 3}


@dataclass
class Report:
    """What a handler returns."""

    pages: int
    made: datetime


async def stored(worker: Lane, result: str | None) -> None:
    await jobs.ack_outcomes(worker, ME, [ack(await claim(worker), JobState.DONE, result)])


async def test_the_result_of_a_task_has_the_type_of_its_handler(
    client: Client, worker: Lane
) -> None:
    @task(queue="sync", registry=Registry())
    def render() -> Report:
        raise NotImplementedError

    set_default_client(client)
    made = datetime(2026, 10, 1, tzinfo=UTC)
    job_id = await render.enqueue()
    await stored(worker, '{"pages": 3, "made": "2026-10-01T00:00:00Z"}')
    assert await job_id.result() == Report(3, made)
    assert await client.result(job_id) == Report(3, made)
    assert await client.result(int(job_id)) == {"pages": 3, "made": "2026-10-01T00:00:00Z"}
    assert await client.result(pickle.loads(pickle.dumps(job_id))) == await client.result(
        int(job_id)
    )


class Receipt(pydantic.BaseModel):
    pages: int


async def test_a_result_is_the_models_of_pydantic_that_the_handler_returns(
    client: Client, worker: Lane
) -> None:
    @task(queue="sync", registry=Registry())
    async def render() -> list[Receipt]:
        raise NotImplementedError

    set_default_client(client)
    job_id = await render.enqueue()
    await stored(worker, '[{"pages": 3}]')
    assert await job_id.result() == [Receipt(pages=3)]


async def test_a_result_of_another_type_is_an_error_that_says_how_to_read_it(
    client: Client, worker: Lane
) -> None:
    @task(queue="sync", registry=Registry())
    async def render() -> Report:
        raise NotImplementedError

    set_default_client(client)
    job_id = await render.options(priority=5).enqueue()
    await stored(worker, '{"pages": "secret"}')
    with pytest.raises(InvalidResult, match=r"pages.*client\.result\(int\(id\)\)") as raised:
        await job_id.result()
    assert "secret" not in str(raised.value)


async def test_a_result_whose_type_cannot_be_decoded_is_what_json_has(
    client: Client, worker: Lane
) -> None:
    @task(queue="sync", registry=Registry())
    def unknown() -> Registry:
        raise NotImplementedError

    @task(queue="sync", registry=Registry())
    def nothing() -> None: ...

    set_default_client(client)
    for each in (unknown, nothing):  # the second stores its result by ctx.complete()
        job_id = await each.enqueue()
        await stored(worker, "[1]")
        assert await client.result(job_id) == [1]


def ack(claimed: Any, state: JobState, result: str | None = None) -> Any:
    return jobs.Ack(claimed.id, ME, claimed.fence, state, result=result)


@pytest.mark.parametrize("how", ["done", "failed", "cancelled by hand", "crashed", "completed"])
async def test_every_end_notifies(
    client: Client, worker: Lane, sql: Any, no_polls: None, how: str
) -> None:
    job_id = await client.enqueue(job())
    waits = await waiting_caller(client, job_id, sql)
    if how == "cancelled by hand":
        await client.cancel([job_id], "not wanted")
        with pytest.raises(JobCancelled, match="not wanted"):
            await waits
        return
    claimed = await claim(worker)
    if how == "done":
        await end(worker, claimed, JobState.DONE)
        assert await waits is None
    elif how == "completed":
        await worker.fetch("complete_job", claimed.id, ME, claimed.fence, "[1]", None, None)
        assert await waits == [1]
    elif how == "failed":
        await end(worker, claimed, JobState.FAILED, reason="ValueError: too big", error=ERROR)
        with pytest.raises(JobFailed, match=f"job {job_id} failed: ValueError: too big") as raised:
            await waits
        assert raised.value.error["message"] == "too big"
    else:
        await sql.execute("UPDATE taskd.worker SET died_at = now(), crashed = true")
        await jobs.rescue(worker, 10, 1, 1)
        with pytest.raises(JobFailed, match="crashed"):
            await waits


async def test_every_statement_that_ends_jobs_shows_who_waits(sql: Any) -> None:
    rows = await sql.fetch(
        "SELECT proname, prosrc FROM pg_proc WHERE pronamespace = 'taskd'::regnamespace"
    )
    functions = {row["proname"]: row["prosrc"] for row in rows}

    def whole(text: str, seen: frozenset[str] = frozenset()) -> str:
        """A statement with all that its functions do."""
        called = (set(re.findall(r"taskd\.(\w+)\(", text)) & functions.keys()) - seen
        return text + "".join(whole(functions[each], seen | called) or "" for each in called)

    finished = {"done", "failed", "cancelled"}
    for each in load().values():
        if {after for before, after in each.moves if before != "-"} & finished:
            assert "'taskd:ended'" in whole(each.text), each.name


async def test_nobody_is_notified_of_a_job_that_nobody_waits_for(
    client: Client, worker: Lane, sql: Any, no_polls: None
) -> None:
    payloads: list[str] = []
    await sql.add_listener("taskd:ended", lambda *args: payloads.append(args[-1]))
    first, second = await client.enqueue_many([job(), job()])
    waits = await waiting_caller(client, second, sql)
    claimed = await jobs.claim(worker, ME, "sync", 10)
    await jobs.ack_done(worker, ME, [each.id for each in claimed], [each.fence for each in claimed])
    await waits
    while not payloads:
        await sql.execute("SELECT 1")
    assert payloads == [str(second)]
    assert await client.result(first, 5.0) is None


async def test_a_waiting_job_that_was_marked_is_notified_as_its_claim_may_have_missed_it(
    client: Client, listener: Any, sql: Any
) -> None:
    await listener.listen("sync")
    job_id = await client.enqueue(job())
    assert await listener.notified() == ["sync"]
    waits = await waiting_caller(client, job_id, sql)
    assert await listener.notified() == ["sync"]  # once, however often it was checked
    waits.cancel()


async def test_a_locked_row_is_not_waited_for_and_gets_its_mark_later(
    client: Client, worker: Lane, sql: Any, other: Any
) -> None:
    job_id = await client.enqueue(job())
    async with other.transaction():
        await other.execute("SELECT FROM taskd.job FOR UPDATE")
        waits = asyncio.create_task(client.result(job_id, 10.0))
        began = time.monotonic()
        await asyncio.sleep(0.2)
        assert await sql.fetchval(AWAITED, job_id) is None
    while not await sql.fetchval(AWAITED, job_id):
        await asyncio.sleep(0.01)
    assert time.monotonic() - began < 5.0
    await end(worker, await claim(worker), JobState.DONE)
    assert await waits is None


async def test_forged_ends_cost_a_bounded_number_of_polls_and_the_true_end_is_noticed(
    client: Client, worker: Lane, sql: Any, no_polls: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, await_jobs = 0, results.results.await_jobs

    async def counted(*args: Any) -> Any:
        nonlocal looks
        looks += 1
        return await await_jobs(*args)

    monkeypatch.setattr(results.results, "await_jobs", counted)
    job_id = await client.enqueue(job())
    waits = await waiting_caller(client, job_id, sql)
    looks, began = 0, time.monotonic()
    for _ in range(400):
        await sql.execute(f"NOTIFY \"taskd:ended\", '{int(job_id)}'")
    took_s = time.monotonic() - began
    assert 1 <= looks <= 2 + took_s / results.FALSE_NOTIFY_PAUSE_S
    await end(worker, await claim(worker), JobState.DONE)
    await waits


async def test_many_who_wait_share_one_connection(
    client: Client, worker: Lane, sql: Any, no_polls: None
) -> None:
    ids = await client.enqueue_many(job() for _ in range(10))
    tasks = [asyncio.create_task(each.result(10.0)) for each in (*ids, ids[0])]
    while await sql.fetchval("SELECT count(*) FROM taskd.job WHERE awaited") < 10:
        await asyncio.sleep(0.01)
    count = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE application_name = 'taskd listen' AND datname = current_database()"
    )
    while not any(each._listens for each in client._waiters.values()):
        await asyncio.sleep(0.005)
    assert await sql.fetchval(count) == 1
    claimed = await jobs.claim(worker, ME, "sync", 10)
    await jobs.ack_done(worker, ME, [each.id for each in claimed], [each.fence for each in claimed])
    assert await asyncio.gather(*tasks) == [None] * 11


async def test_polling_is_all_there_is_behind_a_pooler_and_enough(
    client: Client, worker: Lane, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(self: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(results.ResultWaiter, "_listen_loop", deaf)
    job_id = await client.enqueue(job())
    waits = asyncio.create_task(client.result(job_id, 10.0))
    await asyncio.sleep(0.1)
    await end(worker, await claim(worker), JobState.DONE)
    assert await waits is None


async def test_a_lost_connection_is_made_again_and_nothing_is_missed(
    client: Client, worker: Lane, sql: Any, no_polls: None
) -> None:
    job_id = await client.enqueue(job())
    waits = await waiting_caller(client, job_id, sql)
    await sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'taskd listen' AND datname = current_database()"
    )
    await end(worker, await claim(worker), JobState.DONE)
    assert await waits is None


async def test_a_result_that_is_gone_is_a_clear_error(
    client: Client, worker: Lane, sql: Any
) -> None:
    await sql.execute("INSERT INTO taskd.queue (name, keep_done_s) VALUES ('sync', 0)")
    job_id = await client.enqueue(job())
    await end(worker, await claim(worker), JobState.DONE)
    with pytest.raises(JobNotFound, match="no longer keeps it"):
        await job_id.result()


async def test_a_time_limit_ends_the_wait_and_not_the_job(client: Client, sql: Any) -> None:
    job_id = await client.enqueue(job())
    with pytest.raises(TimeoutError):
        await job_id.result(timeout_s=0.05)
    assert await sql.fetchval("SELECT state::text FROM taskd.job") == "queued"
    assert not any(each._awaited for each in client._waiters.values())


async def test_closing_the_client_shows_who_waits(dsn: str) -> None:
    client = Client(dsn)
    job_id = await client.enqueue(job())
    waits = asyncio.create_task(job_id.result())
    await asyncio.sleep(0.05)
    await client.close()
    with pytest.raises(Exception, match="closed"):
        await waits


def test_without_a_loop(dsn: str) -> None:
    client = Client(dsn)
    job_id = client.enqueue_sync(job())
    with pytest.raises(TimeoutError):
        job_id.result_sync(timeout_s=0.05)
    asyncio.run(client.cancel([job_id], "late"))
    with pytest.raises(JobCancelled, match="late"):
        client.result_sync(job_id)
    client.close_sync()


def test_an_id_from_elsewhere_has_no_client() -> None:
    enqueued = Enqueued.instead(7, "skipped")
    enqueued.client = Client("postgresql://nowhere/x")
    copy = pickle.loads(pickle.dumps(enqueued))
    assert (copy, copy.outcome, copy.client) == (7, "skipped", None)
    with pytest.raises(RuntimeError, match=r"client.result\(id\)"):
        copy.result_sync()


async def test_a_producer_reads_results_only_where_its_login_may(
    logins: Logins, sql: Any, client: Client, worker: Lane
) -> None:
    async with Client(logins.dsn("producer")) as shop:
        job_id = await shop.enqueue(job())
        with pytest.raises(PermissionDenied, match="await_jobs"):
            await job_id.result()
        await sql.execute(
            "GRANT EXECUTE ON FUNCTION taskd.await_jobs(bigint[], bigint[]) "
            f"TO {logins.role('producer')}_login"
        )
        await end(worker, await claim(worker), JobState.DONE)
        assert await job_id.result() is None
