"""Apply settings of operators: paused tasks and the concurrency of queues.

The database stores these settings. The rescuer (upkeep/rescuer.py) reads them before the first
claim, and then at least every six seconds. It also reads them after a notification on the channel
of all workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from taskd import events
from taskd.worker.lease.state import Lease
from taskd.worker.running.preparation import Shared
from taskd.worker.running.runner import Runner
from taskd.worker.services.service import Wakeup

# Any user who can connect to the database can send any number of notifications.
ACT_AT_MOST_EVERY_S = 0.2


class Controls:
    """Applies the settings of operators.

    Args:
        runners: the runners of all queues. Their limits are the configured concurrencies, which
            apply while no operator has set another one.
        shared: the state of the worker from which consumers and runners read the paused tasks.
    """

    def __init__(self, runners: Sequence[Runner], shared: Shared) -> None:
        self._runners, self._shared = runners, shared
        self._configured = {runner.queue: runner.limit for runner in runners}
        self._set: Mapping[str, int] = {}

    def configure(self, limits: Mapping[str, int]) -> None:
        """Apply configured concurrencies, by queue, after a reload of the settings."""
        self._configured.update(limits)
        self._resize()

    def apply(
        self,
        paused: frozenset[str],
        limits: Mapping[str, int],
        elsewhere: Mapping[str, Mapping[str, int]],
    ) -> None:
        """Apply the settings that the rescuer has read.

        Args:
            paused: the paused tasks.
            limits: the concurrencies that operators have set, by queue.
            elsewhere: by queue and task, the newest version of the arguments that any other live
                worker reads. It contains only tasks and versions that this worker cannot run.
        """
        self._shared.elsewhere.update(elsewhere)
        if paused != self._shared.paused:
            self._shared.paused = paused
            events.tasks_paused(sorted(paused))
        if limits != self._set:
            self._set = limits
            for runner in self._resize():
                events.queue_resized(runner.queue, runner.limit)

    def _resize(self) -> list[Runner]:
        """Set the concurrency of each runner; return the runners whose concurrency has changed."""
        changed = []
        for runner in self._runners:
            limit = self._set.get(runner.queue, self._configured[runner.queue])
            if limit != runner.limit:
                runner.resize(limit)
                changed.append(runner)
        return changed


class Calls:
    """Receives the notifications on the channel of all workers.

    A notification without a payload tells all workers to read the settings. Such a notification is
    sent after an operator has changed a setting, a worker with other tasks has started, or a worker
    has begun to serve other queues. A notification with a worker's id tells this worker that a user
    has requested the cancellation of one of its jobs.

    Args:
        look: the wake-up of the rescuer, which reads the settings.
        reconcile: the wake-up of the reconciler, which reads requested cancellations.
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
        """Set the wake-up soon: now, or ACT_AT_MOST_EVERY_S after it was last set."""
        now = time.monotonic()
        if self._at > now:
            return  # a call is planned already
        self._at = max(now, self._at + ACT_AT_MOST_EVERY_S)
        asyncio.get_running_loop().call_later(self._at - now, self._wakeup.set)
