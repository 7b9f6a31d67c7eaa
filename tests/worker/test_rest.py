"""A worker without work rests: it wakes seldom, and misses nothing that begins."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from taskd.worker.lease import renewal
from taskd.worker.observing import loop_monitor
from taskd.worker.observing.loop_monitor import LATE_S, REST_TICK_S, TICK_S, LoopMonitor, Pulse
from taskd.worker.services.service import Wakeup
from taskd.worker.upkeep import promoter, timer
from tests.worker.conftest import Desk, Started, until

BURIED = "UPDATE taskd.worker SET died_at = now() WHERE id = $1"


@pytest.fixture
def long_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rests so long that anything that must not wait for their end fails its test."""
    monkeypatch.setattr(timer, "REST_AFTER_S", 0.1)
    monkeypatch.setattr(timer, "REST_TICK_S", 60.0)
    monkeypatch.setattr(loop_monitor, "REST_TICK_S", 60.0)
    monkeypatch.setattr(renewal, "REST_CHECK_EVERY_S", 60.0)


async def resting(worker: Started) -> None:
    """Wait until the timer and the loop monitor rest."""
    looking = worker.worker._lease_thread._monitor
    await until(lambda: worker.worker._pulse.resting)
    await until(lambda: time.monotonic() - looking._checked > 0.3)


def statements(worker: Started) -> list[str]:
    """The names of all that the upkeep runs from now on."""
    ran: list[str] = []
    fetch = worker.worker.parts.upkeep.fetch

    async def noted(name: str, *args: Any) -> Any:
        ran.append(name)
        return await fetch(name, *args)

    worker.worker.parts.upkeep.fetch = noted  # type: ignore[method-assign]
    return ran


@pytest.mark.usefixtures("long_rests")
async def test_an_idle_ticker_still_names_a_blocked_loop(desk: Desk) -> None:
    @desk.task()
    async def blocks() -> None:
        time.sleep(1.2)

    worker = await desk.start()
    await resting(worker)
    (job,) = await desk.enqueue(blocks.job())
    await desk.settled(job)
    (named,) = desk.emitted.of("loop.blocked")
    assert named["job_id"] == job
    # Half a second, and a margin for a busy machine.
    assert named["blocked_s"] < 1.0


@pytest.mark.usefixtures("long_rests")
async def test_a_deadline_holds_from_the_first_job_after_a_rest(desk: Desk) -> None:
    @desk.task(timeout_s=0.2, max_attempts=1)
    async def hangs() -> None:
        await asyncio.sleep(600)

    worker = await desk.start()
    await resting(worker)
    (job,) = await desk.enqueue(hangs.job())
    (row,) = await desk.settled(job)
    assert row["state"] == "failed"
    await resting(worker)


