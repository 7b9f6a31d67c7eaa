"""Each job finds its asyncio task as if it were its own, although jobs follow each other in one."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.worker.running.runner import Runner
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


async def all_done(desk: Desk, *new: NewJob) -> None:
    """Run these one at a time: none of them fails."""
    jobs = await desk.enqueue(*new)
    await desk.start(concurrency=1)
    rows = await desk.settled(*jobs)
    assert {row["state"] for row in rows} == {"done"}


@pytest.fixture(autouse=True)
def _forget() -> None:
    kept.clear()
    refs.clear()


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    """The runner of each coroutine that has set out."""
    made: list[Runner] = []
    walk = Runner._take_jobs

    def counted(runner: Runner) -> Any:
        made.append(runner)
        return walk(runner)

    monkeypatch.setattr(Runner, "_take_jobs", counted)
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

    await all_done(desk, *(tidy.job(number=number) for number in range(JOBS)))
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

    await all_done(desk, *(stained.job() for _ in range(JOBS)))
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

    await all_done(desk, *(swallows.job() for _ in range(JOBS)))
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

    new = (leaks.job() if number % 4 == 0 else innocent.job() for number in range(JOBS))
    await all_done(desk, *new)
    await asyncio.gather(*leaked)


async def test_coroutines_that_walk_on_keep_to_the_limit_also_when_it_shrinks(
    desk: Desk, walks: list[Runner]
) -> None:
    running = 0
    seen: list[int] = []

    @desk.task()
    async def counted() -> None:
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0.005)
        running -= 1

    await desk.start(concurrency=8)
    jobs = await desk.enqueue(*(counted.job() for _ in range(600)))
    # With more to come at hand: a coroutine that finds nothing ends by itself.
    await until(lambda: running == 8 and walks[0].waiting >= 8)
    before = len(seen)
    walks[0].resize(2)
    await desk.settled(*jobs)
    assert max(seen[:before]) == 8
    assert max(seen[before:]) == 2
