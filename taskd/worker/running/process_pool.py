"""Handlers with process=True: processes that can be stopped, killed and replaced one by one.

The process pool of concurrent.futures is not used: if one process dies, all running calls of that
pool fail, and the pool cannot ask a process to end a call. In the pool of this module, a process
runs one attempt at a time, and each message is a line.

Processes are started when they are needed, and end with their worker.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from taskd import events
from taskd.config import Settings
from taskd.core.jobs.failure import Failure
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import KeepLogs
from taskd.core.outcomes.attempt_ends import DecidedElsewhere
from taskd.core.outcomes.process_reports import (
    Answer,
    ProcessDied,
    ProcessNotStarted,
    ended,
    value_of,
)
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import ConfigError
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.observing.log_writer import LogWriter
from taskd.worker.running.handler_call import HandlerCall
from taskd.worker.running.process_child import (
    BEGUN,
    PROGRESS,
    READY,
    Boot,
    Request,
    find,
    find_task,
    to_builtins,
)
from taskd.worker.running.process_context import ContextFields, ProgressLine
from taskd.worker.running.traces import with_trace_context
from taskd.worker.services.own_tasks import OwnTask, own_task

# Not `python -m`, which would load the module twice and warn about that.
PROGRAM = "from taskd.worker.running.process_child import main; main()"
# How long a process can take to start: a large app takes a while to import.
BOOT_S_MAX = 60.0
# Enough for arguments or a result of 256 KiB, in which JSON can escape every character, and for the
# log lines of an attempt.
LINE_BYTES_MAX = 4 * 1024 * 1024
# If a process dies before the handler has started, the attempt is given to another process. At most
# this many processes are tried.
STARTS_MAX = 3
# How long a process that has closed the socket can take to end: a large core dump takes seconds.
CLOSED_S = 5.0
# The name of asyncio tasks that start a process.
START = "process-start"
# How long a process can take to end after the worker has closed the socket: exit handlers of the
# app run then.
END_S = 2.0


class JobProcess:
    """The worker's view of one process.

    Attributes:
        jobs: number of attempts whose handlers this process has started.
        ending: whether the process was asked to end its attempt, or was killed. It gets no further
            attempt then.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.pid = process.pid
        self.jobs = 0
        self.ending = False
        self._process, self._reader, self._writer = process, reader, writer
        self._exit = own_task(process.wait(), "process-exit")

    async def boot(self, boot: bytes) -> None:
        """Send the Boot, as JSON, and wait until the process is ready.

        Raises:
            ProcessNotStarted: the process ended, could not import the app, or was not ready within
                BOOT_S_MAX.
        """
        self._writer.write(boot + b"\n")
        try:
            async with asyncio.timeout(BOOT_S_MAX):
                line = await self._line()
        except TimeoutError:
            raise ProcessNotStarted(f"it was not ready within {BOOT_S_MAX:g} s") from None
        except ProcessDied as error:
            raise ProcessNotStarted(f"it ended with {ended(error.code)}") from None
        if line != READY:
            failure = msgspec.json.decode(line, type=Failure)
            raise ProcessNotStarted(f"{failure.type}: {failure.message}")

    async def run(self, request: bytes, call: ProcessCall) -> Answer:
        """Run an attempt; pass the start of the handler and its progress reports to `call`.

        Raises:
            ProcessDied: the process ended before it sent its answer.
        """
        self._writer.write(request + b"\n")
        line = await self._line()
        while not line.startswith(b"{"):
            if line == BEGUN:
                self.jobs += 1
                call.begin()
            else:
                call.report(msgspec.json.decode(line.removeprefix(PROGRESS), type=ProgressLine))
            line = await self._line()
        return msgspec.json.decode(line, type=Answer)

    async def _line(self) -> bytes:
        # Wait for the exit too: a process that a handler has forked can keep the socket open after
        # the death of this process.
        reading = own_task(self._reader.readline(), "process-line")
        try:
            either: set[OwnTask[Any]] = {reading, self._exit}
            await asyncio.wait(either, return_when="FIRST_COMPLETED")
            if not reading.done():
                # The process has ended. Read the line that it may have sent before.
                await asyncio.wait({reading}, timeout=0.1)
            with suppress(OSError, ValueError):
                if reading.done() and (line := reading.result()).endswith(b"\n"):
                    return line
        finally:
            reading.end()
        # If the process has closed the socket, let it end by itself: its exit code says why.
        dead, _ = await asyncio.wait({self._exit}, timeout=CLOSED_S)
        self.kill()
        code = await asyncio.shield(self._exit)
        raise ProcessDied(self.pid, code, hung_up=not dead)

    @property
    def alive(self) -> bool:
        """Return whether the process runs, as far as the worker knows."""
        return not self._exit.done()

    def request_end(self, why: str) -> None:
        """Ask the process to end its attempt.

        Args:
            why: `timeout`, or any other reason, which the process treats as a stop.
        """
        self.ending = True
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR1 if why == "timeout" else signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process group: the process, and programs that its handlers have started."""
        self.ending = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Close the socket, let the process end within END_S, and kill its process group."""
        self._writer.close()
        await asyncio.wait({self._exit}, timeout=END_S)
        self.kill()
        await asyncio.wait({self._exit}, timeout=END_S)


