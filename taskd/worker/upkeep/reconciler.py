"""The reconciler: compare the jobs that the database assigns to this worker with those it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from taskd import events
from taskd.core.jobs.job import JobState
from taskd.core.outcomes.ack import Ack
from taskd.errors import StoreUnavailable
from taskd.store import workers
from taskd.store.connections.database import Lane
from taskd.store.workers import RunningJob
from taskd.worker.finishing.acker import Acker
from taskd.worker.lease import Lease
from taskd.worker.running.runner import Runner
from taskd.worker.service import Loop

RECONCILE_EVERY_S = 2.0
IDLE_LOOK_EVERY_S = 15.0


class Reconciler(Loop):
    """Compares what the database says this worker runs with what it does run.

    Rows that it never received (a claim whose reply was lost) are given back; jobs that somebody
    asked to cancel are cancelled. An idle worker with no claim in doubt looks now and then only.

    Args:
        claims: the lanes of the claims, so that no claim is under way while it looks, except one
            that nobody waits for any more.
    """

    name = "reconciler"

    def __init__(
        self,
        claims: Sequence[Lane],
        lease: Lease,
        acker: Acker,
        runners: Sequence[Runner],
        statement_timeout_s: float,
    ) -> None:
        super().__init__(RECONCILE_EVERY_S)
        self._claims, self._lease, self._acker, self._runners = claims, lease, acker, runners
        # A claim that nobody waits for may still run on the server.
        self._grace_s = statement_timeout_s + 5.0
        self._doubted_at: float | None = None
        self._looked_at = time.monotonic()

    def doubt(self) -> None:
        """The reply to a claim was lost: look until its rows must have shown."""
        self._doubted_at = time.monotonic()

    async def tick(self) -> None:
        """Compare once."""
        now = time.monotonic()
        calm = self._doubted_at is None and all(runner.idle for runner in self._runners)
        if calm and now - self._looked_at < IDLE_LOOK_EVERY_S:
            return
        worker_id, known = self._lease.worker_id, self._known()
        try:
            rows = await self._running_jobs(worker_id)
        except StoreUnavailable:
            return
        self._looked_at = now
        if self._doubted_at is not None and now - self._doubted_at > 2 * self._grace_s:
            self._doubted_at = None
        # Known before or after: what ended meanwhile was still running when the database looked.
        known |= self._known()
        strangers = [row for row in rows if row.id not in known and row.age_s > self._grace_s]
        for row in strangers:
            self._acker.settled(Ack(row.id, worker_id, row.fence, JobState.QUEUED, refund=True))
        if strangers:
            events.jobs_reconciled([row.id for row in strangers])
        for row in rows:
            if row.cancel_reason is not None:
                for runner in self._runners:
                    runner.cancel_job(row.id, row.cancel_reason)

    async def _running_jobs(self, worker_id: int) -> list[RunningJob]:
        first, *others = self._claims
        async with AsyncExitStack() as resting:
            for lane in others:
                await resting.enter_async_context(lane.at_rest())
            return await workers.running_jobs(first, worker_id)

    def _known(self) -> set[int]:
        known = set(self._acker.unwritten())
        for runner in self._runners:
            known.update(runner.known())
        return known
