"""What one of several processes knows of the others: its place, and whether its parent lives."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import MutableMapping
from dataclasses import dataclass

from taskd.config import Settings

VARIABLE = "TASKD_CHILD"
EXIT_ABANDONED = 75
# After the drain and the cancellation: outcomes that nobody takes (5 s), the app's resources (5 s);
# upkeep, beats, the row, connections, threads and the interpreter, a second or two each.
STOP_MARGIN_S = 25.0


def longest_stop_s(settings: Settings) -> float:
    """A worker whose loop turns has ended within so many seconds."""
    return settings.drain_s + settings.cancel_s + STOP_MARGIN_S


@dataclass(frozen=True, slots=True)
class Place:
    """Which one this is of how many processes; the first of one is alone.

    Attributes:
        lifeline: the reading end of a pipe that the parent holds open for as long as it lives.
        asked: a socket over which the parent asks for metrics (stats_socket.py); -1: it never does.
    """

    number: int = 1
    of: int = 1
    lifeline: int = -1
    asked: int = -1

    @classmethod
    def from_environment(cls, environ: MutableMapping[str, str]) -> Place:
        """The place that the parent gave to this process; taken out of the environment."""
        numbers = environ.pop(VARIABLE, "")
        return cls(*map(int, numbers.split())) if numbers else cls()

    def environment(self) -> dict[str, str]:
        """What tells a child its place."""
        return {VARIABLE: f"{self.number} {self.of} {self.lifeline} {self.asked}"}

    @property
    def alone(self) -> bool:
        """Whether there are no others."""
        return self.of == 1


class ParentWatch:
    """Ends this process after its parent, however that one ended: the kernel closes the pipe.

    A thread reads it, and at its end sends this process the SIGTERM that the parent cannot send any
    more. All else follows from that, also when a handler blocks the loop (signals.py).
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        # Whatever a handler starts must not hold it.
        os.set_inheritable(fd, False)
        threading.Thread(target=self._watch, name="taskd-lifeline", daemon=True).start()

    def _watch(self) -> None:
        while os.read(self._fd, 1):
            pass  # nobody writes
        os.kill(os.getpid(), signal.SIGTERM)
