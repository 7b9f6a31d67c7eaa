"""The program of a process that runs handlers with process=True, one attempt at a time.

job_process.py starts the program with one end of a socket; each message is a line. The process
first reads a Boot, and answers with `ready` or with a Failure. Then it reads Requests. For each
Request, it writes `begun` when the handler starts, and an Answer when the attempt has ended. When
the handler has reported progress, it writes `progress` and a ProgressLine.

The process ends when the worker closes the socket. If the worker dies without closing the socket,
the kernel kills the process. Where the kernel cannot do this, as on macOS, a thread of the process
ends the process within PARENT_CHECK_S.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from taskd.core.jobs.failure import describe
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import Lines, LogEvent, line_of
from taskd.core.jobs.verdicts import Verdict
from taskd.core.outcomes import policy
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import Raised, Returned
from taskd.core.outcomes.process_reports import Answer, MustEnd
from taskd.core.tasks.hooks import Hook, call_inside
from taskd.core.tasks.task import Task
from taskd.worker.attempt_variables import copier
from taskd.worker.finishing.tracebacks import forget_locals
from taskd.worker.observing.log_buffer import hider
from taskd.worker.observing.log_capture import LogCapture
from taskd.worker.running.job_processes.context import ProcessAttemptContext, ProgressLine
from taskd.worker.running.job_processes.lookup import find, find_task
from taskd.worker.running.job_processes.messages import BEGUN, PROGRESS, READY, Boot, Request
from taskd.worker.running.returned_awaitables import refuse_unfinished
from taskd.worker.running.traces import restore_trace_context

PR_SET_PDEATHSIG = 1
PARENT_CHECK_S = 1.0


class Program:
    """The process: receives requests, and runs handlers and signal handlers in its main thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._stream = connection.makefile("rwb")
        self._running = False
        # The job of the running attempt. All log lines of this process belong to this job,
        # whichever thread writes them.
        self._job: Job | None = None
        self._kept = Kept()
        self._context: ProcessAttemptContext | None = None
        self._hide: Callable[[str], str] | None = None
        self._lines = LogCapture(lambda: self._job, self._kept, lambda _: self._hide)

    def serve(self) -> None:
        """Boot, then run attempts until the worker closes the socket."""
        signal.signal(signal.SIGUSR1, self._on_signal)
        signal.signal(signal.SIGTERM, self._on_signal)
        # SIGTERM must end processes that a handler forks, such as those of a pool.
        os.register_at_fork(after_in_child=_forget_signals)
        try:
            _boot(msgspec.json.decode(self._stream.readline(), type=Boot, dec_hook=_path))
        except BaseException as error:  # noqa: BLE001 - the worker reports whatever the app raises
            self._send(describe(error).to_json().encode() + b"\n")
            return
        self._lines.install()
        self._send(READY)
        while line := self._stream.readline():
            request = msgspec.json.decode(line, type=Request)
            self._send(msgspec.json.encode(self._attempt(request)) + b"\n")

    def _send(self, line: bytes) -> None:
        self._stream.write(line)
        self._stream.flush()

    def _on_signal(self, number: int, _frame: Any) -> None:
        """Raise MustEnd in a running handler; end an idle process at SIGTERM."""
        if self._running:
            self._running = False  # a second signal must not raise MustEnd again
            raise MustEnd("timeout" if number == signal.SIGUSR1 else "stop")
        if number == signal.SIGTERM:
            sys.exit(0)

    def _attempt(self, request: Request) -> Answer:
        task: Task[..., Any] | None = None
        try:
            importlib.import_module(request.module)
            task = find_task(request.module, request.name)
            if task is None:
                raise LookupError(f"module {request.module} has no task {request.name}")  # noqa: TRY301
            hooks = [_hook(module, name) for module, name in request.hooks]
            # The imports above can set context variables, so each attempt gets new copies of them.
            value = copier()().run(self._run, task, hooks, request)
        except BaseException as error:  # noqa: BLE001 - even SystemExit fails only this job
            self._running = False
            answer = _answer(request.job, task, Raised(error))
            forget_locals(error)
            return self._with_lines(answer)
        return self._with_lines(_answer(request.job, task, Returned(value)))

    def _run(self, task: Task[..., Any], hooks: list[Hook], request: Request) -> Any:
        """Run the handler inside the hooks, and return its result."""
        arguments = task.decode(request.job.args, request.job.args_version)
        hide = hider([request.job], task)
        self._hide = hide if task.redact or request.keep else None
        self._kept.begin(self._hide if request.keep else None)
        self._job = request.job
        restore_trace_context(request.job)
        self._running = True
        self._send(BEGUN)
        value = call_inside(hooks, partial(task.call, self._new_context(request, hide), arguments))
        refuse_unfinished(value)
        self._running = False
        return value

    def _new_context(
        self, request: Request, hide: Callable[[str], str]
    ) -> ProcessAttemptContext | None:
        if request.context is not None:
            self._context = ProcessAttemptContext(
                request.job, request.context, self._send_progress, hide
            )
        return self._context

    def _send_progress(self, line: ProgressLine) -> None:
        self._send(PROGRESS + msgspec.json.encode(line) + b"\n")

    def _with_lines(self, answer: Answer) -> Answer:
        if self._context is not None:
            self._context.end()
        self._job = self._context = None
        answer.lines, answer.left_out = self._kept.end()
        return answer


