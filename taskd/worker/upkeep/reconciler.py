"""The reconciler: compare the jobs in this process with the rows of the worker's running jobs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack

from taskd import events
from taskd.core.jobs.job import Job, JobState
from taskd.core.outcomes.ack import Ack
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.workers import RunningJob
from taskd.worker.finishing.acker import Acker
from taskd.worker.lease.state import Lease
from taskd.worker.running.runner import Runner
from taskd.worker.services.service import Loop

RECONCILE_EVERY_S = 2.0
IDLE_CHECK_EVERY_S = 15.0


class Reconciler(Loop):
    """Service: releases jobs that the worker never received, and cancels jobs on request.

    It also cancels the attempts of jobs that a user has completed or restarted by hand.

    The worker never receives a claimed job if the reply to the claim is lost. While the worker is
    idle and no reply was lost, the reconciler compares every IDLE_CHECK_EVERY_S.

    Args:
        claims: the lanes of the claims. While the reconciler reads the rows, it lets no other
            statement run on these lanes.
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
        # The grace time. If the reply to a claim was lost, the claim ends on the server within this
        # time.
        self._grace_s = statement_timeout_s + 5.0
        self._claim_lost_at: float | None = None
        self._checked_at = time.monotonic()

    def claim_lost(self) -> None:
        """Record that the reply to a claim was lost: PostgreSQL may still commit the claim.

        For twice the grace time, the reconciler compares every RECONCILE_EVERY_S, even if the
        worker is idle.
        """
        self._claim_lost_at = time.monotonic()

    async def tick(self) -> None:
        """Compare once."""
        now = time.monotonic()
        calm = self._claim_lost_at is None and all(runner.idle for runner in self._runners)
        if calm and now - self._checked_at < IDLE_CHECK_EVERY_S:
            return
        worker_id, here = self._lease.worker_id, self._job_ids()
        before = [(runner, job) for runner in self._runners for job in runner.jobs()]
        rows = await self._running_jobs(worker_id)
        self._checked_at = now
        if self._claim_lost_at is not None and now - self._claim_lost_at > 2 * self._grace_s:
            self._claim_lost_at = None
        # The jobs that were here before the read or are here after it. A job that ended during the
        # read can still be in `rows`.
        here |= self._job_ids()
        missing = [row for row in rows if row.id not in here and row.age_s > self._grace_s]
        for row in missing:
            self._acker.outcome(Ack(row.id, worker_id, row.fence, JobState.QUEUED, refund=True))
        if missing:
            events.jobs_reconciled([row.id for row in missing])
        await self._take_away(before, {row.id for row in rows})
        for row in rows:
            if row.cancel_reason is not None:
                for runner in self._runners:
                    runner.cancel_job(row.id, row.cancel_reason)

    async def _take_away(self, before: Sequence[tuple[Runner, Job]], running: set[int]) -> None:
        """Cancel attempts whose jobs a user has completed or restarted by hand.

        A job also no longer runs for this worker if a failover has lost its claim, or its handler
        has completed it. Then the attempt continues.
        """
        worker_id, unwritten = self._lease.worker_id, set(self._acker.unwritten())
        gone = [
            (runner, job) for runner, job in before
            if job.id not in running and job.id not in unwritten and job.worker_id == worker_id
        ]  # fmt: skip
        if not gone:
            return
        ids, fences = [job.id for _, job in gone], [job.fence for _, job in gone]
        statuses = await jobs.check_acks(self._claims[0], worker_id, ids, fences)
        for runner, job in gone:
            if statuses.get(job.id) == "by hand":
                runner.take_away(job)

    async def _running_jobs(self, worker_id: int) -> list[RunningJob]:
        first, *others = self._claims
        async with AsyncExitStack() as resting:
            for lane in others:
                await resting.enter_async_context(lane.at_rest())
            return await workers.running_jobs(first, worker_id)

    def _job_ids(self) -> set[int]:
        here = set(self._acker.unwritten())
        for runner in self._runners:
            here.update(job.id for job in runner.jobs())
        return here
