"""Code that cancels what asyncio.all_tasks() returns, or stops the loop, ends no worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from taskd.handlers import Item
from tests.worker.conftest import Desk, Emitted, until


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        # The tasks of the test itself, and of pytest, stand for nothing in a worker.
        if task.get_name() not in {"worker", "test"}:
            task.cancel()


@dataclass
class Nothing:
    pass


def crashes(emitted: Emitted) -> list[dict[str, Any]]:
    return emitted.of("service.crashed")


async def test_a_handler_that_cancels_all_tasks_fails_alone(desk: Desk) -> None:
    _name_me()
    waits_on = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        await waits_on.wait()

    @desk.task(max_attempts=1)
    async def cancels(first: bool) -> None:
        if not first:
            await asyncio.sleep(0)
        mine = asyncio.current_task()
        for task in asyncio.all_tasks():
            # Those of others first: the order of a set is accidental.
            if task is not mine and task.get_name().startswith(("consumer", "timer", "acker")):
                task.cancel()

    waiting = await desk.enqueue(*(waits.job() for _ in range(5)))
    worker = await desk.start()
    (runner,) = worker.worker.parts.runners
    await until(lambda: runner.running == 5)
    bad = await desk.enqueue(cancels.job(True), cancels.job(False))
    rows = await desk.settled(*bad)
    assert [row["state"] for row in rows] == ["failed", "failed"]
    [error] = json.loads(rows[0]["errors"])
    assert error["type"] == "RuntimeError"
    assert "must not cancel the asyncio task" in error["message"]
    assert "in cancels" in error["traceback"]
    waits_on.set()
    rows = await desk.settled(*waiting)
    assert {(row["state"], row["attempt"], row["interrupts"]) for row in rows} == {("done", 1, 0)}
    assert not crashes(desk.emitted)
    assert await worker.stop() == 0


async def test_a_task_of_a_handler_can_cancel_its_own_job_only(desk: Desk) -> None:
    _name_me()
    others = asyncio.Event()
    tasks: dict[str, asyncio.Task[Any]] = {}

    @desk.task(max_attempts=1)
    async def waits(name: str) -> None:
        tasks[name] = asyncio.current_task()  # type: ignore[assignment]
        await others.wait()

    @desk.task(max_attempts=1)
    async def scoped(victim: str) -> str:
        mine = asyncio.current_task()

        async def child() -> None:
            tasks.get(victim, mine).cancel()  # type: ignore[union-attr]
            await asyncio.sleep(60)

        try:
            await asyncio.gather(asyncio.create_task(child()), asyncio.sleep(60))
        except asyncio.CancelledError:
            return "cancelled"
        return "not cancelled"

    [other] = await desk.enqueue(waits.job("other"))
    await desk.start()
    await until(lambda: "other" in tasks)
    own, foreign = await desk.enqueue(scoped.job("self"), scoped.job("other"))
    rows = await desk.settled(own, foreign)
    assert rows[0]["result"] == '"cancelled"'
    assert rows[1]["state"] == "failed"
    assert json.loads(rows[1]["errors"])[0]["type"] == "RuntimeError"
    others.set()
    [row] = await desk.settled(other)
    assert (row["state"], row["attempt"]) == ("done", 1)


@pytest.mark.parametrize("kind", ["one by one", "batch"])
async def test_a_cancellation_from_elsewhere_costs_no_attempt(desk: Desk, kind: str) -> None:
    _name_me()
    begun, args = 0, (Nothing(),) if kind == "batch" else ()
    go = asyncio.Event()

    async def wait() -> None:
        nonlocal begun
        begun += 1
        await go.wait()

    if kind == "batch":

        @desk.task(batch=5, max_wait_s=0.01, max_attempts=2)
        async def waits(items: list[Item[Nothing]]) -> None:
            await wait()

    else:

        @desk.task(max_attempts=2)
        async def waits() -> None:
            await wait()

    jobs = await desk.enqueue(*(waits.job(*args) for _ in range(5)))
    worker = await desk.start()
    (runner,) = worker.worker.parts.runners
    await until(lambda: runner.running == 5 and begun)
    asyncio.get_running_loop().call_soon(cancel_all)
    told = await desk.emitted.wait("job.interrupted", 5)
    assert {each["why"] for each in told} == {"foreign"}
    go.set()
    rows = await desk.settled(*jobs)
    assert {(row["state"], row["attempt"], row["interrupts"]) for row in rows} == {("done", 1, 1)}
    assert await worker.stop() == 0


async def test_a_handler_that_cancels_itself_fails_as_before(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def cancels_itself(first: bool) -> None:
        if not first:
            await asyncio.sleep(0)
        asyncio.current_task().cancel()  # type: ignore[union-attr]
        await asyncio.sleep(60)

    jobs = await desk.enqueue(cancels_itself.job(True), cancels_itself.job(False))
    await desk.start()
    rows = await desk.settled(*jobs)
    assert {(row["state"], row["interrupts"]) for row in rows} == {("failed", 0)}


@pytest.mark.parametrize("kind", ["at once", "later", "in a task"])
async def test_a_handler_that_stops_the_loop_fails(desk: Desk, kind: str) -> None:
    async def stop() -> None:
        asyncio.get_running_loop().stop()

    @desk.task(max_attempts=1)
    async def stops() -> None:
        if kind == "later":
            await asyncio.sleep(0)
        await (asyncio.create_task(stop()) if kind == "in a task" else stop())

    [job] = await desk.enqueue(stops.job())
    before: Callable[[], None] = asyncio.get_running_loop().stop
    worker = await desk.start()
    [row] = await desk.settled(job)
    assert "must not stop the event loop" in json.loads(row["errors"])[0]["message"]
    assert await worker.stop() == 0
    assert asyncio.get_running_loop().stop == before


def _name_me() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.set_name("test")
