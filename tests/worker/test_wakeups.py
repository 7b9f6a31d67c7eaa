"""No job is missed when a worker that polled its queue falls asleep: scripted interleavings."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import Job, JobState, NewJob
from taskd.core.outcomes.ack import Ack
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import queues, workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import busy_marks as store
from taskd.store.jobs import jobs
from taskd.worker.claiming import busy_mark, consumer
from taskd.worker.upkeep import promoter, rescuer
from tests.schema import fetches
from tests.store.helpers import (
    MARK,
    MARK_SEQUENCE,
    MARKED,
    UNMARK,
    Ears,
    Transaction,
    waits_for_lock,
)
from tests.worker.conftest import Desk, Started, until

RARELY_S = 30.0
# Far below that; the polls of a worker that falls asleep are at most a second apart.
SOON_S = 5.0
OTHER_ID = 7
SLEEPER_CONCURRENCY = 7
# Keep so many jobs queued that the worker never sleeps. With 300 it polled continuously only by
# chance.
STREAM_JOBS, STREAM_AHEAD = 300, 1500

# Until this transaction ends, statements that read or write the mark wait.
HOLD_MARK = "ALTER SEQUENCE {} NO CYCLE"
# As if a worker lived: otherwise producers do not check for a mark.
NEEDED = "SELECT setval('taskd.needs', 1)"
WAITS_FOR = "SELECT relation = $2::text::regclass FROM pg_locks WHERE pid = $1 AND NOT granted"
WITHDRAWS = """
SELECT EXISTS (
    SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
    AND query LIKE 'SELECT taskd.clear_busy_mark(%'
)
"""
XID = "SELECT pg_current_xact_id()::xid::text::bigint"


@pytest.fixture(autouse=True)
def _rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings under which a job that is not found at once is never found."""
    monkeypatch.setattr(consumer, "POLL_UNSURE_S", RARELY_S)
    monkeypatch.setattr(promoter, "TIMER_S_MAX", RARELY_S)
    monkeypatch.setattr(rescuer, "SWEEP_EVERY_S_MAX", RARELY_S)
    monkeypatch.setattr(busy_mark, "MARK_AFTER_S", 0.02)
    monkeypatch.setattr(busy_mark, "MARK_S", 60.0)
    monkeypatch.setattr(busy_mark, "RENEW_EVERY_S", 30.0)
    monkeypatch.setattr(busy_mark, "END_S", 6.0)


