"""Resources: made once per worker, seen by every handler, taken down after the last attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from taskd import resource
from taskd.core.tasks.registry import Registry
from taskd.errors import ResourceError
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
    assert event["error"] == "OSError: already gone"


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
