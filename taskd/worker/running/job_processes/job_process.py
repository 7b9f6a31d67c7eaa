"""The worker's view of one process that runs handlers with process=True."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from taskd.core.jobs.failure import Failure
from taskd.core.outcomes.process_reports import Answer, ProcessDied, ProcessNotStarted, ended
from taskd.worker.running.job_processes.context import ProgressLine
from taskd.worker.running.job_processes.messages import BEGUN, PROGRESS, READY
from taskd.worker.services.own_tasks import OwnTask, own_task

# Not `python -m`, which would load the module twice and warn about that.
PROGRAM = "from taskd.worker.running.job_processes.child import main; main()"
# How long a process can take to start: a large app takes a while to import.
BOOT_S_MAX = 60.0
# A line holds arguments or a result of 256 KiB, in which JSON can escape every character, and the
# log lines of an attempt.
LINE_BYTES_MAX = 4 * 1024 * 1024
# How long a process that has closed the socket can take to end: a large core dump takes seconds.
CLOSED_S = 5.0
# How long a process can take to end after the worker has closed the socket: exit handlers of the
# app run then.
END_S = 2.0


class Observer(Protocol):
    """Receives the start of the handler that a process runs, and its progress reports."""

    def begin(self) -> None:
        """Record that the handler starts now."""

    def report(self, line: ProgressLine) -> None:
        """Pass on a report of the handler."""


class JobProcess:
    """The worker's view of one process.

    Attributes:
        jobs: number of attempts whose handlers this process has started.
        ending: whether the process was asked to end its attempt, or was killed. In both cases, the
            process gets no further attempt.
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

    async def run(self, request: bytes, call: Observer) -> Answer:
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


async def start_process() -> JobProcess:
    """Start a process, which waits for its Boot.

    Raises:
        OSError: the process could not be started.
    """
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
