"""Handle signals until the worker installs its handlers: during the app's import and shortly after.

The process has claimed nothing yet, so a stop needs no drain: the process ends with exit code 0.
This module imports nothing of the worker, so that it can act before these imports.
"""

from __future__ import annotations

import _thread
import asyncio
import faulthandler
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any

from taskd.cli import EXIT_INTERRUPTED

# Windows, where this module is imported to show the help, has no SIGQUIT.
STOPS = (signal.SIGTERM, getattr(signal, "SIGQUIT", signal.SIGTERM))
# If the main thread runs C code, or catches StoppedEarly, the watch thread ends the process after
# this time.
GRACE_S = 3.0


class StoppedEarly(BaseException):
    """A signal has stopped the process before its event loop ran."""


class EarlySignals:
    """Signal handlers of the main thread until the worker installs those of its event loop.

    SIGTERM and SIGQUIT stop the process. SIGHUP does nothing, because this process is only starting
    and reads the settings anyway. SIGUSR2 dumps the stacks. Ctrl-C raises KeyboardInterrupt, as in
    every Python program.

    Attributes:
        stopped_by: the name of the signal that has stopped the process, or an empty text.
    """

    def __init__(self) -> None:
        self.stopped_by = ""
        self._read = self._write = -1

    def install(self) -> None:
        """Install the handlers; outside of the main thread, do nothing."""
        try:
            for number in STOPS:
                signal.signal(number, self._on_stop)
        except ValueError:
            return
        signal.signal(signal.SIGHUP, _ignore)
        # Not sys.stderr, which the app can replace by an object without a file.
        if sys.__stderr__ is not None:
            with suppress(OSError, ValueError):
                faulthandler.register(signal.SIGUSR2, file=sys.__stderr__, all_threads=True)
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=self._after_fork)
        # Not threading.Thread, which gevent and eventlet break if the app lets them replace it.
        _thread.start_new_thread(self._watch, ())

    def end_watch(self) -> None:
        """End the watch thread: from now on, an event loop handles signals."""
        if self._write != -1:
            signal.set_wakeup_fd(-1)
            os.close(self._write)
            self._write = -1

    def cancel_at_stop(self, main: asyncio.Task[Any]) -> None:
        """Let SIGTERM and SIGQUIT cancel `main` until the worker installs its own handlers.

        Call this on the event loop.

        A cancelled task can clean up, which StoppedEarly would prevent.
        """
        loop = asyncio.get_running_loop()
        with suppress(ValueError, RuntimeError):  # not the main thread
            for number in STOPS:
                loop.add_signal_handler(number, self._cancel, number, main)

    def _cancel(self, number: signal.Signals, main: asyncio.Task[Any]) -> None:
        self.stopped_by = number.name
        main.cancel()

    def _on_stop(self, number: int, _frame: object) -> None:
        self.stopped_by = signal.Signals(number).name
        raise StoppedEarly(self.stopped_by)

    def _watch(self) -> None:
        """Run the watch thread: end the process if it has not ended GRACE_S after a stop signal."""
        # faulthandler must run in the main thread. Elsewhere, it would read the stack of the main
        # thread while that stack changes, which can crash the interpreter.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        exit_code: int | None = None
        while True:
            if not poll.poll(None if exit_code is None else GRACE_S * 1000):
                os._exit(exit_code or 0)
            numbers = os.read(self._read, 4096)
            if not numbers:
                break
            if exit_code is None and any(number in STOPS for number in numbers):
                exit_code = 0
            elif exit_code is None and signal.SIGINT in numbers:
                exit_code = EXIT_INTERRUPTED
        os.close(self._read)

    def _after_fork(self) -> None:
        # A process that the app forks during its import shares the pipe. Signals to that process
        # are not meant for the worker.
        if self._write == -1:
            return
        signal.set_wakeup_fd(-1)
        for fd in (self._read, self._write):
            os.close(fd)
        self._write = -1
        for number in (*STOPS, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)


def _ignore(_number: int, _frame: object) -> None:
    # Not SIG_IGN, which programs that the app starts would inherit.
    pass