class Scene:
    """A worker that is kept busy, and tasks for it.

    Attributes:
        found: the task whose jobs must be found.
    """

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.end_slow = asyncio.Event()
        self._waiting = 0

        @desk.task()
        async def busy() -> None:
            self._waiting -= 1

        @desk.task()
        async def found() -> None: ...

        @desk.task()
        async def slow() -> None:
            await self.end_slow.wait()

        self.found: Task[..., None] = found
        self.slow: Task[..., None] = slow
        self._busy = busy

    async def start(self, **settings: Any) -> Started:
        return await self.desk.start(**{"poll_s": RARELY_S, "lease_s": 600.0} | settings)

    async def start_asleep(self, **settings: Any) -> Started:
        """A worker that has found nothing, and relies on notifications."""
        worker = await self.start(concurrency=SLEEPER_CONCURRENCY, **settings)
        mine = worker.worker.parts.consumers["default"].busy_mark
        # It never sets the mark itself.
        mine._not_before = math.inf
        await self.desk.emitted.wait("queue.claimed", batch=SLEEPER_CONCURRENCY)
        await until(lambda: not (mine.marked or mine.must_poll))
        return worker

    @asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        """The worker is busy for as long as the block lasts, or until cease()."""
        self._streaming = asyncio.create_task(self._stream(), name="stream")
        try:
            yield
        finally:
            await self.cease()

    async def cease(self) -> None:
        self._streaming.cancel()
        await asyncio.wait({self._streaming})

    @asynccontextmanager
    async def attended(self) -> AsyncIterator[asyncio.Event]:
        """Set a mark, and keep the worker from clearing it during the block.

        Yields:
            An event that is set when the worker is about to clear the mark.
        """
        about_to, may = asyncio.Event(), asyncio.Event()
        withdraw = store.clear_busy_mark

        async def withdraw_later(on: Any, queue: str, worker_id: int | None) -> None:
            about_to.set()
            await may.wait()
            await withdraw(on, queue, worker_id)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "clear_busy_mark", withdraw_later)
            try:
                await until(self.marked)
                yield about_to
            finally:
                may.set()

    async def _stream(self) -> None:
        lane = Lane(self.desk.database, "stream")
        try:
            while True:
                if self._waiting < STREAM_AHEAD:
                    self._waiting += STREAM_JOBS
                    await jobs.enqueue(lane, [self._busy.job()] * STREAM_JOBS)
                await asyncio.sleep(0.001)
        finally:
            await lane.close()

    async def marked(self) -> bool:
        marked: bool = await self.desk.sql.fetchval(MARKED, "default")
        return marked

    async def falls_asleep(self, looks: int = 0) -> None:
        """Wait until the mark is gone and the worker has polled that many times since."""

        async def unmarked() -> bool:
            return not await self.marked()

        await until(unmarked)
        empty = len(self.desk.emitted.of("queue.claimed", count=0))
        await self.desk.emitted.wait("queue.claimed", empty + looks, count=0)

    async def awakes(self, sleeper: Started) -> None:
        """It may claim again, polls once, and sleeps on."""
        mine = sleeper.worker.parts.consumers["default"]
        before = mine.busy_mark._claimed_at
        sleeper.worker._quiet(False)
        mine.wakeup.set()
        await until(lambda: mine.busy_mark._claimed_at > before)

    async def is_found(self, job_id: int) -> None:
        """Wait until a job is done, for far less time than until the next poll."""
        await self.desk.emitted.wait("job.done", job_id=job_id, within_s=SOON_S)


@pytest.fixture
def scene(desk: Desk) -> Scene:
    return Scene(desk)


@pytest.fixture
async def producer(dsn: str) -> AsyncIterator[Any]:
    """The connection of a transaction that stays open."""
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()


# The placements that random trials never meet.


async def test_the_bound_of_a_withdrawal_covers_who_read_the_mark_before(
    sql: Any, producer: Any, lane: Lane
) -> None:
    await workers.register(lane, _stranger(), 60.0, ["default"], {})
    await store.set_busy_mark(lane, "default", OTHER_ID, 60.0)
    too_early = await sql.fetchval(XID)
    async with Transaction(producer) as held:
        await jobs.enqueue(fetches(producer), [NewJob("t", queue="default")])
        assert await producer.fetchval(MARKED, "default")
        assert await producer.fetchval(XID) > too_early
        await store.clear_busy_mark(lane, "default", OTHER_ID)
        assert not await producer.fetchval(MARKED, "default")
        xid = await store.draw_xid(lane)
        assert not await store.transactions_ended(lane, xid)
        assert not await store.transactions_ended(lane, xid)
        await held.commit()
        # Others on the same server may have transactions open.
        await until(lambda: store.transactions_ended(lane, xid))


async def test_a_withdrawal_counts_before_its_commit_and_although_it_is_rolled_back(
    sql: Any, producer: Any, other: Any, lane: Lane
) -> None:
    """So an xid that is drawn after its reply is a bound, however its transaction ends."""
    ears = Ears(sql)
    await ears.listen("taskd_default")
    await workers.register(lane, _stranger(), 60.0, ["default"], {})
    await store.set_busy_mark(lane, "default", OTHER_ID, 60.0)
    await _enqueue_through("client", producer, "default")
    async with Transaction(other) as withdrawing:
        await store.clear_busy_mark(fetches(other), "default", OTHER_ID)
        assert not await sql.fetchval(MARKED, "default")
        assert await ears.so_far() == []
        await _enqueue_through("client", producer, "default")
        assert await ears.so_far() == ["taskd_default"]
        await withdrawing.rollback()
    assert not await sql.fetchval(MARKED, "default")


