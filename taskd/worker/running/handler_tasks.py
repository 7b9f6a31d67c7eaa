"""The asyncio tasks that handlers make: whose they are, and what becomes of those that are left.

A handler that ends should leave nothing running. What it does leave is often lawful, such as the
reader of a client that the first handler opened for all of them, and to cancel that would harm
other jobs. So what is left is named, and as long as it is little it is let be; beyond LEFT_MAX it
is cancelled, the newest first, so that a handler that leaks cannot fill the memory.

Who never makes a task pays nothing: whose child a task is, is seen when it is made (about 1 us a
task), and that an attempt has ended is looked up once a second.
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
TELL_EVERY_S = 60.0


class HandlerTasks:
    """Tags the asyncio tasks that are made while a handler runs, and those that they make.

    Args:
        runs: whether an attempt still runs.
    """

    def __init__(self, pulse: Pulse, runs: Callable[[Job], bool]) -> None:
        self._pulse, self._runs = pulse, runs
        self._owners = pulse.owners
        self._seen: set[asyncio.Task[Any]] = set()
        self._told: set[asyncio.Task[Any]] = set()
        self._tell_at: dict[str, float] = {}
        self._look_at = 2 * LEFT_MAX
        self._before: Any = None

    def watch(self) -> None:
        """Have all tasks of the running loop made here; a factory of the app's is asked first."""
        loop = asyncio.get_running_loop()
        self._before = loop.get_task_factory()
        loop.set_task_factory(self._make)  # type: ignore[arg-type]

    def unwatch(self) -> None:
        """Give the loop's own factory back."""
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
            # Kept here, it cannot be collected while it waits: the loop alone would not keep it.
            self._owners[task] = job
            task.add_done_callback(self._ended)
            if len(self._owners) > self._look_at:
                self.look()
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._owners.pop(task, None)

    def look(self) -> None:
        """Once a second: what has outlived its attempt for that long is named."""
        if not self._owners:
            self._seen.clear()
            self._told.clear()
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
        self._look_at = 2 * (len(self._owners) - len(excess) + LEFT_MAX)
        there = set(left)
        self._told &= there
        self._tell([task for task in left if task in self._seen and task not in self._told], excess)
        self._seen = there

    def _tell(self, new: list[asyncio.Task[Any]], excess: list[asyncio.Task[Any]]) -> None:
        """One line for each kind of job, now and then."""
        now, cancelled = time.monotonic(), set(excess)
        groups: dict[str, list[asyncio.Task[Any]]] = {}
        for task in [*new, *(task for task in excess if task not in self._told)]:
            groups.setdefault(self._owners[task].task, []).append(task)
            self._told.add(task)
        for name, group in groups.items():
            if now >= self._tell_at.get(name, 0.0):
                self._tell_at[name] = now + TELL_EVERY_S
                events.task_leaks(
                    self._owners[group[0]],
                    len(group),
                    cancelled=len(cancelled.intersection(group)),
                    stack=where(group[0].get_coro()),
                )
