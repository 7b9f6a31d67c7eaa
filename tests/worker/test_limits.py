"""Limits under real workers: strict for all together, and quick to give a place on."""

from __future__ import annotations

import asyncio
from typing import Any

from taskd import Fail, Limit, Retry, Snooze
from taskd.store.jobs import limits
from tests.worker.conftest import Desk, until

# The maximum number of concurrent attempts, by limit and key.
MOST = """
WITH ran AS (
    SELECT limit_key, id, started_at AS since, finished_at AS until FROM taskd.job_history
    UNION ALL
    SELECT limit_key, id, (e ->> 'started')::timestamptz, (e ->> 'ended')::timestamptz
    FROM taskd.job_history, jsonb_array_elements(errors) AS e
)
SELECT coalesce(max(together), 0)
FROM (
    SELECT (SELECT count(DISTINCT o.id) FROM ran AS o
            WHERE ($1 OR o.limit_key = r.limit_key) AND o.since <= r.since AND o.until > r.since
           ) AS together
    FROM ran AS r
) AS counted
"""


async def most(desk: Desk, *, in_all: bool = False) -> int:
    found: int = await desk.sql.fetchval(MOST, in_all)
    return found


async def test_two_workers_never_run_more_of_a_key_than_may(desk: Desk) -> None:
    @desk.task(limit=Limit(concurrency=2, by="tenant", concurrency_in_all=5))
    async def work(tenant: str) -> None:
        await asyncio.sleep(0.002)

    for _ in range(2):
        await desk.start()
    ids = await desk.enqueue(*(work.job(f"t{n % 8}") for n in range(120)))
    await desk.settled(*ids)
    assert await most(desk) <= 2
    assert 2 < await most(desk, in_all=True) <= 5


async def test_every_end_of_an_attempt_lets_the_next_one_begin(desk: Desk) -> None:
    @desk.task(limit=Limit(concurrency=1), max_attempts=2)
    async def work(how: str, attempt: int = 0) -> None:
        match how:
            case "fail":
                raise Fail("no")
            case "raise":
                raise ValueError(how)
            case "retry":
                raise Retry(0.0)
            case "snooze" if not snoozed:
                snoozed.append(1)
                raise Snooze(0.05)

    snoozed: list[int] = []
    await desk.start()
    hows = ["done", "fail", "retry", "snooze", "done"] * 3
    rows = await desk.settled(*await desk.enqueue(*(work.job(how) for how in hows)))
    assert len(rows) == len(hows)
    assert await most(desk) == 1


async def test_the_next_of_a_key_begins_within_moments_of_an_end(desk: Desk) -> None:
    @desk.task(limit=Limit(concurrency=1))
    async def work() -> None: ...

    await desk.start()
    rows = await desk.settled(*await desk.enqueue(*[work.job()] * 20))
    # Not by a timer: twenty in a row would take seconds.
    assert (rows[-1]["finished_at"] - rows[0]["started_at"]).total_seconds() < 2


async def test_a_cancelled_job_gives_its_place_back(desk: Desk) -> None:
    @desk.task(limit=Limit(concurrency=1))
    async def work(forever: bool) -> None:
        if forever:
            await asyncio.Event().wait()

    started = await desk.start()
    first, second = await desk.enqueue(work.job(True), work.job(False))
    await desk.state(first, "running")
    await desk.lane.fetch("cancel_jobs", [first], "", None, True, None)
    started.worker.parts.reconciler.wakeup.set()
    await desk.settled(first, second)


async def test_the_places_of_a_worker_that_died_come_back(desk: Desk) -> None:
    @desk.task(limit=Limit(concurrency=1))
    async def work() -> None: ...

    # A pid that no process of this machine has: its death is proved.
    await desk.other_worker(99, pid=2**22 + 1)
    dead, second = await desk.enqueue(work.job(), work.job())
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = 99, fence = 1, attempt = 1, "
        "started_at = now() WHERE id = $1",
        dead,
    )
    await desk.start()
    await desk.settled(second, dead)
    assert await most(desk) == 1


