"""Each job finds its asyncio task as if it were its own, although jobs follow each other in one."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from taskd.worker.runner import Runner
from tests.worker.conftest import Desk, until

JOBS = 20
NAME = "consumer:default"

kept: list[asyncio.Task[Any]] = []
refs: list[weakref.ref[asyncio.Task[Any]]] = []


def keep(task: asyncio.Task[Any]) -> None:
    kept.append(task)


def refer(task: asyncio.Task[Any]) -> None:
    refs.append(weakref.ref(task, lambda _: None))


def call_back(task: asyncio.Task[Any]) -> None:
    task.add_done_callback(lambda _: None)


def rename(task: asyncio.Task[Any]) -> None:
    task.set_name("somebody's")


def annotate(task: asyncio.Task[Any]) -> None:
    task.request = 1  # type: ignore[attr-defined]


def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()


STAINS: tuple[Callable[[asyncio.Task[Any]], None], ...] = (
    keep,
    refer,
    call_back,
    rename,
    annotate,
    cancel,
)


def stains(task: asyncio.Task[Any]) -> list[str]:
    """What an earlier job has left on a task."""
    found = {
        "kept": task in kept,
        "referred to": any(ref() is task for ref in refs),
        "called back": bool(task._callbacks),
        "named": task.get_name() != NAME,
        "annotated": hasattr(task, "request"),
        "cancelled": bool(task.cancelling()),
    }
    return [what for what, there in found.items() if there]


@pytest.fixture(autouse=True)
def _forget() -> None:
    kept.clear()
    refs.clear()


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    """The runner of each coroutine that has set out."""
    made: list[Runner] = []
    walk = Runner._walk

    def counted(runner: Runner) -> Any:
        made.append(runner)
        return walk(runner)

    monkeypatch.setattr(Runner, "_walk", counted)
    return made


async def test_handlers_that_leave_nothing_behind_follow_each_other_in_one_coroutine(
    desk: Desk, walks: list[Runner]
) -> None:
    @desk.task()
    async def tidy(number: int) -> None:
        async with asyncio.timeout(60):
            await asyncio.sleep(0.001)
        if number % 2:
            await asyncio.gather(*(asyncio.sleep(0) for _ in range(3)))

    jobs = await desk.enqueue(*(tidy.job(number=number) for number in range(JOBS)))
    await desk.start(concurrency=1)
    rows = await desk.settled(*jobs)
    assert {row["state"] for row in rows} == {"done"}
    assert len(walks) < JOBS / 2


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after a wait"])
@pytest.mark.parametrize("stain", STAINS)
async def test_what_a_job_does_to_its_asyncio_task_does_not_reach_the_next(
    desk: Desk, stain: Callable[[asyncio.Task[Any]], None], *, waits: bool
) -> None:
    found: list[str] = []

    @desk.task(max_attempts=1)
    async def stained() -> None:
        task = asyncio.current_task()
        assert task is not None
        found.extend(stains(task))
        if waits:
            await asyncio.sleep(0)
        stain(task)

    jobs = await desk.enqueue(*(stained.job() for _ in range(JOBS)))
    await desk.start(concurrency=1)
    rows = await desk.settled(*jobs)
    assert {row["state"] for row in rows} == {"done"}
    assert found == []


async def test_a_cancellation_that_a_handler_swallowed_does_not_reach_the_next(desk: Desk) -> None:
    found: list[str] = []

    @desk.task(max_attempts=1)
    async def swallows() -> None:
        task = asyncio.current_task()
        assert task is not None
        found.extend(stains(task))
        task.cancel()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    jobs = await desk.enqueue(*(swallows.job() for _ in range(JOBS)))
    await desk.start(concurrency=1)
    rows = await desk.settled(*jobs)
    assert {row["state"] for row in rows} == {"done"}
    assert found == []


async def test_what_a_leaked_task_cancels_is_no_later_job(desk: Desk) -> None:
    leaked: list[asyncio.Task[None]] = []

    async def cancel_soon(task: asyncio.Task[Any]) -> None:
        await asyncio.sleep(0.02)
        task.cancel()

    @desk.task(max_attempts=1)
    async def leaks() -> None:
        task = asyncio.current_task()
        assert task is not None
        leaked.append(asyncio.create_task(cancel_soon(task)))
        await asyncio.sleep(0)

    @desk.task(max_attempts=1)
    async def innocent() -> None:
        await asyncio.sleep(0.01)

    new = [leaks.job() if number % 4 == 0 else innocent.job() for number in range(JOBS)]
    jobs = await desk.enqueue(*new)
    await desk.start(concurrency=1)
    rows = await desk.settled(*jobs)
    assert {row["state"] for row in rows} == {"done"}
    await asyncio.gather(*leaked)


async def test_coroutines_that_walk_on_keep_to_the_limit_also_when_it_shrinks(
    desk: Desk, walks: list[Runner]
) -> None:
    running, most = 0, 0

    @desk.task()
    async def counted() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1

    started = await desk.start(concurrency=8)
    first = await desk.enqueue(*(counted.job() for _ in range(400)))
    await until(lambda: running == 8)
    walks[0].resize(2)
    await until(lambda: running <= 2)
    assert most == 8
    most = 0
    await desk.settled(*first)
    assert most <= 2
    assert started.worker.ready.is_set()