async def test_a_worker_waits_for_who_reads_the_mark_while_it_is_about_to_take_it_back(
    scene: Scene, producer: Any
) -> None:
    await scene.start()
    async with Transaction(producer) as held:
        async with scene.streaming(), scene.attended() as about_to:
            await scene.cease()
            await about_to.wait()
            # One that the worker had drawn by now would be too low.
            drawn = await scene.desk.sql.fetchval(XID)
            (job,) = await jobs.enqueue(fetches(producer), [scene.found.job()])
            assert await producer.fetchval(MARKED, "default")
            assert await producer.fetchval(XID) > drawn
        await scene.falls_asleep(looks=6)
        await held.commit()
        await scene.is_found(job)


async def test_a_producer_that_reads_the_mark_while_it_is_cleared_is_waited_for_or_notifies(
    scene: Scene, producer: Any, other: Any
) -> None:
    """Both stand before it, and go on together."""
    await scene.start()
    async with Transaction(producer) as held:
        async with Transaction(other) as holding:
            async with scene.streaming(), scene.attended() as about_to:
                await scene.cease()
                await about_to.wait()
                await other.execute(
                    HOLD_MARK.format(await other.fetchval(MARK_SEQUENCE, "default"))
                )
                enqueueing = asyncio.create_task(_enqueue(scene, producer, 0))
                await waits_for_lock(scene.desk.sql, producer)
            await until(lambda: scene.desk.sql.fetchval(WITHDRAWS))
            await holding.commit()
        job = await enqueueing
        await scene.falls_asleep(looks=6)
        await held.commit()
        await scene.is_found(job)


# Everything that moves a job to where it can be claimed.

Prepare = Callable[[Scene], Awaitable[int]]
Act = Callable[[Scene, Any, int], Awaitable[int]]


def _stranger(worker_id: int = OTHER_ID) -> workers.Incarnation:
    return workers.Incarnation(worker_id, 1, 100, "elsewhere", "boot", "pid:[1]", "0", "app")


async def _nothing(_scene: Scene) -> int:
    return 0


async def _later(scene: Scene) -> int:
    return (await scene.desk.enqueue(scene.found.job().after(3600)))[0]


async def _elsewhere(scene: Scene) -> int:
    """A job that another worker runs."""
    return (await _run_elsewhere(scene)).id


async def _run_elsewhere(scene: Scene) -> Job:
    await scene.desk.enqueue(scene.found.job())
    await workers.register(scene.desk.lane, _stranger(), 600.0, ["default"], {"found": 1})
    (job,) = await jobs.claim(scene.desk.lane, OTHER_ID, "default", 1)
    return job


async def _failed(scene: Scene) -> int:
    job = await _run_elsewhere(scene)
    ack = Ack(job.id, OTHER_ID, job.fence, JobState.FAILED, reason="no luck")
    await jobs.ack_outcomes(scene.desk.lane, OTHER_ID, [ack])
    return job.id


async def _enqueue(scene: Scene, conn: Any, _job: int) -> int:
    return (await jobs.enqueue(fetches(conn), [scene.found.job()]))[0]


async def _enqueue_by_sql(_scene: Scene, conn: Any, _job: int) -> int:
    job: int = await conn.fetchval("SELECT taskd.enqueue('found', queue => 'default')")
    return job


async def _schedule(scene: Scene, conn: Any, _job: int) -> int:
    return (await jobs.enqueue(fetches(conn), [scene.found.job().after(0.3)]))[0]


async def _promote(_scene: Scene, conn: Any, job: int) -> int:
    await conn.execute("UPDATE taskd.job SET run_at = now() - interval '1 s' WHERE id = $1", job)
    assert "default" in await jobs.promote(fetches(conn), 1000)
    return job


