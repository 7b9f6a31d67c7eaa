"""The idle poller: looks for jobs that were not notified, in all sleeping queues at once.

Notifications can be lost, and a pooler passes none on, so polling never stops. If each consumer
polled for itself, most of those claims would be empty. One statement polls all sleeping queues, and
the poller wakes the consumers that have something to claim.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from taskd.errors import TaskdError
from taskd.store.connections.database import Lane
from taskd.store.jobs import jobs
from taskd.worker.service import Loop, Wakeup, jittered_s

# A poll is slow when dead index entries precede the queued jobs (read_position.py). The pause after
# a poll is this many times its duration.
LOOK_SHARE = 20


@dataclass(slots=True, eq=False)
class Sleeper:
    """A consumer that waits for a notification.

    Attributes:
        poll_s: the interval of its polls; doubles with each empty one.
        due_at: time.monotonic() by which it must be polled.
        woken: the idle poller has woken it, because there are or may be jobs to claim.
    """

    wakeup: Wakeup
    poll_s: float
    due_at: float
    woken: bool = False


class IdlePoller(Loop):
    """Service: polls all sleepers when the first one is due.

    Args:
        poll_s: the longest interval between two polls.
    """

    name = "idle-poller"

    def __init__(self, lane: Lane, poll_s: float) -> None:
        super().__init__(poll_s)
        self._lane = lane
        self._sleepers: dict[str, Sleeper] = {}
        self._next_check_at = self._not_before = 0.0

    def later(self, poll_s: float) -> float:
        """Return the interval that follows an empty poll after `poll_s`."""
        return min(poll_s * 2, self.every_s)

    def add(self, queue: str, wakeup: Wakeup, poll_s: float) -> Sleeper:
        """Poll the queue until remove(): its consumer goes to sleep.

        Not a context manager, which would cost 12 us per wake-up.
        """
        sleeper = Sleeper(wakeup, poll_s, time.monotonic() + jittered_s(poll_s))
        self._sleepers[queue] = sleeper
        if sleeper.due_at < self._next_check_at:
            self.wakeup.set()
        return sleeper

    def remove(self, queue: str) -> None:
        """Stop polling the queue: its consumer is awake."""
        self._sleepers.pop(queue, None)

    async def tick(self) -> float:
        """Poll if a sleeper is due; return the seconds until the next one is."""
        if self._due_at() <= time.monotonic():
            await self._poll()
        self._next_check_at = self._due_at()
        return max(0.0, self._next_check_at - time.monotonic())

    def _due_at(self) -> float:
        idle_until = time.monotonic() + self.every_s
        first = min((each.due_at for each in self._sleepers.values()), default=idle_until)
        return max(first, self._not_before)

    async def _poll(self) -> None:
        sleeping = dict(self._sleepers)
        began = time.monotonic()
        failed: TaskdError | None = None
        try:
            found = await jobs.poll(self._lane, sleeping)
        except TaskdError as error:
            # The poll failed: let each consumer claim for itself.
            found, failed = set(sleeping), error
        now = time.monotonic()
        self._not_before = now + min(LOOK_SHARE * (now - began), self.every_s)
        for queue, sleeper in sleeping.items():
            if self._sleepers.get(queue) is not sleeper:
                continue  # it has woken meanwhile
            if queue in found:
                sleeper.woken = True
                sleeper.wakeup.set()
            else:
                sleeper.poll_s = self.later(sleeper.poll_s)
            sleeper.due_at = now + jittered_s(sleeper.poll_s)
        if failed is not None:
            raise failed
