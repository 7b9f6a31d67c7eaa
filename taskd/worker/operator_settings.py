"""Settings by operators, as this worker has read them: paused tasks and concurrency of queues.

The database holds these settings. A worker reads them before its first claim and then about every
five seconds (upkeep/rescuer.py); a notification on the channel of all workers makes it read them at
once. So a pause takes effect after a round trip or, without notifications, within about six
seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from taskd import events
from taskd.worker.lease.state import Lease
from taskd.worker.running.preparation import Shared
from taskd.worker.running.runner import Runner
from taskd.worker.service import Wakeup

# Any user who can connect to the database can send such notifications without end.
ACT_AT_MOST_EVERY_S = 0.2


class Controls:
    """Applies the settings that operators have made.

    Args:
        runners: each has its configured concurrency until an operator sets another one.
        shared: the state in which consumers read the paused tasks.
    """

    def __init__(self, runners: Sequence[Runner], shared: Shared) -> None:
        self._runners, self._shared = runners, shared
        self._configured = {runner.queue: runner.limit for runner in runners}
        self._set: Mapping[str, int] = {}

    def configure(self, limits: Mapping[str, int]) -> None:
        """Apply the concurrencies of the settings after a reload."""
        self._configured.update(limits)
        self._resize()

    def apply(
        self,
        paused: frozenset[str],
        limits: Mapping[str, int],
        elsewhere: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Apply paused tasks, concurrencies of queues, and which jobs other workers can run."""
        self._shared.elsewhere.update(elsewhere)
        if paused != self._shared.paused:
            self._shared.paused = paused
            events.tasks_paused(sorted(paused))
        if limits != self._set:
            self._set = limits
            for runner in self._resize():
                events.queue_resized(runner.queue, runner.limit)

    def _resize(self) -> list[Runner]:
        """Set the concurrency of each runner; return the runners that have changed."""
        changed = []
        for runner in self._runners:
            limit = self._set.get(runner.queue, self._configured[runner.queue])
            if limit != runner.limit:
                runner.resize(limit)
                changed.append(runner)
        return changed


class Calls:
    """Receives the notifications on the channel of all workers.

    A notification without a payload is for all workers: an operator has changed a setting. A
    notification with a worker's id is for that worker: the cancellation of one of its jobs was
    requested.

    Args:
        look: wakes the service that reads the settings.
        reconcile: wakes the service that reads requested cancellations.
    """

    def __init__(self, lease: Lease, look: Wakeup, reconcile: Wakeup) -> None:
        self._lease = lease
        self._look, self._reconcile = RateLimited(look), RateLimited(reconcile)

    def receive(self, payload: str) -> None:
        """Handle one notification."""
        if not payload:
            self._look.set()
        elif payload == str(self._lease.worker_id):
            self._reconcile.set()


class RateLimited:
    """Sets a wake-up at most once every ACT_AT_MOST_EVERY_S seconds."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._at = 0.0

    def set(self) -> None:
        """Set the wake-up now or as soon as it is allowed."""
        now = time.monotonic()
        if self._at > now:
            return  # already planned
        self._at = max(now, self._at + ACT_AT_MOST_EVERY_S)
        asyncio.get_running_loop().call_later(self._at - now, self._wakeup.set)
