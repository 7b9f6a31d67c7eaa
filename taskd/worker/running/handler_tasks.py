"""The asyncio tasks that handlers create: which job each belongs to, and how many can remain.

An asyncio task that outlives its attempt is usually a mistake. But some are legitimate, such as the
reader of a client that the first handler opened for all jobs. Cancelling that reader would harm
other jobs. So remaining asyncio tasks are logged, and up to LEFT_MAX of them continue. If more
remain, the newest asyncio tasks are cancelled, so that a leaking handler cannot fill the memory.

Handlers that create no asyncio tasks pay nothing. For other handlers, recording the job costs about
1 us per asyncio task. Once a second, the recorded tasks are compared with the running attempts.

The module also protects the worker from handlers that cancel asyncio tasks of the worker, or stop
the event loop. Such a call raises an error in the handler.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from taskd import events
from taskd.core.jobs.job import Job
from taskd.worker.observing.loop_monitor import Pulse
from taskd.worker.running.attempt import where
from taskd.worker.services.own_tasks import OwnTask, guards

LEFT_MAX = 1000
LOG_EVERY_S = 60.0


class HandlerTasks:
    """Records the job of each asyncio task that a handler or a recorded asyncio task creates.

    Args:
        runs: returns whether the attempt of a claimed job still runs.
        runs_in: returns whether the attempt of a claimed job, or its batch, runs in this asyncio
            task.
    """

    def __init__(
        self,
        pulse: Pulse,
        runs: Callable[[Job], bool],
        runs_in: Callable[[asyncio.Task[Any], Job], bool],
    ) -> None:
        self._pulse, self._runs, self._runs_in = pulse, runs, runs_in
        self._owners = pulse.owners
        self._seen: set[asyncio.Task[Any]] = set()
        self._logged: set[asyncio.Task[Any]] = set()
        self._log_at: dict[str, float] = {}
        self._check_at = 2 * LEFT_MAX
        self._before: Any = None
        self._watched: asyncio.AbstractEventLoop | None = None
        self._stop_before: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Install a task factory and the guards on the running loop.

        The task factory calls the task factory of the app, if the app has set one.
        """
        loop = self._watched = asyncio.get_running_loop()
        self._before = loop.get_task_factory()
        loop.set_task_factory(self._make)  # type: ignore[arg-type]
        guards.setdefault(loop, []).append(self._refuse_to_cancel)
        self._stop_before = loop.stop
        loop.stop = self._stop_loop  # type: ignore[method-assign]

    def unwatch(self) -> None:
        """Undo watch(), except what the app has replaced since."""
        loop, self._watched = self._watched, None
        if loop is None:
            return
        if loop.get_task_factory() == self._make:
            loop.set_task_factory(self._before)
        if loop.stop == self._stop_loop:
            loop.stop = self._stop_before  # type: ignore[method-assign]
        guards[loop].remove(self._refuse_to_cancel)
        if not guards[loop]:
            del guards[loop]

    def _refuse_to_cancel(self, task: OwnTask[Any]) -> None:
        """Check that a handler cancels no task of the worker except the task of its own job.

        Raises:
            RuntimeError: the handler that runs has tried to cancel another task of the worker.
        """
        loop = task.get_loop()
        job = self._pulse.running(loop)
        if job is None:
            return  # taskd itself, or a callback of the loop, such as that of a timeout
        if task is asyncio.current_task(loop) or self._runs_in(task, job):
            task.cancelled_by_handler = True
            return
        raise RuntimeError(
            f"the handler must not cancel the asyncio task {task.get_name()!r}, which belongs to "
            "the worker or to another job: cancel only tasks that the handler has created. "
            "asyncio.all_tasks() returns the tasks of the whole process"
        )

    def _stop_loop(self) -> None:
        """Stop the loop, unless a handler calls this.

        Raises:
            RuntimeError: a handler has called this.
        """
        if self._watched is not None and self._pulse.running(self._watched) is not None:
            raise RuntimeError(
                "the handler must not stop the event loop, which runs the worker and all other "
                "jobs: return from the handler to end the job"
            )
        self._stop_before()

    def _make(
        self, loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = (
            asyncio.Task(coro, loop=loop, **options)
            if self._before is None
            else self._before(loop, coro, **options)
        )
        job = self._pulse.job
        if job is None:
            if not self._owners:
                return task
            job = self._pulse.running(loop)
        if job is not None and not task.done():
            # This reference also keeps the asyncio task alive: asyncio has only weak references.
            self._owners[task] = job
            task.add_done_callback(self._ended)
            if len(self._owners) > self._check_at:
                self.check()
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._owners.pop(task, None)

    def check(self) -> None:
        """Log asyncio tasks whose attempts have ended; cancel those beyond LEFT_MAX.

        An asyncio task is logged at most once: when it is cancelled, or at the second check after
        the end of its attempt.

        The timer calls this method once a second. The task factory calls it when many asyncio tasks
        are recorded, so that asyncio tasks beyond LEFT_MAX are cancelled early.
        """
        if not self._owners:
            self._seen.clear()
            self._logged.clear()
            return
        now_running = self._pulse.job
        left = [
            task
            for task, job in self._owners.items()
            if job is not now_running and not self._runs(job)
        ]
        excess = left[LEFT_MAX:]
        for task in excess:
            task.cancel()
        self._check_at = 2 * (len(self._owners) - len(excess) + LEFT_MAX)
        there = set(left)
        self._logged &= there
        self._log(
            [task for task in left if task in self._seen and task not in self._logged], excess
        )
        self._seen = there

    def _log(self, new: list[asyncio.Task[Any]], excess: list[asyncio.Task[Any]]) -> None:
        """Log these asyncio tasks: one line for each task of taskd, at most every LOG_EVERY_S."""
        now, cancelled = time.monotonic(), set(excess)
        groups: dict[str, list[asyncio.Task[Any]]] = {}
        for task in [*new, *(task for task in excess if task not in self._logged)]:
            groups.setdefault(self._owners[task].task, []).append(task)
            self._logged.add(task)
        for name, group in groups.items():
            if now >= self._log_at.get(name, 0.0):
                self._log_at[name] = now + LOG_EVERY_S
                events.task_leaks(
                    self._owners[group[0]],
                    len(group),
                    cancelled=len(cancelled.intersection(group)),
                    stack=where(group[0].get_coro()),
                )
