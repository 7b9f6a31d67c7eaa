"""Await a statement to its end, even if the caller's task is cancelled.

Compared with to_its_end(), asyncio.shield() around a new task would take four more iterations of
the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from types import coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Until:
    """A future that the caller's task awaits, and that this task cannot cancel.

    A task needs only these members of an awaited object: `_asyncio_future_blocking`, get_loop(),
    add_done_callback() and cancel().
    """

    __slots__ = ("_asyncio_future_blocking", "_future")

    def __init__(self, future: asyncio.Future[Any]) -> None:
        self._future = future
        self._asyncio_future_blocking = True

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._future.get_loop()

    def add_done_callback(
        self, call: Callable[[asyncio.Future[Any]], object], *, context: Context | None = None
    ) -> None:
        self._future.add_done_callback(call, context=context)

    def cancel(self, msg: object = None) -> bool:
        # Refuse: the task then remembers the cancellation, and raises it when the future is done.
        return False


@coroutine
def to_its_end(work: Coroutine[Any, Any, T]) -> Generator[Any, None, T]:
    """Run a coroutine in the caller's task; return its result.

    The coroutine must not depend on the current task: no asyncio.timeout(), no task group.

    Raises:
        asyncio.CancelledError: the caller was cancelled meanwhile, and the coroutine has ended.
    """
    cancelled: asyncio.CancelledError | None = None
    try:
        while True:
            future = work.send(None)
            try:
                if future is None:  # asyncio.sleep(0)
                    yield
                else:
                    # A task resets this flag, too, when it receives a future.
                    future._asyncio_future_blocking = False  # noqa: SLF001
                    yield _Until(future)
            except asyncio.CancelledError as error:
                if future is None or not future.cancelled():
                    cancelled = error
            except Exception:  # noqa: BLE001, S110 - the coroutine reads this error from the future
                pass
    except StopIteration as ended:
        result: T = ended.value
    except Exception:
        if cancelled is None:
            raise
    if cancelled is not None:
        raise cancelled
    return result
