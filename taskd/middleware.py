"""`@middleware`: functions that an app runs around the attempts of its tasks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import partial
from typing import Any

from taskd.core.tasks.middleware import Around, CallNext, Middleware
from taskd.core.tasks.registry import DEFAULT, Registry

__all__ = ["CallNext", "middleware"]


def middleware(
    around: Around | None = None, *, tasks: Iterable[str] = (), registry: Registry = DEFAULT
) -> Any:
    """Register `async def around(ctx, call_next)` for the attempts of all tasks, or of some.

    `await call_next()` runs the next middleware, or the handler, and returns its result. The
    return value of `around` is the result of the attempt. An exception from `around` ends the
    attempt in the same way as an exception from the handler. The middleware that was registered
    first is the outermost. Middleware runs on the event loop, in the attempt's context and under
    its timeout, even if the handler is a plain function in a thread.

    Args:
        around: the middleware.
        tasks: names of the tasks; empty: all tasks.
        registry: where the middleware is registered.

    Raises:
        TypeError: `around` is not an `async def` with two parameters.
    """
    if isinstance(tasks, str):
        raise TypeError(f"middleware: tasks {tasks!r} is a text; write tasks=[{tasks!r}]")
    if around is None:
        return partial(middleware, tasks=tuple(tasks), registry=registry)
    _check(around)
    registry.add_middleware(Middleware(around, frozenset(tasks)))
    return around


def _check(around: Any) -> None:
    name = getattr(around, "__name__", repr(around))
    if not inspect.iscoroutinefunction(around):
        raise TypeError(f"middleware {name}: write `async def {name}(ctx, call_next)`")
    try:
        inspect.signature(around).bind(None, None)
    except TypeError:
        raise TypeError(f"middleware {name}: it must take ctx and call_next") from None
