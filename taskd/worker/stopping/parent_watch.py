"""The index of a `--processes` child, and the watch for the end of its parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass

from taskd.config import Settings

VARIABLE = "TASKD_CHILD"
EXIT_ABANDONED = 75
# The time for everything after drain_s and cancel_s: 5 s for outcomes and 6 s for the app's
# resources. Upkeep, lease, row, connections, threads and interpreter have one or two seconds each.
STOP_MARGIN_S = 25.0


def longest_stop_s(settings: Settings) -> float:
    """Return the maximum duration of a stop in seconds, if the event loop is not blocked."""
    return settings.drain_s + settings.cancel_s + STOP_MARGIN_S


@dataclass(frozen=True, slots=True)
class ProcessIndex:
    """The index of this process among the processes of its parent, and descriptors from the parent.

    Attributes:
        number: the index, from 1.
        of: the number of processes.
        parent_pipe: the file descriptor of the reading end of a pipe whose writing end the parent
            keeps open; -1 without a parent.
        stats_socket: the file descriptor of a socket over which the parent requests metrics
            (stats_socket.py); -1 if the parent requests none.
        listen_socket: the file descriptor of a socket over which the parent passes notifications
            on (shared_listening.py); -1 if this process listens itself.
    """

    number: int = 1
    of: int = 1
    parent_pipe: int = -1
    stats_socket: int = -1
    listen_socket: int = -1

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> ProcessIndex:
        """Return the index that the parent has put into `environ`, and remove it from there."""
        numbers = environ.pop(VARIABLE, "")
        return cls(*map(int, numbers.split())) if numbers else cls()

    def environment(self) -> dict[str, str]:
        """Return the environment variable that gives a child its index."""
        sockets = f"{self.stats_socket} {self.listen_socket}"
        return {VARIABLE: f"{self.number} {self.of} {self.parent_pipe} {sockets}"}

    @property
    def alone(self) -> bool:
        """Return whether there are no other processes."""
        return self.of == 1


class ParentWatch:
    """Stops this process when its parent has ended: the kernel then closes the parent's pipe.

    A thread reads the pipe `fd`. When the pipe is closed, the thread sends SIGTERM to this process.
    SIGTERM works even while a handler blocks the event loop (signals.py).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Programs that a handler starts must not hold the pipe open.
        os.set_inheritable(fd, False)
        threading.Thread(target=self._watch, name="taskd-parent-watch", daemon=True).start()

    def _watch(self) -> None:
        while os.read(self._fd, 1):
            pass  # the parent never writes
        os.kill(os.getpid(), signal.SIGTERM)
