"""Asyncio tasks of the worker, which the code of handlers must not cancel.

asyncio.all_tasks() also returns the tasks of the worker and those of other jobs. A handler that
cancels all of them would end the worker. The guards of a loop (handler_tasks.py) raise
an error in such a handler instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context as ContextVars
from typing import Any, TypeVar

T = TypeVar("T")


class OwnTask(asyncio.Task[T]):
    """An asyncio task of the worker.

    Attributes:
        cancelled_by_handler: whether the handler that the task runs has cancelled the task.
        ending: whether end() was called.
    """

    cancelled_by_handler = False
    ending = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task like any other, if no guard objects.

        Raises:
            RuntimeError: a handler has called this, and the task does not belong to its job.
        """
        if not self.done():
            for guard in guards.get(self.get_loop(), ()):
                guard(self)
        return super().cancel(msg)

    def end(self) -> None:
        """Cancel the task; only taskd itself calls this."""
        self.ending = True
        super().cancel()


Guard = Callable[[OwnTask[Any]], None]
# The guards of each loop. A guard raises an error if a handler must not cancel the task.
guards: dict[asyncio.AbstractEventLoop, list[Guard]] = {}


def own_task(
    coroutine: Coroutine[Any, Any, T], name: str, context: ContextVars | None = None
) -> OwnTask[T]:
    """Start a coroutine as a task of the worker.

    The task factory of the loop is not used, because the factory records each task as a task of a
    handler.
    """
    loop = asyncio.get_running_loop()
    return OwnTask(coroutine, loop=loop, name=name, context=context)


async def undisturbed(run: Callable[[], Awaitable[T]]) -> T:
    """Await `run()`; start it again if code other than OwnTask.end() cancels the current task."""
    me = asyncio.current_task()
    assert isinstance(me, OwnTask)
    while True:
        try:
            return await run()
        except asyncio.CancelledError:
            if me.ending:
                raise
            uncancel(me)


def uncancel(task: asyncio.Task[Any]) -> None:
    """Forget the requests to cancel the running task."""
    while task.cancelling():
        task.uncancel()
