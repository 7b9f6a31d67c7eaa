"""What a person on call asks while jobs wait: `taskd doctor` and `taskd why` name the cause."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from taskd.core.doctor import jobs as job_checks
from taskd.core.doctor import workers as checks
from taskd.core.doctor.checks import CHECKS, statements
from taskd.core.doctor.finding import Finding, Level, run_check
from taskd.core.explain import reasons
from taskd.core.explain.sentences import explain
from taskd.core.jobs.backoff import Fixed
from taskd.store.reading import doctor, reports
from taskd.worker.observing import failure_streaks
from tests.worker.conftest import Desk, until

LEASE_S = 3.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, desk: Desk) -> None:
    """Nothing is given time, and the status is published twice a second."""
    for each in (checks, job_checks):
        monkeypatch.setattr(each, "GRACE_S", 0.0)
    monkeypatch.setattr(checks, "BLOCKED_S_MIN", 0.5)
    monkeypatch.setattr(reasons, "STANDS_STILL_S", 0.0)
    desk.settings["lease_s"] = LEASE_S


async def examine(desk: Desk, name: str) -> Finding:
    [check] = [each for each in CHECKS if each.name == name]
    readings = await doctor.read(desk.lane, statements((check,)))
    return run_check(check, readings.rows, readings.refused)


async def found(desk: Desk, name: str, level: Level = Level.ERROR) -> Finding:
    """Wait until a check finds something of this level."""

    async def there() -> Finding | None:
        finding = await examine(desk, name)
        return finding if finding.level is level else None

    finding: Finding = await until(there)
    return finding


async def why(desk: Desk, job_id: int) -> dict[str, tuple[str, list[str]]]:
    facts = await reports.why_job(desk.lane, job_id)
    assert facts is not None
    return {str(each.reason.why): (each.text, each.commands) for each in explain(facts)}


async def test_slots_that_hang_without_a_timeout_are_named(desk: Desk) -> None:
    @desk.task(timeout_s=None)
    async def hang() -> None:
        await asyncio.Event().wait()

    @desk.task()
    async def innocent() -> None: ...

    await desk.start(concurrency=3)
    hung = await desk.enqueue(*(hang.job() for _ in range(3)))
    for each in hung:
        await desk.state(each, "running")
    [waits] = await desk.enqueue(innocent.job())

    finding = await found(desk, "full_queues")
    assert "all 3 slots are taken, 3 by the task hang for up to " in finding.found[0]
    assert "without a timeout; waiting: 1 job" in finding.found[0]
    restart = "taskd jobs restart --task hang --running-for "
    assert finding.repairs[0].text.startswith(restart)
    text, commands = (await why(desk, waits))["slots_taken"]
    assert text.startswith("All 3 slots of the queue default are taken: 3 by the task hang for up")
    assert "which has no timeout" in text
    assert any(each.startswith(restart) for each in commands)
    facts = await reports.why_job(desk.lane, waits)
    assert facts is not None
    assert reasons.reasons(facts)[0] == (reasons.Why.SLOTS_TAKEN, True)

    await desk.sql.execute("UPDATE taskd.job SET cancel_reason = 'hangs' WHERE worker_id > 0")
    await desk.settled(waits)
    assert (await examine(desk, "full_queues")).level is Level.OK


async def test_slots_that_a_timeout_will_free_are_a_warning(desk: Desk) -> None:
    @desk.task(timeout_s=600)
    async def slow() -> None:
        await asyncio.Event().wait()

    await desk.start(concurrency=1)
    first, second = await desk.enqueue(slow.job(), slow.job())
    await desk.state(first, "running")
    await found(desk, "full_queues", Level.WARNING)
    assert "until its timeout" in (await why(desk, second))["slots_taken"][0]


async def test_threads_that_hang_are_named(desk: Desk) -> None:
    ended = threading.Event()

    @desk.task()
    def hang() -> None:
        ended.wait(60)

    try:
        await desk.start(concurrency=10, threads=2)
        await desk.enqueue(*(hang.job() for _ in range(20)))
        finding = await found(desk, "full_queues")
        assert "all 2 threads are taken, 2 by the task hang" in " ".join(finding.found)
    finally:
        ended.set()


async def test_a_task_whose_attempts_all_fail_is_named_until_one_succeeds(desk: Desk) -> None:
    broken = True

    @desk.task(max_attempts=100, backoff=Fixed(0.01))
    async def send() -> None:
        if broken:
            raise ConnectionError("no route")

    @desk.task()
    async def other() -> None: ...

    await desk.start()
    jobs = await desk.enqueue(send.job(), send.job())
    await desk.settled(*await desk.enqueue(other.job()))
    finding = await found(desk, "failing_tasks")
    assert finding.found[0].startswith("all attempts of the task send in ")
    assert finding.found[0].endswith("ago with ConnectionError")
    assert len(finding.found) == 1
    assert finding.repairs[0].text == "taskd stats errors --task send"
    broken = False
    await desk.settled(*jobs)
    await found(desk, "failing_tasks", Level.OK)


async def test_a_streak_that_is_not_continued_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streaks = failure_streaks.FailureStreaks()
    for _ in range(failure_streaks.FAILED_MIN):
        assert streaks.published() == ()
        streaks.failed("send", '{"type": "Odd", "message": "m"}')
    [streak] = streaks.published()
    assert (streak.task, streak.failed, streak.error) == ("send", 5, "Odd")
    monkeypatch.setattr(failure_streaks, "FORGET_S", -1.0)
    assert streaks.published() == ()


async def test_a_handler_that_blocks_the_loop_again_and_again_is_named(desk: Desk) -> None:
    @desk.task(queue="crunching")
    async def crunch() -> None:
        time.sleep(0.8)

    @desk.task(queue="waiting")
    async def innocent() -> None: ...

    await desk.start()
    await desk.enqueue(*(crunch.job() for _ in range(4)))
    finding = await found(desk, "blocked_loops", Level.WARNING)
    [text] = finding.found
    assert "of the last minute, mostly by the task crunch. While" in text
    assert "crunching, waiting" in text
    assert finding.repairs[0].text == "taskd tasks pause crunch"


async def test_a_task_that_no_worker_knows_stays_named(desk: Desk) -> None:
    @desk.task()
    async def known() -> None: ...

    from taskd.core.jobs.job import NewJob

    await desk.start()
    await desk.enqueue(*(NewJob(task="strange", queue="default") for _ in range(3)))
    # From the first release on, which comes long before the minute that a finding takes.
    await until(lambda: desk.sql.fetchval("SELECT bool_and(parked) FROM taskd.job"))
    # The jobs are claimed and released meanwhile, as when they are due again.
    for _ in range(20):
        await desk.sql.execute("UPDATE taskd.job SET run_at = now() - interval '1 s'")
        assert (await examine(desk, "unknown_tasks")).level is Level.ERROR
        await desk.settled(*await desk.enqueue(known.job()))
