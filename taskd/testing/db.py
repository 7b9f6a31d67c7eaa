"""The database of one test: read its jobs, run them, and move its time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Coroutine
from typing import Any

from taskd.client.connecting.background_loop import BackgroundLoop
from taskd.core.jobs.job import JobState
from taskd.core.tasks import registry as registries
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import JobNotFound
from taskd.store import schedules
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.reading import testing
from taskd.testing.expectations import Expectation
from taskd.testing.rows import JobRow
from taskd.testing.run import APP, AttemptFailed, Run, raise_failures


class TaskdDB:
    """A database with the schema taskd that only this test uses: the fixture `taskd_db`.

    run_all() is a coroutine function, and run_all_sync() needs a test without an event loop. All
    other methods are plain functions that take a millisecond or two, and work in tests with and
    without an event loop.

    Args:
        dsn: the DSN of the database.
        background: the event loop that queries the database.
        registry: the tasks that run_all() can run; by default the tasks of the imported modules.
    """

    def __init__(
        self, dsn: str, background: BackgroundLoop, registry: Registry = registries.DEFAULT
    ) -> None:
        self.dsn = dsn
        self._background = background
        self._registry = registry
        self._lane = Lane(Database({"dsn": dsn}), "testing")

    def close(self) -> None:
        """Close the connection."""
        self._ask(self._lane.close())

    def _ask(self, asking: Coroutine[Any, Any, Any]) -> Any:
        return self._background.run(asking)

    # Inspect.

    def jobs(self) -> list[JobRow]:
        """Return all jobs, live and finished, in the order in which they were enqueued."""
        return [
            JobRow.of(row, task.args_type.__struct_fields__ if task else ())
            for row in self._ask(testing.jobs(self._lane))
            for task in [self._registry.get(row["task"])]
        ]

    def job(self, job_id: int) -> JobRow:
        """Return one job.

        Raises:
            JobNotFound: no job has this id.
        """
        for row in self.jobs():
            if row.id == job_id:
                return row
        raise JobNotFound(f"there is no job {job_id} in the database of this test")

    def enqueued(self, task: Task[..., Any] | str | None = None) -> list[JobRow]:
        """Return all waiting jobs, or the waiting jobs of one task; see JobRow.waits."""
        name = task.name if isinstance(task, Task) else task
        return [row for row in self.jobs() if row.waits and name in (None, row.task)]

    def assert_enqueued(self, task: Task[..., Any] | str, /, **args: Any) -> JobRow:
        """Check that a job of this task with these arguments waits; return the first such job.

        Args:
            task: the task, or its name.
            args: the arguments to compare; other arguments can have any value.

        Raises:
            AssertionError: no such job waits; the message lists the waiting jobs and how they
                differ.
            TypeError: `task` is neither a task nor a name, or the task has no such argument.
        """
        __tracebackhide__ = True
        expected, rows = Expectation(task, args), self.jobs()
        for row in rows:
            if row.waits and expected.fits(row):
                return row
        raise AssertionError(expected.missing(rows))

    def assert_not_enqueued(self, task: Task[..., Any] | str, /, **args: Any) -> None:
        """Check that no job of this task with these arguments waits.

        Raises:
            AssertionError: such a job waits.
            TypeError: `task` is neither a task nor a name, or the task has no such argument.
        """
        __tracebackhide__ = True
        expected = Expectation(task, args)
        found = [row for row in self.enqueued() if expected.fits(row)]
        if found:
            raise AssertionError(expected.unexpected(found))

    # Run.

    async def run_all(
        self,
        *,
        check: bool = False,
        crash: Collection[int] = (),
        concurrency: int = 1,
        timeout_s: float = 30.0,
    ) -> list[JobRow]:
        """Run all jobs that are due now, and the jobs that they enqueue, with a real worker.

        Jobs that are due later do not run; see travel(). Jobs of paused queues and tasks do not
        run, either, nor do jobs that a rate delays by over a second. Jobs run only if an imported
        module defines their task.

        Args:
            check: raise AttemptFailed if a handler raised an error, or if the arguments of a job do
                not fit its task. The `__cause__` of AttemptFailed is the error of the first such
                job.
            crash: ids of jobs whose worker dies after the handler has ended and before the outcome
                is written. All jobs of that worker are rescued, and another worker runs them again.
                To make a worker die earlier, raise Crash in a handler.
            concurrency: concurrent attempts per queue.
            timeout_s: seconds after which the call fails.

        Returns:
            The jobs that had an attempt, or whose arguments do not fit their task, sorted by id, as
            they are now.

        Raises:
            AttemptFailed: with `check`, an attempt failed.
            TimeoutError: the jobs took longer than `timeout_s`.
            ValueError: a job of `crash` did not run.
        """
        __tracebackhide__ = True
        run = Run(self.dsn, self._lane, self._ask, self._registry, concurrency, crash)
        try:
            await run.until_nothing_is_due(timeout_s)
        except TimeoutError:
            live = [f"  {row}" for row in self.jobs() if row.waits or row.state == JobState.RUNNING]
            raise TimeoutError(
                "\n".join([f"run_all() has not ended within {timeout_s:g} s; live jobs:", *live])
            ) from None
        if run.doomed:
            left = ", ".join(map(str, sorted(run.doomed)))
            raise ValueError(f"crash: these jobs did not run, as they were not due: {left}")
        ended = [row for row in self.jobs() if row.id in run.ended or row.unfit]
        if check:
            raise_failures(ended, run)
        return ended

    def run_all_sync(
        self,
        *,
        check: bool = False,
        crash: Collection[int] = (),
        concurrency: int = 1,
        timeout_s: float = 30.0,
    ) -> list[JobRow]:
        """Run like run_all(), for tests without an event loop.

        Raises:
            RuntimeError: called in an event loop: await run_all().
        """
        __tracebackhide__ = True
        running = self.run_all(
            check=check, crash=crash, concurrency=concurrency, timeout_s=timeout_s
        )
        try:
            return asyncio.run(running)
        except (AttemptFailed, TimeoutError, ValueError) as error:
            # Let the traceback begin in the test, without the frames of asyncio.
            raise error.with_traceback(None)  # noqa: B904 - the same error is raised again

    # Time.

    def travel(self, seconds: float) -> None:
        """Move all future times in the database `seconds` closer to now.

        Afterwards, jobs and ticks of schedules whose times were within that period are due. Pauses
        and unique keys that would have ended within that period have ended. The clocks of the
        database and of this process do not change, so handlers see the real time.

        First, the schedules of the imported modules are declared, as by a worker that starts. The
        first tick of a new schedule is computed from now. The `catch_up` of a schedule decides
        which ticks within the skipped time are fired; by default the last one enqueues a job.

        Raises:
            ValueError: seconds is not a number above zero.
        """
        __tracebackhide__ = True
        if not 0 < seconds < math.inf:
            raise ValueError(f"travel({seconds!r}): time moves only forward, by seconds above zero")
        self._ask(schedules.publish(self._lane, APP, self._registry.schedules.values()))
        self._ask(testing.travel(self._lane, seconds))
