"""Hooks: they run in the thread or process of a handler, before and after it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from taskd import Cancel, Fixed
from taskd.core.tasks.hooks import Hook, call_inside
from taskd.core.tasks.registry import Registry
from taskd.errors import ConfigError
from taskd.middleware import in_thread
from tests.worker import borders_app as app
from tests.worker.conftest import Desk

NOW = Fixed(0.01)


def hooks_of(story: list[Any], *names: str) -> list[Hook]:
    def made(name: str) -> Hook:
        def hook() -> Iterator[None]:
            story.append(f"before {name}")
            error = yield
            story.append(f"after {name}: {error!r}")

        return hook

    return [made(name) for name in names]


def test_the_first_hook_is_the_outermost_and_learns_of_the_error() -> None:
    story: list[Any] = []
    hooks = hooks_of(story, "one", "two")
    assert call_inside(hooks, lambda: "result") == "result"
    assert story == ["before one", "before two", "after two: None", "after one: None"]
    story.clear()
    with pytest.raises(KeyError):
        call_inside(hooks, lambda: {}["x"])
    assert story[2:] == ["after two: KeyError('x')", "after one: KeyError('x')"]


@pytest.mark.parametrize("error", [StopIteration("own"), SystemExit(3), Cancel("no")])
def test_the_exception_of_the_handler_has_precedence_over_those_of_hooks(
    error: BaseException,
) -> None:
    story: list[Any] = []

    def breaks() -> Iterator[None]:
        yield
        raise OSError("the server is gone")

    def handler() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        call_inside([*hooks_of(story, "outer"), breaks], handler)
    assert raised.value is error
    assert error.__notes__ == ["also, the hook breaks raised OSError: the server is gone"]
    assert len(story) == 2


def test_an_exception_of_a_hook_fails_the_call() -> None:
    story: list[Any] = []

    def refuses() -> Iterator[None]:
        raise LookupError("no connection")
        yield

    def breaks() -> Iterator[None]:
        yield
        raise OSError("the server is gone")

    with pytest.raises(LookupError):
        call_inside([*hooks_of(story, "outer"), refuses], lambda: story.append("handler"))
    assert story == ["before outer", "after outer: LookupError('no connection')"]
    with pytest.raises(OSError, match="the server is gone"):
        call_inside([breaks], lambda: story.append("handler"))
    assert story[-1] == "handler"


@pytest.mark.parametrize("times", [0, 2])
def test_a_hook_yields_once(times: int) -> None:
    def hook() -> Iterator[None]:
        yield from [None] * times

    with pytest.raises(RuntimeError, match="the hook hook must yield exactly once"):
        call_inside([hook], lambda: None)


def test_what_cannot_be_a_hook_is_refused() -> None:
    async def runs_on_the_loop() -> Any:
        yield

    def takes_an_argument(ctx: Any) -> Iterator[None]:
        yield

    def no_generator() -> None: ...

    for each in (runs_on_the_loop, takes_an_argument, no_generator):
        with pytest.raises(TypeError, match=f"hook {each.__name__}: write `def"):
            in_thread(each)  # type: ignore[arg-type,type-var]
    with pytest.raises(TypeError, match=r"write tasks=\['one'\]"):
        in_thread(tasks="one")


async def test_hooks_run_in_the_thread_of_each_plain_function_and_of_no_other(
    desk: Desk,
) -> None:
    story: list[Any] = []

    @in_thread(registry=desk.registry)
    def hook() -> Iterator[None]:
        story.append(("before", threading.current_thread().name))
        error = yield
        story.append(("after", threading.current_thread().name, repr(error)))

    @in_thread(tasks=["other"], registry=desk.registry)
    def for_another() -> Iterator[None]:
        story.append("never")
        yield

    @desk.task(max_attempts=1)
    def works(fails: bool) -> None:
        story.append(("handler", threading.current_thread().name))
        if fails:
            raise ValueError("it failed")

    @desk.task()
    async def on_the_loop() -> None: ...

    (first,) = await desk.enqueue(on_the_loop.job())
    await desk.start(threads=1)
    await desk.settled(first)
    assert story == []
    for fails in (False, True):
        (job,) = await desk.enqueue(works.job(fails))
        (row,) = await desk.settled(job)
        assert row["state"] == ("failed" if fails else "done")
    (thread,) = {each[1] for each in story}
    assert thread.startswith("taskd-job")
    assert [each[0] for each in story] == ["before", "handler", "after"] * 2
    assert [each[2] for each in story if each[0] == "after"] == ["None", "ValueError('it failed')"]


async def test_hooks_run_in_the_process_of_a_handler(desk: Desk) -> None:
    (job,) = await desk.enqueue(app.in_hook.job())
    await desk.start(app.REGISTRY, process_slots=1)
    (row,) = await desk.settled(job)
    assert row["result"] == '"before the handler"'
    (after,) = await desk.enqueue(app.after_hook.job())
    (row,) = await desk.settled(after)
    assert row["result"] == '["None"]'


async def test_a_hook_that_a_process_cannot_find_is_refused_at_the_start(desk: Desk) -> None:
    registry = Registry()
    registry.add(app.in_process)

    @in_thread(registry=registry)
    def local() -> Iterator[None]:
        yield

    with pytest.raises(ConfigError, match=r"hook .*local: the process of task in_process must"):
        desk.worker(registry)
    limited = Registry()
    limited.add(app.in_process)
    in_thread(tasks=["other"], registry=limited)(local)
    desk.worker(limited)


async def test_the_timeout_of_a_process_includes_its_hooks(desk: Desk) -> None:
    began = time.monotonic()
    (job,) = await desk.enqueue(app.slow_hook.job())
    await desk.start(app.REGISTRY, process_slots=1, cancel_s=30.0)
    (row,) = await desk.settled(job)
    assert "TimedOut" in row["reason"]
    assert time.monotonic() - began < 25


async def test_a_scoped_session_of_sqlalchemy_is_new_for_each_job_even_after_an_outage(
    desk: Desk,
) -> None:
    url = desk.dsn.replace("postgresql://", "postgresql+psycopg://")
    engine = create_engine(url)
    session: scoped_session[Session] = scoped_session(sessionmaker(engine))

    @in_thread(registry=desk.registry)
    def remove_session() -> Iterator[None]:
        yield
        session.remove()

    @desk.task(max_attempts=1)
    def asks(sql: str) -> Any:
        return session.scalar(text(sql))

    try:
        await desk.start(threads=1)
        results = []
        for sql in ("SELECT 1/0", "SELECT 1", "SELECT pg_terminate_backend(pg_backend_pid())",
                    "SELECT 2"):  # fmt: skip
            (job,) = await desk.enqueue(asks.job(sql))
            (row,) = await desk.settled(job)
            results.append((row["state"], row["result"]))
        assert results == [("failed", None), ("done", "1"), ("failed", None), ("done", "2")]
    finally:
        await asyncio.to_thread(engine.dispose)
