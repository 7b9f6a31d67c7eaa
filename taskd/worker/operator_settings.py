"""Settings by operators: paused tasks and the concurrency of queues, as this worker knows them.

The database has the truth. A worker reads it before its first claim and then every five seconds,
together with other upkeep data; a notification on the channel of all workers makes it read at once.
So a pause takes effect after a round trip, or, without notifications, within five seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from taskd import events
from taskd.worker.lease import Lease
from taskd.worker.running.runner import Runner, Shared
from taskd.worker.service import Wakeup

# Any user who can connect can send such notifications, without end.
LOOK_FOR_CALLS_EVERY_S = 0.2


class Controls:
    """Applies what operators have set.

    Args:
        runners: their size is the worker's own setting, unless an operator has set another one.
        shared: where consumers read which tasks are paused.
    """

    def __init__(self, runners: Sequence[Runner], shared: Shared) -> None:
        self._runners, self._shared = runners, shared
        self._configured = {runner.queue: runner.limit for runner in runners}
        self._set: Mapping[str, int] = {}

    def configure(self, limits: Mapping[str, int]) -> None:
        """Note that the worker's settings were read again."""
        self._configured.update(limits)
        self._resize()

    def heed(self, paused: frozenset[str], limits: Mapping[str, int]) -> None:
        """Apply what was read: the paused tasks, and the queues with a set concurrency."""
        if paused != self._shared.paused:
            self._shared.paused = paused
            events.tasks_paused(sorted(paused))
        if limits != self._set:
            self._set = limits
            for runner in self._resize():
                events.queue_resized(runner.queue, runner.limit)

    def _resize(self) -> list[Runner]:
        """Set the size of each runner; return those that have changed."""
        changed = []
        for runner in self._runners:
            limit = self._set.get(runner.queue, self._configured[runner.queue])
            if limit != runner.limit:
                runner.resize(limit)
                changed.append(runner)
        return changed


class Calls:
    """Receives notifications on the channel of all workers.

    A notification without a payload concerns all workers: an operator has set something. One with a
    worker's id concerns that worker: the cancellation of one of its jobs was requested.

    Args:
        look: makes the worker read what operators have set.
        reconcile: makes it read which of its jobs to cancel.
    """

    def __init__(self, lease: Lease, look: Wakeup, reconcile: Wakeup) -> None:
        self._lease = lease
        self._look, self._reconcile = Seldom(look), Seldom(reconcile)

    def hear(self, payload: str) -> None:
        """Handle a notification."""
        if not payload:
            self._look.set()
        elif payload == str(self._lease.worker_id):
            self._reconcile.set()


class Seldom:
    """Sets a wake-up, at once or after a minimum interval since the last time."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._at = 0.0

    def set(self) -> None:
        """Set it."""
        now = time.monotonic()
        if self._at > now:
            return  # it is scheduled already
        self._at = max(now, self._at + LOOK_FOR_CALLS_EVERY_S)
        asyncio.get_running_loop().call_later(self._at - now, self._wakeup.set)
