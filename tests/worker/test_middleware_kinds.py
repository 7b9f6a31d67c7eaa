"""Middleware around handlers that wait for a slot: processes, batches, transactions."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from taskd import Cancel
from taskd.handlers import HandlerRaised, Item
from taskd.middleware import CallNext, middleware
from taskd.workflows import pipeline, stage
from tests.worker import process_app as app
from tests.worker.conftest import Desk, until


@dataclass
class Point:
    x: int


@pytest.mark.parametrize("kind", ["process", "batch", "transaction"])
async def test_slow_middleware_does_not_count_as_waiting_for_a_turn(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("taskd.worker.running.attempt_table.SLOT_WAIT_S", 0.5)
    calls = 0

    async def indexes(items: list[Item[Point]]) -> None: ...

    async def pays(ctx: Any, x: int) -> None: ...

    match kind:
        case "batch":
            work = desk.task(batch=1)(indexes)
        case "transaction":
            work = desk.task(transaction=True)(pays)
        case _:
            work = app.adds
            desk.registry.add(work)
    new = work.job(Point(1)) if kind == "batch" else work.job(1)
    (warm,) = await desk.enqueue(new)
    slow_now = asyncio.Event()

    @middleware(registry=desk.registry)
    async def slow(ctx: Any, call_next: CallNext) -> Any:
        nonlocal calls
        if slow_now.is_set():
            calls += 1
            await asyncio.sleep(1.0)
        return await call_next()

    await desk.start(process_slots=1)
    await desk.settled(warm)  # a process or a connection is there from now on
    slow_now.set()
    (job,) = await desk.enqueue(new)
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], calls) == ("done", 1, 1)


async def test_a_job_joins_its_batch_when_its_middleware_lets_it(desk: Desk) -> None:
    seen: list[list[int]] = []

    @middleware(registry=desk.registry)
    async def guard(ctx: Any, call_next: CallNext) -> Any:
        await asyncio.sleep(0.05)
        if ctx.job_id == refused:
            raise Cancel("not this one")
        return {"wrapped": await call_next()}

    @desk.task(batch=3, max_wait_s=0.3)
    async def index(items: list[Item[Point]]) -> list[int]:
        await asyncio.sleep(0)
        seen.append([item.args.x for item in items])
        return [item.args.x for item in items]

    ids = await desk.enqueue(*(index.job(Point(n)) for n in range(4)))
    refused = ids[1]
    # One place is enough: a job leaves it when it waits for its batch.
    worker = await desk.start(concurrency=1)
    rows = await desk.settled(*ids)
    assert [row["state"] for row in rows] == ["done", "cancelled", "done", "done"]
    assert [row["result"] for row in rows if row["result"]] == [
        '{"wrapped": 0}', '{"wrapped": 2}', '{"wrapped": 3}',
    ]  # fmt: skip
    assert sorted(x for batch in seen for x in batch) == [0, 2, 3]
    assert worker.worker.parts.runners[0].free > 0


async def test_a_batch_keeps_its_place_until_the_middleware_of_its_jobs_has_ended(
    desk: Desk,
) -> None:
    waiting: list[int] = []
    may_end = asyncio.Event()

    @middleware(registry=desk.registry)
    async def tail(ctx: Any, call_next: CallNext) -> Any:
        result = await call_next()
        waiting.append(ctx.job_id)
        await may_end.wait()
        return result

    @desk.task(batch=2, max_wait_s=0.0)
    async def index(items: list[Item[Point]]) -> None: ...

    ids = await desk.enqueue(*(index.job(Point(n)) for n in range(4)))
    worker = await desk.start(concurrency=1)
    await until(lambda: len(waiting) >= 1)
    runner = worker.worker.parts.runners[0]
    await until(lambda: runner.free <= 0)
    may_end.set()
    await desk.settled(*ids)
    await until(lambda: runner.free == 2 and runner.idle)


async def test_middleware_sees_what_a_handler_in_a_process_returns_and_raises(desk: Desk) -> None:
    seen: list[str] = []

    @middleware(registry=desk.registry)
    async def watches(ctx: Any, call_next: CallNext) -> Any:
        try:
            result = await call_next()
        except HandlerRaised as error:
            seen.append(str(error))
            raise
        return {"sum": result["sum"] + 1}

    for each in (app.adds, app.raises):
        desk.registry.add(each)
    ids = await desk.enqueue(
        app.adds.job(1), *(app.raises.job(word) for word in ("verdict", "rule"))
    )
    await desk.start(process_slots=1)
    added, cancelled, failed = await desk.settled(*ids)
    assert json.loads(added["result"]) == {"sum": 4}
    assert (cancelled["state"], cancelled["reason"]) == ("cancelled", "no longer wanted")
    assert (failed["state"], failed["reason"]) == ("failed", "KeyError: 'hopeless'")
    assert "process_app.py" in json.loads(failed["errors"])[0]["traceback"]
    assert sorted(seen) == ["KeyError: 'hopeless'", "no longer wanted"]


async def test_who_outlives_its_handler_costs_no_process_that_serves_another_job(
    desk: Desk, tmp_path: Path
) -> None:
    tails, may_end = asyncio.Event(), asyncio.Event()

    @middleware(tasks=["adds"], registry=desk.registry)
    async def deaf(ctx: Any, call_next: CallNext) -> Any:
        await call_next()
        tails.set()
        while not may_end.is_set():
            try:
                await may_end.wait()
            except asyncio.CancelledError:
                continue

    for each in (app.adds, app.waits_for_note):
        desk.registry.add(each)
    note = tmp_path / "note"
    (first,) = await desk.enqueue(replace(app.adds.job(1), timeout_s=5.0))
    await desk.start(process_slots=1, cancel_s=0.2)
    await tails.wait()
    (second,) = await desk.enqueue(app.waits_for_note.job(str(note)))
    await until(Path(f"{note}.begun").exists)
    await desk.emitted.wait("job.abandoned", job_id=first)
    note.touch()
    (row,) = await desk.settled(second)
    may_end.set()
    assert (row["state"], row["result"]) == ("done", '"found"')


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in middleware"])
@pytest.mark.parametrize(("to", "ended"), [("last", ("last", "7")), ("stop", ("steps", None))])
async def test_a_stage_in_a_process_names_the_next_one_or_ends_the_run(
    desk: Desk, to: str, ended: tuple[str, str | None], inside: bool
) -> None:
    for each in (app.steps, app.last):
        desk.registry.add(each)
    if inside:

        @middleware(registry=desk.registry)
        async def through(ctx: Any, call_next: CallNext) -> Any:
            return await call_next()

    line = pipeline("two", stage("steps", app.steps), stage("last", app.last), registry=None)
    run = await line.start(to=to, n=7, conn=desk.sql)
    worker = await desk.start(process_slots=1)
    wanted = 2 if to == "last" else 1
    await desk.emitted.wait("job.done", wanted)
    ids = [each["job_id"] for each in desk.emitted.of("job.done")]
    rows = await desk.settled(*ids)
    assert len(rows) == wanted
    assert rows[-1]["task"] == ended[0]
    assert rows[-1]["result"] == (ended[1] or '{"stopped": 7}')
    assert await worker.stop() == 0
    assert run.id


async def test_what_middleware_does_after_a_commit_changes_nothing(desk: Desk) -> None:
    @middleware(registry=desk.registry)
    async def broken(ctx: Any, call_next: CallNext) -> Any:
        await call_next()
        raise LookupError("after the commit")

    @desk.task(transaction=True)
    async def pays(ctx: Any) -> str:
        return "paid"

    (job,) = await desk.enqueue(pays.job())
    worker = await desk.start()
    (row,) = await desk.settled(job)
    await desk.emitted.wait("job.done", job_id=job)
    assert (row["state"], row["result"]) == ("done", '"paid"')
    assert await worker.stop() == 0
    assert worker.worker.report.jobs["retried"] == 0
