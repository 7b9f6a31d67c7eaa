"""Signals: the phases of a stop that they request, and the thread that delivers them.

The first SIGTERM drains, the second cancels the handlers, the third abandons them (StopPhase).

A loop that is blocked by a handler receives nothing. So a thread receives the numbers of signals
first. It passes them on to the loop and watches the stop: if the stop should be over and the loop
does not answer, the thread ends the process with exit code 75.

Python's own signal handlers are not enough: they run between bytecode instructions of the main
thread, and a database driver in C that waits for a reply executes none. The C handler itself writes
the number to `signal.set_wakeup_fd`, whatever the main thread does. Blocking signals (sigmask,
sigwait) is no alternative, as processes that handlers start would inherit the mask.

C code that holds the interpreter lock remains out of reach: no thread runs, and only SIGKILL ends
the process, which systemd sends after TimeoutStopSec.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

from taskd.config import Settings
from taskd.worker.stopping.parent_watch import EXIT_ABANDONED

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# How long a stop may take after drain and cancel before the loop is checked: if the loop answers,
# it is not blocked and gets more time.
MARGIN_S = 1.0
ANSWER_S = 2.0
LEAVE_S = 3.0
LISTEN_EVERY_S = 1.0

_installed: list[Signals] = []


class StopPhase(IntEnum):
    """The phase of a stop that was requested."""

    NONE = 0
    DRAIN = 1
    CANCEL = 2
    ABANDON = 3

    def next(self, *, at_once: bool) -> StopPhase:
        """Return the phase after one more request; `at_once` (SIGQUIT) skips to the last one."""
        return StopPhase.ABANDON if at_once else StopPhase(min(self + 1, StopPhase.ABANDON))

    def patience_s(self, settings: Settings) -> float:
        """Return how long a stop may take from this request on, in seconds."""
        drain_s = settings.drain_s if self < StopPhase.CANCEL else 0.0
        return drain_s + (settings.cancel_s if self < StopPhase.ABANDON else 0.0)


class StopRequests:
    """The stop requests that have reached the event loop.

    The signal thread counts signals as well (signals.py), because a blocked loop counts nothing.

    Attributes:
        phase: the requested phase.
        requested: set by the first request.
    """

    def __init__(self) -> None:
        self.phase = StopPhase.NONE
        self.requested = asyncio.Event()
        self._changed = asyncio.Event()

    def add(self, *, at_once: bool) -> None:
        """Request the next phase, or the last one."""
        self.phase = self.phase.next(at_once=at_once)
        self.requested.set()
        self._changed.set()

    async def wait_for_next(self, timeout_s: float) -> None:
        """Wait for another request, at most `timeout_s`."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


