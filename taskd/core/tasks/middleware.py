"""Middleware: functions around the attempts of an app's tasks, for example to open a span."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

CallNext = Callable[[], Awaitable[Any]]
Around = Callable[[Any, CallNext], Awaitable[Any]]


class Middleware(NamedTuple):
    """A function that wraps attempts.

    Attributes:
        around: the function; it gets the context of the attempt and `call_next`.
        tasks: names of the tasks whose attempts the function wraps; if empty, it wraps all
            attempts.
    """

    around: Around
    tasks: frozenset[str] = frozenset()

    def fits(self, task: str) -> bool:
        """Return whether the function wraps the attempts of this task."""
        return not self.tasks or task in self.tasks


async def through(chain: Sequence[Around], ctx: Any, attempt: Coroutine[Any, Any, Any]) -> Any:
    """Run an attempt inside a chain of functions, the first of which is the outermost."""
    try:
        return await _call(chain, 0, ctx, attempt)
    finally:
        attempt.close()  # has an effect only if a middleware did not call call_next()


async def _call(
    chain: Sequence[Around], index: int, ctx: Any, attempt: Coroutine[Any, Any, Any]
) -> Any:
    if index == len(chain):
        return await attempt
    called = False

    async def call_next() -> Any:
        nonlocal called
        if called:
            raise RuntimeError("call_next() was called twice: an attempt runs once")
        called = True
        return await _call(chain, index + 1, ctx, attempt)

    return await chain[index](ctx, call_next)
