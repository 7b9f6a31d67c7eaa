"""What operators have set: paused tasks and the concurrency of queues, as this worker knows it.

The truth is in the database. A worker reads it before its first claim and then every five seconds,
with what it asks about its surroundings anyway; a call on the channel of all workers has it look at
once. So a pause is late by a round trip, or, where nothing is heard, by five seconds at most.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from taskd import events
from taskd.worker.lease import Lease
from taskd.worker.running.runner import Runner, Shared
from taskd.worker.service import Wakeup

# Whoever may connect can call, in vain and without end.
ACT_AT_MOST_EVERY_S = 0.2


class Controls:
    """Heeds what operators have set.

    Args:
        runners: each is as large as its settings say, until somebody sets it otherwise.
        shared: where consumers read which tasks are paused.
    """

    def __init__(self, runners: Sequence[Runner], shared: Shared) -> None:
        self._runners, self._shared = runners, shared
        self._configured = {runner.queue: runner.limit for runner in runners}
        self._set: Mapping[str, int] = {}

    def configure(self, limits: Mapping[str, int]) -> None:
        """The settings were read again."""
        self._configured.update(limits)
        self._resize()

    def apply(self, paused: frozenset[str], limits: Mapping[str, int]) -> None:
        """The database was read: the paused tasks, and the queues whose concurrency is set."""
        if paused != self._shared.paused:
            self._shared.paused = paused
            events.tasks_paused(sorted(paused))
        if limits != self._set:
            self._set = limits
            for runner in self._resize():
                events.queue_resized(runner.queue, runner.limit)

    def _resize(self) -> list[Runner]:
        """Make each runner as large as it is to be; those that have changed."""
        changed = []
        for runner in self._runners:
            limit = self._set.get(runner.queue, self._configured[runner.queue])
            if limit != runner.limit:
                runner.resize(limit)
                changed.append(runner)
        return changed


class Calls:
    """Hears the calls on the channel of all workers.

    One without a payload is for everybody: something was set. One with a worker's id is for that
    worker: a job that it runs is to be cancelled.

    Args:
        look: has the worker read what is set.
        reconcile: has it read which of its jobs are to be cancelled.
    """

    def __init__(self, lease: Lease, look: Wakeup, reconcile: Wakeup) -> None:
        self._lease = lease
        self._look, self._reconcile = RateLimited(look), RateLimited(reconcile)

    def receive(self, payload: str) -> None:
        """Somebody calls."""
        if not payload:
            self._look.set()
        elif payload == str(self._lease.worker_id):
            self._reconcile.set()


class RateLimited:
    """Sets a wake-up, at once or so long after the last time that it is not set too often."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._at = 0.0

    def set(self) -> None:
        """Set it."""
        now = time.monotonic()
        if self._at > now:
            return  # it is going to be
        self._at = max(now, self._at + ACT_AT_MOST_EVERY_S)
        asyncio.get_running_loop().call_later(self._at - now, self._wakeup.set)
