"""The emergency stop: a thread finishes the stop of a worker whose event loop is blocked.

The thread writes unwritten outcomes, releases claimed jobs that have not started, abandons running
attempts, and closes the worker's row. The thread can write only as far as PostgreSQL answers in
time. If the loop runs again meanwhile, the loop can write the same outcomes. Every statement is
guarded, so only one of the two writes changes a row. The job of an abandoned handler is due again
five seconds later. This process ends within three seconds from the start of the thread, so the two
attempts do not overlap. The attempts can overlap if the first attempt had timed out. Then the
backoff of the task applies, and it can be shorter than five seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from taskd import events
from taskd.core.jobs.job import Job
from taskd.core.outcomes import policy
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import Interrupted, NotStarted
from taskd.core.tasks.registry import Registry
from taskd.store import workers
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs as store
from taskd.worker.finishing.acker import Acker, by_worker
from taskd.worker.lease.state import Lease
from taskd.worker.observing.loop_monitor import LoopMonitor
from taskd.worker.running.runner import Runner

LOCK_TIMEOUT_MS = "300"


class EmergencyStop:
    """Called once, in a thread, if a stop takes too long and the event loop does not respond."""

    def __init__(
        self,
        database: Database,
        lease: Lease,
        acker: Acker,
        runners: Sequence[Runner],
        registry: Registry,
        watch: LoopMonitor,
    ) -> None:
        self._database, self._lease, self._watch = database, lease, watch
        self._registry = registry
        self._acker, self._runners = acker, runners

    def __call__(self) -> None:
        """Log what blocks the loop, and write outcomes; the caller then ends the process."""
        blocker = self._watch.blocker()
        unstarted = [job for runner in self._runners for job in runner.take_unstarted()]
        abandoned = self._abandoned(blocker)
        events.worker_stuck(blocker, len(abandoned), len(unstarted), self._watch.stack())
        if not self._lease.worker_id:
            return  # the worker has not registered, so it has claimed nothing
        done, acks = self._acker.outcomes()
        acks += [policy.decide(job, None, NotStarted()) for job in unstarted]
        asyncio.run(self._write(done, acks + abandoned))

    def _abandoned(self, blocker: Job | None) -> list[Ack]:
        """Kill the processes of running attempts; return an ack for each running attempt.

        A runner lists an attempt only after its handler has waited for something. If the attempt of
        `blocker` is not listed for this reason, its ack is added.
        """
        left = [attempt for runner in self._runners for attempt in runner.attempts]
        for attempt in left:
            if attempt.kill is not None:
                attempt.kill()
        found = [policy.decide(each.job, each.task, each.abandonment()) for each in left]
        if blocker is not None and blocker.id not in {ack.id for ack in found}:
            task = self._registry.get(blocker.task)
            found.append(policy.decide(blocker, task, Interrupted(abandoned=True)))
        return found

    async def _write(self, done: list[Job], acks: list[Ack]) -> None:
        # Leave out rows that another session has locked, for example another connection of this
        # worker: there is no time to wait. An error of one statement must not prevent the other
        # statements.
        lane = Lane(self._database, "emergency_stop", lock_timeout=LOCK_TIMEOUT_MS)
        locked: set[int] = set()
        with suppress(Exception):
            ids = [job.id for job in done] + [ack.id for ack in acks]
            locked.update(await store.locked(lane, ids))
        free_done = sorted((job for job in done if job.id not in locked), key=lambda job: job.id)
        free = sorted((ack for ack in acks if ack.id not in locked), key=lambda ack: ack.id)
        if free_done:
            for worker_id, group in by_worker(free_done):
                ids, fences = [job.id for job in group], [job.fence for job in group]
                with suppress(Exception):
                    await store.ack_done(lane, worker_id, ids, fences)
        if free:
            for worker_id, ended in by_worker(free):
                with suppress(Exception):
                    await store.ack_outcomes(lane, worker_id, ended)
        await workers.retire(lane, self._lease.worker_id)
        await lane.close()
