"""Middleware: what an app puts around the attempts of its tasks, such as a span or a tenant."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from taskd.core.registry import DEFAULT, Registry

CallNext = Callable[[], Awaitable[Any]]
Around = Callable[[Any, CallNext], Awaitable[Any]]


class Middleware(NamedTuple):
    """A function that goes around attempts.

    Attributes:
        tasks: names of the tasks that it goes around; none: all of them.
    """

    around: Around
    tasks: frozenset[str] = frozenset()

    def fits(self, task: str) -> bool:
        """Whether it goes around the attempts of this task."""
        return not self.tasks or task in self.tasks


def middleware(
    around: Around | None = None, *, tasks: Iterable[str] = (), registry: Registry = DEFAULT
) -> Any:
    """Register `async def around(ctx, call_next)` for the attempts of all tasks, or of some.

    `await call_next()` runs what is inside, in the end the handler, and returns what that returns;
    what `around` returns is the attempt's result, and what it raises is what the attempt raised.
    The first that was registered is the outermost one. It runs in the attempt's own context and
    under its deadline, on the event loop, also around a plain function that runs in a thread.

    Args:
        around: the function.
        tasks: names of the tasks; none: all of them.
        registry: where it is registered.

    Raises:
        TypeError: it is no `async def` with two parameters.
    """
    if isinstance(tasks, str):
        raise TypeError(f"middleware: tasks {tasks!r} is a text; write tasks=[{tasks!r}]")
    if around is None:
        return partial(middleware, tasks=tuple(tasks), registry=registry)
    _check(around)
    registry.add_middleware(Middleware(around, frozenset(tasks)))
    return around


async def through(chain: Sequence[Around], ctx: Any, attempt: Coroutine[Any, Any, Any]) -> Any:
    """Run an attempt inside of the chain, its first function outermost."""
    try:
        return await _call(chain, 0, ctx, attempt)
    finally:
        attempt.close()  # if nobody has called it; one that was awaited has ended


async def _call(
    chain: Sequence[Around], place: int, ctx: Any, attempt: Coroutine[Any, Any, Any]
) -> Any:
    if place == len(chain):
        return await attempt
    called = False

    async def call_next() -> Any:
        nonlocal called
        if called:
            raise RuntimeError("call_next() was called twice: an attempt runs once")
        called = True
        return await _call(chain, place + 1, ctx, attempt)

    return await chain[place](ctx, call_next)


def _check(around: Any) -> None:
    name = getattr(around, "__name__", repr(around))
    if not inspect.iscoroutinefunction(around):
        raise TypeError(f"middleware {name}: write `async def {name}(ctx, call_next)`")
    try:
        inspect.signature(around).bind(None, None)
    except TypeError:
        raise TypeError(f"middleware {name}: it takes ctx and call_next") from None
