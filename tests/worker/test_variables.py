"""Context variables: attempts see what the app has set at its import, and nothing of each other."""

from __future__ import annotations

import asyncio
import decimal
import functools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from taskd import resource
from taskd.handlers import Item
from tests.worker import borders_app as app
from tests.worker.conftest import Desk

FOUND = ["set", "0.3333333"]


@dataclass
class Number:
    n: int


@pytest.fixture
def imported() -> None:
    """Set what the import of the app would have set in this context."""
    app.tenant.set("set")
    decimal.setcontext(decimal.Context(prec=7))


@pytest.fixture
def handlers(desk: Desk) -> dict[str, Any]:
    @desk.task(queue="one")
    async def in_first_step() -> list[object]:
        return app.seen_and_changed()

    @desk.task(queue="one")
    async def after_a_wait() -> list[object]:
        await asyncio.sleep(0)
        return app.seen_and_changed()

    @desk.task(queue="one")
    def in_thread() -> list[object]:
        return app.seen_and_changed()

    @desk.task(queue="one", batch=1)
    async def in_batch(items: list[Item[Number]]) -> list[list[object]]:
        return [app.seen_and_changed()]

    @desk.task(queue="one", transaction=True)
    async def in_transaction(ctx: Any) -> list[object]:
        return app.seen_and_changed()

    made = (in_first_step, after_a_wait, in_thread, in_batch, in_transaction)
    return {each.name: each for each in made}


@pytest.mark.parametrize(
    "kind", ["in_first_step", "after_a_wait", "in_thread", "in_batch", "in_transaction"]
)
async def test_an_attempt_sees_what_the_app_has_set_and_nothing_of_other_attempts(
    imported: None, desk: Desk, handlers: dict[str, Any], kind: str
) -> None:
    work = handlers[kind]
    new = work.job(Number(1)) if kind == "in_batch" else work.job()
    ids = await desk.enqueue(*[new] * 3)
    await desk.start(concurrency=1, threads=1)
    rows = await desk.settled(*ids)
    assert [json.loads(row["result"] or "null") for row in rows] == [FOUND] * 3
    assert app.tenant.get() == "set"
    assert decimal.getcontext().prec == 7


async def test_attempts_in_a_process_see_what_the_import_there_has_set(desk: Desk) -> None:
    ids = await desk.enqueue(*[app.in_process.job()] * 3)
    await desk.start(app.REGISTRY, process_slots=1)
    rows = await desk.settled(*ids)
    found = ["imported", "0.3333333"]
    assert [json.loads(row["result"] or "null") for row in rows] == [found] * 3


async def test_an_attempt_sees_what_a_resource_has_set(
    desk: Desk, handlers: dict[str, Any]
) -> None:
    @resource(registry=desk.registry)
    async def session() -> AsyncIterator[str]:
        await asyncio.sleep(0)
        app.tenant.set("async resource")
        yield ""

    @resource(registry=desk.registry)
    def plain() -> Iterator[str]:
        app.tenant.set(f"{app.tenant.get()}, then a plain one")
        yield ""

    ids = await desk.enqueue(handlers["in_first_step"].job(), handlers["in_thread"].job())
    await desk.start()
    rows = await desk.settled(*ids)
    found = {json.loads(row["result"] or "null")[0] for row in rows}
    assert found == {"async resource, then a plain one"}


async def test_a_decorator_that_is_no_coroutine_sets_variables_of_its_attempt_only(
    imported: None, desk: Desk
) -> None:
    """`functools.wraps` around an `async def`, and around a handler of batches."""

    def as_tenant(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def inner(*args: Any, **kwargs: Any) -> Any:
            if app.tenant.get() != "set":
                raise AssertionError(app.tenant.get())
            app.tenant.set("decorated")
            return function(*args, **kwargs)

        return inner

    @desk.task(queue="one", max_attempts=1)
    @as_tenant
    async def single() -> str:
        return app.tenant.get()

    @desk.task(queue="one", max_attempts=1, batch=1)
    @as_tenant
    async def batched(items: list[Item[Number]]) -> list[str]:
        return [app.tenant.get()]

    ids = await desk.enqueue(*[single.job()] * 3, *[batched.job(Number(1))] * 3)
    await desk.start(concurrency=1, threads=1)
    rows = await desk.settled(*ids)
    assert [row["result"] for row in rows] == ['"decorated"'] * 6
