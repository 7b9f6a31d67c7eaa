"""client.buffered(): jobs are taken at once, written in batches, and never lost unsaid."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit, urlunsplit

import pytest

from taskd import Client, NewJob, Unique
from taskd.errors import BufferFull, InvalidJob, KeyHeld, NotEnqueued, UnknownTask
from tests.system.faults.proxy import Ambush, Fault, Proxy

COUNT = "SELECT count(*) FROM taskd.job"
LOCK = "LOCK TABLE taskd.job IN ACCESS EXCLUSIVE MODE"


def job(n: int = 0, **options: Any) -> NewJob:
    return NewJob("t", json.dumps({"n": n}), queue="default", **options)


@pytest.fixture
async def proxy(dsn: str) -> AsyncIterator[Proxy]:
    position = urlsplit(dsn)
    [home] = parse_qs(position.query).get("host", [position.hostname or "127.0.0.1"])
    made = Proxy(home, position.port or 5432)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def through(dsn: str, proxy: Proxy) -> AsyncIterator[Client]:
    position = urlsplit(dsn)
    user = position.netloc.rpartition("@")[0]
    netloc = f"{user}@127.0.0.1:{proxy.port}"
    async with Client(
        urlunsplit(position._replace(netloc=netloc, query="sslmode=disable"))
    ) as made:
        yield made


async def ns(sql: Any) -> list[int]:
    rows = await sql.fetch("SELECT (args ->> 'n')::int FROM taskd.job ORDER BY id")
    return [row[0] for row in rows]


async def test_jobs_are_taken_at_once_and_written_in_their_order(client: Client, sql: Any) -> None:
    async with client.buffered() as b:
        for n in range(2500):
            b.enqueue(job(n))
        assert len(b) == 2500
    assert await ns(sql) == list(range(2500))


async def test_who_awaits_gets_the_id_while_the_block_goes_on(client: Client, sql: Any) -> None:
    async with client.buffered(max_wait_s=0.01) as b:
        first, second = await asyncio.gather(b.enqueue(job(1)), b.enqueue(job(2)))
        assert await ns(sql) == [1, 2]
        assert (first.outcome, second - first) == ("enqueued", 1)
        assert first.client is client


async def test_a_flush_waits_for_what_was_taken_and_not_for_its_time(
    client: Client, sql: Any
) -> None:
    async with client.buffered(max_wait_s=60.0) as b:
        b.enqueue(job(1))
        await b.flush()
        assert await ns(sql) == [1]
        b.enqueue(job(2))  # the end of the block does not wait for its time either
    assert await ns(sql) == [1, 2]


async def test_a_full_buffer_says_so_or_lets_wait(client: Client, sql: Any, other: Any) -> None:
    async with other.transaction():
        await other.execute(LOCK)
        block = client.buffered(max_jobs=3, max_wait_s=0.0)
        b = await block.__aenter__()
        for n in range(3):
            b.enqueue(job(n))
        with pytest.raises(BufferFull, match="3 jobs"):
            b.enqueue(job(3))
        waiting = asyncio.create_task(b.enqueue_waiting(job(4)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
    await (await waiting)
    await block.__aexit__(None, None, None)
    assert await ns(sql) == [0, 1, 2, 4]


async def test_bytes_are_bounded_too_but_one_job_always_fits(client: Client) -> None:
    big = NewJob("t", json.dumps({"x": "x" * 1000}), queue="default")
    async with client.buffered(max_bytes=100) as b:
        b.enqueue(big)
        with pytest.raises(BufferFull):
            b.enqueue(job())


async def test_the_limit_counts_bytes_and_not_characters(client: Client) -> None:
    euros = NewJob("t", '{"x": "' + "€" * 30 + '"}', queue="default")
    async with client.buffered(max_bytes=100) as b:
        b.enqueue(job())
        with pytest.raises(BufferFull):
            b.enqueue(euros)  # 39 characters, 99 bytes
        await b.flush()
        b.enqueue(euros)


async def test_a_refused_job_is_named_and_harms_no_other(client: Client, sql: Any) -> None:
    await client.enqueue(job(unique=Unique("k")))
    bad = [NewJob("unheard_of"), job(7, unique=Unique("k", on_conflict="raise"))]
    with pytest.raises(NotEnqueued, match="2 were refused") as raised:
        async with client.buffered() as b:
            for n in range(1, 6):
                b.enqueue(job(n))
            with pytest.raises(UnknownTask):
                await b.enqueue(bad[0])
            b.enqueue(bad[1])
            b.enqueue(job(6))
    assert [each for each, _ in raised.value.refused] == bad
    assert isinstance(raised.value.refused[1][1], KeyHeld)
    assert (raised.value.jobs, raised.value.unsure) == ([], [])
    assert await ns(sql) == list(range(7))


async def test_a_short_outage_is_survived_without_loss_or_double(
    proxy: Proxy, through: Client, sql: Any
) -> None:
    async with through.buffered(max_wait_s=0.0) as b:
        await b.enqueue(job(0))
        proxy.set(Fault.REFUSE)
        for link in list(proxy.links):
            link.cut()
        receipts = [b.enqueue(job(n)) for n in range(1, 50)]
        await asyncio.sleep(0.2)
        assert not receipts[0].done()
        proxy.heal()
        await asyncio.gather(*receipts)
    assert await ns(sql) == list(range(50))


@pytest.mark.parametrize("on_its_way", [False, True], ids=["committed", "never committed"])
async def test_a_commit_without_an_answer_is_asked_for_and_not_written_twice(
    proxy: Proxy, through: Client, sql: Any, on_its_way: bool
) -> None:
    async with through.buffered(max_wait_s=0.0) as b:
        await b.enqueue(job(0))
        ambush = proxy.ambush = Ambush(
            "taskd buffer", "COMMIT", lambda _tag: True, on_its_way=on_its_way
        )
        results = await asyncio.gather(*(b.enqueue(job(n)) for n in range(1, 20)))
        assert ambush.sprung.is_set()
    assert await ns(sql) == list(range(20))
    ids = [row[0] for row in await sql.fetch("SELECT id FROM taskd.job ORDER BY id")]
    assert results == ids[1:]


async def test_the_end_says_exactly_what_was_not_written(proxy: Proxy, through: Client) -> None:
    with pytest.raises(NotEnqueued, match="3 jobs were not written: PostgreSQL") as raised:
        async with through.buffered(flush_s=0.3) as b:
            proxy.set(Fault.REFUSE)
            jobs = [job(n) for n in range(3)]
            receipts = [b.enqueue(each) for each in jobs]
    assert raised.value.jobs == jobs
    assert (raised.value.unsure, raised.value.refused) == ([], [])
    with pytest.raises(NotEnqueued):
        await receipts[0]


async def test_the_end_says_what_may_have_been_written(
    proxy: Proxy, through: Client, sql: Any
) -> None:
    with pytest.raises(NotEnqueued, match="2 may or may not") as raised:
        async with through.buffered(max_wait_s=0.0, flush_s=0.3) as b:
            await b.enqueue(job(0))
            proxy.ambush = Ambush("taskd buffer", "COMMIT", lambda _tag: True, silently=True)
            b.enqueue(job(1))
            b.enqueue(job(2))
            await proxy.ambush.sprung.wait()
            b.enqueue(job(3))
    assert raised.value.unsure == [job(1), job(2)]
    assert raised.value.jobs == [job(3)]
    assert await ns(sql) == [0, 1, 2]


async def test_an_error_of_the_block_stays_what_it_is_and_gets_a_note(
    proxy: Proxy, through: Client
) -> None:
    with pytest.raises(KeyError) as raised:
        async with through.buffered(flush_s=0.1) as b:
            proxy.set(Fault.REFUSE)
            b.enqueue(job())
            raise KeyError("mine")
    assert "1 jobs were not written" in raised.value.__notes__[0]


async def test_who_does_not_wait_for_the_end_is_reported_what_was_not_written(
    proxy: Proxy, through: Client
) -> None:
    receipts = []

    async def produces() -> None:
        async with through.buffered(flush_s=60.0) as b:
            proxy.set(Fault.REFUSE)
            receipts.append(b.enqueue(job()))
            ends.set()

    ends = asyncio.Event()
    producing = asyncio.create_task(produces())
    await ends.wait()
    producing.cancel()  # as the end of the block waits for the server
    with pytest.raises(asyncio.CancelledError) as raised:
        await producing
    assert "1 jobs were not written" in raised.value.__notes__[0]
    with pytest.raises(NotEnqueued):
        await receipts[0]


async def test_a_buffer_is_used_inside_of_its_block(client: Client) -> None:
    b = client.buffered()
    with pytest.raises(RuntimeError, match="async with"):
        b.enqueue(job())
    with pytest.raises(InvalidJob, match="max_jobs"):
        client.buffered(max_jobs=0)
