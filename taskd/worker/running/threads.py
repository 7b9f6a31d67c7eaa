"""Plain functions: each runs in a thread of the worker's pool, and may have to wait for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from taskd.core.outcomes.attempt_ends import Raised, Returned
from taskd.worker.running.handler_call import HandlerCall


class ThreadCall(HandlerCall):
    """A plain function that runs in the thread pool.

    Args:
        call: the function with its arguments.
    """

    def __init__(self, call: Callable[[], Any], pool: Executor, slots: asyncio.Semaphore) -> None:
        super().__init__()
        self._call, self._pool, self._slots = call, pool, slots

    async def run(self) -> Any:
        """Run it; return its result.

        A thread cannot be cancelled, so this does not end before the function: otherwise the job
        could run elsewhere while it still runs here. An attempt that takes too long is abandoned.
        """
        self.wait()
        async with self._slots:
            self.begin()
            # In the job's own context: what a function sets does not reach the thread's next job.
            inside = copy_context().run
            future = asyncio.get_running_loop().run_in_executor(self._pool, inside, self._guarded)
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait({future})
        happened = future.result()
        if isinstance(happened, Raised):
            raise happened.error
        return happened.value

    def _guarded(self) -> Returned | Raised:
        try:
            return Returned(self._call())
        except BaseException as error:  # noqa: BLE001 - StopIteration cannot cross a future
            return Raised(error)
