"""Run a real worker in this process until no job is due, or let the worker die."""

from __future__ import annotations

import asyncio
import copy
import functools
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any

from taskd import events
from taskd.config import Settings
from taskd.core.jobs.failure import PACKAGE
from taskd.core.jobs.verdicts import Retry
from taskd.core.tasks.batch import Item
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.reading import testing
from taskd.testing.rows import JobRow
from taskd.worker import Worker
from taskd.worker.running.returned_awaitables import finished, is_unfinished
from taskd.worker.upkeep.rescuer import MAX_CRASHES, MAX_CRASHES_UNPROVED, RESCUE_BATCH

APP = "testing"
LOOK_EVERY_S = 0.01
STOP_S = 10.0
THREADS = 4
FAILED = frozenset({"job.failed", "job.result_refused"})
ENDS = FAILED | {"job.done", "job.retried", "job.cancelled", "job.snoozed"}


class Crash(BaseException):
    """Raise this in a handler to let the worker die at this line.

    A test replaces a function that the handler calls, and raises Crash in the replacement. The
    attempt ends without an outcome, as if the worker was killed. But unlike after a kill, `finally`
    blocks run.
    """


class AttemptFailed(AssertionError):
    """A handler raised an error during `run_all(check=True)`; the first error is the cause."""


