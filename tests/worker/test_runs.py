"""Attempts: what handlers get, what they may return and raise, and what is written about it."""

from __future__ import annotations

import asyncio
import contextvars
import json
import re
import threading
import time
from typing import Any

import pytest

from taskd.core.jobs.backoff import Fixed, Linear
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
from taskd.core.tasks.context import Context, TransactionContext
from taskd.middleware import CallNext, middleware
from tests.worker.conftest import Desk, until

NOW = Fixed(0.01)


async def test_both_kinds_of_handlers_run_and_their_results_are_kept(desk: Desk) -> None:
    threads = []

    @desk.task()
    async def adds(a: int, b: int = 2) -> dict[str, int]:
        return {"sum": a + b}

    @desk.task()
    async def waits() -> str:
        await asyncio.sleep(0.01)
        return "waited"

    @desk.task()
    def plain(text: str) -> list[str]:
        threads.append(threading.current_thread().name)
        return [text]

    @desk.task()
    async def nothing() -> None: ...

    ids = await desk.enqueue(adds.job(1), waits.job(), plain.job("x"), nothing.job())
    worker = await desk.start()
    rows = await desk.settled(*ids)
    assert [row["state"] for row in rows] == ["done"] * 4
    results = [row["result"] and json.loads(row["result"]) for row in rows]
    assert results == [{"sum": 3}, "waited", ["x"], None]
    assert [row["attempt"] for row in rows] == [1] * 4
    assert threads[0].startswith("taskd-job")
    assert await worker.stop() == 0
    assert worker.worker.report.jobs["done"] == 4


async def test_the_context_says_everything(desk: Desk) -> None:
    said: dict[str, Any] = {}

    def tell(ctx: Any) -> None:
        said[ctx.task] = {
            name: getattr(ctx, name)
            for name in (
                "job_id",
                "task",
                "queue",
                "attempt",
                "max_attempts",
                "fence",
                "idempotency_key",
                "deadline",
                "stopping",
                "resources",
            )
        } | {"remaining_s": ctx.remaining_s()}

    @desk.task(queue="reports", timeout_s=60, max_attempts=7)
    async def asks(ctx: Any) -> None:
        tell(ctx)
        if ctx.attempt == 1:
            raise Retry(0.01)

    @desk.task(queue="reports", timeout_s=None)
    def asks_in_a_thread(ctx: Any, n: int) -> None:
        tell(ctx)

    before = time.monotonic()
    one, two = await desk.enqueue(
        asks.job(), NewJob("asks_in_a_thread", '{"n": 1}', "reports", max_attempts=3)
    )
    await desk.start()
    await desk.settled(one, two)
    first, second = said["asks"], said["asks_in_a_thread"]
    assert 0 < first.pop("remaining_s") <= 60
    assert before + 60 < first.pop("deadline") < time.monotonic() + 60
    # The same for every attempt, and another in every database.
    assert re.fullmatch(rf"[0-9a-f]{{8,}}-{one}", first.pop("idempotency_key"))
    assert first == {
        "job_id": one,
        "task": "asks",
        "queue": "reports",
        "attempt": 2,
        "max_attempts": 7,
        "fence": 2,
        "stopping": False,
        "resources": {},
    }
    assert second["deadline"] is None
    assert second["remaining_s"] is None
    assert second["max_attempts"] == 3


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in middleware"])
async def test_handlers_get_the_context_at_any_place(desk: Desk, inside: bool) -> None:
    @desk.task()
    async def last(n: int, ctx: Any) -> list[Any]:
        return [n, ctx.attempt]

    @desk.task()
    def by_annotation(n: int, *, this: Context) -> list[Any]:
        return [n, this.attempt]

    @desk.task(transaction=True)
    async def in_a_transaction(n: int, context: TransactionContext) -> list[Any]:
        return [n, await context.conn.fetchval("SELECT 1")]

    if inside:

        @middleware(registry=desk.registry)
        async def around(ctx: Any, call_next: CallNext) -> Any:
            return await call_next()

    ids = await desk.enqueue(last.job(5), by_annotation.job(n=5), in_a_transaction.job(5))
    await desk.start()
    assert [row["result"] for row in await desk.settled(*ids)] == ["[5, 1]"] * 3