@pytest.mark.usefixtures("long_rests")
async def test_who_rests_stops_at_once(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start()
    await resting(worker)
    assert await worker.stop() == 0
    assert not worker.worker._lease_thread._thread.is_alive()


async def test_nobody_rests_while_a_handler_runs_or_was_abandoned(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer, "REST_AFTER_S", 0.1)
    go = asyncio.Event()

    @desk.task(timeout_s=0.5, max_attempts=1)
    async def swallows() -> None:
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                continue

    worker = await desk.start(cancel_s=0.2)
    (runner,) = worker.worker.parts.runners
    pulse = worker.worker._pulse

    async def rests() -> bool:
        began = pulse.ticked
        await until(lambda: pulse.resting or pulse.ticked > began + 0.3)
        return pulse.resting

    try:
        (job,) = await desk.enqueue(swallows.job())
        await until(lambda: runner.running)
        assert not await rests()
        await desk.settled(job)
        assert runner.abandoned == 1
        assert not await rests()
    finally:
        go.set()
    await until(lambda: pulse.resting)


async def test_at_rest_a_late_tick_is_no_blocked_loop_and_a_first_job_that_blocks_is(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, woken = 1000.0, []
    monkeypatch.setattr(loop_monitor.time, "monotonic", lambda: clock)
    pulse = Pulse()
    pulse.on_wake.append(lambda: woken.append(clock))
    looking = LoopMonitor(pulse)

    def look_after(passed_s: float) -> int:
        nonlocal clock
        clock += passed_s
        looking.check()
        return len(desk.emitted.of("loop.blocked"))

    pulse.rest()
    assert look_after(REST_TICK_S + LATE_S - 0.01) == 0
    pulse.starts(clock)
    assert woken == [clock]
    assert look_after(TICK_S + LATE_S - 0.01) == 0
    assert look_after(0.02) == 1
    pulse.starts(clock)
    assert len(woken) == 1
    pulse.ticked = clock
    pulse.rest()
    assert look_after(REST_TICK_S + LATE_S - 0.01) == 1
    assert look_after(0.02 + loop_monitor.AGAIN_S) == 1  # stopped as a whole: not the loop's fault
    assert look_after(0.1) == 2


async def test_orphans_are_rescued_by_the_next_rescue(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start(lease_s=2.0)
    ran = statements(worker)
    await until(lambda: ran.count("check_upkeep") >= 3)
    assert "rescue_jobs" not in ran
    # A claim that commits after its worker was declared dead; no other worker is left to rescue it.
    await desk.other_worker(42)
    await desk.sql.execute(BURIED, 42)
    job = await desk.sql.fetchval(
        "INSERT INTO taskd.job (queue, task, state, worker_id, fence, attempt, started_at) "
        "VALUES ('default', 'quick', 'running', 42, 1, 1, now()) RETURNING id"
    )
    (row,) = await desk.settled(job)
    assert (row["state"], row["crashes"], row["attempt"]) == ("done", 0, 1)
    assert not desk.emitted.of("workers.declared_dead")
    ran.clear()
    await until(lambda: ran.count("check_upkeep") >= 3)
    assert "rescue_jobs" not in ran


async def test_due_jobs_without_a_notification_are_seen_by_the_next_check(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    async def scheduled(delay: str) -> int:
        found: int = await desk.sql.fetchval(
            "INSERT INTO taskd.job (queue, task, state, run_at) "
            "VALUES ('default', 'quick', 'scheduled', now() + $1::text::interval) RETURNING id",
            delay,
        )
        return found

    worker = await desk.start(lease_s=2.0)
    ran = statements(worker)
    # The promoter has set its timer, and nothing is due.
    await until(lambda: ran[-3:] == ["check_upkeep"] * 3)
    job = await scheduled("1 s")
    began = time.monotonic()
    await desk.settled(job)
    assert time.monotonic() - began < promoter.TIMER_S_MAX / 3
    # A due time that the timer is already set for does not wake the promoter at every check.
    await scheduled("20 s")
    await until(lambda: ran[-1] == "next_due")
    ran.clear()
    await until(lambda: ran.count("check_upkeep") >= 5)
    # The tick that has promoted the first one may end only now.
    assert ran.count("next_due") <= 2


# Wake-ups.


async def test_a_wakeup_ends_a_wait_or_the_next_one_and_time_ends_it_otherwise() -> None:
    wakeup = Wakeup()
    assert not await wakeup.wait(0.0)
    waiting = [asyncio.create_task(wakeup.wait(timeout)) for timeout in (None, 60.0)]
    await asyncio.sleep(0)
    wakeup.set()
    wakeup.set()
    assert await asyncio.gather(*waiting) == [True, True]
    assert await wakeup.wait(0.0)
    wakeup.clear()
    assert not await wakeup.wait(0.01)
    assert not wakeup.is_set()


async def test_a_wait_that_is_cancelled_leaves_nothing_behind() -> None:
    wakeup = Wakeup()
    waiting = asyncio.create_task(wakeup.wait(0.01))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not wakeup._waiters
    await asyncio.sleep(0.02)
    wakeup.set()
    assert await wakeup.wait()
