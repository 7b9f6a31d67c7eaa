"""A worker process's view of its siblings: its number, and whether its parent is alive."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass

from taskd.config import Settings

VARIABLE = "TASKD_CHILD"
EXIT_ABANDONED = 75
# After the drain and the cancellation: unwritten outcomes (5 s), the app's resources (5 s); upkeep,
# lease, the row, connections, threads and the interpreter, a second or two each.
STOP_MARGIN_S = 25.0


def longest_stop_s(settings: Settings) -> float:
    """Return the seconds within which a worker whose loop runs has stopped."""
    return settings.drain_s + settings.cancel_s + STOP_MARGIN_S


@dataclass(frozen=True, slots=True)
class Place:
    """The number of this process among several; a single one is alone.

    Attributes:
        lifeline: the reading end of a pipe that the parent holds open while it lives.
        asked: a socket over which the parent asks for metrics (stats_socket.py); -1: it never does.
    """

    number: int = 1
    of: int = 1
    lifeline: int = -1
    asked: int = -1

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Place:
        """Return what the parent gave to this process; removed from the environment."""
        numbers = environ.pop(VARIABLE, "")
        return cls(*map(int, numbers.split())) if numbers else cls()

    def environment(self) -> dict[str, str]:
        """Return the environment that tells a child its number."""
        return {VARIABLE: f"{self.number} {self.of} {self.lifeline} {self.asked}"}

    @property
    def alone(self) -> bool:
        """Return whether there are no others."""
        return self.of == 1


class ParentWatch:
    """Ends this process after its parent, however that ended: the kernel closes the pipe.

    A thread reads the pipe, and at its end sends this process the SIGTERM that the parent can no
    longer send. Everything else follows from that, also while a handler blocks the loop
    (signals.py).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Programs that a handler starts must not inherit it.
        os.set_inheritable(fd, False)
        threading.Thread(target=self._watch, name="taskd-lifeline", daemon=True).start()

    def _watch(self) -> None:
        while os.read(self._fd, 1):
            pass  # no process writes to it
        os.kill(os.getpid(), signal.SIGTERM)