class Run:
    """Runs due jobs with one worker after another.

    Args:
        dsn: the database of the test.
        lane: a connection to that database, on an event loop of its own.
        run_on_loop: runs a coroutine on that loop and waits; any thread can call it.
        registry: the tasks.
        concurrency: concurrent attempts per queue.
        crash: ids of jobs; the worker dies at the end of their first attempt.

    Attributes:
        ended: ids of jobs with an attempt that ended, or that was rescued after a crash.
        failed: ids of jobs with an attempt that ended with an error.
        errors: the exceptions that handlers raised, by the job's id.
        doomed: ids of `crash` whose attempt has not ended yet.
    """

    def __init__(
        self,
        dsn: str,
        lane: Lane,
        run_on_loop: Callable[[Coroutine[Any, Any, Any]], Any],
        registry: Registry,
        concurrency: int,
        crash: Collection[int],
    ) -> None:
        self.ended: set[int] = set()
        self.failed: set[int] = set()
        self.errors: dict[int, Exception] = {}
        self.doomed = set(crash)
        self._dsn, self._lane, self._run_on_loop = dsn, lane, run_on_loop
        self._concurrency = concurrency
        self._loop = asyncio.get_running_loop()
        self._died = False
        self._registry = registry.with_tasks(map(self._watched, registry))

    async def until_nothing_is_due(self, timeout_s: float) -> None:
        """Run all jobs that are due, and jobs that become due during the run.

        Raises:
            TimeoutError: this takes longer than `timeout_s`.
        """
        ends = time.monotonic() + timeout_s
        unsubscribe = events.subscribe(self._hear)
        try:
            # Start another worker if one died, or did not serve a queue into which a handler has
            # enqueued a job.
            while queues := await self._due():
                await self._work(queues | {task.queue for task in self._registry}, ends)
        finally:
            unsubscribe()

    async def _due(self) -> set[str]:
        """Return the queues with due or running jobs."""
        looking = testing.due_queues(self._lane, self._registry.names())
        due: set[str] = await asyncio.to_thread(self._run_on_loop, looking)
        return due

    async def _work(self, queues: set[str], ends: float) -> None:
        """Run one worker, until nothing is due or it has died."""
        self._died = False
        settings = Settings(
            dsn=self._dsn,
            queues=tuple(sorted(queues)),
            concurrency=self._concurrency,
            threads=max(THREADS, self._concurrency),
            drain_s=1.0,
            cancel_s=1.0,
        )
        worker = self._worker = Worker(
            settings, self._registry, Database({"dsn": self._dsn}), app=APP
        )
        working = asyncio.create_task(worker.run(), name="taskd-testing-worker")
        try:
            while not working.done():
                await asyncio.wait({working}, timeout=LOOK_EVERY_S)
                if time.monotonic() > ends:
                    raise TimeoutError
                if worker.report.why or not worker.ready.is_set():
                    continue
                if not queues & await self._due():
                    worker.stop("nothing is due")
        finally:
            if not working.done():
                _abandon(worker)
                await asyncio.wait({working}, timeout=STOP_S)
        working.result()
        if worker.report.why == "SIGINT":  # the worker has handled the Ctrl-C of the user
            raise KeyboardInterrupt

    def _hear(self, name: str, fields: Mapping[str, Any]) -> None:
        if self._died or name not in ENDS:
            return  # events of a dead worker do not count
        job_id = fields["job_id"]
        self.ended.add(job_id)
        handler_asked = isinstance(self.errors.get(job_id), Retry)
        if name in FAILED or (name == "job.retried" and not handler_asked):
            self.failed.add(job_id)

    # Handlers.

    def _watched(self, task: Task[..., Any]) -> Task[..., Any]:
        """Return the task with a handler that records exceptions, and that can let the worker die.

        A handler that runs in a separate process does not change. The row of its job contains the
        error of the handler.
        """
        if task.kind is HandlerKind.PROCESS:
            return task

        @functools.wraps(task.handler)
        async def awaited(ctx: Any, **arguments: Any) -> Any:
            with self._watching(ctx.job_id):
                value = task.call(ctx, arguments)
                return await finished(value)

        @functools.wraps(task.handler)
        def called(ctx: Any, **arguments: Any) -> Any:
            with self._watching(ctx.job_id):
                value = task.call(ctx, arguments)
            return returned(ctx, value) if is_unfinished(value) else value

        async def returned(ctx: Any, value: Any) -> Any:
            with self._watching(ctx.job_id):
                return await finished(value)

        @functools.wraps(task.handler)
        async def gathered(items: list[Item[Any]]) -> Any:
            with ExitStack() as watching:
                for item in items:
                    watching.enter_context(self._watching(item.ctx.job_id))
                results = await finished(task.handler(items))
            for item, each in zip(
                items, results if isinstance(results, list) else (), strict=False
            ):
                if isinstance(each, Exception):
                    self.errors[item.ctx.job_id] = each
            return results

        watched = copy.copy(task)
        watched.handler = awaited if task.is_async else called
        if task.kind is HandlerKind.BATCH:
            watched.handler = gathered
        watched.takes_context, watched.context_name = True, "ctx"
        return watched

    @contextmanager
    def _watching(self, job_id: int) -> Iterator[None]:
        dies = job_id in self.doomed
        self.errors.pop(job_id, None)
        try:
            yield
        except Crash:
            dies = True
            raise
        except Exception as error:
            self.errors[job_id] = error
            raise
        finally:
            if dies:
                self._die(job_id)

    def _die(self, job_id: int) -> None:
        """Let the worker die as if it was killed: declare it dead, and rescue its jobs.

        Later acks of this worker match no row, and later events of this worker do not count.
        """
        self._died = True
        self.doomed.discard(job_id)
        worker = self._worker
        self.ended |= self._run_on_loop(self._declare_dead(worker.parts.shared.lease.worker_id))
        self._loop.call_soon_threadsafe(_abandon, worker)

    async def _declare_dead(self, worker_id: int) -> set[int]:
        await workers.declare_dead(self._lane, [worker_id], proved=True)
        return set(await jobs.rescue(self._lane, RESCUE_BATCH, MAX_CRASHES, MAX_CRASHES_UNPROVED))


def _abandon(worker: Worker) -> None:
    """Stop the worker at once: request a drain, then cancel its attempts, then abandon them."""
    for _ in range(3):
        worker.stop("it is over")


def raise_failures(rows: Collection[JobRow], run: Run) -> None:
    """Check that no handler has raised an error.

    Raises:
        AttemptFailed: the message lists each such job; the cause is the first error.
    """
    __tracebackhide__ = True
    failed = [row for row in rows if row.id in run.failed or row.unfit]
    if not failed:
        return
    lines = [f"{len(failed)} of {len(rows)} jobs failed:"]
    cause = run.errors.get(failed[0].id)
    for row in failed:
        lines.append(f"  {row}")
        if cause is None or row is not failed[0]:  # pytest shows the cause with its source
            lines += [f"      {line}" for line in row.traceback.splitlines()]
    raise AttemptFailed("\n".join(lines)) from cause and cause.with_traceback(_theirs(cause))


def _theirs(error: Exception) -> TracebackType | None:
    """Return the traceback of an error without the frames of taskd that precede the handler."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(PACKAGE):
        frames = frames.tb_next
    return frames
