"""Settings by operators: paused tasks and the concurrency of queues, as this worker knows them.

The database holds these settings. A worker reads them before its first claim and then every five
seconds (upkeep/rescuer.py); a call on the channel of all workers makes it read them at once. So a
pause takes effect after a round trip or, without notifications, within five seconds.
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

# Any user who can connect can call without end.
ACT_AT_MOST_EVERY_S = 0.2


class Controls:
    """Applies what operators have set.

    Args:
        runners: each has its configured concurrency until an operator sets another one.
        shared: the state in which consumers read the paused tasks.
    """

    def __init__(self, runners: Sequence[Runner], shared: Shared) -> None:
        self._runners, self._shared = runners, shared
        self._configured = {runner.queue: runner.limit for runner in runners}
        self._set: Mapping[str, int] = {}

    def configure(self, limits: Mapping[str, int]) -> None:
        """Apply concurrencies that were read from the settings again."""
        self._configured.update(limits)
        self._resize()

    def apply(
        self,
        paused: frozenset[str],
        limits: Mapping[str, int],
        elsewhere: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Apply the paused tasks, the queues whose concurrency is set, and what others can run."""
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
    """Receives the calls on the channel of all workers.

    A call without a payload is for all workers: an operator has set something. A call with a
    worker's id is for that worker: the cancellation of one of its jobs was requested.

    Args:
        look: wakes the service that reads the settings.
        reconcile: wakes the service that reads requested cancellations.
    """

    def __init__(self, lease: Lease, look: Wakeup, reconcile: Wakeup) -> None:
        self._lease = lease
        self._look, self._reconcile = RateLimited(look), RateLimited(reconcile)

    def receive(self, payload: str) -> None:
        """Handle one call."""
        if not payload:
            self._look.set()
        elif payload == str(self._lease.worker_id):
            self._reconcile.set()


class RateLimited:
    """Sets a wake-up, but not more often than every ACT_AT_MOST_EVERY_S."""

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
