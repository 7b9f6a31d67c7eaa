"""Batch handlers: gathered jobs, one outcome for each, one place and one time limit for all."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest

from taskd import Cancel, Fixed, Retry, Task, task
from taskd.core.jobs.job import NewJob
from taskd.core.tasks import handler_kind
from taskd.core.tasks.registry import Registry
from taskd.errors import InvalidArgs
from taskd.handlers import Item
from taskd.store.jobs import jobs
from tests.worker.conftest import Desk, until

NOW = Fixed(0.01)


@dataclass
class Doc:
    id: int
    tags: list[str] = field(default_factory=list)


class Point(msgspec.Struct):
    x: int
    y: int = 0


async def test_jobs_are_handed_over_together_with_their_arguments_and_contexts(desk: Desk) -> None:
    seen: list[list[Any]] = []

    @desk.task(batch=3, max_wait_s=2.0)
    async def index(items: list[Item[Doc]]) -> None:
        await asyncio.sleep(0)
        seen.append([(item.args, item.ctx.job_id, item.ctx.attempt) for item in items])

    ids = await desk.enqueue(*(index.job(Doc(n, ["a"])) for n in range(6)))
    worker = await desk.start(concurrency=1)
    rows = await desk.settled(*ids)
    assert [row["state"] for row in rows] == ["done"] * 6
    made = [(Doc(n, ["a"]), job, 1) for n, job in enumerate(ids)]
    assert seen == [made[:3], made[3:]]
    assert worker.worker.report.jobs["done"] == 6


async def test_what_does_not_fill_a_batch_waits_for_its_time_only(desk: Desk) -> None:
    sizes: list[int] = []

    @desk.task(batch=100, max_wait_s=0.1)
    async def index(items: list[Item[Point]]) -> None:
        sizes.append(len(items))

    await desk.start()
    began = time.monotonic()
    ids = await desk.enqueue(index.job(Point(1)), NewJob("index", '{"x": 2}', "default"))
    await desk.settled(*ids)
    assert sizes == [2]
    assert time.monotonic() - began >= 0.1


async def test_each_job_has_an_outcome_of_its_own(desk: Desk) -> None:
    @desk.task(batch=4, max_wait_s=0.2, backoff=NOW, max_attempts=2)
    async def index(items: list[Item[Point]]) -> list[Any]:
        said: list[Any] = []
        for item in items:
            match item.args.x:
                case 0:
                    said.append(None)
                case 1:
                    said.append({"x": 1})
                case 2:
                    said.append(Cancel("not wanted"))
                case _:
                    said.append(ValueError("odd") if item.ctx.attempt == 1 else None)
        return said

    ids = await desk.enqueue(*(index.job(Point(n)) for n in range(4)))
    await desk.start()
    none, result, cancelled, retried = await desk.settled(*ids)
    assert (none["state"], none["result"]) == ("done", None)
    assert (result["state"], json.loads(result["result"])) == ("done", {"x": 1})
    assert (cancelled["state"], cancelled["reason"]) == ("cancelled", "not wanted")
    assert (retried["state"], retried["attempt"]) == ("done", 2)
    assert [each["message"] for each in json.loads(retried["errors"])] == ["odd"]


@pytest.mark.parametrize("how", ["raises", "verdict", "exits", "short", "odd", "cancelled"])
async def test_a_handler_that_fails_fails_them_all_each_by_its_own_attempts(
    desk: Desk, how: str
) -> None:
    @desk.task(batch=2, max_wait_s=2.0, backoff=NOW, max_attempts=2)
    async def index(items: list[Item[Point]]) -> Any:
        await asyncio.sleep(0)
        if how == "raises":
            raise ValueError("all of them")
        if how == "verdict":
            raise Retry(0.01, "later")
        if how == "exits":
            raise SystemExit(3)
        if how == "cancelled":
            raise asyncio.CancelledError
        return [None] if how == "short" else "done"

    ids = await desk.enqueue(index.job(Point(0)), index.job(Point(1)))
    await desk.start()
    rows = await desk.settled(*ids)
    assert [(row["state"], row["attempt"]) for row in rows] == [("failed", 2)] * 2
    reasons = {
        "raises": "ValueError: all of them",
        "verdict": "Retry: later",
        "exits": "SystemExit: 3",
        "short": "TypeError: a batch handler returns None or a list of 2 outcomes, not 1 outcomes",
        "odd": "TypeError: a batch handler returns None or a list of 2 outcomes, not <class 'str'>",
        "cancelled": "CancelledError: CancelledError",
    }
    assert rows[0]["reason"] in (reasons[how], "CancelledError: ")
    if how == "raises":
        for row in rows:
            trace = json.loads(row["errors"])[0]["traceback"]
            assert trace.count("test_batch.py") == 1


async def test_arguments_that_do_not_fit_delay_their_job_and_no_other(desk: Desk) -> None:
    @desk.task(batch=2, max_wait_s=0.05, max_attempts=1)
    async def index(items: list[Item[Point]]) -> None: ...

    odd, good = await desk.enqueue(NewJob("index", '{"x": "one"}', "default"), index.job(Point(1)))
    await desk.start()
    (done,) = await desk.settled(good)
    assert done["state"] == "done"
    assert "ArgsDoNotFit" in (await desk.state(odd, "scheduled"))["errors"]


async def test_a_batch_has_one_time_limit(desk: Desk) -> None:
    lengths: list[int] = []

    @desk.task(batch=3, max_wait_s=0.5, timeout_s=0.2, max_attempts=1)
    async def index(items: list[Item[Point]]) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            lengths.append(len(items))
            await asyncio.sleep(0.05)  # to clean up; it is not cancelled again
            lengths.append(0)
            raise

    ids = await desk.enqueue(*(index.job(Point(n)) for n in range(3)))
    await desk.start()
    rows = await desk.settled(*ids)
    assert {row["reason"] for row in rows} == {"TimedOut: the attempt took longer than 0.2 s"}
    assert lengths == [3, 0]


async def test_a_batch_takes_one_place_and_frees_it_when_it_is_abandoned(desk: Desk) -> None:
    running = most = 0
    stuck = asyncio.Event()

    @desk.task(batch=10, max_wait_s=0.1, timeout_s=0.2, max_attempts=1, queue="q")
    async def hangs(items: list[Item[Point]]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if items[0].args.x == 0:
            while not stuck.is_set():
                try:
                    await stuck.wait()
                except asyncio.CancelledError:
                    running -= 1
        else:
            await asyncio.sleep(0.01)
            running -= 1

    [*first] = await desk.enqueue(*(replace(hangs.job(Point(0)), priority=1) for _ in range(10)))
    [*others] = await desk.enqueue(*(hangs.job(Point(1)) for _ in range(30)))
    worker = await desk.start(concurrency=1, cancel_s=0.2)
    rows = await desk.settled(*first, *others)
    assert [row["state"] for row in rows] == ["failed"] * 10 + ["done"] * 30
    assert most == 1
    assert worker.worker.parts.runners[0].abandoned == 10
    stuck.set()
    await until(lambda: worker.worker.parts.runners[0].abandoned == 0)
    assert worker.worker.parts.runners[0].idle


async def test_a_cancelled_job_is_marked_and_the_others_go_on(desk: Desk) -> None:
    begun, marked = asyncio.Event(), asyncio.Event()

    @desk.task(batch=2, max_wait_s=2.0)
    async def index(items: list[Item[Point]]) -> list[Any]:
        begun.set()
        while not any(item.cancel_requested for item in items):
            await asyncio.sleep(0.01)
        marked.set()
        return [Cancel("left out") if item.cancel_requested else None for item in items]

    one, two = await desk.enqueue(index.job(Point(0)), index.job(Point(1)))
    worker = await desk.start(cancel_s=30.0)
    await begun.wait()
    await jobs.cancel(desk.lane, [one], "by hand")
    worker.worker.parts.runners[0].cancel_job(one, "by hand")
    first, second = await desk.settled(one, two)
    assert (first["state"], second["state"]) == ("cancelled", "done")


async def test_a_stop_gives_back_what_is_gathered_and_lets_a_batch_end(desk: Desk) -> None:
    begun, may_end = asyncio.Event(), asyncio.Event()

    @desk.task(batch=2, max_wait_s=3.0)
    async def index(items: list[Item[Point]]) -> None:
        begun.set()
        await may_end.wait()

    ids = await desk.enqueue(*(index.job(Point(n)) for n in range(3)))
    worker = await desk.start(drain_s=20.0)
    await begun.wait()
    await until(lambda: worker.worker.parts.runners[0].has_job(ids[2]))
    stopping = asyncio.create_task(worker.stop())
    row = await desk.state(ids[2], "queued")
    assert (row["attempt"], row["interrupts"]) == (0, 0)
    may_end.set()
    assert await stopping == 0
    assert [row["state"] for row in await desk.settled(*ids[:2])] == ["done"] * 2


async def test_a_stop_that_cancels_a_batch_gives_all_of_it_back(desk: Desk) -> None:
    begun = asyncio.Event()

    @desk.task(batch=2, max_wait_s=2.0)
    async def index(items: list[Item[Point]]) -> None:
        begun.set()
        await asyncio.sleep(60)

    ids = await desk.enqueue(*(index.job(Point(n)) for n in range(2)))
    worker = await desk.start(drain_s=0.05)
    await begun.wait()
    assert await worker.stop() == 0
    for job in ids:
        row = await desk.row(job)
        assert (row["state"], row["attempt"], row["interrupts"]) == ("queued", 0, 1)


async def test_each_job_can_be_completed_in_a_transaction(desk: Desk, other: Any) -> None:
    @desk.task(batch=2, max_wait_s=2.0)
    async def books(items: list[Item[Point]]) -> None:
        async with other.transaction():
            await other.execute("CREATE TABLE effect ()")
            for item in items:
                await item.ctx.complete(other, item.args.x)

    ids = await desk.enqueue(books.job(Point(5)), books.job(Point(6)))
    await desk.start()
    assert [row["result"] for row in await desk.settled(*ids)] == ["5", "6"]


async def test_other_jobs_of_the_queue_do_not_wait_for_a_batch(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_kind, "MAX_WAIT_S_MAX", 60.0)  # longer than this test

    @desk.task(batch=50, max_wait_s=60.0)
    async def index(items: list[Item[Point]]) -> int: ...

    @desk.task()
    async def plain() -> None: ...

    gathered, *ids = await desk.enqueue(index.job(Point(0)), *(plain.job() for _ in range(30)))
    await desk.start(concurrency=1)
    await desk.settled(*ids)
    assert (await desk.row(gathered))["state"] == "running"


def test_what_is_no_batch_handler_is_refused() -> None:
    async def two(items: list[Item[Doc]], n: int) -> None: ...

    async def plain(items: list[Doc]) -> None: ...

    async def number(items: list[Item[int]]) -> None: ...

    async def with_context(ctx: Any, items: list[Item[Doc]]) -> None: ...

    def blocks(items: list[Item[Doc]]) -> None: ...

    for handler, said in (
        (two, r"write `async def two\(items: list\[Item\["),
        (plain, r"write `async def plain\(items: list\[Item\["),
        (number, "a dataclass or a msgspec.Struct"),
        (with_context, "ctx of its own"),
        (blocks, "`async def`"),
    ):
        with pytest.raises(TypeError, match=said):
            Task(handler, batch=5)
    for wrong in ({"batch": 0}, {"batch": 5, "max_wait_s": 9}):
        with pytest.raises(ValueError, match="is not"):
            task(registry=Registry(), **wrong)(number)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="exclude each other"):
        task(registry=Registry(), batch=5, transaction=True)(number)  # type: ignore[call-overload]


def test_one_job_has_the_arguments_of_its_class() -> None:
    async def index(items: list[Item[Doc]]) -> None: ...

    made = task(batch=5, registry=Registry())(index)
    assert made.job(Doc(1)).args == '{"id":1,"tags":[]}'
    assert made.item('{"id":1}') == Doc(1, [])
    assert json.loads(made.args_schema)["required"] == ["id"]
    with pytest.raises(InvalidArgs, match="the argument must be a Doc, not a Point"):
        made.job(Point(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgs, match="Expected `int`"):
        made.job(Doc("one"))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgs, match="unknown field"):
        made.item('{"id":1,"more":2}')
