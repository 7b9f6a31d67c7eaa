"""Watch the processes of other workers on this host: the kernel reports when one ends."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from taskd.store import workers
from taskd.worker.lease.process_identity import is_gone

# Each worker watches the next two workers in the order of ids; the lowest id follows the highest.
# So two workers watch each process, and the end of a process wakes only these two workers, however
# many workers the host has.
WATCHED_MAX = 2


class Neighbours:
    """Watches other workers on this host, and calls `on_end` when the process of one has ended.

    A file descriptor of a process (pidfd_open, Linux 5.3) becomes readable when the process ends.
    If no descriptor can be opened for a process, the process is not watched. Then the regular
    checks of the rescuer find that the process has ended.
    """

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._descriptors: dict[int, int] = {}

    def watch(self, my_id: int, others: Sequence[workers.Other]) -> None:
        """Watch the processes of the WATCHED_MAX workers after `my_id` on this host, and no others.

        Args:
            others: the other workers that were not declared dead, on all hosts.
        """
        ring = sorted(
            (other for other in others if other.neighbour),
            key=lambda other: (other.id < my_id, other.id),
        )
        next_ones = {other.id: other for other in ring[:WATCHED_MAX]}
        for worker_id in self._descriptors.keys() - next_ones.keys():
            self._forget(worker_id)
        for worker_id in next_ones.keys() - self._descriptors.keys():
            self._open(next_ones[worker_id])

    def close(self) -> None:
        """Stop watching."""
        for worker_id in list(self._descriptors):
            self._forget(worker_id)

    def _open(self, other: workers.Other) -> None:
        try:
            descriptor: int = getattr(os, "pidfd_open")(other.pid)  # noqa: B009 - not on macOS
        except (AttributeError, OSError):
            return
        # If the worker ended before this call, the descriptor can belong to a later process.
        if is_gone(other):
            os.close(descriptor)
            return
        self._descriptors[other.id] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._ended, other.id)

    def _ended(self, worker_id: int) -> None:
        self._forget(worker_id)
        self._on_end()

    def _forget(self, worker_id: int) -> None:
        descriptor = self._descriptors.pop(worker_id)
        asyncio.get_running_loop().remove_reader(descriptor)
        os.close(descriptor)
