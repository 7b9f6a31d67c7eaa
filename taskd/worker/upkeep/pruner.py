"""The pruner: creates and drops partitions of the history, and deletes expired rows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from taskd import events
from taskd.errors import TaskdError
from taskd.store import workers, workflows
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import HeldUp, is_outage
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, limits, logs, results
from taskd.worker.services.service import Loop
from taskd.worker.upkeep.sequences import mend_sequences

HISTORY_EVERY_S, AGAIN_S = 600.0, 60.0
FORGET_WORKERS_AFTER_S = 7 * 86400.0


class Pruner(Loop):
    """Service: runs each step of STEPS every ten minutes, or every minute while one fails."""

    name = "pruner"

    def __init__(self, database: Database) -> None:
        super().__init__(HISTORY_EVERY_S)
        self._database = database
        self._failed: dict[str, str] = {}

    async def tick(self) -> None:
        """Run all steps, on a connection of their own."""
        lane = Lane(self._database, "history", lock_timeout=str(history.LOCK_TIMEOUT_MS))
        try:
            await self._prune(lane)
        finally:
            await lane.close()

    async def _prune(self, lane: Lane) -> None:
        """Run every step, even if an earlier step failed; stop only during an outage."""
        self.every_s = HISTORY_EVERY_S
        for what, step in STEPS.items():
            try:
                await step(lane)
            except Exception as error:  # noqa: BLE001 - a step that fails must not stop the worker
                self.every_s = AGAIN_S
                outage = isinstance(error, TaskdError) and is_outage(error)
                if outage or isinstance(error, HeldUp):
                    events.upkeep_postponed(what, str(error))
                elif self._failed.get(what) != str(error):
                    self._failed[what] = str(error)
                    events.upkeep_failed(what, str(error))
                if outage:
                    return
                self.failures.failed(what, str(error))
            else:
                self._failed.pop(what, None)
                self.failures.worked(what)


async def _make_partitions(lane: Lane) -> None:
    made = await history.make_partitions(lane)
    if made:
        events.partitions_made(made)


async def _drop_partitions(lane: Lane) -> None:
    for leaf in await history.drop_expired(lane):
        events.partition_dropped(leaf)


async def _forget_workers(lane: Lane) -> None:
    await workers.prune(lane, FORGET_WORKERS_AFTER_S)


STEPS: dict[str, Callable[[Lane], Awaitable[Any]]] = {
    "advance sequences behind their rows": mend_sequences,
    "make partitions of the history": _make_partitions,
    "drop partitions of the history": _drop_partitions,
    "prune the history": history.prune_default,
    "prune unique keys": history.prune_keys,
    "prune workflows": workflows.prune,
    "prune progress": results.prune_progress,
    "prune logs": logs.prune,
    "delete full token buckets": limits.prune_buckets,
    "prune the records of actions": history.prune_actions,
    "prune workers": _forget_workers,
}
