"""Resources: objects for handlers that an app makes once per worker, such as a connection pool."""

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
    """Register a generator function as a resource, under the name of the function.

    The function yields one object. A worker calls the function before its first claim, and handlers
    find the object in `ctx.resources`. When the worker stops and its last attempt has ended, the
    code after the `yield` runs.

    Args:
        maker: an `async def` or a plain `def` with one `yield`; it takes no arguments.
        registry: where the resource is registered.

    Raises:
        TypeError: `maker` is not a generator function, or takes arguments.
        ValueError: another resource has this name.
    """
    if maker is None:
        return lambda made: resource(made, registry=registry)
    _check(maker)
    registry.add_resource(maker)
    return maker


def opened(maker: Maker) -> AbstractAsyncContextManager[Any] | AbstractContextManager[Any]:
    """Return a context manager that makes the resource, and closes the resource at the end."""
    if inspect.isasyncgenfunction(maker):
        return asynccontextmanager(maker)()
    return contextmanager(maker)()  # type: ignore[arg-type]


def _check(maker: Any) -> None:
    name = getattr(maker, "__name__", repr(maker))
    if not (inspect.isasyncgenfunction(maker) or inspect.isgeneratorfunction(maker)):
        raise TypeError(f"resource {name}: write a function that yields the resource once")
    if inspect.signature(maker).parameters:
        raise TypeError(f"resource {name}: the function must take no arguments")
