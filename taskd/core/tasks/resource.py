"""Resources: objects that an app makes once per worker for its handlers, such as a pool."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
)
from typing import Any

from taskd.core.tasks.registry import DEFAULT, Registry

Maker = Callable[[], AsyncIterator[Any]] | Callable[[], Iterator[Any]]


def resource(maker: Maker | None = None, *, registry: Registry = DEFAULT) -> Any:
    """Register a generator function as a resource, named as the function.

    It yields once. The yielded object is in `ctx.resources` of every handler of the worker, from
    before the first claim; the code after the yield runs when the last attempt has ended.

    Args:
        maker: `async def` with one `yield`, or a plain one; it takes no arguments.
        registry: where it is registered.

    Raises:
        TypeError: it is not a generator function, or takes arguments.
        ValueError: another resource has this name.
    """
    if maker is None:
        return lambda made: resource(made, registry=registry)
    _check(maker)
    registry.add_resource(maker)
    return maker


def opened(maker: Maker) -> AbstractAsyncContextManager[Any] | AbstractContextManager[Any]:
    """Return the context manager that makes the resource and closes it."""
    if inspect.isasyncgenfunction(maker):
        return asynccontextmanager(maker)()
    return contextmanager(maker)()  # type: ignore[arg-type]


def _check(maker: Any) -> None:
    name = getattr(maker, "__name__", repr(maker))
    if not (inspect.isasyncgenfunction(maker) or inspect.isgeneratorfunction(maker)):
        raise TypeError(f"resource {name}: write a function that yields the resource once")
    if inspect.signature(maker).parameters:
        raise TypeError(f"resource {name}: it must take no arguments")