@pytest.mark.parametrize("returned", [False, True], ids=["raised", "returned"])
async def test_verdicts_decide(desk: Desk, returned: bool) -> None:
    def say(verdict: Exception) -> Any:
        if returned:
            return verdict
        raise verdict

    @desk.task(max_attempts=1)
    async def snoozes(ctx: Any) -> Any:
        return say(Snooze(0.01)) if ctx.fence < 4 else None

    @desk.task(max_attempts=2, backoff=Fixed(3600))
    async def retries(ctx: Any) -> Any:
        return say(Retry(0.01, "not yet")) if ctx.attempt < 2 else None

    @desk.task()
    async def cancels() -> Any:
        return say(Cancel("no longer wanted"))

    @desk.task()
    def fails() -> Any:
        return say(Fail("hopeless"))

    ids = await desk.enqueue(snoozes.job(), retries.job(), cancels.job(), fails.job())
    await desk.start()
    snoozed, retried, cancelled, failed = await desk.settled(*ids)
    assert (snoozed["state"], snoozed["attempt"], snoozed["fence"]) == ("done", 1, 4)
    assert (retried["state"], retried["attempt"]) == ("done", 2)
    assert json.loads(retried["errors"])[0]["message"] == "not yet"
    assert (cancelled["state"], cancelled["reason"]) == ("cancelled", "no longer wanted")
    assert (failed["state"], failed["reason"], failed["attempt"]) == ("failed", "hopeless", 1)


async def test_backoff_attempts_and_rules_decide_about_errors(desk: Desk) -> None:
    class Gone(KeyError): ...

    @desk.task(backoff=Linear(100.0))
    async def later() -> None:
        raise ValueError("no")

    @desk.task(max_attempts=3, backoff=NOW)
    async def thrice() -> None:
        raise ValueError("no")

    @desk.task(
        backoff=Fixed(3600),
        on_error={KeyError: Fail, Gone: Cancel("gone"), TimeoutError: NOW, OSError: Snooze(500)},
    )
    async def ruled(ctx: Any, kind: str) -> None:
        if ctx.attempt > 1:
            return
        raise {"key": KeyError("k"), "gone": Gone(), "time": TimeoutError(), "os": OSError()}[kind]

    ids = await desk.enqueue(
        later.job(),
        thrice.job(),
        NewJob("thrice", queue="default", max_attempts=1),
        *(ruled.job(kind) for kind in ("key", "gone", "time", "os")),
    )
    await desk.start()
    _, three, one, key, gone, timed, _ = ids
    await desk.settled(three, one, key, gone, timed)
    row = await desk.state(ids[0], "scheduled")
    delay = await desk.sql.fetchval(
        "SELECT extract(epoch FROM run_at - now()) FROM taskd.job WHERE id = $1", ids[0]
    )
    assert 50 < delay <= 100
    assert row["attempt"] == 1
    rows = {row["id"]: row for row in await desk.settled(three, one, key, gone, timed)}
    assert (rows[three]["state"], rows[three]["attempt"], rows[three]["reason"]) == (
        "failed",
        3,
        "ValueError: no",
    )
    assert [each["attempt"] for each in json.loads(rows[three]["errors"])] == [1, 2, 3]
    assert (rows[one]["state"], rows[one]["attempt"]) == ("failed", 1)
    assert (rows[key]["state"], rows[key]["reason"]) == ("failed", "KeyError: 'k'")
    assert (rows[gone]["state"], rows[gone]["reason"]) == ("cancelled", "gone")
    assert (rows[timed]["state"], rows[timed]["attempt"]) == ("done", 2)
    snoozed = await desk.state(ids[6], "scheduled")
    assert snoozed["attempt"] == 0


async def test_the_first_and_the_last_nineteen_errors_stay_and_are_small(desk: Desk) -> None:
    @desk.task(max_attempts=25, backoff=Fixed(0.0))
    async def always(ctx: Any) -> None:
        raise ValueError(f"attempt {ctx.attempt} " + "x" * 20_000)

    (job,) = await desk.enqueue(always.job())
    await desk.start()
    (row,) = await desk.settled(job)
    errors = json.loads(row["errors"])
    assert [each["attempt"] for each in errors] == [1, *range(7, 26)]
    for each in errors:
        assert each["message"].startswith(f"attempt {each['attempt']} ")
        assert each["type"] == "ValueError"
        assert "in always" in each["traceback"]
        assert each["started"] < each["ended"]
        assert int(each["worker"]) == row["worker_id"]
        assert len(json.dumps(each)) < 4600


async def test_arguments_that_no_longer_fit_harm_their_job_only(desk: Desk) -> None:
    @desk.task(max_attempts=2, backoff=NOW)
    async def takes(n: int) -> None: ...

    deep = '{"n": ' + "[" * 3000 + "]" * 3000 + "}"
    texts = ['{"n": "one"}', "{}", '{"n": 1, "m": 2}', deep, '{"n": 1}', '{"n": 2}']
    ids = [
        await desk.sql.fetchval(
            "INSERT INTO taskd.job (queue, task, args) "
            "VALUES ('default', 'takes', $1::text::jsonb) RETURNING id",
            text,
        )
        for text in texts
    ]
    await desk.start()
    assert [row["state"] for row in await desk.settled(*ids[4:])] == ["done"] * 2
    for job in ids[:4]:
        row = await desk.state(job, "scheduled")
        assert (row["attempt"], row["started_at"] is not None) == (0, True)


