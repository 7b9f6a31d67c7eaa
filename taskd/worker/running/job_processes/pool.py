"""Handlers with process=True: processes that can be stopped, killed and replaced one by one.

The process pool of concurrent.futures is not used: if one process dies, all running calls of that
pool fail. That pool also cannot ask a process to end a call. In the pool of this module, a process
runs one attempt at a time.

Processes are started when they are needed, and end with their worker.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from collections.abc import Coroutine
from typing import Any

import msgspec

from taskd import events
from taskd.config import Settings
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import KeepLogs
from taskd.core.outcomes.attempt_ends import DecidedElsewhere
from taskd.core.outcomes.process_reports import ProcessDied, ProcessNotStarted, value_of
from taskd.core.tasks.task import Task
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.observing.log_writer import LogWriter
from taskd.worker.running.handler_call import HandlerCall
from taskd.worker.running.job_processes.context import ContextFields, ProgressLine
from taskd.worker.running.job_processes.job_process import JobProcess, start_process
from taskd.worker.running.job_processes.messages import Boot, Request, to_builtins
from taskd.worker.running.traces import with_trace_context
from taskd.worker.services.own_tasks import OwnTask, own_task

# If a process dies before the handler has started, the attempt is given to another process. At most
# this many processes are tried.
STARTS_MAX = 3
# The name of asyncio tasks that start a process.
START = "process-start"


class JobProcesses:
    """The pool.

    Args:
        app: the module that each process imports at its start, or None.
        log_writer: gets the log lines of handlers at the end of each attempt; with None, processes
            do not send log lines.

    Attributes:
        slots: the largest number of processes.
    """

    def __init__(
        self, settings: Settings, app: str | None = None, log_writer: LogWriter | None = None
    ) -> None:
        self.slots = process_slots(settings)
        self._jobs_max = settings.process_jobs_max
        self._settings, self._app, self._log_writer = settings, app, log_writer
        self._idle: list[JobProcess] = []
        self._all: set[JobProcess] = set()
        self._free_slots = self.slots
        self._waiting: deque[asyncio.Future[JobProcess]] = deque()
        self._tasks: set[OwnTask[Any]] = set()

    async def run(self, task: Task[..., Any], job: Job, call: ProcessCall) -> DecidedElsewhere:
        """Run an attempt in one of the processes, and return the outcome that the process decided.

        Raises:
            ProcessDied: the process ended during the attempt, or STARTS_MAX processes ended before
                they started the handler.
            ProcessNotStarted: no process could be started.
        """
        writer, handler = self._log_writer, task.handler
        keep = writer is not None and writer.keeps(task.name) is not KeepLogs.OFF
        hooks = [(each.__module__, each.__qualname__) for each in task.hooks]
        request = Request(
            handler.__module__,
            handler.__qualname__,
            with_trace_context(job),
            hooks,
            keep,
            call.fields(),
        )
        line = msgspec.json.encode(request)
        for start in range(1, STARTS_MAX + 1):
            process = await self._acquire()
            call.set_process(process)
            jobs = process.jobs
            try:
                answer = await process.run(line, call)
            except ProcessDied:
                if process.jobs == jobs and not process.ending and start < STARTS_MAX:
                    continue
                raise
            finally:
                call.set_process(None)
                self._put_back(process)
            if self._log_writer is not None and answer.lines:
                self._log_writer.add_all(job, answer.lines, answer.left_out)
            return DecidedElsewhere(answer.ack, answer.decided)
        raise AssertionError("the last start returns or raises")

    def own(self, coroutine: Coroutine[Any, Any, Any], name: str) -> OwnTask[Any]:
        """Create an asyncio task that belongs to this pool, and not to the job that needs it."""
        made = own_task(coroutine, name)
        self._tasks.add(made)
        made.add_done_callback(self._tasks.discard)
        return made

    async def close(self) -> None:
        """End the idle processes, and kill the others."""
        for waiter in self._waiting:
            waiter.cancel()
        # Afterwards, a process that was being started is in `_all`, or has ended.
        for each in (starting := self._starting()):
            each.end()
        if starting:
            await asyncio.wait(starting)
        for process in self._all - set(self._idle):
            process.kill()
        ends = [own_task(each.end(), "process-end") for each in self._all]
        if ends:
            await asyncio.wait(ends)
        for each in self._tasks:
            each.end()

    async def _acquire(self) -> JobProcess:
        """Return an idle process; if there is none, wait for one.

        Raises:
            ProcessNotStarted: no process could be started for this attempt.
        """
        while self._idle:
            process = self._idle.pop()
            if process.alive:
                return process
            self._end_later(process)
        waiter: asyncio.Future[JobProcess] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._start_more()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._put_back(waiter.result())
            raise

    def _put_back(self, process: JobProcess) -> None:
        """Give a process to the next waiting attempt, or keep it idle; end it if it is spent."""
        spent = process.ending or not process.alive or process.jobs >= self._jobs_max
        if spent:
            self._end_later(process)
            return
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(process)
                return
        self._idle.append(process)

    def _end_later(self, process: JobProcess) -> None:
        self.own(self._end(process), "process-end")

    async def _end(self, process: JobProcess) -> None:
        await process.end()
        self._all.discard(process)
        self._free_slots += 1
        self._start_more()

    def _start_more(self) -> None:
        """Start processes for waiting attempts, as far as slots are free."""
        wanted = sum(not waiter.done() for waiter in self._waiting)
        for _ in range(min(self._free_slots, wanted - len(self._starting()))):
            self._free_slots -= 1
            self.own(self._start(), START)

    def _starting(self) -> list[OwnTask[Any]]:
        return [task for task in self._tasks if task.get_name() == START and not task.done()]

    async def _start(self) -> None:
        process: JobProcess | None = None
        try:
            process = await start_process()
            self._all.add(process)
            boot = Boot(sys.path, self._app, self._settings)
            await process.boot(msgspec.json.encode(boot, enc_hook=to_builtins))
        except (ProcessNotStarted, OSError) as error:
            if process is None:
                self._free_slots += 1
            else:
                process.kill()
                self._end_later(process)
            self._refuse(ProcessNotStarted(f"the process for this attempt did not start: {error}"))
        else:
            self._put_back(process)

    def _refuse(self, error: ProcessNotStarted) -> None:
        """Let the first waiting attempt fail; each of the others waits for another start."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_exception(error)
                break
        asyncio.get_running_loop().call_soon(self._start_more)