class JobProcesses:
    """The pool.

    Args:
        app: the module that each process imports at its start; None: no module.
        log_writer: gets the log lines of handlers at the end of each attempt; None: processes do
            not send log lines.

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
        """Run an attempt in one of the processes, and return the outcome that it has decided.

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
            ProcessNotStarted: the process that was started for this attempt did not start.
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
        """Give a process to the next waiting attempt, or keep it idle; end a used-up process."""
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
            process = await self._spawned()
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

    async def _spawned(self) -> JobProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            program = ("-c", PROGRAM, str(theirs.fileno()), str(os.getpid()))
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *program,
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    # So the process does not receive Ctrl-C, and its process group can be killed.
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours, limit=LINE_BYTES_MAX)
        except BaseException:
            ours.close()
            process.kill()
            await process.wait()
            raise
        return JobProcess(process, reader, writer)


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
        """Return the fields of the handler's context; None: the handler takes no context."""
        context, timeout_s = self._context, self._job.timeout_s or self._task.timeout_s
        if context is None or self._task.context_name is None:
            return None
        return ContextFields(context.idempotency_key, context.max_attempts, timeout_s)

    def report(self, line: ProgressLine) -> None:
        """Pass on a report of the handler; drop one that an earlier attempt sent at its end."""
        own = (line.job_id, line.fence) == (self._job.id, self._job.fence)
        if own and self._context is not None:
            self._context.progress(line.report.done, line.report.total, line.report.note)

    def set_process(self, process: JobProcess | None) -> None:
        """Set the process that runs the attempt; None: no process runs it."""
        assert self.attempt is not None
        self._process = process
        self.attempt.kill = None if process is None else self._kill

    def _kill(self) -> None:
        """Kill the process that runs the attempt."""
        if self._process is not None and self.attempt is not None:
            events.process_killed(self._job, self.attempt.why or "stop", self._process.pid)
            self._process.kill()

    async def run(self) -> Any:
        """Run the handler in a process; return the outcome or, to middleware, the handler's result.

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


def check_found(registry: Registry) -> None:
    """Check that other processes will find the handlers with process=True, and their hooks.

    Raises:
        ConfigError: the module of such a handler does not have the task under the handler's name,
            or the module of a hook does not have the hook.
    """
    for task in registry:
        if task.kind is not HandlerKind.PROCESS:
            continue
        module, name = task.handler.__module__, task.handler.__qualname__
        found = None if module == "__main__" else find_task(module, name)
        if found is None or found.name != task.name:
            raise ConfigError(
                f"task {task.name}: with process=True, other processes must find the task as "
                f"{name} in the module {module}, but cannot. Decorate the function where it is "
                "defined, in a module that can be imported"
            )
        for hook in task.hooks:
            module, name = hook.__module__, hook.__qualname__
            if module == "__main__" or find(module, name) is not hook:
                raise ConfigError(
                    f"hook {name}: the process of task {task.name} must find the hook in the "
                    f"module {module}, but cannot. Define the function at the top level of a "
                    "module that can be imported, or limit the hook to other tasks with "
                    "@in_thread(tasks=[...])"
                )
