"""Producers notify only queues that no worker polls: setting the busy mark, and clearing it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest

from taskd.worker.claiming import busy_mark
from tests.store.helpers import MARK, MARKED, SERVES, UNMARK, Ears
from tests.worker.conftest import until

# No poll within the test: a job is found by a notification or by the consumer's own polling.
CUT = """
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND application_name LIKE 'taskd listen%'
"""
NO_POLL: dict[str, Any] = {"queues": ("default",), "poll_s": 600}


@pytest.fixture
async def rings(desk: Any) -> Any:
    """The notifications of the queue, as another listener receives them."""
    listener = await asyncpg.connect(desk.dsn)
    ears = Ears(listener)
    await ears.listen("taskd_default")
    yield ears
    await listener.close()


async def keep_busy(desk: Any, job: Any, enough: asyncio.Event) -> None:
    while not enough.is_set():
        await desk.enqueue(*[job] * 50)


async def marked(desk: Any) -> bool:
    found: bool = await desk.sql.fetchval(MARKED, "default")
    return found


async def not_marked(desk: Any) -> bool:
    return not await marked(desk)


async def all_before_have_ended(desk: Any) -> None:
    """All transactions that may have read the earlier state have committed."""
    xid = await desk.sql.fetchval("SELECT pg_current_xact_id()::text")
    ended = "SELECT pg_snapshot_xmin(pg_current_snapshot()) > $1::text::xid8"
    await until(lambda: desk.sql.fetchval(ended, xid))


async def test_a_busy_queue_is_polled_and_not_notified(
    desk: Any, rings: Ears, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def work() -> None: ...

    # On a loaded machine producer and worker may be slow for a moment: it is not to leave then.
    few_for_s = busy_mark.FEW_FOR_S
    monkeypatch.setattr(busy_mark, "FEW_FOR_S", 600.0)
    monkeypatch.setattr(busy_mark, "CLAIM_AT_LEAST_EVERY_S", 600.0)
    monkeypatch.setattr(busy_mark, "MARK_S", 50.0)
    await desk.start(**NO_POLL)
    # It is alone: a polling worker notifies the others when its claims are full.
    await desk.sql.execute("DELETE FROM taskd.worker WHERE id = $1", SERVES)
    enough = asyncio.Event()
    busy = asyncio.create_task(keep_busy(desk, work.job(), enough))
    await desk.emitted.wait("queue.polled")
    await until(lambda: marked(desk))
    await all_before_have_ended(
        desk
    )  # the producer may have notified before it could read the mark
    before = len(await rings.so_far())
    for _ in range(20):
        await desk.sql.execute("SELECT taskd.enqueue('work', queue => 'default')")
    assert len(await rings.so_far()) == before
    monkeypatch.setattr(busy_mark, "FEW_FOR_S", few_for_s)
    enough.set()
    await busy
    await desk.emitted.wait("queue.unpolled")
    assert not await marked(desk)
    # Quiet again: each job is notified and found at once.
    job_id = await desk.sql.fetchval("SELECT taskd.enqueue('work', queue => 'default')")
    await desk.settled(job_id)
    await until(lambda: len(rings.notifications) > before)


async def test_a_mark_that_comes_back_with_another_server_is_taken_back_once_more(
    desk: Any,
) -> None:
    """A promoted replica may still have a cleared mark, which would suppress notifications."""

    @desk.task()
    async def work() -> None: ...

    await desk.start(**NO_POLL)
    worker_id = await desk.sql.fetchval("SELECT id FROM taskd.worker")
    enough = asyncio.Event()
    busy = asyncio.create_task(keep_busy(desk, work.job(), enough))
    await desk.emitted.wait("queue.polled")
    enough.set()
    await busy
    await desk.emitted.wait("queue.unpolled")
    await until(lambda: desk.sql.fetchval("SELECT count(*) = 0 FROM taskd.job"))
    await desk.sql.execute(MARK, "default", 3600.0, worker_id)
    # All its connections are opened again, including the one that listens.
    await desk.sql.execute(CUT)
    await until(lambda: not_marked(desk))


async def test_producers_that_wait_for_each_other_need_not_notify(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def work() -> None: ...

    monkeypatch.setattr(busy_mark, "MARK_AFTER_S", 600.0)
    monkeypatch.setattr(busy_mark, "OFTEN_CLAIMS_PER_S", 10)
    await desk.start(**NO_POLL)
    enough = asyncio.Event()
    producers = [asyncio.create_task(ring_on(desk.dsn, enough)) for _ in range(16)]
    await desk.emitted.wait("queue.polled")
    enough.set()
    ids = [job_id for each in producers for job_id in await each]
    await desk.emitted.wait("queue.unpolled")
    for job_id in ids:
        await desk.settled(job_id)


async def test_a_load_that_paused_is_polled_again_at_once_but_not_twice_within_a_second(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def work() -> None: ...

    async def until_attended(count: int) -> None:
        monkeypatch.setattr(busy_mark, "FEW_FOR_S", 600.0)
        monkeypatch.setattr(busy_mark, "CLAIM_AT_LEAST_EVERY_S", 600.0)
        enough = asyncio.Event()
        busy = asyncio.create_task(keep_busy(desk, work.job(), enough))
        await desk.emitted.wait("queue.polled", count)
        # From here on: had it counted from when the queue is left, it would never come back.
        monkeypatch.setattr(busy_mark, "MARK_AT_MOST_EVERY_S", 3600.0)
        monkeypatch.setattr(busy_mark, "FEW_FOR_S", few_for_s)
        enough.set()
        await busy
        await desk.emitted.wait("queue.unpolled", count)

    few_for_s = busy_mark.FEW_FOR_S
    monkeypatch.setattr(busy_mark, "MARK_AT_MOST_EVERY_S", 0.1)
    await desk.start(**NO_POLL)
    await until_attended(1)
    await until_attended(2)
    # This time the hour counts, however busy it is.
    monkeypatch.setattr(busy_mark, "MARK_AFTER_S", 0.0)
    await desk.settled(*await desk.enqueue(*[work.job()] * 5000))
    assert len(desk.emitted.of("queue.polled")) == 2


async def test_where_another_polls_a_worker_that_keeps_up_gives_way(
    desk: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It never sleeps, and renews its mark before each claim.
    monkeypatch.setattr(busy_mark, "MARK_AFTER_S", -1.0)
    monkeypatch.setattr(busy_mark, "MARK_AT_MOST_EVERY_S", 0.0)
    monkeypatch.setattr(busy_mark, "RENEW_EVERY_S", 0.0)
    monkeypatch.setattr(busy_mark, "FEW_FOR_S", 600.0)
    await desk.other_worker(1)
    await desk.other_worker(2)
    one = busy_mark.BusyMark(
        desk.lane,
        "default",
        SimpleNamespace(worker_id=1),
        lambda: None,  # type: ignore[arg-type]
    )
    one.claimed(1, 1)
    await desk.sql.execute(MARK, "default", 50.0, 2)
    await one.before_claim(full=False)
    assert not one.marked
    assert not one.must_poll
    # A worker that cannot keep up polls as well, until it can.
    for full in (True, True, False):
        await desk.sql.execute(MARK, "default", 50.0, 2)
        await one.before_claim(full=full)
        assert one.marked == full
    assert one.must_poll, "whoever has read its mark was silent"
    assert await marked(desk), "it took the other's mark back"
    await desk.sql.execute(UNMARK, "default")
    await one.before_claim(full=False)
    assert one.marked


async def ring_on(dsn: str, enough: asyncio.Event) -> list[int]:
    """Enqueue one job after the other; their ids."""
    producer = await asyncpg.connect(dsn)
    ids = []
    while not enough.is_set():
        ids.append(await producer.fetchval("SELECT taskd.enqueue('work', queue => 'default')"))
    await producer.close()
    return ids


async def test_a_job_whose_producer_read_the_mark_is_found_after_the_worker_left(desk: Any) -> None:
    @desk.task()
    async def work() -> None: ...

    await desk.start(**NO_POLL)
    enough = asyncio.Event()
    busy = asyncio.create_task(keep_busy(desk, work.job(), enough))
    await desk.emitted.wait("queue.polled")
    producer = await asyncpg.connect(desk.dsn)
    transaction = producer.transaction()
    await until(lambda: marked(desk))
    await transaction.start()
    job_id = await producer.fetchval("SELECT taskd.enqueue('work', queue => 'default')")
    enough.set()
    await busy
    await desk.emitted.wait("queue.unpolled")
    await asyncio.sleep(0.3)  # it goes on looking, and must not take "nothing there" for an answer
    await transaction.commit()
    await desk.settled(job_id)
    await producer.close()


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
async def test_a_transaction_of_any_level_notifies_only_queues_that_are_not_polled(
    desk: Any, rings: Ears, isolation: str
) -> None:
    await desk.sql.execute(MARK, "default", 50.0, 1)
    for notified in (0, 1):
        async with desk.sql.transaction(isolation=isolation):
            await desk.sql.execute("SELECT taskd.enqueue('work', queue => 'default')")
        assert len(await rings.so_far()) == notified
        await desk.sql.execute(UNMARK, "default")


async def test_jobs_due_later_than_in_a_minute_are_not_notified(desk: Any, rings: Ears) -> None:
    for delay_s in (3600, 61, 59):
        await desk.sql.execute(
            f"SELECT taskd.enqueue('work', queue => 'default', delay_s => {delay_s})"
        )
    await until(lambda: rings.notifications)
    await desk.sql.execute("SELECT 1")
    assert len(rings.notifications) == 1


async def test_a_polling_worker_that_is_full_of_slow_jobs_notifies_the_others(
    desk: Any, rings: Ears
) -> None:
    go = asyncio.Event()

    @desk.task()
    async def work() -> None: ...

    @desk.task()
    async def slow() -> None:
        await go.wait()

    started = await desk.start(**NO_POLL, concurrency=5)
    enough = asyncio.Event()
    busy = asyncio.create_task(keep_busy(desk, work.job(), enough))
    await desk.emitted.wait("queue.polled")
    await until(lambda: marked(desk))
    before = len(rings.notifications)
    await desk.enqueue(*[replace(slow.job(), priority=1)] * 5)
    await until(lambda: sum(r.running for r in started.worker.parts.runners) == 5)
    enough.set()
    await busy
    left = await desk.emitted.wait("queue.unpolled")
    assert left
    await until(lambda: len(rings.notifications) > before)
    # From now on jobs are notified.
    second = await desk.start(**NO_POLL)
    [job_id] = await desk.enqueue(work.job())
    await desk.settled(job_id)
    go.set()
    await second.stop()


async def test_a_stopping_worker_leaves_no_mark_and_calls_the_others(
    desk: Any, rings: Ears
) -> None:
    @desk.task()
    async def work() -> None: ...

    started = await desk.start(**NO_POLL)
    enough = asyncio.Event()
    busy = asyncio.create_task(keep_busy(desk, work.job(), enough))
    await desk.emitted.wait("queue.polled")
    await until(lambda: marked(desk))
    before = len(rings.notifications)
    await started.stop()
    assert not await marked(desk)
    await until(lambda: len(rings.notifications) > before)
    enough.set()
    await busy
