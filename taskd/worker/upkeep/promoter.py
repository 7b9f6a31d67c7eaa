"""The promoter: moves due jobs into the index of queued jobs, with a timer of its own.

It also admits jobs that their limits have blocked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from taskd import events
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Lane
from taskd.store.jobs import jobs, limits
from taskd.store.jobs.jobs import DueIn
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.service import Loop, Wakeup, jittered_s

PROMOTE_BATCH = 1000
PROMOTE_AT_MOST_EVERY_S = 0.05
# With 50 notified jobs per second, a check per notification would run 20 times a second.
LOOK_FOR_RINGS_EVERY_S = 0.5
# The rescuer reads the due times as well, far more often than this.
TIMER_S_MAX = 30.0
TIMER_BUSY_S = 1.0


class Promoter(Loop):
    """Promotes due jobs, with a timer set to the next due time; wakes the quarantine for suspects.

    Args:
        consumers: of the queues served here; promoting notifies other workers. While one of them
            polls its queue, and until it trusts notifications again, none may announce later jobs.
        suspects: the wake-up of the quarantine.
    """

    name = "promoter"

    def __init__(self, lane: Lane, consumers: Mapping[str, Consumer], suspects: Wakeup) -> None:
        super().__init__(TIMER_S_MAX)
        self._lane, self._consumers, self._suspects = lane, consumers, suspects
        self._looks_at = 0.0
        self._looked_at = 0.0
        self._hears: asyncio.TimerHandle | None = None

    def hear(self) -> None:
        """A notification may announce a job that will be due: check, but not for each notification.

        Nearly all of them announce a job to claim. A consumer that finds none sets the wake-up.
        """
        if self._hears is None:
            wait_s = max(0.0, self._looked_at + LOOK_FOR_RINGS_EVERY_S - time.monotonic())
            self._hears = asyncio.get_running_loop().call_later(wait_s, self.wakeup.set)

    def expect(self, due: DueIn) -> None:
        """The next due times were read: wake up if one comes before the timer ends.

        Notifications announce them as well. This covers lost ones, so due times need to be read
        only twice a minute and not every few seconds.
        """
        self._tell_limited(due)
        soon = [each for each in (due.job_s, due.suspect_s, due.gate_s) if each is not None]
        if soon and time.monotonic() + min(soon) < self._looks_at - PROMOTE_AT_MOST_EVERY_S:
            self.wakeup.set()

    async def tick(self) -> float:
        """Promote due jobs; return seconds until the next due time."""
        if self._hears is not None:
            self._hears.cancel()
            self._hears = None
        self._looked_at = time.monotonic()
        try:
            wait_s = await self._promote()
        except StoreUnavailable:
            wait_s = 1.0
        # Notifications come with every enqueue; do not read the clock for each of them.
        pause_s = min(wait_s or PROMOTE_AT_MOST_EVERY_S, PROMOTE_AT_MOST_EVERY_S)
        await asyncio.sleep(pause_s)
        busy = any(
            each.attendance.attending or each.attendance.doubtful
            for each in self._consumers.values()
        )
        timer_s = TIMER_BUSY_S if busy else jittered_s(TIMER_S_MAX)
        timer_s = min(max(wait_s - pause_s, 0.0), timer_s)
        self._looks_at = time.monotonic() + timer_s
        return timer_s

    async def _promote(self) -> float:
        """Promote due jobs; return seconds until there is something to do again."""
        due = await jobs.next_due(self._lane)
        while due.job_s is not None and due.job_s <= 0:
            moved = await jobs.promote(self._lane, PROMOTE_BATCH)
            if moved:
                events.jobs_promoted(moved)
            for queue in moved.keys() & self._consumers.keys():
                self._consumers[queue].wakeup.set()
            due = await jobs.next_due(self._lane)
            if not moved:
                break  # other workers are promoting the rest
        due = await self._admit(due)
        self._tell_limited(due)
        wait_s = TIMER_S_MAX if due.job_s is None else max(due.job_s, 0.0)
        if due.gate_s is not None:
            wait_s = min(wait_s, max(due.gate_s, 0.0))
        if due.suspect_s is not None:
            if due.suspect_s <= 0:
                self._suspects.set()
            else:
                wait_s = min(wait_s, due.suspect_s)
        return wait_s

    async def _admit(self, due: DueIn) -> DueIn:
        """Admit jobs that have arrived at limits or can start now; return when the next can."""
        while due.gate_s is not None and due.gate_s <= 0:
            admitted = await limits.admit(self._lane, PROMOTE_BATCH)
            if admitted.queues:
                events.jobs_admitted(admitted.queues)
            for queue in admitted.queues.keys() & self._consumers.keys():
                self._consumers[queue].wakeup.set()
            due = await jobs.next_due(self._lane)
            if not admitted.looked:
                break  # another worker does it, or holds a lock
        return due

    def _tell_limited(self, due: DueIn) -> None:
        """Note whose queue an operator has limited, or no longer limits."""
        if due.limited is not None:
            for queue, consumer in self._consumers.items():
                consumer.be_limited(limited=queue in due.limited)
