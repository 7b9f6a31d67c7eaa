"""The pruner: makes and drops partitions of the history, and deletes expired rows."""

from __future__ import annotations

from taskd import events
from taskd.store import workers, workflows
from taskd.store.connections.database import Database, Lane
from taskd.store.jobs import history, limits, logs, results
from taskd.worker.service import Loop
from taskd.worker.upkeep.sequences import mend_sequences

HISTORY_EVERY_S = 600.0
FORGET_WORKERS_AFTER_S = 7 * 86400.0


class Pruner(Loop):
    """Service: creates partitions in advance, drops expired ones, and deletes old rows."""

    name = "pruner"

    def __init__(self, database: Database) -> None:
        super().__init__(HISTORY_EVERY_S)
        self._database = database

    async def tick(self) -> None:
        """Prune once, on a connection of its own."""
        lane = Lane(self._database, "history", lock_timeout=str(history.LOCK_TIMEOUT_MS))
        try:
            await self._prune(lane)
        finally:
            await lane.close()

    async def _prune(self, lane: Lane) -> None:
        try:
            await mend_sequences(lane)
            made = await history.make_partitions(lane)
            if made:
                events.partitions_made(made)
            while leaf := await history.drop_expired(lane):
                events.partition_dropped(leaf)
            await history.prune_default(lane)
            await history.prune_keys(lane)
            await workflows.prune(lane)
            await results.prune_progress(lane)
            await logs.prune(lane)
            await limits.prune_buckets(lane)
            await workers.prune(lane, FORGET_WORKERS_AFTER_S)
        except Exception as error:  # noqa: BLE001 - not permitted, or altered by hand: jobs go on
            events.upkeep_postponed("history", str(error))
            self.every_s = 60.0
        else:
            self.every_s = HISTORY_EVERY_S