class Kept:
    """The log lines of the running attempt, which the worker gets with the Answer."""

    def __init__(self) -> None:
        self._hide: Callable[[str], str] | None = None
        self._kept = Lines()

    def begin(self, hide: Callable[[str], str] | None) -> None:
        """Start an attempt.

        Args:
            hide: removes the values of redacted arguments from a line; with None, no lines are
                kept.
        """
        self._hide, self._kept = hide, Lines()

    def line(self, job: Job, event: LogEvent) -> None:
        """Add a log line of the handler."""
        if self._hide is not None:
            self._kept.add(line_of(event, self._hide))

    def end(self) -> tuple[list[str], int]:
        """End the attempt; return the kept lines as JSON, and the number of omitted lines."""
        kept, self._kept, self._hide = self._kept, Lines(), None
        return kept.each(), kept.left_out


def _hook(module: str, name: str) -> Hook:
    importlib.import_module(module)
    hook: Hook | None = find(module, name)
    if hook is None:
        raise LookupError(f"module {module} has no hook {name}")
    return hook


def _answer(job: Job, task: Task[..., Any] | None, happened: Raised | Returned) -> Answer:
    decided = isinstance(happened, Returned) or issubclass(type(happened.error), Verdict)
    try:
        return Answer(policy.decide(job, task, happened), decided)
    except BaseException as error:  # noqa: BLE001 - a hostile exception or value harms one job
        text = f"the outcome could not be described: {type(error).__name__}"
        ack: Ack = policy.decide(job, task, Raised(RuntimeError(text)))
        return Answer(ack, decided=False)


def _boot(boot: Boot) -> None:
    from taskd import configure, events
    from taskd.config.environment_block import hide_environment

    sys.path[:] = boot.path
    settings = boot.settings
    if settings.commands:
        hide_environment()
    if settings.process_memory_mb is not None:
        _limit_memory(settings.process_memory_mb * 1024 * 1024)
    events.configure(settings.log_format, settings.log_level)
    configure(settings=settings)
    if boot.app is not None:
        importlib.import_module(boot.app)


def _limit_memory(limit_bytes: int) -> None:
    """Let allocations above the limit fail, so that the handler gets MemoryError."""
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _forget_signals() -> None:
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _path(kind: type, value: Any) -> Any:
    return Path(value) if kind is Path else value


def _end_with(worker: int) -> None:
    """Let the kernel, or a thread, kill this process when the worker ends."""
    prctl = getattr(ctypes.CDLL(None, use_errno=True), "prctl", None)
    if prctl is None:  # macOS, BSD
        thread = threading.Thread(target=_kill_after, args=(worker,), daemon=True)
        thread.start()
    else:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:  # the worker had ended before the call
        os._exit(1)


def _kill_after(worker: int) -> None:
    while os.getppid() == worker:
        time.sleep(PARENT_CHECK_S)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Run the process; the arguments of the program are FD and WORKER_PID."""
    fd, worker = int(sys.argv[1]), int(sys.argv[2])
    _end_with(worker)
    faulthandler.enable()  # print the stack if the interpreter crashes
    os.set_inheritable(fd, False)
    Program(socket.socket(fileno=fd)).serve()
