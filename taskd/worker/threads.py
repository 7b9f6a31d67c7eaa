"""Plain functions: each runs in a thread of the worker's pool, for which it may have to wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import copy_context
from typing import Any

from taskd.core.outcome import Raised, Returned
from taskd.worker.attempt import Attempt


class ThreadCall:
    """A plain function that is to run in the thread pool.

    Args:
        call: the function with its arguments.
    """

    def __init__(self, call: Callable[[], Any], pool: Executor, slots: asyncio.Semaphore) -> None:
        self._call, self._pool, self._slots = call, pool, slots
        self._waits = False
        self._attempt: Attempt | None = None

    def belongs_to(self, attempt: Attempt) -> None:
        """Its time counts from when it has a thread; before that, middleware may run."""
        self._attempt = attempt
        if self._waits:
            attempt.wait_for_room()

    async def run(self) -> Any:
        """Run it; what it returns.

        A thread cannot be cancelled, so this does not end before it: to return early would let the
        job run elsewhere while it still runs here. Who waits too long abandons the attempt.
        """
        self._waits = True
        if self._attempt is not None:
            self._attempt.wait_for_room()
        async with self._slots:
            self._waits = False
            if self._attempt is not None:
                self._attempt.begin(time.monotonic())
            # In the job's own context: what a function sets is not there for the thread's next job.
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