async def test_a_rate_holds_over_a_window(desk: Desk) -> None:
    @desk.task(limit=Limit(rate=40, burst=5))
    async def work() -> None: ...

    for _ in range(2):
        await desk.start()
    rows = await desk.settled(*await desk.enqueue(*[work.job()] * 40))
    began = sorted(row["started_at"].timestamp() for row in rows)
    # A saved burst, one admitted job that had not started, and what the rate allows.
    for first, start in enumerate(began):
        within = [each for each in began[first:] if each < start + 0.25]
        assert len(within) <= 5 + 5 + 40 * 0.25
    assert began[-1] - began[0] > (40 - 5) / 40 - 0.2


async def test_a_limit_that_an_operator_raises_lets_parked_jobs_in_at_once(desk: Desk) -> None:
    open_ = asyncio.Event()

    @desk.task(limit=Limit(concurrency=1))
    async def work() -> None:
        await open_.wait()

    await desk.start()
    ids = await desk.enqueue(*[work.job()] * 4)
    await desk.state(ids[0], "running")
    running = "SELECT count(*) = $1 FROM taskd.job WHERE state = 'running'"
    await limits.set_limit(desk.lane, "work", 3, None, None, None, [])
    await until(lambda: desk.sql.fetchval(running, 3))
    open_.set()
    await desk.settled(*ids)


async def test_an_idle_worker_asks_nothing_for_limits_that_nobody_has(
    desk: Desk, monkeypatch: Any
) -> None:
    @desk.task()
    async def work() -> None: ...

    asked = []
    real = limits.admit

    async def admit(*args: Any) -> Any:
        asked.append(args)
        return await real(*args)

    monkeypatch.setattr(limits, "admit", admit)
    await desk.start()
    await desk.settled(*await desk.enqueue(*[work.job()] * 50))
    assert asked == []


async def test_a_limited_queue_runs_no_more_than_it_may_and_goes_on_by_itself(desk: Desk) -> None:
    @desk.task()
    async def work() -> None:
        await asyncio.sleep(0.005)

    await limits.limit_queue(desk.lane, "default", max_running=2)
    for _ in range(2):
        await desk.start()
    rows = await desk.settled(*await desk.enqueue(*[work.job()] * 40))
    assert await most(desk, in_all=True) <= 2
    # No poll in between, or it would take twenty of them.
    assert (rows[-1]["finished_at"] - rows[0]["started_at"]).total_seconds() < 5


async def test_a_queue_that_is_limited_while_it_runs_is_obeyed_and_let_go_again(desk: Desk) -> None:
    open_ = asyncio.Event()

    @desk.task()
    async def work() -> None:
        await open_.wait()

    await desk.start()
    await limits.limit_queue(desk.lane, "default", max_running=2)
    ids = await desk.enqueue(*[work.job()] * 6)
    running = "SELECT count(*) = $1 FROM taskd.job WHERE state = 'running'"
    await until(lambda: desk.sql.fetchval(running, 2))
    await limits.limit_queue(desk.lane, "default", without=["max_running"])
    await until(lambda: desk.sql.fetchval(running, 6))
    open_.set()
    await desk.settled(*ids)


async def test_a_queue_with_a_rate_begins_the_next_job_when_its_token_comes(desk: Desk) -> None:
    @desk.task()
    async def work() -> None: ...

    await limits.limit_queue(desk.lane, "default", rate=20.0, burst=1)
    await desk.start()
    rows = await desk.settled(*await desk.enqueue(*[work.job()] * 10))
    began = sorted(row["started_at"].timestamp() for row in rows)
    # A token is taken a moment before the job begins, and on a busy machine that moment is long.
    assert 9 / 20 - 0.2 < began[-1] - began[0] < 5