async def _release(_scene: Scene, conn: Any, job: int) -> int:
    ack = Ack(job, OTHER_ID, 1, JobState.QUEUED, refund=True)
    assert await jobs.ack_outcomes(fetches(conn), OTHER_ID, [ack]) == {job: JobState.QUEUED}
    return job


async def _fail_once(_scene: Scene, conn: Any, job: int) -> int:
    ack = Ack(job, OTHER_ID, 1, JobState.SCHEDULED, delay_s=0.3, error='{"type": "ValueError"}')
    assert await jobs.ack_outcomes(fetches(conn), OTHER_ID, [ack]) == {job: JobState.SCHEDULED}
    return job


async def _rescue(_scene: Scene, conn: Any, job: int) -> int:
    await workers.declare_dead(fetches(conn), [OTHER_ID], proved=True)
    assert job in await jobs.rescue(fetches(conn), 1000, 3, 3)
    return job


async def _retry(_scene: Scene, conn: Any, job: int) -> int:
    assert await jobs.retry(fetches(conn), [job]) == [job]
    return job


async def _resume(scene: Scene, conn: Any, _job: int) -> int:
    await queues.pause(scene.desk.lane, ["default"], None, "a while")
    (job,) = await scene.desk.enqueue(scene.found.job())
    assert await queues.resume(fetches(conn), ["default"]) == ["default"]
    return job


@pytest.mark.parametrize(
    ("prepare", "act"),
    [
        pytest.param(_nothing, _enqueue, id="enqueued"),
        pytest.param(_nothing, _enqueue_by_sql, id="enqueued by SQL"),
        pytest.param(_nothing, _schedule, id="scheduled"),
        pytest.param(_later, _promote, id="promoted"),
        pytest.param(_elsewhere, _release, id="released"),
        pytest.param(_elsewhere, _fail_once, id="failed once"),
        pytest.param(_elsewhere, _rescue, id="rescued"),
        pytest.param(_failed, _retry, id="retried"),
        pytest.param(_nothing, _resume, id="resumed"),
    ],
)
async def test_what_moves_in_a_transaction_across_the_nap_is_found(
    scene: Scene, producer: Any, prepare: Prepare, act: Act
) -> None:
    job = await prepare(scene)
    await scene.start()
    async with Transaction(producer) as held:
        async with scene.streaming(), scene.attended():
            job = await act(scene, producer, job)
            assert await producer.fetchval(MARKED, "default")
        # The waits between polls grow from 2 ms on.
        await scene.falls_asleep(looks=6)
        await held.commit()
        await scene.is_found(job)


async def test_what_is_scheduled_is_found_although_somebody_elses_transaction_stays_open(
    scene: Scene, producer: Any, other: Any
) -> None:
    await scene.start()
    async with Transaction(other):
        # Older than the bound: while it is open, the worker must poll.
        await other.fetchval(XID)
        async with Transaction(producer) as held:
            async with scene.streaming(), scene.attended():
                job = await _schedule(scene, producer, 0)
                assert await producer.fetchval(MARKED, "default")
            await scene.falls_asleep(looks=3)
            await held.commit()
            await scene.is_found(job)


async def test_what_becomes_due_around_the_nap_is_found_in_time(scene: Scene) -> None:
    await scene.start()
    async with scene.streaming(), scene.attended():
        due = await scene.desk.enqueue(*(scene.found.job().after(n / 10) for n in range(12)))
        assert await scene.marked()
    for job in due:
        await scene.is_found(job)
    late = """
    SELECT max(started_at - run_at) < interval '2 s' FROM taskd.jobs WHERE id = ANY ($1::bigint[])
    """
    assert await scene.desk.sql.fetchval(late, due)


# A worker that stops claiming makes the others poll.


async def _gets_full(scene: Scene, _worker: Started) -> None:
    """Wait until all its executors are taken by slow jobs."""
    slow = scene.slow.job()
    await scene.desk.enqueue(
        *[NewJob(slow.task, queue=slow.queue, priority=-100, checked=True)] * 3
    )
    await scene.desk.emitted.wait("job.started", 3, task="slow")