async def test_an_unknown_task_is_given_back_without_burning_an_attempt(desk: Desk) -> None:
    @desk.task()
    async def known() -> None: ...

    stranger, friend = await desk.enqueue(NewJob("unknown", queue="default"), known.job())
    await desk.start()
    await desk.settled(friend)
    row = await desk.state(stranger, "scheduled")
    assert (row["attempt"], row["fence"], row["worker_id"]) == (0, 1, None)
    delay = await desk.sql.fetchval(
        "SELECT extract(epoch FROM run_at - now()) FROM taskd.job WHERE id = $1", stranger
    )
    assert 2 < delay <= 10
    assert desk.emitted.of("task.unknown", task="unknown", queue="default", count=1)


async def test_a_job_without_an_attempt_left_fails(desk: Desk) -> None:
    @desk.task(max_attempts=2)
    async def never(ctx: Any) -> None:
        raise AssertionError("it must not start")

    job = await desk.sql.fetchval(
        "INSERT INTO taskd.job (queue, task, attempt) VALUES ('default', 'never', 2) RETURNING id"
    )
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["reason"]) == ("failed", "no attempt is left: the limit is 2")


async def test_odd_results_do_not_undo_the_work(desk: Desk) -> None:
    class Mute:
        def __str__(self) -> str:
            raise ValueError

    loop: list[Any] = []
    loop.append(loop)
    values: dict[str, Any] = {
        "nan": float("nan"),
        "bytes": b"\xff\x00",
        "huge": "x" * 300_000,
        "object": object(),
        "mute": Mute(),
        "loop": loop,
        "nul": "a\x00b\\u0000",
        "surrogate": "\ud800",
        "set": {1},
        "key": {(1, 2): 3},
        "int": 2**80,
        "class": int,
    }

    @desk.task()
    async def returns(kind: str) -> Any:
        return values[kind]

    ids = dict(zip(values, await desk.enqueue(*map(returns.job, values)), strict=True))
    await desk.start()
    rows = {row["id"]: row for row in await desk.settled(*ids.values())}
    assert {row["state"] for row in rows.values()} == {"done"}
    assert {row["attempt"] for row in rows.values()} == {1}
    stored = {kind for kind, job in ids.items() if rows[job]["result"] is not None}
    assert stored == {"bytes", "nul", "set", "int"}
    assert {kind for kind, job in ids.items() if rows[job]["reason"] is None} == stored
    assert len(await desk.emitted.wait("job.result_unstored", len(ids) - 4)) == len(ids) - 4
    assert json.loads(rows[ids["nul"]]["result"]) == "a\u2400b\\u0000"
    assert not desk.emitted.of("job.outcome_refused")


async def test_a_job_is_reported_to_be_done_once(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    ids = await desk.enqueue(*(quick.job() for _ in range(300)))
    worker = await desk.start()
    await desk.settled(*ids)
    assert sorted(each["job_id"] for each in desk.emitted.of("job.done")) == ids
    assert worker.worker.report.jobs["done"] == 300


canary: contextvars.ContextVar[str] = contextvars.ContextVar("canary")


async def test_five_thousand_jobs_leave_no_task_behind(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    @desk.task()
    async def waits() -> None:
        await asyncio.sleep(0)

    await desk.start()
    (first,) = await desk.enqueue(quick.job())
    await desk.settled(first)

    def standing() -> set[str]:
        return {t.get_name() for t in asyncio.all_tasks() if "statement" not in t.get_name()}

    before = standing()
    for _ in range(5):
        await desk.enqueue(*(quick.job() if n % 2 else waits.job() for n in range(1000)))
    await until(lambda: len(desk.emitted.of("job.done")) == 5001)
    await until(lambda: standing() == before)
    assert await desk.sql.fetchval("SELECT count(*) FROM taskd.job_history") <= 5001


async def test_jobs_that_wait_begin_together_and_not_one_in_each_turn_of_the_loop(
    desk: Desk,
) -> None:
    turn, began = 0, list[int]()
    all_wait = asyncio.Event()

    async def turns() -> None:
        nonlocal turn
        while not all_wait.is_set():
            turn += 1
            await asyncio.sleep(0)

    @desk.task()
    async def waits() -> None:
        began.append(turn)
        if len(began) == 20:
            all_wait.set()
        await all_wait.wait()

    ids = await desk.enqueue(*[waits.job()] * 20)
    counting = asyncio.create_task(turns())
    await desk.start(concurrency=20)
    await desk.settled(*ids)
    await counting
    assert began[-1] - began[0] <= 5
