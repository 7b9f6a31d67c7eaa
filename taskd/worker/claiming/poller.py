"""The idle poller: finds jobs whose notification did not arrive.

Notifications can be lost, and a pooler forwards none. So polling never stops. If each consumer
polled by claims, most of these claims would be empty. Instead, one statement polls the queues of
all sleeping consumers, and the poller wakes the consumers that have jobs to claim.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from taskd.errors import TaskdError
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.worker.services.service import Loop, Wakeup, jittered_s

# The pause after a poll is at least this many times the duration of the poll, up to `poll_s`. Polls
# are slow while dead index entries precede the queued jobs (read_position.py).
LOOK_SHARE = 20


@dataclass(slots=True, eq=False)
class Sleeper:
    """A consumer that sleeps until a notification.

    Attributes:
        wakeup: wakes the consumer.
        poll_s: the present interval between polls of its queue; it doubles with each empty poll.
        due_at: when its queue must be polled next (time.monotonic).
        woken: the idle poller has woken the consumer, because the poller has found jobs, or the
            poll has failed.
    """

    wakeup: Wakeup
    poll_s: float
    due_at: float
    woken: bool = False


class IdlePoller(Loop):
    """Service: polls the queues of all sleepers when the first of them is due.

    Args:
        poll_s: the longest interval between two polls, in seconds, before jitter.
    """

    name = "idle-poller"

    def __init__(self, lane: Lane, poll_s: float) -> None:
        super().__init__(poll_s)
        self._lane = lane
        self._sleepers: dict[str, Sleeper] = {}
        self._next_check_at = self._not_before = 0.0

    def later(self, poll_s: float) -> float:
        """Return the interval after an empty poll; `poll_s` is the interval before it."""
        return min(poll_s * 2, self.every_s)

    def add(self, queue: str, wakeup: Wakeup, poll_s: float) -> Sleeper:
        """Begin to poll the queue, because its consumer goes to sleep.

        There is no context manager for add() and remove(), because it would cost 12 us per wake-up.
        """
        sleeper = Sleeper(wakeup, poll_s, time.monotonic() + jittered_s(poll_s))
        self._sleepers[queue] = sleeper
        if sleeper.due_at < self._next_check_at:
            self.wakeup.set()
        return sleeper

    def remove(self, queue: str) -> None:
        """Stop polling the queue, because its consumer is awake."""
        self._sleepers.pop(queue, None)

    async def tick(self) -> float:
        """Poll if a sleeper is due; return the seconds until the next sleeper is due."""
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
            # The poll has failed. Wake all consumers, so that each of them claims without a poll.
            found, failed = set(sleeping), error
        now = time.monotonic()
        self._not_before = now + min(LOOK_SHARE * (now - began), self.every_s)
        for queue, sleeper in sleeping.items():
            if self._sleepers.get(queue) is not sleeper:
                continue  # its consumer has woken meanwhile
            if queue in found:
                sleeper.woken = True
                sleeper.wakeup.set()
            else:
                sleeper.poll_s = self.later(sleeper.poll_s)
            sleeper.due_at = now + jittered_s(sleeper.poll_s)
        if failed is not None:
            raise failed
