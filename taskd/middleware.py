"""`@middleware` and `@in_thread`: functions that an app runs around the attempts of its tasks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar, overload

from taskd.core.tasks.hooks import Hook, ThreadHook
from taskd.core.tasks.middleware import Around, CallNext, Middleware
from taskd.core.tasks.registry import DEFAULT, Registry

__all__ = ["CallNext", "in_thread", "middleware"]

GeneratorFunction = TypeVar("GeneratorFunction", bound=Hook)


def middleware(
    around: Around | None = None, *, tasks: Iterable[str] = (), registry: Registry = DEFAULT
) -> Any:
    """Register `async def around(ctx, call_next)` for the attempts of all tasks, or of some.

    `await call_next()` runs the next middleware, or the handler, and returns the result. The
    return value of `around` is the result of the attempt. An exception from `around` ends the
    attempt in the same way as an exception from the handler. The middleware that was registered
    first is the outermost. Middleware runs with the context variables and the timeout of the
    attempt. Middleware runs on the event loop, even if the handler is a plain function in a thread.

    Args:
        around: the middleware.
        tasks: names of the tasks; by default, all tasks.
        registry: where the middleware is registered.

    Raises:
        TypeError: `around` is not an `async def` with two parameters.
    """
    names = _names("middleware", tasks)
    if around is None:
        return partial(middleware, tasks=names, registry=registry)
    _check(around)
    registry.add_middleware(Middleware(around, names))
    return around


@overload
def in_thread(hook: GeneratorFunction) -> GeneratorFunction: ...
@overload
def in_thread(
    *, tasks: Iterable[str] = (), registry: Registry = DEFAULT
) -> Callable[[GeneratorFunction], GeneratorFunction]: ...
def in_thread(
    hook: Hook | None = None, *, tasks: Iterable[str] = (), registry: Registry = DEFAULT
) -> Any:
    """Register a hook for handlers that are plain functions, in all tasks or in some.

    A hook is a generator function that yields once. It runs in the thread or the process of the
    handler. The code before the `yield` runs before the handler, and the code after the `yield`
    runs when the handler has ended. The `yield` returns the exception that the handler has raised,
    or None. If the hook raises an exception, the attempt fails with this exception, unless the
    handler has raised one itself. The hook that was registered first is the outermost. The timeout
    of the attempt includes the time that the hooks take. Hooks do not run around `async def`
    handlers.

    Args:
        hook: the generator function; it takes no arguments. For tasks with process=True, it must be
            defined at the top level of a module.
        tasks: names of the tasks; by default, all tasks.
        registry: where the hook is registered.

    Raises:
        TypeError: `hook` is not a plain generator function without arguments.
    """
    names = _names("in_thread", tasks)
    if hook is None:
        return partial(_registered, names=names, registry=registry)
    return _registered(hook, names=names, registry=registry)


def _registered(hook: Any, *, names: frozenset[str], registry: Registry) -> Any:
    name = getattr(hook, "__name__", repr(hook))
    if not inspect.isgeneratorfunction(hook) or inspect.signature(hook).parameters:
        raise TypeError(f"hook {name}: write `def {name}():` with one `yield`")
    registry.add_hook(ThreadHook(hook, names))
    return hook


def _names(decorator: str, tasks: Iterable[str]) -> frozenset[str]:
    if isinstance(tasks, str):
        raise TypeError(f"{decorator}: tasks {tasks!r} is a text; write tasks=[{tasks!r}]")
    return frozenset(tasks)


def _check(around: Any) -> None:
    name = getattr(around, "__name__", repr(around))
    if not inspect.iscoroutinefunction(around):
        raise TypeError(f"middleware {name}: write `async def {name}(ctx, call_next)`")
    try:
        inspect.signature(around).bind(None, None)
    except TypeError:
        raise TypeError(f"middleware {name}: it must take ctx and call_next") from None
