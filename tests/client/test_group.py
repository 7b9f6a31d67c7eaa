"""Single jobs that are enqueued at the same time share a transaction, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd import Client
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import NewJob
from taskd.errors import InvalidJob, QueueFull, StoreUnavailable
from taskd.store import group_enqueue
from tests.store.helpers import held_up, workers_locked

WRITTEN = "SELECT id, queue, args ->> 'n' AS n, xmin::text AS xid FROM taskd.job"


def job(n: object, queue: str = "default") -> NewJob:
    return NewJob("noop", f'{{"n":"{n}"}}', queue=queue, checked=True)


def begin(client: Client, *jobs: NewJob) -> list[asyncio.Task[Enqueued]]:
    return [asyncio.create_task(client.enqueue(each)) for each in jobs]


async def test_jobs_enqueued_at_the_same_time_share_a_transaction(client: Client, sql: Any) -> None:
    ids = await asyncio.gather(*(client.enqueue(job(n)) for n in range(100)))
    rows = await sql.fetch(WRITTEN)
    assert {row["id"]: row["n"] for row in rows} == {id_: str(n) for n, id_ in enumerate(ids)}
    assert len({row["xid"] for row in rows}) == group_enqueue.ABREAST + 1


@pytest.mark.parametrize(
    ("work_s", "transactions"), [(1e-9, 10), (600.0, group_enqueue.ABREAST + 1)]
)
async def test_where_statements_mostly_wait_more_of_them_are_under_way(
    client: Client, sql: Any, monkeypatch: pytest.MonkeyPatch, work_s: float, transactions: int
) -> None:
    monkeypatch.setattr(group_enqueue, "WAIT_S", 600.0)
    monkeypatch.setattr(group_enqueue, "WORK_S", work_s)
    await client.enqueue(job("how long one takes"))
    ids = await asyncio.gather(*(client.enqueue(job(n)) for n in range(10)))
    rows = [row for row in await sql.fetch(WRITTEN) if row["id"] in ids]
    assert len({row["xid"] for row in rows}) == transactions


async def test_how_long_statements_take_is_learnt_anew() -> None:
    async def insert(jobs: object) -> list[Enqueued]:
        raise AssertionError(jobs)

    def singles(of: group_enqueue.Group) -> int:
        """How many may be under way at once."""
        begun = []
        while (began := of.begin()) is not None:
            begun.append(began)
        for _ in begun:
            of.ended()
        return len(begun)

    one = group_enqueue.Group(insert, 10)
    assert singles(one) == group_enqueue.ABREAST
    for took_s, abreast in (
        (0.1, 10),
        (0.0001, group_enqueue.ABREAST),
        (0.1, group_enqueue.ABREAST),
    ):
        began = one.begin()
        assert began is not None
        one.ended(began - took_s)
        assert singles(one) == abreast
    for _ in range(400):  # commits take long from now on
        began = one.begin()
        assert began is not None
        one.ended(began - 0.1)
    assert singles(one) == 10


async def test_one_that_enqueues_after_the_other_waits_for_nobody(
    client: Client, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_enqueue, "WAIT_S", 600.0)
    ids = [await client.enqueue(job(n)) for n in range(5)]
    rows = await sql.fetch(WRITTEN)
    assert [row["id"] for row in sorted(rows)] == ids
    assert len({row["xid"] for row in rows}) == 5


async def test_a_job_that_is_refused_is_refused_alone(client: Client, sql: Any) -> None:
    jobs = [job(n) for n in range(20)]
    jobs[13] = NewJob("noop", '{"n":1e999999}', queue="default", checked=True)
    results = await asyncio.gather(*(client.enqueue(each) for each in jobs), return_exceptions=True)
    assert isinstance(results[13], InvalidJob)
    assert {row["n"] for row in await sql.fetch(WRITTEN)} == {str(n) for n in range(20)} - {"13"}
    assert all(isinstance(each, int) for n, each in enumerate(results) if n != 13)


async def test_a_full_queue_takes_as_many_as_it_has_room_for(
    client: Client, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two statements at once do not see each other's jobs, and may exceed the depth together.
    monkeypatch.setattr(group_enqueue, "ABREAST", 1)
    monkeypatch.setattr(group_enqueue, "WAIT_S", 600.0)
    await sql.execute("INSERT INTO taskd.queue (name, max_depth) VALUES ('narrow', 5)")
    jobs = [job(n, "narrow") for n in range(20)]
    results = await asyncio.gather(*(client.enqueue(each) for each in jobs), return_exceptions=True)
    assert sum(isinstance(each, QueueFull) for each in results) == 15
    assert {row["id"] for row in await sql.fetch(WRITTEN)} == {
        each for each in results if isinstance(each, int)
    }


async def test_jobs_of_other_queues_have_a_transaction_of_their_own(
    client: Client, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_enqueue, "WAIT_S", 600.0)
    queues = ("default", "default", "one", "two", "one", "two")
    await asyncio.gather(*(client.enqueue(job(n, queue)) for n, queue in enumerate(queues)))
    rows = await sql.fetch(WRITTEN)
    xids = {queue: {row["xid"] for row in rows if row["queue"] == queue} for queue in queues}
    assert {queue: len(each) for queue, each in xids.items()} == {"default": 2, "one": 1, "two": 1}
    assert xids["one"] != xids["two"]


async def test_a_job_does_not_wait_for_those_whose_statements_take_long(
    client: Client, sql: Any
) -> None:
    async with workers_locked(sql):
        first = begin(client, *(job(n) for n in range(group_enqueue.ABREAST)))
        await held_up(sql, group_enqueue.ABREAST)
        more = begin(client, job("more"))
        await held_up(sql, group_enqueue.ABREAST + 1)
    assert len({await each for each in (*first, *more)}) == group_enqueue.ABREAST + 1


async def test_when_all_connections_are_busy_jobs_wait_for_one_together(dsn: str, sql: Any) -> None:
    async with Client(dsn, pool_max=3) as client:
        async with workers_locked(sql):
            first = begin(client, *(job(n) for n in range(group_enqueue.ABREAST)))
            await held_up(sql, group_enqueue.ABREAST)
            third = begin(client, job("third"))
            await held_up(sql, group_enqueue.ABREAST + 1)
            more = []
            for n in range(5):
                more += begin(client, job(f"more {n}"))
                await asyncio.sleep(2 * group_enqueue.WAIT_S)
        for each in (*first, *third, *more):
            await each
    rows = await sql.fetch(WRITTEN)
    xids = {row["n"]: row["xid"] for row in rows}
    assert len(rows) == 8
    assert len({xids[f"more {n}"] for n in range(5)}) == 1


async def test_a_job_that_is_cancelled_while_it_waits_is_not_written(
    client: Client, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_enqueue, "WAIT_S", 600.0)
    async with workers_locked(sql):
        first = begin(client, *(job(n) for n in range(group_enqueue.ABREAST)))
        await held_up(sql, group_enqueue.ABREAST)
        kept, dropped = begin(client, job("kept"), job("dropped"))
        await asyncio.sleep(0)
        dropped.cancel()
        await asyncio.wait({dropped})
        assert dropped.cancelled()
    for each in (*first, kept):
        await each
    assert {row["n"] for row in await sql.fetch(WRITTEN)} == {"0", "1", "kept"}


async def test_who_is_cancelled_while_his_job_is_being_written_hears_when_that_has_ended(
    client: Client, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_enqueue, "CANCEL_S", 600.0)
    async with workers_locked(sql):
        first = begin(client, *(job(n) for n in range(group_enqueue.ABREAST)))
        await held_up(sql, group_enqueue.ABREAST)
        kept, dropped = begin(client, job("kept"), job("dropped"))
        await held_up(sql, group_enqueue.ABREAST + 1)
        dropped.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not dropped.done()
    await asyncio.wait({dropped, kept, *first})
    assert dropped.cancelled()
    assert kept.result()
    assert {row["n"] for row in await sql.fetch(WRITTEN)} == {"0", "1", "kept", "dropped"}


async def test_all_hear_that_the_connection_broke_each_by_an_error_of_his_own(
    client: Client, sql: Any
) -> None:
    async with workers_locked(sql):
        tasks = begin(client, *(job(n) for n in range(6)))
        await held_up(sql, group_enqueue.ABREAST + 1)
        await sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE application_name = 'taskd client' AND datname = current_database()"
        )
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(each, StoreUnavailable) for each in results)
    assert len({id(each) for each in results}) == 6
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0
    assert await client.enqueue(job("after"))


async def test_whoever_waits_hears_that_the_client_was_closed(
    dsn: str, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_enqueue, "WAIT_S", 600.0)
    client = Client(dsn)
    async with workers_locked(sql):
        first = begin(client, *(job(n) for n in range(group_enqueue.ABREAST)))
        await held_up(sql, group_enqueue.ABREAST)
        (last,) = begin(client, job("last"))
        await asyncio.sleep(0)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0)
    await asyncio.wait({closing, last, *first})
    assert all(each.result() for each in first)
    assert isinstance(last.exception(), StoreUnavailable)
    assert {row["n"] for row in await sql.fetch(WRITTEN)} == {"0", "1"}