async def _gets_quiet(_scene: Scene, worker: Started) -> None:
    worker.worker._quiet(True)


async def _stops(_scene: Scene, worker: Started) -> None:
    worker.worker.stop()


@pytest.mark.parametrize("across", [False, True], ids=["committed before", "committed after"])
@pytest.mark.parametrize("ceases", [_gets_full, _gets_quiet, _stops])
async def test_who_ceases_to_claim_calls_the_others(
    scene: Scene,
    producer: Any,
    ceases: Callable[[Scene, Started], Awaitable[None]],
    across: bool,
) -> None:
    sleeper = await scene.start_asleep()
    sleeper.worker._quiet(True)
    worker = await scene.start(concurrency=3)
    async with Transaction(producer) as held:
        async with scene.streaming():
            async with scene.attended():
                (job,) = await jobs.enqueue(fetches(producer), [scene.found.job()])
                assert await producer.fetchval(MARKED, "default")
            await ceases(scene, worker)
        # The rest of the stream would keep the other worker awake.
        await scene.desk.sql.execute(
            "DELETE FROM taskd.job WHERE task = 'busy' AND state = 'queued'"
        )
        if across:
            await scene.falls_asleep()
        await scene.awakes(sleeper)
        await held.commit()
        await scene.is_found(job)
    row = await scene.desk.row(job)
    assert row["worker_id"] == sleeper.worker._lease.worker_id
    for _ in range(5):
        (job,) = await scene.desk.enqueue(scene.found.job())
        await scene.is_found(job)
    scene.end_slow.set()


async def test_what_came_while_a_dead_workers_mark_was_out_is_found_by_who_buries_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescuer, "SWEEP_EVERY_S_MAX", 0.2)
    await scene.start_asleep()
    await scene.desk.sql.execute(MARK, "default", 60.0, OTHER_ID)
    (job,) = await scene.desk.enqueue(scene.found.job())
    with pytest.raises(TimeoutError):
        await scene.desk.emitted.wait("job.done", job_id=job, within_s=0.3)
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    await scene.desk.other_worker(OTHER_ID, pid=process.pid)
    await scene.is_found(job)
    assert not await scene.marked()


async def test_what_came_while_a_dead_workers_mark_was_out_is_found_by_a_poll(
    scene: Scene,
) -> None:
    await scene.start_asleep(poll_s=0.5)
    await scene.desk.sql.execute(MARK, "default", 60.0, OTHER_ID)
    (job,) = await scene.desk.enqueue(scene.found.job())
    await scene.is_found(job)


# What producers read.

DOORS = ["SQL, published", "SQL, unpublished", "client", "client, several"]
LEVELS = ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"]


async def _enqueue_through(door: str, conn: Any, queue: str) -> None:
    if door == "client":
        await jobs.enqueue(fetches(conn), [NewJob("t", queue=queue)])
    elif door == "client, several":
        await jobs.enqueue(fetches(conn), [NewJob("t", queue=queue)] * 2)
    else:
        # Of a published task the short way.
        task = door.removeprefix("SQL, ")
        await conn.fetchval("SELECT taskd.enqueue($1, queue => $2)", task, queue)


@pytest.fixture(params=DOORS)
async def door(request: pytest.FixtureRequest, lane: Lane) -> str:
    async def published() -> None: ...

    registry = Registry()
    registry.add(Task(published))
    await workers.publish(lane, "app", registry, ["default"])
    name: str = request.param
    return name


