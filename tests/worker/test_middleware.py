"""Middleware: around attempts of any kind, in order; its errors are the attempt's errors."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from typing import Any

import pytest

from taskd.core.jobs.verdicts import Cancel
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.middleware import CallNext, middleware
from taskd.worker.running.middleware import with_middleware
from tests.worker.conftest import Desk

tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")


async def test_the_first_is_the_outermost_and_sees_what_came_of_it(desk: Desk) -> None:
    story: list[Any] = []

    @middleware(registry=desk.registry)
    async def outer(ctx: Any, call_next: CallNext) -> Any:
        story.append(("outer", ctx.task, ctx.attempt))
        result = await call_next()
        story.append(("outer saw", result))
        return result

    @middleware(registry=desk.registry)
    async def inner(ctx: Any, call_next: CallNext) -> Any:
        await asyncio.sleep(0)
        return {"wrapped": await call_next()}

    @desk.task()
    async def work(n: int) -> int:
        story.append("work")
        await asyncio.sleep(0)
        return n

    [job_id] = await desk.enqueue(work.job(7))
    await desk.start()
    [row] = await desk.settled(job_id)
    assert row["result"] == '{"wrapped": 7}'
    assert story == [("outer", "work", 1), "work", ("outer saw", {"wrapped": 7})]


async def test_a_plain_function_has_it_on_the_loop_and_runs_in_its_thread(desk: Desk) -> None:
    threads: list[Any] = []

    @middleware(registry=desk.registry)
    async def tells_tenant(ctx: Any, call_next: CallNext) -> Any:
        await asyncio.sleep(0.02)
        tenant.set("ada")
        threads.append(threading.current_thread())
        return await call_next()

    @desk.task()
    def plain(word: str) -> list[str]:
        threads.append(threading.current_thread())
        return [word, tenant.get()]

    [job_id] = await desk.enqueue(plain.job("hello"))
    await desk.start()
    [row] = await desk.settled(job_id)
    assert row["result"] == '["hello", "ada"]'
    assert threads[0] is threading.main_thread()
    assert threads[1].name.startswith("taskd-job")
    assert tenant.get() == "nobody"


async def test_slow_middleware_does_not_count_as_waiting_for_a_thread(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskd.worker.running.attempt_table.SLOT_WAIT_S", 0.1)

    @middleware(registry=desk.registry)
    async def slow(ctx: Any, call_next: CallNext) -> Any:
        await asyncio.sleep(0.4)
        return await call_next()

    @desk.task()
    def plain() -> None: ...

    [job_id] = await desk.enqueue(plain.job())
    await desk.start()
    [row] = await desk.settled(job_id)
    assert (row["state"], row["attempt"]) == ("done", 1)
    assert not desk.emitted.of("job.released")


async def test_its_errors_and_verdicts_are_the_attempts(desk: Desk) -> None:
    @middleware(tasks=["breaks"], registry=desk.registry)
    async def broken(ctx: Any, call_next: CallNext) -> Any:
        await call_next()
        raise LookupError("after the handler")

    @middleware(tasks=["refused"], registry=desk.registry)
    async def guard(ctx: Any, call_next: CallNext) -> Any:
        raise Cancel("not today")

    @middleware(tasks=["exits"], registry=desk.registry)
    async def leaves(ctx: Any, call_next: CallNext) -> Any:
        raise SystemExit(3)

    ran: list[str] = []
    made = []
    for name in ("breaks", "refused", "exits", "untouched"):

        async def handler(name: str) -> None:
            ran.append(name)

        made.append(desk.task(name=name, max_attempts=1)(handler).job(name))
    ids = await desk.enqueue(*made)
    await desk.start()
    rows = await desk.settled(*ids)
    assert [row["state"] for row in rows] == ["failed", "cancelled", "failed", "done"]
    assert [row["reason"] for row in rows] == [
        "LookupError: after the handler", "not today", "SystemExit: 3", None,
    ]  # fmt: skip
    assert sorted(ran) == ["breaks", "untouched"]


@pytest.mark.parametrize("kind", ["async", "plain"])
async def test_one_that_does_not_call_the_handler_gives_the_result(desk: Desk, kind: str) -> None:
    @middleware(registry=desk.registry)
    async def cached(ctx: Any, call_next: CallNext) -> str:
        return "from the cache"

    async def works() -> None:
        raise AssertionError("it ran")

    def plainly() -> None:
        raise AssertionError("it ran")

    task = desk.task()(works if kind == "async" else plainly)
    [job_id] = await desk.enqueue(task.job())
    await desk.start()
    [row] = await desk.settled(job_id)
    assert row["result"] == '"from the cache"'


async def test_an_attempt_runs_once(desk: Desk) -> None:
    @middleware(registry=desk.registry)
    async def twice(ctx: Any, call_next: CallNext) -> Any:
        await call_next()
        return await call_next()

    runs: list[int] = []

    @desk.task(max_attempts=1)
    async def work() -> None:
        runs.append(1)

    [job_id] = await desk.enqueue(work.job())
    await desk.start()
    [row] = await desk.settled(job_id)
    assert (row["state"], runs) == ("failed", [1])
    assert "called twice" in row["reason"]


async def test_a_deadline_cancels_it_and_what_it_hides_is_not_believed(desk: Desk) -> None:
    seen: list[str] = []

    @middleware(registry=desk.registry)
    async def stubborn(ctx: Any, call_next: CallNext) -> Any:
        try:
            return await call_next()
        except asyncio.CancelledError:
            seen.append("cancelled")
            return "fine"

    @desk.task(timeout_s=0.1, max_attempts=1)
    async def sleeps() -> None:
        await asyncio.sleep(60)

    [job_id] = await desk.enqueue(sleeps.job())
    await desk.start()
    [row] = await desk.settled(job_id)
    assert (row["state"], seen) == ("failed", ["cancelled"])
    assert "TimedOut" in row["reason"]


async def test_tasks_without_any_are_the_very_same() -> None:
    async def one() -> None: ...

    async def two() -> None: ...

    registry = Registry()
    first, second = Task(one), Task(two)
    registry.add(first)
    registry.add(second)
    assert with_middleware(registry) is registry

    @middleware(tasks=["two"], registry=registry)
    async def around(ctx: Any, call_next: CallNext) -> Any:
        return await call_next()

    made = with_middleware(registry)
    assert made.get("one") is first
    assert made.get("two") is not second
    assert second.around is None


def test_what_can_be_no_middleware_is_refused() -> None:
    registry = Registry()
    with pytest.raises(TypeError, match="async def"):
        middleware(lambda ctx, call_next: None, registry=registry)

    async def lonely(ctx: Any) -> None: ...

    with pytest.raises(TypeError, match="ctx and call_next"):
        middleware(lonely, registry=registry)
    with pytest.raises(TypeError, match=r"tasks=\['one'\]"):
        middleware(tasks="one", registry=registry)
