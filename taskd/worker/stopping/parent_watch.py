"""The view a worker process has of its siblings: its index, and whether its parent is alive."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass

from taskd.config import Settings

VARIABLE = "TASKD_CHILD"
EXIT_ABANDONED = 75
# After drain and cancel: 5 s for outcomes, 5 s for the app's resources, and a second or two each
# for upkeep, lease, row, connections, threads and interpreter.
STOP_MARGIN_S = 25.0


def longest_stop_s(settings: Settings) -> float:
    """Return the time within which a worker whose loop is not blocked has ended, in seconds."""
    return settings.drain_s + settings.cancel_s + STOP_MARGIN_S


@dataclass(frozen=True, slots=True)
class ProcessIndex:
    """The index of this process among its siblings, from 1; a single process is alone.

    Attributes:
        number: the index.
        of: the number of processes.
        parent_pipe: the reading end of a pipe that the parent holds open while it lives.
        stats_socket: a socket over which the parent requests metrics (stats_socket.py); -1: none.
    """

    number: int = 1
    of: int = 1
    parent_pipe: int = -1
    stats_socket: int = -1

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> ProcessIndex:
        """Return the index that the parent gave; remove it from the environment."""
        numbers = environ.pop(VARIABLE, "")
        return cls(*map(int, numbers.split())) if numbers else cls()

    def environment(self) -> dict[str, str]:
        """Return the environment that gives a child its index."""
        return {VARIABLE: f"{self.number} {self.of} {self.parent_pipe} {self.stats_socket}"}

    @property
    def alone(self) -> bool:
        """Return whether there are no other processes."""
        return self.of == 1


class ParentWatch:
    """Ends this process when its parent has exited or was killed: the kernel then closes the pipe.

    A thread reads the pipe. At its end the thread sends this process a SIGTERM in place of the
    parent, which also works while a handler blocks the loop (signals.py).
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
