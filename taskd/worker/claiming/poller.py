"""The idle poller: polls all sleeping queues at once for jobs without a notification.

Notifications can get lost, and do not pass a pooler, so polling never stops. If each consumer
polled by itself, many claims would be in vain. One statement polls all sleeping queues, and wakes
the consumers of those with jobs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Lane
from taskd.store.jobs import jobs
from taskd.worker.service import Loop, Wakeup, jittered_s

# A poll is slow where dead index entries lie before the queued jobs (read_position.py). The pause
# after a poll is this many times as long as the poll took.
LOOK_SHARE = 20


@dataclass(slots=True, eq=False)
class Sleeper:
    """A sleeping consumer, as the idle poller knows it.

    Attributes:
        poll_s: its interval between two polls; grows with each poll in vain.
        due_at: time.monotonic() of its next poll, at the latest.
        woken: the poller woke it, because there is a job, or there might be.
    """

    wakeup: Wakeup
    poll_s: float
    due_at: float
    woken: bool = False


class IdlePoller(Loop):
    """Service: polls when the first sleeping consumer is due; all of them are polled then.

    Args:
        poll_s: the longest interval while any consumer sleeps.
    """

    name = "scout"

    def __init__(self, lane: Lane, poll_s: float) -> None:
        super().__init__(poll_s)
        self._lane = lane
        self._sleepers: dict[str, Sleeper] = {}
        self._looks_at = self._not_before = 0.0

    def later(self, poll_s: float) -> float:
        """Return how long to sleep after a poll in vain that came after `poll_s`."""
        return min(poll_s * 2, self.every_s)

    def watch(self, queue: str, wakeup: Wakeup, poll_s: float) -> Sleeper:
        """Poll the queue until leave(): its consumer goes to sleep.

        Two calls and no context manager, which made each wake-up slower.
        """
        sleeper = Sleeper(wakeup, poll_s, time.monotonic() + jittered_s(poll_s))
        self._sleepers[queue] = sleeper
        if sleeper.due_at < self._looks_at:
            self.wakeup.set()
        return sleeper

    def leave(self, queue: str) -> None:
        """The consumer of the queue is awake."""
        self._sleepers.pop(queue, None)

    async def tick(self) -> float:
        """Poll if it is time; return seconds until the next poll is due."""
        if self._due_at() <= time.monotonic():
            await self._look()
        self._looks_at = self._due_at()
        return max(0.0, self._looks_at - time.monotonic())

    def _due_at(self) -> float:
        idle_until = time.monotonic() + self.every_s
        first = min((each.due_at for each in self._sleepers.values()), default=idle_until)
        return max(first, self._not_before)

    async def _look(self) -> None:
        asked = dict(self._sleepers)
        began = time.monotonic()
        try:
            found = await jobs.poll(self._lane, asked)
        except StoreUnavailable:
            # If the statement failed, wake each consumer, which finds out by itself.
            found = set(asked)
        now = time.monotonic()
        self._not_before = now + min(LOOK_SHARE * (now - began), self.every_s)
        for queue, sleeper in asked.items():
            if self._sleepers.get(queue) is not sleeper:
                continue  # it has woken meanwhile
            if queue in found:
                sleeper.woken = True
                sleeper.wakeup.set()
            else:
                sleeper.poll_s = self.later(sleeper.poll_s)
            sleeper.due_at = now + jittered_s(sleeper.poll_s)
