"""Claims: how many jobs, in which order, how soon, and which jobs are not claimed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from taskd.core.jobs.job import Job, NewJob
from taskd.store import queues
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.jobs.jobs import Read
from taskd.worker.claiming import busy_mark, consumer
from taskd.worker.finishing import acker
from taskd.worker.upkeep import promoter
from tests.worker.conftest import Desk, until

TERMINATE = """
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
WHERE datname = current_database() AND application_name = $1
"""
RUNNING = "SELECT count(*) FROM taskd.job WHERE worker_id = $1"


async def test_slow_jobs_are_not_hoarded(desk: Desk) -> None:
    @desk.task()
    async def slow() -> None:
        await asyncio.sleep(0.2)

    await desk.enqueue(*(slow.job() for _ in range(200)))
    worker = await desk.start(concurrency=20)
    most = 0

    async def finished() -> bool:
        nonlocal most
        most = max(most, await desk.sql.fetchval(RUNNING, worker.worker._lease.worker_id))
        return len(desk.emitted.of("job.done")) == 200

    await until(finished)
    # 20 run; those that ended are not written at once, and 100 jobs per second allow 5 ahead.
    assert most <= 20 + 20 + 10
    assert not desk.emitted.of("job.released")
    assert all(had["batch"] <= 30 for had in desk.emitted.of("queue.claimed"))


async def test_a_slow_claim_begins_while_the_runner_has_enough_to_do_until_its_answer(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = jobs.claim
    left: list[int] = []

    async def slow(
        lane: Lane, me: int, queue: str, batch: int, read: Read, **more: Any
    ) -> list[Job]:
        runner = worker.worker.parts.runners[0]
        enough = runner.ended + 60
        claimed = await claim(lane, me, queue, batch, read, **more)
        if not read.only_urgent:
            # As long as 60 jobs last on this machine now, but no longer than there are some.
            while runner.ended < enough and runner.waiting:
                await asyncio.sleep(0)
            left.append(runner.waiting)
        return claimed

    @desk.task()
    async def short() -> None:
        time.sleep(0.0005)

    monkeypatch.setattr(consumer, "PREFETCH_S_MAX", 5.0)
    monkeypatch.setattr(jobs, "claim", slow)
    ids = await desk.enqueue(*(short.job() for _ in range(5000)))
    worker = await desk.start()
    await desk.settled(*ids)
    # The first claims are small, and take no longer than there are jobs. Where only what lasts for
    # 50 ms is claimed ahead, half of it was left when the next claim began, and none at its answer.
    assert sum(each > 0 for each in left) >= 5, left


async def test_two_workers_share_slow_jobs_evenly(desk: Desk) -> None:
    @desk.task()
    async def slow() -> None:
        await asyncio.sleep(0.05)

    @desk.task(queue="plain")
    def slow_in_a_thread() -> None:
        time.sleep(0.02)

    one = await desk.start(concurrency=10, threads=4)
    two = await desk.start(concurrency=10, threads=4)
    ids = await desk.enqueue(
        *(slow.job() for _ in range(300)), *(slow_in_a_thread.job() for _ in range(200))
    )
    rows = await desk.settled(*ids)
    for task, all_of_them in (("slow", 300), ("slow_in_a_thread", 200)):
        mine = [
            row
            for row in rows
            if row["task"] == task and row["worker_id"] == one.worker._lease.worker_id
        ]
        assert 0.3 * all_of_them < len(mine) < 0.7 * all_of_them
    assert two.worker.limits == {"default": 10, "plain": 4}


async def test_a_large_claim_of_one_queue_keeps_no_other_queue_waiting(desk: Desk) -> None:
    @desk.task(queue="bulk")
    async def one_of_many() -> None: ...

    @desk.task(queue="mail")
    async def letter() -> None: ...

    worker = await desk.start(queues=("bulk:2", "mail"))
    parts = worker.worker.parts
    # As long as a claim would be under way there.
    async with parts.backlog_claims.at_rest():
        ids = await desk.enqueue(*(one_of_many.job() for _ in range(5)))
        await desk.emitted.wait("job.done", 2, task="one_of_many")
        (job,) = await desk.enqueue(letter.job())
        await desk.settled(job)
        assert len(desk.emitted.of("job.done")) == 3
    await desk.settled(*ids)


async def test_a_worker_of_one_queue_claims_over_one_lane(desk: Desk) -> None:
    @desk.task()
    async def any_task() -> None: ...

    one = await desk.start(queues=("mail",))
    two = await desk.start(queues=("mail", "bulk"))
    assert one.worker.parts.backlog_claims is one.worker.parts.claims
    connections = [each["connections"] for each in desk.emitted.of("worker.started")]
    # With a second queue, one more to claim over, and one more that listens.
    assert connections == [7, 9]
    assert len(two.worker.parts.lanes) == len(one.worker.parts.lanes) + 1


async def test_urgent_jobs_come_first_and_then_the_older_ones(desk: Desk) -> None:
    order: list[int] = []

    @desk.task()
    async def notes(n: int) -> None:
        order.append(n)
        await asyncio.sleep(0)

    def job(n: int, priority: int) -> NewJob:
        return NewJob("notes", f'{{"n": {n}}}', "default", priority=priority)

    await desk.enqueue(job(5, 200), job(3, 100), job(4, 100), job(1, -5))
    ids = await desk.enqueue(job(6, 200), job(2, 1))
    await desk.start(concurrency=1)
    await desk.settled(*ids)
    await until(lambda: len(order) == 6)
    assert order == [1, 2, 3, 4, 5, 6]


async def test_each_queue_has_its_own_concurrency(desk: Desk) -> None:
    running = {"one": 0, "two": 0}
    most = dict(running)

    @desk.task(queue="one")
    async def works(queue: str) -> None:
        running[queue] += 1
        most[queue] = max(most[queue], running[queue])
        await asyncio.sleep(0.02)
        running[queue] -= 1

    ids = await desk.enqueue(
        *(
            NewJob("works", f'{{"queue": "{queue}"}}', queue)
            for queue in ("one", "two")
            for _ in range(40)
        )
    )
    worker = await desk.start(queues=("one:2", "two:7"))
    assert worker.worker.limits == {"one": 2, "two": 7}
    await desk.settled(*ids)
    assert most == {"one": 2, "two": 7}


async def test_a_paused_queue_rests_and_resumes_at_once(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    @desk.task(queue="other")
    async def beside() -> None: ...

    await queues.pause(desk.lane, ["default"], None, "maintenance")
    job, witness = await desk.enqueue(quick.job(), beside.job())
    await desk.start(poll_s=60)
    await desk.settled(witness)
    await desk.emitted.wait("queue.claimed", queue="default", count=0)
    assert (await desk.row(job))["state"] == "queued"
    began = time.monotonic()
    await queues.resume(desk.lane, ["default"])
    await desk.settled(job)
    assert time.monotonic() - began < 0.7


async def idle(desk: Desk, queue: str = "default") -> None:
    """Wait until the consumer has found nothing twice, and polls slowly."""
    await desk.emitted.wait("queue.claimed", 2, queue=queue)


async def test_an_enqueued_job_wakes_an_idle_worker(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.start(poll_s=60)
    await idle(desk)
    took = []
    for _ in range(5):
        began = time.monotonic()
        (job,) = await desk.enqueue(quick.job())
        await desk.emitted.wait("job.done", job_id=job)
        took.append(time.monotonic() - began)
    assert sorted(took)[2] < 0.3


async def test_without_notifications_jobs_are_found_by_polling(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.start(poll_s=0.3)
    await idle(desk)
    job = await desk.sql.fetchval(
        "INSERT INTO taskd.job (queue, task) VALUES ('default', 'quick') RETURNING id"
    )
    await desk.settled(job)


async def test_listening_has_a_dsn_of_its_own_and_polling_does_without(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.start(poll_s=0.3, listen_dsn="postgresql://nobody@127.0.0.1:1/nothing")
    (job,) = await desk.enqueue(quick.job())
    await desk.settled(job)
    assert await desk.emitted.wait("listener.lost")
    assert not desk.emitted.of("listener.connected")
    assert not desk.emitted.of("service.crashed")


async def test_a_lost_listener_is_made_again_and_nothing_is_missed(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.start(poll_s=60)
    await idle(desk)
    assert await desk.sql.fetchval(TERMINATE, "taskd listen default") == 1
    # Without a notification: the new listener makes the consumer poll.
    job = await desk.sql.fetchval(
        "INSERT INTO taskd.job (queue, task) VALUES ('default', 'quick') RETURNING id"
    )
    await desk.emitted.wait("listener.lost")
    await desk.emitted.wait("listener.connected", 2)
    await desk.settled(job)
    (job,) = await desk.enqueue(quick.job())
    await desk.settled(job)


async def test_scheduled_jobs_and_retries_come_in_time(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    due: dict[int, float] = {}
    late: dict[int, float] = {}

    @desk.task()
    async def notes(ctx: Any) -> None:
        late[ctx.job_id] = time.time() - due[ctx.job_id]

    monkeypatch.setattr(promoter, "TIMER_S_MAX", 30.0)
    await desk.start(poll_s=60)
    await idle(desk)
    delays = (0.3, 0.9, 0.6)
    for delay in delays:
        began = time.time()
        (job,) = await desk.enqueue(notes.job().after(delay))
        due[job] = began + delay
    await desk.settled(*due)
    assert max(late.values()) < 0.5
    assert min(late.values()) > -0.05


async def test_jobs_that_others_are_promoting_do_not_make_it_spin(desk: Desk, other: Any) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start()
    (job,) = await desk.enqueue(quick.job().after(1.0))
    looks = 0
    fetch = worker.worker.parts.upkeep.fetch

    async def counted(name: str, *args: Any) -> Any:
        nonlocal looks
        looks += name == "next_due"
        return await fetch(name, *args)

    async with other.transaction():
        await other.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", job)
        await until(
            lambda: other.fetchval(
                "SELECT run_at < clock_timestamp() FROM taskd.job WHERE id = $1", job
            )
        )
        worker.worker.parts.upkeep.fetch = counted  # type: ignore[method-assign]
        began = time.monotonic()
        await until(lambda: looks >= 6)
        assert time.monotonic() - began > 0.1
    await desk.settled(job)


@pytest.mark.parametrize("distance", [{"CLAIM_EVERY_S": 0.2}, {"PER_JOB_S": 9.0, "GAP_S": 0.2}])
async def test_jobs_that_come_fast_share_claims_and_acks(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, distance: dict[str, float]
) -> None:
    @desk.task()
    async def work() -> None: ...

    for name, seconds in distance.items():
        monkeypatch.setattr(consumer, name, seconds)
    monkeypatch.setattr(acker, "WRITE_EVERY_S", 0.2)
    monkeypatch.setattr(busy_mark, "MARK_AFTER_S", 600.0)
    await desk.start()
    began = time.monotonic()
    ids = [
        await desk.sql.fetchval("SELECT taskd.enqueue('work', queue => 'default')")
        for _ in range(30)
    ]
    await desk.settled(*ids)
    most = 3 + (time.monotonic() - began) / 0.2
    # At its start the consumer polls more often, and finds nothing.
    assert sum(claim["count"] > 0 for claim in desk.emitted.of("queue.claimed")) <= most
    assert len(desk.emitted.of("acks.written")) <= most


async def test_a_stop_waits_for_no_distance_between_claims_and_writes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = asyncio.Event()

    @desk.task()
    async def work(late: bool) -> None:
        if late:
            await go.wait()

    monkeypatch.setattr(consumer, "CLAIM_EVERY_S", 600.0)
    monkeypatch.setattr(acker, "WRITE_EVERY_S", 600.0)
    ids = await desk.enqueue(work.job(late=False), work.job(late=True))
    worker = await desk.start()
    await desk.settled(ids[0])
    go.set()
    await worker.stop()
    assert (await desk.row(ids[1]))["state"] == "done"
