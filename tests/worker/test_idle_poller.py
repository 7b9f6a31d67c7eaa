"""One poll for all sleeping queues finds the jobs that were not notified."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from taskd.errors import StoreUnavailable
from taskd.store import queues
from taskd.store.jobs import jobs
from taskd.worker.claiming import busy_mark, consumer
from taskd.worker.upkeep import promoter, rescuer
from tests.worker.conftest import Desk, Started, until

QUEUES = ("one", "two", "three")
# As if by a client that does not notify.
INSERT = "INSERT INTO taskd.job (queue, task) VALUES ($1, 'quick') RETURNING id"


@pytest.fixture
def quick(desk: Desk) -> Any:
    @desk.task(queue="one")
    async def quick() -> None: ...

    return quick


class Lookout:
    """The statements that the worker runs from now on, by name."""

    def __init__(self, started: Started) -> None:
        self.ran: list[tuple[str, Any]] = []
        for lane in started.worker.parts.lanes:
            self._watch(lane)

    def _watch(self, lane: Any) -> None:
        fetch = lane.fetch

        async def noted(name: str, *args: Any) -> Any:
            self.ran.append((name, args))
            return await fetch(name, *args)

        lane.fetch = noted

    def of(self, name: str) -> list[Any]:
        return [args for each, args in self.ran if each == name]


async def asleep(started: Started, *names: str) -> None:
    """Wait until the consumers of these queues sleep, and nothing else."""
    parts = started.worker.parts
    for queue in names:
        await until(lambda queue=queue: not parts.consumers[queue].busy_mark.must_poll)
        await until(lambda queue=queue: queue in parts.poller._sleepers)


async def test_one_poll_is_for_all_queues_and_only_queues_with_jobs_are_claimed(
    desk: Desk, quick: Any
) -> None:
    started = await desk.start(queues=QUEUES, poll_s=0.3)
    await asleep(started, *QUEUES)
    seen = Lookout(started)
    await until(lambda: len(seen.of("poll_queues")) >= 3)
    assert {frozenset(queues) for (queues,) in seen.of("poll_queues")} == {frozenset(QUEUES)}
    assert not seen.of("claim_jobs")
    job = await desk.sql.fetchval(INSERT, "two")
    await desk.settled(job)
    assert {queue for _, queue, *_ in seen.of("claim_jobs")} == {"two"}


async def test_who_has_just_found_something_is_polled_soon_and_then_ever_later(
    desk: Desk, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "POLL_UNSURE_S", 0.05)
    started = await desk.start(queues=("one",), poll_s=0.4)
    await asleep(started, "one")
    sleepers = started.worker.parts.poller._sleepers
    await until(lambda: sleepers["one"].poll_s == 0.4)
    await desk.sql.fetchval(INSERT, "one")
    await until(lambda: "one" in sleepers and sleepers["one"].poll_s < 0.4)
    await until(lambda: sleepers["one"].poll_s == 0.4)


async def test_a_paused_queue_is_not_claimed_from_and_its_pause_may_end_unheard(
    desk: Desk, quick: Any
) -> None:
    started = await desk.start(queues=QUEUES, poll_s=0.3)
    await asleep(started, *QUEUES)
    await queues.pause(desk.lane, ["one"], 1.5, "maintenance")
    seen = Lookout(started)
    job = await desk.sql.fetchval(INSERT, "one")
    await until(lambda: len(seen.of("poll_queues")) >= 2)
    assert not [call for call in seen.of("claim_jobs") if call[1] == "one"]
    await desk.settled(job)


async def test_jobs_that_others_have_locked_are_claimed_in_vain_ever_later(
    desk: Desk, quick: Any, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "POLL_UNSURE_S", 0.02)
    started = await desk.start(queues=("one",), poll_s=0.3)
    await asleep(started, "one")
    sleepers = started.worker.parts.poller._sleepers
    await until(lambda: sleepers["one"].poll_s == 0.3)
    seen = Lookout(started)
    async with other.transaction():
        job = await desk.sql.fetchval(INSERT, "one")
        await other.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", job)
        await until(lambda: len(seen.of("claim_jobs")) >= 3)
        await until(lambda: "one" in sleepers)
        assert sleepers["one"].poll_s == 0.3
    await desk.settled(job)


async def test_while_the_idle_poller_cannot_poll_each_consumer_claims_for_itself(
    desk: Desk, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cannot(*_: Any) -> Any:
        raise StoreUnavailable("on purpose")

    started = await desk.start(queues=QUEUES, poll_s=0.3)
    await asleep(started, *QUEUES)
    monkeypatch.setattr(jobs, "poll", cannot)
    for queue in (*QUEUES, *QUEUES):
        await desk.settled(await desk.sql.fetchval(INSERT, queue))
    monkeypatch.undo()
    seen = Lookout(started)
    await desk.settled(await desk.sql.fetchval(INSERT, "one"))
    assert seen.of("poll_queues")


async def test_a_polling_consumer_needs_no_idle_poller(
    desk: Desk, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(busy_mark, "FEW_FOR_S", 60.0)
    monkeypatch.setattr(busy_mark, "CLAIM_AT_LEAST_EVERY_S", 60.0)
    started = await desk.start(queues=("one", "two"), poll_s=0.3)
    await asleep(started, "one", "two")
    enough = asyncio.Event()

    async def keep_busy() -> None:
        while not enough.is_set():
            await desk.enqueue(*[quick.job()] * 50)

    busy = asyncio.create_task(keep_busy())
    await desk.emitted.wait("queue.polled", queue="one")
    enough.set()
    await busy
    seen = Lookout(started)
    await until(lambda: len(seen.of("poll_queues")) >= 2)
    assert [queues for (queues,) in seen.of("poll_queues")][-1] == ["two"]


async def test_not_each_notification_with_a_job_causes_a_check_for_due_ones(
    desk: Desk, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promoter, "CHECK_AT_MOST_EVERY_S", 600.0)
    monkeypatch.setattr(rescuer, "SWEEP_EVERY_S_MAX", 600.0)
    started = await desk.start(queues=("one",), poll_s=60, lease_s=600.0)
    await asleep(started, "one")
    timer = started.worker.parts.promoter
    await until(lambda: time.monotonic() - timer._checked_at > 0.2)
    seen = Lookout(started)
    for _ in range(5):
        [job] = await desk.enqueue(quick.job())
        await desk.settled(job)
    assert not seen.of("next_due")
    # A notification without a job to claim makes the promoter check: this job is due later.
    [job] = await desk.enqueue(quick.job().after(0.3))
    await desk.settled(job)
    assert seen.of("promote_jobs")


async def test_the_first_notification_of_a_worker_is_followed_at_once(
    desk: Desk, quick: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It has checked twice by then, and the first check followed no notification.
    monkeypatch.setattr(consumer, "EMPTY_PAUSE_S", 600.0)
    monkeypatch.setattr(consumer, "EMPTY_PAUSE_S_MAX", 600.0)
    started = await desk.start(queues=("one",), poll_s=60)
    await asleep(started, "one")
    [job] = await desk.enqueue(quick.job())
    await desk.settled(job)
