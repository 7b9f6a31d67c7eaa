"""Handlers that do what they should not: each harms its own job and nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from taskd.core.jobs.backoff import Fixed
from taskd.core.outcomes.results import RESULT_BYTES_MAX
from taskd.store.connections.error_translation import first_line
from taskd.worker.running import attempt_table
from tests.worker.conftest import Desk, until

NOW = Fixed(0.01)
leak: contextvars.ContextVar[str] = contextvars.ContextVar("leak", default="clean")


class Odd(BaseException):
    """No Exception at all."""


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


def chain(length: int) -> Exception:
    error: Exception = ValueError("the first")
    for number in range(length):
        following = ValueError(f"link {number}")
        following.__cause__, error = error, following
    return error


class Liar(Exception):
    """An object whose __class__ raises SystemExit."""

    @property
    def __class__(self) -> Any:
        raise SystemExit(3)

    @__class__.setter
    def __class__(self, kind: Any) -> None:
        """As mypy wants it."""


class Text(str):
    """A string whose methods raise."""

    __slots__ = ()

    def replace(self, *_: Any) -> str:
        raise KeyboardInterrupt


class SaysOddly(Exception):
    def __str__(self) -> str:
        return Text("odd")


RAISED: dict[str, Callable[[], BaseException]] = {
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "GeneratorExit": GeneratorExit,
    "StopIteration": lambda: StopIteration(1),
    "StopAsyncIteration": StopAsyncIteration,
    "CancelledError": asyncio.CancelledError,
    "BaseException": lambda: Odd("odd"),
    "BaseExceptionGroup": lambda: BaseExceptionGroup("many", [Odd(), ValueError()]),
    "unspeakable": Unspeakable,
    "chain": lambda: chain(2000),
    "liar": Liar,
    "odd text": SaysOddly,
    "NUL": lambda: ValueError("before\x00after\\u0000"),
    "surrogate": lambda: ValueError("\ud800"),
    "huge": lambda: ValueError("x" * 3_000_000),
}


def oddity(kind: str) -> BaseException:
    return RAISED[kind]()


async def raises_itself(kind: str) -> None:
    raise oddity(kind)


async def raises_after_waiting(kind: str) -> None:
    await asyncio.sleep(0.001)
    raise oddity(kind)


async def awaits_a_future_that_raises(kind: str) -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    if kind == "StopIteration":  # no future can hold it
        raise oddity(kind)
    asyncio.get_running_loop().call_soon(future.set_exception, RAISED[kind]())
    await future


def raises_in_a_thread(kind: str) -> None:
    raise oddity(kind)


async def cancels_itself() -> None:
    task = asyncio.current_task()
    assert task
    task.cancel()


async def cancels_itself_and_waits() -> None:
    task = asyncio.current_task()
    assert task
    task.cancel()
    await asyncio.sleep(10)


async def task_group_fails() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.sleep(10))
        group.create_task(raises_itself("NUL"))


async def times_out_inside() -> str:
    try:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(10)
    except TimeoutError:
        return "timed out inside"
    return "not"


async def leaks_a_context() -> None:
    leak.set("dirty")
    await asyncio.sleep(0)
    leak.set("dirtier")


async def leaks_a_context_at_once() -> None:
    leak.set("dirty")


async def leaks_tasks() -> None:
    for _ in range(3):
        asyncio.create_task(asyncio.sleep(0.5))  # noqa: RUF006 - it leaks
    await asyncio.sleep(0)


async def yields_nonsense() -> None:
    class Nonsense:
        def __await__(self) -> Any:
            yield 42

    await Nonsense()


async def changes_its_task_later() -> None:
    task = asyncio.current_task()
    assert task
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.05, task.cancel)


async def recurses() -> None:
    def deeper() -> None:
        deeper()

    deeper()


async def ignores_generator_exit() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.set_exception, GeneratorExit())
    try:
        await future
    finally:
        await asyncio.sleep(0)


HOSTILE = {
    cancels_itself: "done", cancels_itself_and_waits: "failed", task_group_fails: "failed",
    times_out_inside: "done", leaks_a_context: "done", leaks_a_context_at_once: "done",
    leaks_tasks: "done", yields_nonsense: "failed", changes_its_task_later: "done",
    recurses: "failed", ignores_generator_exit: "failed",
}  # fmt: skip


def leaks_in_a_thread() -> None:
    assert leak.get() == "clean"
    leak.set("dirty")


async def test_the_hostile_mix_ends_once_and_harms_no_other_job(desk: Desk) -> None:
    dirty: list[str] = []

    @desk.task()
    async def canary(wait: bool) -> None:
        task = asyncio.current_task()
        assert task
        if task.cancelling() or leak.get() != "clean":
            dirty.append(f"{task.cancelling()} {leak.get()}")
        if wait:
            await asyncio.sleep(0.001)
        if leak.get() != "clean":
            dirty.append(leak.get())

    expected: list[tuple[Any, str]] = []
    for raiser in (
        raises_itself,
        raises_after_waiting,
        awaits_a_future_that_raises,
        raises_in_a_thread,
    ):
        made = desk.task(max_attempts=1)(raiser)
        expected += [(made.job(kind), "failed") for kind in RAISED] * 3
    for handler, ends in (HOSTILE | {leaks_in_a_thread: "done"}).items():
        expected += [(desk.task(max_attempts=1)(handler).job(), ends)] * 5
    expected += [(canary.job(n % 2 == 0), "done") for n in range(600)]
    random.Random(7).shuffle(expected)
    ids = await desk.enqueue(*(job for job, _ in expected))
    worker = await desk.start(concurrency=20)
    rows = await desk.settled(*ids)
    assert [(row["task"], row["state"]) for row in rows] == [
        (job.task, end) for job, end in expected
    ]
    assert {row["attempt"] for row in rows} == {1}
    assert not dirty
    ends = Counter(
        had["job_id"] for name in ("job.done", "job.failed") for had in desk.emitted.of(name)
    )
    assert ends == dict.fromkeys(ids, 1)
    for name in ("service.crashed", "job.outcome_refused", "job.lost", "job.abandoned"):
        assert not desk.emitted.of(name)
    # The worker is as good as new.
    (last,) = await desk.enqueue(canary.job(True))
    await desk.settled(last)
    await until(lambda: all(runner.idle for runner in worker.worker.parts.runners))
    assert await worker.stop() == 0


async def test_what_a_refused_text_would_be_is_described(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def raising(kind: str) -> None:
        raise oddity(kind)

    ids = dict(zip(RAISED, await desk.enqueue(*map(raising.job, RAISED)), strict=True))
    await desk.start()
    rows = {row["id"]: row for row in await desk.settled(*ids.values())}
    errors = {kind: json.loads(rows[job]["errors"])[0] for kind, job in ids.items()}
    assert errors["NUL"]["message"] == "before\u2400after\\u0000"
    assert errors["surrogate"]["message"] == "\\ud800"
    assert errors["unspeakable"]["message"] == "(its message could not be formatted)"
    assert errors["StopIteration"]["type"] == "RuntimeError"
    assert errors["CancelledError"]["type"] == "CancelledError"
    assert all(len(json.dumps(error)) < 4700 for error in errors.values())


async def test_a_timeout_ends_the_attempt_and_is_retried(desk: Desk) -> None:
    @desk.task(timeout_s=0.1, max_attempts=2, backoff=NOW)
    async def slow(ctx: Any) -> str:
        if ctx.attempt == 1:
            await asyncio.sleep(60)
        return "second"

    @desk.task(timeout_s=0.1, max_attempts=1)
    async def returns_when_told() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return

    one, two = await desk.enqueue(slow.job(), returns_when_told.job())
    await desk.start()
    first, second = await desk.settled(one, two)
    assert (first["state"], first["attempt"]) == ("done", 2)
    assert json.loads(first["errors"])[0]["message"] == "the attempt took longer than 0.1 s"
    # Our own flag decides, not what the handler made of the cancellation.
    assert (second["state"], second["reason"]) == (
        "failed",
        "TimedOut: the attempt took longer than 0.1 s",
    )


async def test_who_ignores_the_cancellation_is_abandoned_and_not_run_again_beside_it(
    desk: Desk,
) -> None:
    release = asyncio.Event()
    starts: list[float] = []

    @desk.task(timeout_s=0.1, backoff=NOW)
    async def swallows(ctx: Any) -> None:
        starts.append(time.monotonic())
        if ctx.attempt > 1:
            return
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    @desk.task()
    async def quick() -> None: ...

    (job,) = await desk.enqueue(swallows.job())
    try:
        worker = await desk.start(concurrency=1, cancel_s=0.2)
        (left,) = await desk.emitted.wait("job.abandoned", job_id=job, why="timeout")
        assert "swallows" in left["stack"]
        # Its place is free again.
        (other,) = await desk.enqueue(quick.job())
        await desk.settled(other)
        # Due again, it waits until the abandoned attempt has ended, and uses no attempt.
        await desk.state(job, "queued")
        (other,) = await desk.enqueue(quick.job())
        await desk.settled(other)
        row = await desk.state(job, "queued")
        assert (row["attempt"], len(starts)) == (1, 1)
        release.set()
        (row,) = await desk.settled(job)
        assert (row["state"], len(starts)) == ("done", 2)
        # An abandoned attempt that has ended does not change the exit code.
        assert await worker.stop() == 0
    finally:
        release.set()


async def test_a_thread_that_takes_too_long_is_abandoned(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    @desk.task(timeout_s=0.1, max_attempts=1)
    def stuck() -> None:
        release.wait(60)

    @desk.task()
    def fine() -> int:
        return 1

    @desk.task(max_attempts=1, timeout_s=0.2)
    def waits_for_a_thread() -> None: ...

    (job,) = await desk.enqueue(stuck.job())
    try:
        worker = await desk.start(cancel_s=0.2, threads=1)
        (row,) = await desk.settled(job)
        assert (
            row["reason"]
            == "TimedOut: the attempt took longer than 0.1 s and ignored its cancellation"
        )
        # The only thread is still busy with it. Waiting for one is no time of the attempt, and
        # a job that waits long is released, for a worker that has a thread.
        monkeypatch.setattr(attempt_table, "SLOT_WAIT_S", 0.5)
        (late,) = await desk.enqueue(waits_for_a_thread.job())
        await until(lambda: worker.worker.parts.counts["released"] >= 2)
    finally:
        release.set()
    (row,) = await desk.settled(late)
    assert (row["state"], row["attempt"]) == ("done", 1)
    (job,) = await desk.enqueue(fine.job())
    (row,) = await desk.settled(job)
    assert row["state"] == "done"
    assert await worker.stop() == 0


async def test_a_plain_function_that_ends_well_just_after_its_deadline_is_done(desk: Desk) -> None:
    runs: list[int] = []

    @desk.task(timeout_s=0.1)
    def nearly() -> str:
        runs.append(1)
        time.sleep(0.3)
        return "done all the same"

    (job,) = await desk.enqueue(nearly.job())
    worker = await desk.start(cancel_s=5.0)
    (row,) = await desk.settled(job)
    assert (row["state"], row["result"], len(runs)) == ("done", '"done all the same"', 1)
    assert await worker.stop() == 0


async def test_results_at_the_limit_and_errors_of_errors(desk: Desk) -> None:
    @desk.task()
    async def large(size: int) -> str:
        return "x" * size

    @desk.task(max_attempts=1)
    async def deep() -> Any:
        nested: list[Any] = []
        for _ in range(sys.getrecursionlimit() * 3):
            nested = [nested]
        return nested

    fits, over, odd = await desk.enqueue(
        large.job(RESULT_BYTES_MAX - 2), large.job(RESULT_BYTES_MAX - 1), deep.job()
    )
    await desk.start()
    rows = await desk.settled(fits, over, odd)
    assert [row["state"] for row in rows] == ["done"] * 3
    assert len(rows[0]["result"]) == RESULT_BYTES_MAX
    assert rows[1]["result"] is rows[2]["result"] is None
    assert "it takes 262,145 bytes" in rows[1]["reason"]
    assert "nested too deeply" in rows[2]["reason"]
    assert first_line(ValueError("a\nb")) == "a"


@pytest.mark.parametrize("limit", [1, 3])
async def test_no_more_than_the_limit_runs_at_the_same_time(desk: Desk, limit: int) -> None:
    running, most = 0, 0

    @desk.task()
    async def counts(ms: int) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(ms / 1000)
        running -= 1

    ids = await desk.enqueue(*(counts.job(n % 4) for n in range(60)))
    await desk.start(concurrency=limit)
    await desk.settled(*ids)
    assert most == limit
