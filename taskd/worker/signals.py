"""Signals: the first stop asks, the second cancels, the third abandons."""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections.abc import Callable
from contextlib import suppress

STOPPING = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Installs handlers on the running loop.

    Args:
        stop: called with the name for each TERM and INT, and with QUIT.
        quiet: called with True for TSTP, False for CONT.
        reload: called for HUP.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        quiet: Callable[[bool], None],
        reload: Callable[[], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handlers: dict[signal.Signals, Callable[[], None]] = {
            signal.SIGTERM: lambda: stop("SIGTERM"),
            signal.SIGINT: lambda: stop("SIGINT"),
            signal.SIGQUIT: lambda: stop("SIGQUIT"),
            signal.SIGTSTP: lambda: quiet(True),
            signal.SIGCONT: lambda: quiet(False),
            signal.SIGHUP: reload,
        }

    def install(self) -> None:
        """Install them; in a thread that may not, nothing happens."""
        with suppress(ValueError, RuntimeError):
            for number, handler in self._handlers.items():
                self._loop.add_signal_handler(number, handler)
            # Written in C, so it works while a handler blocks the loop.
            faulthandler.register(signal.SIGUSR2, all_threads=True)

    def remove(self) -> None:
        """Give the signals back."""
        with suppress(ValueError, RuntimeError):
            for number in self._handlers:
                self._loop.remove_signal_handler(number)
            faulthandler.unregister(signal.SIGUSR2)
