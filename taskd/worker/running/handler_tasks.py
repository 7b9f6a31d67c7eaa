"""The asyncio tasks that handlers create: which job each belongs to, and how many can remain.

An asyncio task that outlives its attempt is usually a mistake. But some are legitimate, such as the
reader of a client that the first handler opened for all jobs, and cancelling that reader would harm
other jobs. So remaining asyncio tasks are logged, and up to LEFT_MAX of them continue. Beyond this
number, the newest ones are cancelled, so that a leaking handler cannot fill the memory.

Handlers that create no asyncio tasks pay nothing. For the others, recording the job costs about 1
us per asyncio task, and once a second the recorded ones are compared with the running attempts.
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

LEFT_MAX = 1000
LOG_EVERY_S = 60.0


class HandlerTasks:
    """Records the job of each asyncio task that a handler or a recorded asyncio task creates.

    Args:
        runs: returns whether the attempt of a claimed job still runs.
    """

    def __init__(self, pulse: Pulse, runs: Callable[[Job], bool]) -> None:
        self._pulse, self._runs = pulse, runs
        self._owners = pulse.owners
        self._seen: set[asyncio.Task[Any]] = set()
        self._logged: set[asyncio.Task[Any]] = set()
        self._log_at: dict[str, float] = {}
        self._check_at = 2 * LEFT_MAX
        self._before: Any = None

    def watch(self) -> None:
        """Install a task factory on the running loop; it calls the app's own, if there is one."""
        loop = asyncio.get_running_loop()
        self._before = loop.get_task_factory()
        loop.set_task_factory(self._make)  # type: ignore[arg-type]

    def unwatch(self) -> None:
        """Restore the former task factory, unless the app has set another one since."""
        loop = asyncio.get_running_loop()
        if loop.get_task_factory() == self._make:
            loop.set_task_factory(self._before)

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
        """Log each asyncio task whose attempt had ended by the previous check, and cancel excess.

        The timer calls this method once a second. The task factory calls it when many asyncio tasks
        are recorded, so that those beyond LEFT_MAX are cancelled early.
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
        """Log one line per task name of their jobs, at most every LOG_EVERY_S."""
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
