"""Hooks: generator functions that run in the thread or process of a handler, around its call."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, cast

Hook = Callable[[], Iterator[Any]]


class ThreadHook(NamedTuple):
    """A hook around calls of handlers.

    Attributes:
        hook: the generator function; it takes no arguments, and yields once.
        tasks: names of the tasks around whose handlers the hook runs; if empty, it runs around all
            handlers.
    """

    hook: Hook
    tasks: frozenset[str] = frozenset()

    def fits(self, task: str) -> bool:
        """Return whether the hook runs around the handler of this task."""
        return not self.tasks or task in self.tasks


def call_inside(hooks: Sequence[Hook], call: Callable[[], Any]) -> Any:
    """Call a handler inside hooks, the first of which is the outermost; return its result.

    If a hook has begun, the code after its `yield` always runs. The `yield` returns the exception
    of the handler or of an inner hook, or None.

    Raises:
        BaseException: the exception of the handler, or if it has none, the first exception of a
            hook. Notes name the exceptions of the other hooks.
    """
    begun: list[tuple[Hook, Generator[Any, Any, Any]]] = []
    error: BaseException | None = None
    result: Any = None
    try:
        for hook in hooks:
            generator = cast("Generator[Any, Any, Any]", hook())
            next(generator)
            begun.append((hook, generator))
        result = call()
    except StopIteration as stop:
        error = stop if len(begun) == len(hooks) else _not_once(hooks[len(begun)])
    except BaseException as raised:  # noqa: BLE001 - raised again below
        error = raised
    for hook, generator in reversed(begun):
        try:
            generator.send(error)
        except StopIteration:
            continue
        except BaseException as also:  # noqa: BLE001 - raised again below
            broken: BaseException = also
        else:
            generator.close()
            broken = _not_once(hook)
        if error is None:
            error = broken
        else:
            error.add_note(f"also, the hook {_name(hook)} raised {type(broken).__name__}: {broken}")
    if error is not None:
        raise error
    return result


def _not_once(hook: Hook) -> RuntimeError:
    return RuntimeError(f"the hook {_name(hook)} must yield exactly once")


def _name(hook: Hook) -> str:
    return getattr(hook, "__name__", repr(hook))