class ProcessCall(HandlerCall):
    """The call of a handler with process=True."""

    def __init__(
        self,
        pool: JobProcesses,
        task: Task[..., Any],
        job: Job,
        context: AttemptContext | None = None,
    ) -> None:
        super().__init__()
        self._pool, self._task, self._job, self._context = pool, task, job, context
        self._process: JobProcess | None = None

    def fields(self) -> ContextFields | None:
        """Return the fields of the handler's context; None if the handler takes no context."""
        context, timeout_s = self._context, self._job.timeout_s or self._task.timeout_s
        if context is None or self._task.context_name is None:
            return None
        return ContextFields(context.idempotency_key, context.max_attempts, timeout_s)

    def report(self, line: ProgressLine) -> None:
        """Pass on a report of the handler; drop late reports of an earlier attempt."""
        own = (line.job_id, line.fence) == (self._job.id, self._job.fence)
        if own and self._context is not None:
            self._context.progress(line.report.done, line.report.total, line.report.note)

    def set_process(self, process: JobProcess | None) -> None:
        """Set the process that runs the attempt, or None if no process runs it."""
        assert self.attempt is not None
        self._process = process
        self.attempt.kill = None if process is None else self._kill

    def _kill(self) -> None:
        """Kill the process that runs the attempt."""
        if self._process is not None and self.attempt is not None:
            events.process_killed(self._job, self.attempt.why or "stop", self._process.pid)
            self._process.kill()

    async def run(self) -> Any:
        """Run the handler in a process, and return the outcome.

        If the task has middleware, return the handler's result instead of the outcome.

        Once a process has the attempt, this method waits until the process has answered or ended,
        even if the attempt is cancelled.

        Raises:
            ProcessDied, ProcessNotStarted: for the same reasons as JobProcesses.run().
            HandlerRaised: the task has middleware, and the handler raised an exception or a
                verdict.
        """
        self.wait()
        outcome = await self._outcome()
        return outcome if self._task.around is None else value_of(outcome)

    async def _outcome(self) -> DecidedElsewhere:
        running: OwnTask[DecidedElsewhere] = self._pool.own(
            self._pool.run(self._task, self._job, self), "process-attempt"
        )
        while not running.done():
            try:
                await asyncio.wait({running})
            except asyncio.CancelledError:
                if self._process is None:
                    running.end()
                else:
                    self._process.request_end((self.attempt and self.attempt.why) or "stop")
        try:
            return running.result()
        finally:
            del running  # it refers to its error, whose traceback refers to this frame


def process_slots(settings: Settings) -> int:
    """Return the largest number of processes; by default one per core that the worker can use."""
    if settings.process_slots:
        return settings.process_slots
    # Without an affinity, as on macOS, a process can use all cores.
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
