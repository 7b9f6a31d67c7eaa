"""Unfinished results: a coroutine, a future, or a generator that a handler has returned.

A forgotten `await`, or a plain decorator around an `async def` handler, returns a coroutine that
has not started. The job must not count as done before this coroutine has ended.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import AsyncGenerator, Awaitable, Generator
from typing import Any

# Most results have one of these types. The check for these types is much cheaper than the checks
# for other types.
_PLAIN = frozenset({bool, bytes, dict, float, int, list, str, tuple})
_UNFINISHED = (Awaitable, Generator, AsyncGenerator, concurrent.futures.Future)


def is_unfinished(value: Any) -> bool:
    """Return whether a value that a handler returned stands for work that has not been done."""
    kind = type(value)
    return kind not in _PLAIN and issubclass(kind, _UNFINISHED)


async def finished(value: Any) -> Any:
    """Await a returned value, then its result if that is awaitable too, and so on.

    Raises:
        TypeError: the value is a generator, over which nothing iterates.
    """
    while is_unfinished(value):
        if isinstance(value, concurrent.futures.Future):
            value = await asyncio.wrap_future(value)
        elif isinstance(value, Awaitable):
            value = await value
        else:
            raise TypeError(
                f"the handler returned {_described(value)}, over which nothing iterates, so its "
                "body has not run; return its items as a list"
            )
    return value


def refuse_unfinished(value: Any) -> None:
    """Check the value that a handler with process=True has returned.

    Raises:
        TypeError: an event loop would have to await the value, or it is a generator.
    """
    if is_unfinished(value):
        described = _described(value)
        if asyncio.iscoroutine(value):
            value.close()
        raise TypeError(
            f"the handler returned {described}, which nothing runs in a process without an event "
            "loop; return the result, for example that of asyncio.run()"
        )


def _described(value: Any) -> str:
    name = type(value).__name__.replace("_", " ")
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
