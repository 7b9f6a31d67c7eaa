"""The slots that all queues of a worker share: the setting `max_running`.

Each queue has slots of its own (its concurrency). A service that claims jobs also reserves shared
slots before the claim. While no shared slot is free, services wait in line, and the first one gets
the next free slots. So a queue with a backlog does not starve the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from taskd.worker.services.service import Wakeup

# A waiting service asks again at least this often. A service that does not ask again has stopped,
# or must not claim.
ASKS_WITHIN_S = 0.5


class SharedSlots:
    """Counts the shared slots in use, and reserves free ones for claims.

    Args:
        most: the number of slots; None if only the concurrency of each queue limits its attempts.

    Attributes:
        most: the same as the argument; it can change while the worker runs.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self._used: list[Callable[[], int]] = []
        self._reserved: dict[Wakeup, int] = {}
        # The services that wait, in their order, and when each of them has asked last.
        self._line: dict[Wakeup, float] = {}

    def add(self, used: Callable[[], int]) -> None:
        """Count the slots that a queue uses; `used` returns their number."""
        self._used.append(used)

    def remove(self, used: Callable[[], int]) -> None:
        """Undo add()."""
        self._used.remove(used)

    def reserve(self, claimant: Wakeup, wanted: int) -> int:
        """Reserve up to `wanted` slots until settle() is called; return how many, or 0.

        If the result is 0, the claimant is in line. It must ask again when it is woken, and at
        least every ASKS_WITHIN_S seconds.
        """
        if self.most is None:
            return wanted
        now = time.monotonic()
        self._line = {each: at for each, at in self._line.items() if now - at < ASKS_WITHIN_S}
        self._line[claimant] = now
        free = self.most - sum(used() for used in self._used) - sum(self._reserved.values())
        if free <= 0 or next(iter(self._line)) is not claimant:
            return 0
        del self._line[claimant]
        reserved = self._reserved[claimant] = min(wanted, free)
        self.freed()
        return reserved

    def settle(self, claimant: Wakeup) -> None:
        """End the reservation: the claim has ended, and the queue counts the claimed jobs."""
        if self._reserved.pop(claimant, 0):
            self.freed()

    def freed(self) -> None:
        """Wake the first service of the line, because a slot may be free."""
        for claimant in self._line:
            claimant.set()
            return
