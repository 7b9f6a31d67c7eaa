"""The memory of failures: what a failed handler held is freed without the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from taskd import Fixed
from taskd.handlers import Item
from taskd.middleware import CallNext, middleware
from taskd.worker.finishing.tracebacks import forget_locals
from tests.worker import borders_app as app
from tests.worker.borders_app import Large, in_a_cycle
from tests.worker.conftest import Desk, until


@dataclass
class Number:
    n: int


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def held() -> list[weakref.ref[Large]]:
    """References to all objects that handlers of the test have made."""
    return []


def fails_soon() -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()
    loop.call_soon(future.set_exception, ValueError("it failed"))
    return future


def error_of(held: list[weakref.ref[Large]]) -> LookupError:
    try:
        in_a_cycle(held)
    except LookupError as error:
        return error
    raise AssertionError


@pytest.fixture
def handlers(desk: Desk, held: list[weakref.ref[Large]]) -> dict[str, Any]:
    options: dict[str, Any] = {"queue": "one", "max_attempts": 1}

    @desk.task(**options)
    def in_thread() -> None:
        in_a_cycle(held)

    @desk.task(**options)
    async def in_first_step() -> None:
        in_a_cycle(held)

    @desk.task(**options)
    async def after_a_wait() -> None:
        large = Large()
        held.append(weakref.ref(large))
        await asyncio.sleep(0)
        in_a_cycle(held)

    @desk.task(**options)
    async def by_a_future() -> None:
        large = Large()
        held.append(weakref.ref(large))
        await fails_soon()

    @desk.task(**options, timeout_s=0.2)
    async def times_out() -> None:
        large = Large()
        held.append(weakref.ref(large))
        await asyncio.sleep(60)

    @desk.task(**options, batch=2)
    async def in_batch(items: list[Item[Number]]) -> None:
        large = Large()
        held.append(weakref.ref(large))
        in_a_cycle(held)

    @desk.task(**options, batch=2)
    async def of_a_batch(items: list[Item[Number]]) -> list[Exception]:
        return [error_of(held) for _ in items]

    @desk.task(**options, transaction=True)
    async def in_transaction(ctx: Any) -> None:
        large = Large()
        held.append(weakref.ref(large))
        in_a_cycle(held)

    made = (in_thread, in_first_step, after_a_wait, by_a_future, times_out, in_batch, of_a_batch,
            in_transaction)  # fmt: skip
    return {each.name: each for each in made}


@pytest.mark.parametrize("with_middleware", [False, True])
@pytest.mark.parametrize(
    "kind",
    ["in_thread", "in_first_step", "after_a_wait", "by_a_future", "times_out", "in_batch",
     "of_a_batch", "in_transaction"],
)  # fmt: skip
async def test_the_locals_of_a_failed_handler_are_freed_at_once(
    desk: Desk,
    handlers: dict[str, Any],
    held: list[weakref.ref[Large]],
    without_gc: None,
    kind: str,
    with_middleware: bool,
) -> None:
    if with_middleware:

        @middleware(registry=desk.registry)
        async def through(ctx: Any, call_next: CallNext) -> Any:
            large = Large()
            held.append(weakref.ref(large))
            return await call_next()

    work = handlers[kind]
    new = work.job(Number(1)) if work.batch > 1 else work.job()
    await desk.start(threads=1)
    ids = await desk.enqueue(*[new] * 4)
    rows = await desk.settled(*ids)
    assert {row["state"] for row in rows} == {"failed"}
    assert len(held) >= 2
    await until(lambda: not any(each() for each in held), within_s=5)


async def test_the_locals_of_a_retried_and_of_a_cancelled_handler_are_freed(
    desk: Desk, held: list[weakref.ref[Large]], without_gc: None
) -> None:
    began = asyncio.Event()

    @desk.task(max_attempts=2, backoff=Fixed(3600))
    def retried() -> None:
        in_a_cycle(held)

    @desk.task()
    async def cancelled() -> None:
        large = Large()
        held.append(weakref.ref(large))
        began.set()
        await asyncio.sleep(60)

    first, second = await desk.enqueue(retried.job(), cancelled.job())
    await desk.start()
    await desk.state(first, "scheduled")
    await began.wait()
    worker = desk.started[0].worker
    worker.parts.runners[0].cancel_job(second, "no longer wanted")
    await desk.settled(second)
    await until(lambda: not any(each() for each in held), within_s=5)


async def test_the_locals_of_an_abandoned_handler_are_freed_when_it_ends(
    desk: Desk, held: list[weakref.ref[Large]], without_gc: None
) -> None:
    ends = time.monotonic() + 2.0

    @desk.task(max_attempts=1, timeout_s=0.1)
    def deaf() -> None:
        large = Large()
        held.append(weakref.ref(large))
        time.sleep(max(0.0, ends - time.monotonic()))
        in_a_cycle(held)

    (job,) = await desk.enqueue(deaf.job())
    await desk.start(cancel_s=0.2)
    await desk.settled(job)
    await until(lambda: len(held) == 2 and not any(each() for each in held), within_s=10)


async def test_the_locals_of_a_handler_in_a_process_are_freed(desk: Desk) -> None:
    (failed,) = await desk.enqueue(app.fails_in_a_cycle.job())
    await desk.start(app.REGISTRY, process_slots=1)
    await desk.settled(failed)
    (job,) = await desk.enqueue(app.still_held.job())
    (row,) = await desk.settled(job)
    assert json.loads(row["result"] or "null") == [1, 0]


def test_a_suspended_coroutine_that_an_error_has_left_is_not_ended() -> None:
    """Such as the reader of a client, which passes its errors on to handlers and continues."""
    kept: list[BaseException] = []

    async def reader() -> str:
        try:
            raise ConnectionError("lost")
        except ConnectionError as error:
            kept.append(error)
        await asyncio.sleep(0)
        return "continued"

    coroutine = reader()
    coroutine.send(None)
    forget_locals(kept[0])
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    assert ended.value.value == "continued"


def test_errors_that_led_to_an_error_and_those_of_a_group_are_cleared_too() -> None:
    held: list[weakref.ref[Large]] = []

    def several() -> None:
        errors = []
        for _ in range(2):
            try:
                in_a_cycle(held)
            except LookupError as error:
                errors.append(error)
        raise ExceptionGroup("both", errors)

    gc.disable()
    try:
        try:
            several()
        except ExceptionGroup as error:
            forget_locals(error)
            lines = error.exceptions[0].__traceback__
        assert [each() for each in held] == [None, None]
        assert lines is not None
    finally:
        gc.enable()


def test_hostile_errors_harm_nothing() -> None:
    class Hostile(Exception):
        @property
        def __cause__(self) -> Any:  # type: ignore[override]
            raise SystemExit(3)

        @property
        def __class__(self) -> Any:  # type: ignore[override]
            raise SystemExit(3)

    try:
        raise Hostile
    except Hostile as error:
        forget_locals(error)
    forget_locals(None)
    deep: BaseException = ValueError()
    for _ in range(3 * sys.getrecursionlimit()):
        outer = ValueError()
        outer.__cause__ = deep
        deep = outer
    forget_locals(deep)
