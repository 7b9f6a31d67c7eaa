"""The scout: looks for jobs that nobody rang for, in all queues that sleep at once.

Rings may get lost, and behind a pooler there are none, so polling never stops. But a consumer that
polled for itself would claim in vain each time: with 50 queues of one job per second every third
claim was such a poll. One statement of the scout asks for all of them, and wakes whoever has
something to claim.
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
    """A consumer that waits for a ring, as the scout knows it.

    Attributes:
        poll_s: how long it wants to sleep between two looks; grows with each that was in vain.
        due_at: time.monotonic() of the next one, at the latest.
        woken: the scout woke it, for there is something to claim, or might be.
    """

    wakeup: Wakeup
    poll_s: float
    due_at: float
    woken: bool = False


class IdlePoller(Loop):
    """Service: polls when the first of the sleepers wants it; then all of them are polled.

    Args:
        poll_s: how often at least, as long as anybody sleeps.
    """

    name = "scout"

    def __init__(self, lane: Lane, poll_s: float) -> None:
        super().__init__(poll_s)
        self._lane = lane
        self._sleepers: dict[str, Sleeper] = {}
        self._looks_at = self._not_before = 0.0

    def later(self, poll_s: float) -> float:
        """How long to sleep after a look in vain that came after `poll_s`."""
        return min(poll_s * 2, self.every_s)

    def watch(self, queue: str, wakeup: Wakeup, poll_s: float) -> Sleeper:
        """Look for jobs of the queue until leave(): its consumer goes to sleep.

        Two calls: as a context manager it made each wake-up 12 us longer.
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
        """Look, if it is time; seconds until the next one wants it."""
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
            # What one statement did not tell, each finds out by itself, or why it cannot.
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
