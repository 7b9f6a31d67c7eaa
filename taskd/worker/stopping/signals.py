"""Signals: the phases of a stop that they request, and the thread that delivers them.

The first SIGTERM drains, the second cancels the handlers, the third abandons them (StopPhase).

While a handler blocks the event loop, the loop receives no signals. So a thread receives the
numbers of signals first. The thread passes these numbers on to the loop, and watches the stop. If
the stop takes too long and the loop does not respond, the thread ends the process. If the worker
was running, the exit code is 75.

Python's signal handlers are not enough: they run between bytecode instructions of the main thread.
A database driver in C that waits for a reply executes no bytecode. But when a signal arrives,
whatever the main thread does, the interpreter also writes the number of the signal to the file
descriptor of `signal.set_wakeup_fd`. The thread reads this descriptor. Blocked signals
(pthread_sigmask and sigwait) are no alternative, because the processes that handlers start would
inherit the mask.

While C code holds the GIL, no thread runs, and only SIGKILL ends the process. systemd sends SIGKILL
after TimeoutStopSec.
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum

from taskd.config import Settings
from taskd.worker.stopping.parent_watch import EXIT_ABANDONED

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT)
# If a stop takes longer than drain_s + cancel_s + MARGIN_S, the thread checks the loop.
MARGIN_S = 1.0
# The loop has this long to respond. After a response, the thread waits for the same time before it
# checks again.
ANSWER_S = 2.0
LEAVE_S = 3.0
LISTEN_EVERY_S = 1.0

# The objects whose install() was called and whose remove() was not: _after_fork() needs them.
_installed: list[Signals] = []


class StopPhase(IntEnum):
    """The phases of a stop, in their order; NONE until a stop is requested."""

    NONE = 0
    DRAIN = 1
    CANCEL = 2
    ABANDON = 3

    def next(self, *, at_once: bool) -> StopPhase:
        """Return the phase that one more request starts; with `at_once` (SIGQUIT), the last."""
        return StopPhase.ABANDON if at_once else StopPhase(min(self + 1, StopPhase.ABANDON))

    def patience_s(self, settings: Settings) -> float:
        """Return the maximum run time of attempts after this phase was requested, in seconds."""
        drain_s = settings.drain_s if self < StopPhase.CANCEL else 0.0
        return drain_s + (settings.cancel_s if self < StopPhase.ABANDON else 0.0)


class StopRequests:
    """The stop requests that have reached the event loop.

    The signal thread counts signals separately, because a blocked loop receives none.

    Attributes:
        phase: the last phase that was requested.
        requested: set by the first request.
    """

    def __init__(self) -> None:
        self.phase = StopPhase.NONE
        self.requested = asyncio.Event()
        self._changed = asyncio.Event()

    def add(self, *, at_once: bool) -> None:
        """Request the next phase; with `at_once`, the last phase."""
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

    Args:
        stop: called on the loop for each SIGTERM, SIGINT and SIGQUIT, with the signal's name.
        quiet: called on the loop with True for SIGTSTP, and with False for SIGCONT.
        reload: called on the loop for SIGHUP.
        patience_s: returns the maximum time in seconds that attempts have to end after a phase was
            requested.
        leave: called in a thread before the process is ended because its loop is blocked; returns
            the exit code. The process ends after LEAVE_S seconds even if `leave` has not returned.
            The loop can run again at any moment.
        last: whether the process ends with this worker. If so, remove() makes the process ignore
            later signals. Otherwise, a later signal could kill the process in its last
            milliseconds, with another exit code.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        quiet: Callable[[bool], None],
        reload: Callable[[], None],
        *,
        patience_s: Callable[[StopPhase], float],
        leave: Callable[[], int],
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
        """Install the handlers and start the thread; outside of the main thread, do nothing."""
        with suppress(ValueError, RuntimeError):
            for number, handler in self._handlers.items():
                self._loop.add_signal_handler(number, handler)
            _dump_stacks_at(signal.SIGUSR2)
            self._read, self._write = os.pipe()
            os.set_blocking(self._write, False)
            self._listen()
            _installed.append(self)
            threading.Thread(target=self._watch, name="taskd-signals", daemon=True).start()

    def _listen(self) -> None:
        """Make signals arrive in the pipe, and keep the loop's wake-up socket to pass them on.

        The loop calls this method again every LISTEN_EVERY_S, because a loop that stops and runs
        again makes a new socket. Until the next call, the loop receives signals without the thread.
        """
        before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        if before not in (-1, self._write):
            # Duplicate the socket: after the loop has closed its socket, the number can belong to
            # another file.
            if self._loops_own == -1:
                self._loops_own = os.dup(before)
            else:
                os.dup2(before, self._loops_own, inheritable=False)
        self._again = self._loop.call_later(LISTEN_EVERY_S, self._listen)

    def remove(self) -> None:
        """Remove the handlers, and end the thread."""
        with suppress(ValueError, RuntimeError):
            for number in self._handlers:
                self._loop.remove_signal_handler(number)
            faulthandler.unregister(signal.SIGUSR2)
            if self._last:
                for number in (*STOPS, signal.SIGHUP, signal.SIGUSR2):
                    signal.signal(number, signal.SIG_IGN)
        if self in _installed:
            _installed.remove(self)
            if self._again is not None:
                self._again.cancel()
            now = signal.set_wakeup_fd(-1)
            if now != self._write:  # another loop or worker has installed it since
                signal.set_wakeup_fd(now, warn_on_full_buffer=False)
            os.close(self._write)  # ends the thread

    def disown(self) -> None:
        """Undo install() in a process that was forked from this one.

        Signals to the forked process are not meant for the worker.
        """
        signal.set_wakeup_fd(-1)
        for number in self._handlers:
            signal.signal(number, signal.SIG_DFL)
        for fd in {self._read, self._write, self._loops_own} - {-1}:
            os.close(fd)

    def _watch(self) -> None:
        """Pass signals on, and end the process if a stop hangs; the signal thread runs this."""
        # faulthandler must run in the main thread. Elsewhere, it would read the stack of the main
        # thread while that stack changes, which can crash the interpreter.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
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
                    with suppress(OSError):  # the loop was closed, or its socket is full
                        os.write(self._loops_own, numbers)
                for number in numbers:
                    if number in STOPS:
                        phase = phase.next(at_once=number == signal.SIGQUIT)
                        ends = time.monotonic() + self._patience_s(phase)
                        ends += MARGIN_S if phase < StopPhase.ABANDON else 0.0
            elif self._answers():
                ends = time.monotonic() + ANSWER_S
            elif not poll.poll(0):  # no signal has arrived meanwhile, and remove() was not called
                self._end()
        os.close(self._read)
        if self._loops_own != -1:
            os.close(self._loops_own)

    def _answers(self) -> bool:
        """Return whether the loop responds within ANSWER_S, or is closed."""
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:
            return True
        # Small steps: if the whole process is suspended meanwhile, only one step times out.
        return any(answered.wait(0.1) for _ in range(int(ANSWER_S / 0.1)))

    def _end(self) -> None:
        """Call `leave`, and end the process with the exit code that `leave` returns.

        If `leave` fails or takes longer than LEAVE_S, the exit code is EXIT_ABANDONED.
        """
        code = EXIT_ABANDONED

        def leave() -> None:
            nonlocal code
            code = self._leave()

        # Call `leave` in a thread, because writing to a full log pipe would block for ever.
        leaving = threading.Thread(target=leave, name="taskd-leave", daemon=True)
        with suppress(RuntimeError):
            leaving.start()
            leaving.join(LEAVE_S)
        os._exit(code)


def dump_stacks() -> None:
    """Write the stacks of all threads to the stderr of the process."""
    # Not sys.stderr, which the app can replace by an object without a file.
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)


def _dump_stacks_at(number: signal.Signals) -> None:
    # faulthandler is written in C, so it works while a handler blocks the loop.
    if sys.__stderr__ is not None:
        with suppress(OSError, ValueError):
            faulthandler.register(number, sys.__stderr__, all_threads=True)


def _after_fork() -> None:
    while _installed:
        _installed.pop().disown()


# A forked process shares the pipe, so a signal to that process, as multiprocessing.Pool.terminate()
# sends, would stop the worker.
os.register_at_fork(after_in_child=_after_fork)
