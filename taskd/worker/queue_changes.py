"""Change the queues that a running worker serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from taskd import events
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.store import queues
from taskd.worker.assembly import Assembly
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.services.service import Loop, jittered_s
from taskd.worker.starting.served_queues import patterns, queue_limits

# The interval while attempts of a queue that the worker no longer serves still run.
LEAVING_S = 0.5
# The interval without patterns. A reload of the settings wakes the service.
IDLE_S = 3600.0


class QueueChanges(Loop):
    """Service: serves the queues of the settings, which a reload can change.

    If the settings contain patterns, the service reads the queues of the database about every
    `poll_s` seconds, and serves further queues that match.

    Args:
        settings: returns the present settings.
        limits: the concurrency of each queue that the worker serves; the service changes it.
    """

    name = "queue-changes"

    def __init__(
        self,
        parts: Assembly,
        registry: Registry,
        settings: Callable[[], Settings],
        limits: dict[str, int],
    ) -> None:
        super().__init__(settings().poll_s)
        self._parts, self._registry, self._settings = parts, registry, settings
        self._limits = limits
        # The queues that matched these patterns, and when to read them again (time.monotonic).
        self._matching: list[str] = []
        self._patterns: list[str] = []
        self._read_at = 0.0
        # The consumers of queues that the worker no longer serves, until their attempts have ended.
        self._left: dict[str, Consumer] = {}

    async def tick(self) -> float | None:
        """Read the queues that match, and serve the queues of the settings."""
        settings = self._settings()
        await self._read_matching(settings)
        await self._serve(queue_limits(settings, self._registry, self._matching))
        if self._forget():
            return LEAVING_S
        return max(0.0, self._read_at - time.monotonic()) if self._patterns else IDLE_S

    async def _read_matching(self, settings: Settings) -> None:
        wanted = patterns(settings)
        if wanted == self._patterns and time.monotonic() < self._read_at:
            return
        self._matching = await queues.matching(self._parts.upkeep, wanted) if wanted else []
        self._patterns = wanted
        self._read_at = time.monotonic() + jittered_s(settings.poll_s)

    async def _serve(self, limits: Mapping[str, int]) -> None:
        parts = self._parts
        parts.controls.configure(limits)
        gone = [queue for queue in parts.consumers if queue not in limits]
        new = [queue for queue in limits if queue not in parts.consumers]
        new = [queue for queue in new if queue not in self._left or self._left[queue].ended]
        if not (gone or new):
            return
        # Change the mapping in place: the worker also uses this mapping to register again.
        self._limits.clear()
        self._limits.update(limits)
        # Producers must notify before the worker relies on notifications.
        await queues.serve(parts.upkeep, parts.shared.lease.worker_id, limits)
        # Before the first claim, so that no job of a paused task starts.
        seen = await parts.rescuer.check()
        for queue in gone:
            self._left[queue] = parts.stop_queue(queue)
        added = [parts.add_queue(queue, limits[queue]) for queue in new]
        for queue in new:
            self._left.pop(queue, None)
        parts.controls.configure(limits)
        parts.promoter.expect(seen.due)
        parts.supervisor.forget_ended()
        parts.listen_again()
        for consumer in added:
            parts.supervisor.add(consumer, beside=parts.quarantine)
        events.queues_changed(new, gone)

    def _forget(self) -> bool:
        """Forget the queues whose attempts have ended; return whether others still run attempts."""
        for queue, consumer in list(self._left.items()):
            runner = consumer.runner
            # A claim of the quarantine can still bring jobs of the queue.
            late = not consumer.ended or self._parts.quarantine.claiming
            if runner.idle and not runner.abandoned and not late:
                self._parts.forget_queue(runner)
                del self._left[queue]
        return bool(self._left)
