"""Handlers that return work instead of a result: coroutines, futures and generators."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import pytest

from taskd.handlers import Item
from taskd.middleware import CallNext, middleware
from tests.worker import process_app
from tests.worker.conftest import Desk


@dataclass
class Number:
    n: int


pytestmark = pytest.mark.filterwarnings("error::RuntimeWarning")  # a coroutine that never ran


def plain_decorator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


def with_own_loop(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return asyncio.run(function(*args, **kwargs))

    return wrapper


@pytest.mark.parametrize("with_middleware", [False, True])
async def test_the_worker_awaits_what_an_async_handler_returns(
    desk: Desk, with_middleware: bool
) -> None:
    if with_middleware:
        _add_middleware(desk)

    @desk.task()
    async def forgot_await() -> Any:
        return _work("forgot_await")

    @desk.task()
    async def forgot_await_late() -> Any:
        await asyncio.sleep(0.01)
        return _work("forgot_await_late", waits=False)

    @desk.task()
    async def forgot_twice() -> Any:
        async def inner() -> Any:
            return _work("forgot_twice", waits=False)

        return inner()

    @desk.task()
    async def future() -> Any:
        return asyncio.ensure_future(_work("future"))

    @desk.task(transaction=True)
    @plain_decorator
    async def in_transaction(ctx: Any) -> Any:
        await ctx.conn.execute("SELECT 1")
        return _work("in_transaction")

    await _all_done(desk)


@pytest.mark.parametrize("with_middleware", [False, True])
async def test_the_worker_awaits_what_a_plain_handler_returns(
    desk: Desk, with_middleware: bool
) -> None:
    if with_middleware:
        _add_middleware(desk)

    @desk.task()
    def plain() -> Any:
        return _work("plain")

    @desk.task()
    def thread_future() -> Any:
        done: Future[str] = Future()
        done.set_result("THREAD_FUTURE")
        return done

    @desk.task()
    @plain_decorator
    async def decorated() -> Any:
        return await _work("decorated")

    @desk.task()
    @with_own_loop
    async def own_loop() -> Any:
        return await _work("own_loop")

    await _all_done(desk)


async def _work(name: str, waits: bool = True) -> str:
    await asyncio.sleep(0.01 * waits)
    return name.upper()


def _add_middleware(desk: Desk) -> None:
    @middleware(registry=desk.registry)
    async def sees_result(_ctx: Any, call_next: CallNext) -> Any:
        result = await call_next()
        assert isinstance(result, str), result
        return result


async def _all_done(desk: Desk) -> None:
    """Run one job of each task; the result of each must be the name of its task in capitals."""
    tasks = [*desk.registry]
    ids = await desk.enqueue(*(each.job() for each in tasks))
    await desk.start()
    rows = await desk.settled(*ids)
    assert [row["state"] for row in rows] == ["done"] * len(tasks), [row["errors"] for row in rows]
    assert [json.loads(row["result"]) for row in rows] == [each.name.upper() for each in tasks]


async def test_the_worker_awaits_what_a_batch_handler_returns(desk: Desk) -> None:
    @desk.task(batch=2, max_wait_s=0.1)
    @plain_decorator
    async def numbers(items: list[Item[Number]]) -> Any:
        async def work() -> list[str]:
            await asyncio.sleep(0)
            return [f"#{item.args.n}" for item in items]

        return work()

    ids = await desk.enqueue(*(numbers.job(Number(n)) for n in range(2)))
    await desk.start()
    rows = await desk.settled(*ids)
    assert [json.loads(row["result"]) for row in rows] == ["#0", "#1"]


async def test_an_error_of_a_returned_coroutine_fails_the_attempt(desk: Desk) -> None:
    async def breaks() -> None:
        raise KeyError("broken")

    @desk.task(max_attempts=1)
    async def forgot_await() -> Any:
        return breaks()

    @desk.task(max_attempts=1)
    def plain() -> Any:
        return breaks()

    rows = await _failures(desk)
    assert all("KeyError" in error for error in rows), rows


async def test_a_returned_coroutine_is_cancelled_at_the_timeout(desk: Desk) -> None:
    cancelled: list[str] = []

    async def waits(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(name)

    @desk.task(max_attempts=1, timeout_s=0.2)
    async def forgot_await() -> Any:
        return waits("forgot_await")

    @desk.task(max_attempts=1, timeout_s=0.2)
    def plain() -> Any:
        return waits("plain")

    rows = await _failures(desk)
    assert all("0.2 s" in error for error in rows), rows
    assert sorted(cancelled) == ["forgot_await", "plain"]


async def test_a_returned_generator_fails_the_attempt(desk: Desk) -> None:
    def numbers() -> Iterator[int]:
        yield 1

    async def numbers_async() -> AsyncIterator[int]:
        yield 1

    @desk.task(max_attempts=1)
    def generator() -> Any:
        return numbers()

    @desk.task(max_attempts=1)
    async def async_generator() -> Any:
        return numbers_async()

    rows = await _failures(desk)
    assert "returned a generator, over which nothing iterates" in rows[0]
    assert "returned an async generator, over which nothing iterates" in rows[1]


async def test_a_coroutine_returned_in_a_process_fails_the_attempt(desk: Desk) -> None:
    (job,) = await desk.enqueue(process_app.returns_coroutine.job())
    await desk.start(process_app.REGISTRY)
    (row,) = await desk.settled(job)
    assert row["state"] == "failed"
    assert "returned a coroutine, which nothing runs in a process" in row["errors"]


async def _failures(desk: Desk) -> list[str]:
    """Run one job of each task, and return the errors of the failed jobs."""
    ids = await desk.enqueue(*(each.job() for each in desk.registry))
    await desk.start()
    rows = await desk.settled(*ids)
    assert {row["state"] for row in rows} == {"failed"}
    return [row["errors"] for row in rows]
