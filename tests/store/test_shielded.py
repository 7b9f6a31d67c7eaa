"""Shielded work runs to its end in the task of its caller, which may be cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from taskd.store.connections.shielded import to_its_end

Story = Callable[[], Coroutine[Any, Any, None]]
STORIES: list[Story] = []


def story(tell: Story) -> Story:
    STORIES.append(tell)
    return tell


class Work:
    """Wait for a future, and then for another iteration of the loop."""

    def __init__(self) -> None:
        self.future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.ended = False
        self.began_in: asyncio.Task[Any] | None = None

    async def run(self) -> str:
        self.began_in = asyncio.current_task()
        try:
            value = await self.future
            await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            return value
        finally:
            self.ended = True


def begin(work: Work) -> asyncio.Task[str]:
    async def call() -> str:
        return await to_its_end(work.run())

    return asyncio.create_task(call())


async def turns(number: int = 5) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@story
async def what_it_returns_is_returned_and_it_runs_in_the_task_of_its_caller() -> None:
    work = Work()
    task = begin(work)
    await turns()
    work.future.set_result("value")
    assert await task == "value"
    assert work.began_in is task


@story
async def what_it_raises_is_raised() -> None:
    work = Work()
    task = begin(work)
    await turns()
    work.future.set_exception(KeyError("odd"))
    with pytest.raises(KeyError, match="odd"):
        await task
    assert work.ended


@story
async def what_it_catches_is_no_concern_of_its_caller() -> None:
    future: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def calm() -> str:
        try:
            return await future
        except KeyError:
            return "calm"

    asyncio.get_running_loop().call_soon(future.set_exception, KeyError("odd"))
    assert await to_its_end(calm()) == "calm"


@story
async def who_is_cancelled_hears_of_it_when_the_work_has_ended() -> None:
    work = Work()
    task = begin(work)
    await turns()
    assert task.cancel()
    await turns()
    assert not task.done()
    assert not work.future.cancelled()
    assert task.cancel()  # however often
    await turns()
    assert not task.done()
    work.future.set_result("value")
    await asyncio.wait({task})
    assert task.cancelled()
    assert work.ended


@story
async def who_is_cancelled_hears_nothing_of_how_the_work_has_failed() -> None:
    work = Work()
    task = begin(work)
    await turns()
    task.cancel()
    work.future.set_exception(KeyError("odd"))
    await asyncio.wait({task})
    assert task.cancelled()


@story
async def one_that_is_cancelled_between_two_steps_of_the_work_ends_it_all_the_same() -> None:
    work = Work()
    task = begin(work)
    await turns()
    work.future.set_result("value")
    task.cancel()  # the task is about to run
    await asyncio.wait({task})
    assert task.cancelled()
    assert work.ended


@story
async def work_that_cancels_its_own_task_comes_to_its_end() -> None:
    ended = []

    async def odd() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0.001)
        ended.append(True)

    async def call() -> None:
        await to_its_end(odd())

    task = asyncio.create_task(call())
    await asyncio.wait({task})
    assert task.cancelled()
    assert ended


@story
async def work_whose_future_is_cancelled_by_somebody_else_is_cancelled() -> None:
    work = Work()
    task = begin(work)
    await turns()
    work.future.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    assert work.ended


@story
async def a_time_limit_around_it_is_raised_as_one_when_the_work_has_ended() -> None:
    work = Work()

    async def call() -> str:
        async with asyncio.timeout(0.01):
            return await to_its_end(work.run())

    task = asyncio.create_task(call())
    await asyncio.sleep(0.03)
    assert not task.done()
    work.future.set_result("value")
    with pytest.raises(TimeoutError):
        await task
    assert task.cancelling() == 0


@story
async def work_that_waits_for_nothing_returns_at_once() -> None:
    async def quick() -> str:
        return "quick"

    assert await to_its_end(quick()) == "quick"


@story
async def one_that_was_cancelled_once_may_go_on_with_other_work() -> None:
    work, other = Work(), Work()

    async def call() -> str:
        try:
            return await to_its_end(work.run())
        except asyncio.CancelledError:
            return await to_its_end(other.run())

    task = asyncio.create_task(call())
    await turns()
    task.cancel()
    work.future.set_result("value")
    other.future.set_result("other")
    assert await task == "other"


@pytest.mark.parametrize("debug", [False, True], ids=["", "debug"])
@pytest.mark.parametrize("kind", [asyncio, uvloop], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_work_runs_to_its_end(tell: Story, kind: Any, debug: bool) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await tell()

    with asyncio.Runner(debug=debug, loop_factory=kind.new_event_loop) as runner:
        runner.run(bounded())
