"""Handlers that are plain functions: each call runs in a thread of the worker's pool."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from contextvars import Context as ContextVars
from contextvars import copy_context
from typing import Any

from taskd.core.jobs.job import Job
from taskd.core.outcomes.attempt_ends import RETURNED_NONE, Raised, Returned
from taskd.core.worker_status import ThreadsTaken
from taskd.worker.observing.loop_monitor import stack_of
from taskd.worker.running.handler_call import HandlerCall
from taskd.worker.running.returned_awaitables import finished, is_unfinished


class ThreadSlots(asyncio.Semaphore):
    """Counts the free threads for plain functions, and the running calls of each task.

    A thread is lost while it runs a function whose attempt was abandoned, because the function
    cannot be stopped.

    The main loop changes the counts, and the lease thread calls `taken`.

    Args:
        threads: number of threads.

    Attributes:
        running: the identifier of the thread that runs a job, by the id of the job.
        lost: number of lost threads, by task.
        on_lost: called when a thread was lost.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads)
        self.threads, self._began = threads, 0.0
        self._tasks: Counter[str] = Counter()
        self.running: dict[int, int] = {}
        self.lost: Counter[str] = Counter()
        self.on_lost: Callable[[], None] = lambda: None

    def begin(self, task: str) -> None:
        """Record that a call of this task begins in its thread."""
        self._began = time.monotonic()
        self._tasks[task] += 1

    def end(self, task: str) -> None:
        """Record that a call of this task has ended."""
        self._tasks[task] -= 1
        if not self._tasks[task]:
            del self._tasks[task]

    def stack(self, job_id: int) -> str:
        """Return the innermost frames of the thread that runs a job; empty if none does."""
        return stack_of(self.running.get(job_id))

    def lose(self, task: str) -> None:
        """Record that the attempt of a call was abandoned.

        The thread is lost until the call ends.
        """
        self.lost[task] += 1
        self.on_lost()

    def returned(self, task: str) -> None:
        """Record that the call in a lost thread has ended."""
        self.lost[task] -= 1
        if not self.lost[task]:
            del self.lost[task]

    def taken(self) -> ThreadsTaken | None:
        """Return which tasks use the threads; None if a thread is free."""
        if not self.locked():
            return None
        since_s = round(time.monotonic() - self._began, 1)
        return ThreadsTaken(self.threads, since_s, dict(self._tasks))


class ThreadCall(HandlerCall):
    """A plain function that runs in the thread pool.

    Args:
        job: the job for which the function runs.
        call: the function with its arguments.
    """

    def __init__(
        self, job: Job, call: Callable[[], Any], pool: Executor, slots: ThreadSlots
    ) -> None:
        super().__init__()
        self._job_id, self._task = job.id, job.task
        self._call, self._pool, self._slots = call, pool, slots
        self._ended: Returned | Raised = RETURNED_NONE

    async def run(self) -> Any:
        """Run the function in a thread, and return its result.

        A thread cannot be cancelled. So this method waits for the end of the function even if the
        attempt is cancelled. Otherwise, the job could run elsewhere while the function still runs
        here. If the function takes too long, the runner abandons the attempt.
        """
        inside = await self._in_thread()
        happened, self._ended = self._ended, RETURNED_NONE
        if isinstance(happened, Raised):
            try:
                raise happened.error
            finally:
                # The traceback of the error refers to this frame.
                del happened
        value = happened.value
        if is_unfinished(value):
            # A plain decorator around an `async def` returned its coroutine. The coroutine needs no
            # thread, but must see the context variables that the decorator has set.
            for variable, found in inside.items():
                variable.set(found)
            value = await finished(value)
        return value

    async def _in_thread(self) -> ContextVars:
        """Run the function, set `_ended`, and return the context variables of the function."""
        self.wait()
        async with self._slots:
            self.begin()
            self._slots.begin(self._task)
            try:
                # In a copy of the contextvars of the attempt: values that the function sets do not
                # reach the next job in the thread.
                inside = copy_context()
                future = asyncio.get_running_loop().run_in_executor(
                    self._pool, inside.run, self._guarded
                )
                while not future.done():
                    with suppress(asyncio.CancelledError):
                        await asyncio.wait({future})
                future.result()
            finally:
                self._slots.end(self._task)
        return inside

    def _guarded(self) -> None:
        self._slots.running[self._job_id] = threading.get_ident()
        # The outcome is not stored in the future. The future and its callbacks refer to each other,
        # so only the garbage collector would free the outcome.
        try:
            self._ended = Returned(self._call())
        except BaseException as error:  # noqa: BLE001 - a future cannot raise StopIteration
            self._ended = Raised(error)
        finally:
            del self._slots.running[self._job_id]
