"""The end of a worker whose loop is blocked: what another thread can still write for it.

It is the last phase of an ordinary stop: outcomes that are not written yet are written, what was
claimed and not started goes back, what runs is abandoned, and the worker's row is closed. Every
statement is guarded, so it does not matter that the loop may come back to life at any moment and
write the same: one of the two takes the row, the other changes nothing. An abandoned job is due
again in five seconds, and this process is gone in three; so it does not run twice at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from taskd import events
from taskd.core import outcome
from taskd.core.job import Job
from taskd.core.outcome import Ack, Interrupted, NotStarted
from taskd.store import jobs as store
from taskd.store import workers
from taskd.store.database import Database, Lane
from taskd.worker.acker import Acker, by_worker
from taskd.worker.lease import Lease
from taskd.worker.runner import Runner
from taskd.worker.watch import LoopWatch


class Leaving:
    """Called once, in a thread, when the loop does not answer at the end of a stop."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        acker: Acker,
        runners: Sequence[Runner],
        watch: LoopWatch,
    ) -> None:
        self._database, self._lease, self._watch = database, lease, watch
        self._acker, self._runners = acker, runners

    def __call__(self) -> None:
        """Say why, and write what there is; the caller ends the process whatever comes of it."""
        blocker = self._watch.blocker()
        unstarted = [job for runner in self._runners for job in runner.take_unstarted()]
        abandoned = self._abandoned(blocker)
        events.worker_stuck(blocker, len(abandoned), len(unstarted), self._watch.stack())
        done, settled = self._acker.outcomes()
        settled += [outcome.settle(job, None, NotStarted()) for job in unstarted]
        asyncio.run(self._write(done, settled + abandoned))

    def _abandoned(self, blocker: Job | None) -> list[Ack]:
        """What runs: attempts that wait, and the one that blocks the loop in its first step."""
        found = [
            outcome.settle(attempt.job, attempt.task, attempt.abandonment())
            for runner in self._runners
            for attempt in runner.attempts()
        ]
        if blocker is not None and blocker.id not in {ack.id for ack in found}:
            found.append(outcome.settle(blocker, None, Interrupted(abandoned=True)))
        return found

    async def _write(self, done: list[Job], settled: list[Ack]) -> None:
        lane = Lane(self._database, "leave")
        if done:
            for worker_id, group in by_worker(sorted(done, key=lambda job: job.id)):
                ids, fences = [job.id for job in group], [job.fence for job in group]
                await store.ack_done(lane, worker_id, ids, fences)
        if settled:
            for worker_id, acks in by_worker(sorted(settled, key=lambda ack: ack.id)):
                await store.ack_settled(lane, worker_id, acks)
        await workers.retire(lane, self._lease.worker_id)
