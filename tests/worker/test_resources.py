"""Resources: made once per worker, seen by every handler, taken down after the last attempt."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from taskd import resource
from taskd.core.tasks.registry import Registry
from taskd.errors import ResourceError
from taskd.worker.starting import resources
from tests.worker.conftest import Desk


async def test_handlers_see_what_was_made_once_and_it_outlives_them(desk: Desk) -> None:
    story: list[str] = []

    @resource(registry=desk.registry)
    async def pool() -> AsyncIterator[str]:
        story.append("pool made")
        yield "a pool"
        story.append("pool closed")

    @resource(registry=desk.registry)
    def model() -> Iterator[dict[str, int]]:
        story.append("model made")
        yield {"weights": 3}
        story.append("model closed")

    started = asyncio.Event()

    @desk.task()
    async def looks(ctx: Any) -> list[Any]:
        started.set()
        await asyncio.sleep(0.05)
        story.append("job ended")
        return [ctx.resources["pool"], ctx.resources["model"]["weights"]]

    @desk.task()
    def looks_from_a_thread(ctx: Any) -> Any:
        return ctx.resources["pool"]

    [early] = await desk.enqueue(looks_from_a_thread.job())
    worker = await desk.start()
    await desk.settled(early)
    [late] = await desk.enqueue(looks.job())
    await started.wait()
    assert await worker.stop() == 0
    assert story == ["pool made", "model made", "job ended", "model closed", "pool closed"]
    rows = await desk.settled(early, late)
    assert [row["result"] for row in rows] == ['"a pool"', '["a pool", 3]']


async def test_a_resource_that_fails_stops_the_start_and_the_others_are_taken_down(
    desk: Desk,
) -> None:
    closed: list[str] = []

    @resource(registry=desk.registry)
    async def first() -> AsyncIterator[int]:
        yield 1
        closed.append("first")

    @resource(registry=desk.registry)
    async def second() -> AsyncIterator[int]:
        raise OSError("the model file is missing")
        yield 2

    @desk.task()
    async def never() -> None: ...

    [job] = await desk.enqueue(never.job())
    with pytest.raises(ResourceError, match=r"resource 'second'.*the model file is missing"):
        await desk.start()
    assert closed == ["first"]
    assert (await desk.state(job, "queued"))["attempt"] == 0


async def test_one_that_fails_to_close_harms_nothing(desk: Desk) -> None:
    @resource(registry=desk.registry)
    async def odd() -> AsyncIterator[int]:
        yield 1
        raise OSError("already gone")

    @desk.task()
    async def works() -> None: ...

    [job] = await desk.enqueue(works.job())
    worker = await desk.start()
    await desk.settled(job)
    assert await worker.stop() == 0
    [event] = desk.emitted.of("resources.not_closed")
    assert (event["resource"], event["error"]) == ("odd", "OSError: already gone")


async def test_a_stop_ends_a_start_that_waits_for_a_resource(desk: Desk) -> None:
    story: list[str] = []
    opening = asyncio.Event()

    @resource(registry=desk.registry)
    async def first() -> AsyncIterator[int]:
        yield 1
        story.append("first closed")

    @resource(registry=desk.registry)
    async def second() -> AsyncIterator[int]:
        opening.set()
        try:
            await asyncio.sleep(600)
        finally:
            story.append("second cancelled")
        yield 2

    @desk.task()
    async def never() -> None: ...

    [job] = await desk.enqueue(never.job())
    worker = desk.worker()
    await opening.wait()
    assert await worker.stop() == 0
    assert story == ["second cancelled", "first closed"]
    assert not desk.emitted.of("worker.started")
    assert (await desk.state(job, "queued"))["attempt"] == 0


@pytest.mark.parametrize("late", ["opens", "closes"])
async def test_a_slow_resource_is_told_with_its_name_and_is_not_waited_for(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    for name in ("SLOW_OPEN_S", "SLOW_CLOSE_S", "CANCEL_S"):
        monkeypatch.setattr(resources, name, 0.01)
    monkeypatch.setattr(resources, "CLOSE_S_MAX", 0.2)
    ends = asyncio.Event()

    async def ignores_its_cancellation() -> None:
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ends.wait()

    @resource(registry=desk.registry)
    async def quick() -> AsyncIterator[int]:
        yield 1

    @resource(registry=desk.registry)
    async def slow() -> AsyncIterator[int]:
        if late == "opens":
            await ignores_its_cancellation()
        yield 2
        if late == "closes":
            await ignores_its_cancellation()

    @resource(registry=desk.registry)
    async def last() -> AsyncIterator[int]:
        yield 3

    @desk.task()
    async def never() -> None: ...

    worker = desk.worker()
    if late == "closes":
        await worker.ready()
        stopping = asyncio.create_task(worker.stop())
    [told, *_] = await desk.emitted.wait("resource.slow")
    assert (told["resource"], told["doing"]) == ("slow", late.removesuffix("s"))
    assert await (stopping if late == "closes" else worker.stop()) == 0
    [event] = desk.emitted.of("resources.not_closed")
    assert (event["resource"], event["error"]) == (
        "slow",
        "TimeoutError: it took longer than 0.2 s",
    )
    ends.set()


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError()])
async def test_a_resource_that_exits_fails_the_start(desk: Desk, error: BaseException) -> None:
    @resource(registry=desk.registry)
    async def odd() -> AsyncIterator[int]:
        raise error
        yield 1

    @desk.task()
    async def never() -> None: ...

    with pytest.raises(ResourceError, match=r"resource 'odd'.*(SystemExit|CancelledError)"):
        await desk.start()


async def test_a_resource_that_is_cancelled_stops_the_worker(desk: Desk) -> None:
    fails = asyncio.Event()

    async def reads() -> None:
        await fails.wait()
        raise OSError("the connection broke")

    @resource(registry=desk.registry)
    async def client() -> AsyncIterator[int]:
        async with asyncio.TaskGroup() as group:
            group.create_task(reads())
            yield 1

    @desk.task()
    async def never() -> None: ...

    worker = await desk.start()
    fails.set()
    assert await worker.end() == 1
    [event] = desk.emitted.of("resources.not_closed")
    assert event["resource"] == "client"
    [draining] = desk.emitted.of("worker.draining")
    assert draining["why"] == "a resource was cancelled"


def test_what_is_no_resource_is_refused() -> None:
    registry = Registry()

    async def returns() -> int:
        return 1

    def asks(name: str) -> Iterator[str]:
        yield name

    def one() -> Iterator[int]:
        yield 1

    def two() -> Iterator[int]:
        yield 2

    two.__name__ = "one"
    with pytest.raises(TypeError, match="returns: write a function that yields"):
        resource(returns, registry=registry)
    with pytest.raises(TypeError, match="asks: the function must take no arguments"):
        resource(asks, registry=registry)
    resource(one, registry=registry)
    with pytest.raises(ValueError, match="two resources are named 'one'"):
        resource(two, registry=registry)
    assert list(registry.resources) == ["one"]