class Signals:
    """Installs signal handlers on the running loop, and a thread that watches the stop.

    A thread that wants to end this process sends it SIGTERM, also while the loop is blocked.

    Args:
        stop: called with the signal's name for each SIGTERM, SIGINT and SIGQUIT.
        quiet: called with True for SIGTSTP, False for SIGCONT.
        reload: called for SIGHUP.
        patience_s: returns how long a stop may take once the given phase was requested.
        leave: called in a thread before the process ends without its loop, which may come back to
            life at any moment; it has LEAVE_S.
        last: the process ends with this worker. Later stop signals are then ignored: by default one
            would kill the process in its last milliseconds, with exit code -15 or 130.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        quiet: Callable[[bool], None],
        reload: Callable[[], None],
        *,
        patience_s: Callable[[StopPhase], float],
        leave: Callable[[], None],
        last: bool,
    ) -> None:
        self._last = last
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: lambda: stop("SIGTERM"),
            signal.SIGINT: lambda: stop("SIGINT"),
            signal.SIGQUIT: lambda: stop("SIGQUIT"),
            signal.SIGTSTP: lambda: quiet(True),
            signal.SIGCONT: lambda: quiet(False),
            signal.SIGHUP: reload,
        }
        self._patience_s, self._leave = patience_s, leave
        self._read = self._write = -1
        self._loops_own = -1
        self._again: asyncio.TimerHandle | None = None

    def install(self) -> None:
        """Install the handlers; outside of the main thread, do nothing."""
        with suppress(ValueError, RuntimeError):
            for number, handler in self._handlers.items():
                self._loop.add_signal_handler(number, handler)
            # Written in C, so it works while a handler blocks the loop.
            faulthandler.register(signal.SIGUSR2, all_threads=True)
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._listen()
            _installed.append(self)
            threading.Thread(target=self._watch, name="taskd-signals", daemon=True).start()

    def _listen(self) -> None:
        """Replace the loop's wake-up socket by the pipe; signals are passed on over that socket.

        Repeated every second: a loop that was stopped and runs again makes a new socket, which
        works without the thread until then.
        """
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before not in (-1, self._write):
            # A duplicate: the loop closes its socket, and the number may then belong to another
            # file.
            if self._loops_own == -1:
                self._loops_own = os.dup(before)
            else:
                os.dup2(before, self._loops_own, inheritable=False)
        self._again = self._loop.call_later(LISTEN_EVERY_S, self._listen)

    def remove(self) -> None:
        """Remove the handlers."""
        with suppress(ValueError, RuntimeError):
            for number in self._handlers:
                self._loop.remove_signal_handler(number)
                if self._last and number in STOPS:
                    signal.signal(number, signal.SIG_IGN)
            faulthandler.unregister(signal.SIGUSR2)
        if self in _installed:
            _installed.remove(self)
            if self._again is not None:
                self._again.cancel()
            now = signal.set_wakeup_fd(-1)
            if now != self._write:  # installed by a later worker
                signal.set_wakeup_fd(now, warn_on_full_buffer=False)
            os.close(self._write)  # which ends the thread

    def disown(self) -> None:
        """Undo everything in a process forked by a handler: its signals are not for the worker."""
        signal.set_wakeup_fd(-1)
        for number in self._handlers:
            signal.signal(number, signal.SIG_DFL)
        for fd in {self._read, self._write, self._loops_own} - {-1}:
            os.close(fd)

    def _watch(self) -> None:
        """In the thread: pass signals on, and end the process if a requested stop hangs."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        phase, ends = StopPhase.NONE, float("inf")
        while True:
            left_s = ends - time.monotonic()
            if poll.poll(None if left_s == float("inf") else max(0.0, left_s) * 1000):
                numbers = os.read(self._read, 4096)
                if not numbers:
                    break
                if self._loops_own != -1:
                    with suppress(OSError):  # the loop was just stopped, or is very far behind
                        os.write(self._loops_own, numbers)
                for number in numbers:
                    if number in STOPS:
                        phase = phase.next(at_once=number == signal.SIGQUIT)
                        ends = time.monotonic() + self._patience_s(phase)
                        ends += MARGIN_S if phase < StopPhase.ABANDON else 0.0
            elif self._answers():
                ends = time.monotonic() + ANSWER_S
            elif not poll.poll(0):  # nor were the handlers removed meanwhile
                self._end()
        os.close(self._read)
        if self._loops_own != -1:
            os.close(self._loops_own)

    def _answers(self) -> bool:
        """Return whether the loop runs; a closed loop counts as running."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return True
        # In small steps: if the whole process was stopped, only one step is lost.
        return any(answered.wait(0.1) for _ in range(int(ANSWER_S / 0.1)))

    def _end(self) -> None:
        """End the process; wait neither for the main thread nor long for the database."""
        # In a thread, as even a log line can hang when its pipe is full.
        leaving = threading.Thread(target=self._leave, name="taskd-leave", daemon=True)
        with suppress(RuntimeError):
            leaving.start()
            leaving.join(LEAVE_S)
        os._exit(EXIT_ABANDONED)


def _after_fork() -> None:
    while _installed:
        _installed.pop().disown()


# A forked process shares the pipe: a signal to it, as from multiprocessing.Pool.terminate(), would
# stop the worker.
os.register_at_fork(after_in_child=_after_fork)