async def test_a_queue_that_is_served_and_not_polled_is_notified(
    sql: Any, producer: Any, other: Any, door: str
) -> None:
    """Above READ COMMITTED producers do not check for workers: the snapshot may be too old."""
    ears = Ears(other)
    await sql.execute(MARK, "attended", 60.0, 1)
    await sql.execute(MARK, "lapsed", -0.1, 1)
    await ears.listen("taskd_attended", "taskd_lapsed", "taskd_free")
    await other.add_listener("taskd_unserved", ears._add)
    for level in ("READ UNCOMMITTED", *LEVELS):
        ears.notifications.clear()
        async with Transaction(producer) as held:
            await producer.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
            for queue in ("attended", "lapsed", "free", "unserved"):
                await _enqueue_through(door, producer, queue)
            await held.commit()
        notified = ["taskd_unserved"] if level in {"REPEATABLE READ", "SERIALIZABLE"} else []
        assert sorted(await ears.so_far()) == ["taskd_free", "taskd_lapsed", *notified], level


@pytest.mark.parametrize("level", LEVELS)
async def test_marks_are_read_as_they_are_when_the_job_is_written(
    sql: Any, producer: Any, other: Any, door: str, level: str
) -> None:
    ears = Ears(other)
    await ears.listen("taskd_marked", "taskd_lapsed", "taskd_left")
    await sql.execute(MARK, "left", 60.0, 1)
    async with Transaction(producer) as held:
        await producer.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        await producer.fetchval("SELECT count(*) FROM taskd.job")
        # All are younger than the transaction and its snapshot; one has lapsed since it began.
        await sql.execute(MARK, "marked", 60.0, 1)
        await sql.execute(MARK, "lapsed", 0.02, 1)
        await sql.execute(UNMARK, "left")
        await until(lambda: sql.fetchval("SELECT NOT taskd.is_polled('lapsed')"))
        for queue in ("marked", "lapsed", "left"):
            await _enqueue_through(door, producer, queue)
        await held.commit()
    assert sorted(await ears.so_far()) == ["taskd_lapsed", "taskd_left"]


async def test_who_reads_the_mark_has_an_xid_before(
    sql: Any, producer: Any, other: Any, door: str
) -> None:
    """A producer that waits where it reads the mark, for a transaction that alters the sequence."""
    await sql.execute(NEEDED)
    await sql.execute(MARK, "q", 60.0, 1)
    sequence = await sql.fetchval(MARK_SEQUENCE, "q")
    async with Transaction(other) as held:
        await other.execute(HOLD_MARK.format(sequence))
        enqueueing = asyncio.create_task(_enqueue_through(door, producer, "q"))
        await waits_for_lock(sql, producer)
        pid = producer.get_server_pid()
        assert await sql.fetchval(WAITS_FOR, pid, sequence)
        mine = "SELECT backend_xid IS NOT NULL FROM pg_stat_activity WHERE pid = $1"
        assert await sql.fetchval(mine, pid)
        await held.commit()
    await enqueueing


async def test_a_mark_that_is_renewed_while_a_snapshot_is_held_costs_no_more_to_read(
    sql: Any, producer: Any, other: Any, door: str
) -> None:
    """Nothing piles up, as the versions of a row would."""
    sequence = await sql.fetchval(MARK_SEQUENCE, "q")
    size = f"SELECT pg_relation_size('{sequence}')"
    read = f"SELECT pg_stat_get_xact_blocks_fetched('{sequence}'::regclass)"

    async def read_by_one() -> int:
        async with Transaction(producer) as held:
            before = await producer.fetchval(read)
            await _enqueue_through(door, producer, "q")
            blocks: int = await producer.fetchval(read) - before
            await held.commit()
            return blocks

    await sql.execute(NEEDED)
    await sql.execute(MARK, "q", 60.0, 1)
    few, small = await read_by_one(), await sql.fetchval(size)
    assert few > 0
    async with other.transaction(isolation="repeatable_read"):
        await other.fetchval("SELECT count(*) FROM taskd.job")
        for _ in range(500):
            await sql.execute(MARK, "q", 60.0, 1)
        assert await sql.fetchval(size) == small
        assert await sql.fetchval(f"SELECT count(*) FROM {sequence}") == 1
        assert await read_by_one() == few
