"""Middleware: what an app puts around the attempts of its tasks, such as a span or a tenant."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NamedTuple

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
