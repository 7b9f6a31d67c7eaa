"""The rescuer: declare workers dead, rescue their jobs, expire, unpark and unblock jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial

from taskd import events
from taskd.core.jobs.job import JobState
from taskd.core.outcomes.error_reports import of_lost_worker, of_rescued_job
from taskd.errors import TaskdError
from taskd.store import workers, workflows
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, jobs, limits
from taskd.store.jobs.jobs import DueIn
from taskd.store.schedules import TicksIn
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.claiming.refused_jobs import RefusedJobs
from taskd.worker.finishing.error_queue import ErrorQueue
from taskd.worker.lease.neighbours import Neighbours
from taskd.worker.lease.process_identity import is_gone
from taskd.worker.lease.state import Lease
from taskd.worker.operator_settings import Controls
from taskd.worker.services.failures import Lasting
from taskd.worker.services.service import Loop
from taskd.worker.upkeep.declarations import Declarations

# An isolated suspect (quarantine.py) that was alone in its group when its worker crashed has caused
# the crash. Such a suspect fails if this is at least its third crash. Any other job that ran during
# crashes runs again. Such a job fails only at its tenth crash, so that no loop is endless. A task's
# options `max_crashes` and `max_attempts=1` replace both limits.
MAX_CRASHES = 3
MAX_CRASHES_UNPROVED = 10
RESCUE_BATCH = 1000
EXPIRE_BATCH = UNPARK_BATCH = UNBLOCK_BATCH = 1000
# Batches of dependants per check, so that a rescue never waits for long.
UNBLOCK_BATCHES = 20
SWEEP_EVERY_S_MAX = 5.0
# The seconds until the check after a death. By then, a supervisor has probably started a new
# worker, whose process can be watched, too.
AFTER_DEATH_S = 2.0
# Time synchronisation sets a clock back by less than this.
BACK_S_MIN = 1.0


class Rescuer(Loop):
    """Service: checks the state of the system every few seconds, and acts on it.

    One statement reads the state. The rescuer declares workers dead, rescues, expires, unparks and
    unblocks jobs, and passes due times and settings to other services.

    Args:
        me: returns the present identity of this worker.
        counts: the numbers of attempts by how they ended; the rescuer adds jobs that it fails.
        on_due: called with the next due times of jobs.
        on_ticks: each is called with the next ticks of schedules.
        consumers: poll their queues after a worker was declared dead. If the dead worker had marked
            a queue as polled, producers have not notified.
        controls: applies the settings of operators.
        errors: receives a report of each dead worker, and of its jobs.
        declarations: publishes and withdraws declarations after other workers of the app have
            started or ended.
    """

    name = "rescuer"

    def __init__(
        self,
        lane: Lane,
        lease: Lease,
        me: Callable[[], workers.Incarnation],
        counts: dict[str, int],
        on_due: Callable[[DueIn], None],
        on_ticks: Sequence[Callable[[TicksIn], None]],
        consumers: Collection[Consumer],
        controls: Controls,
        errors: ErrorQueue,
        declarations: Declarations,
    ) -> None:
        super().__init__(min(lease.lease_s / 6, SWEEP_EVERY_S_MAX))
        self._lane, self._lease, self._me, self._counts = lane, lease, me, counts
        self._on_due, self._on_ticks, self._consumers = on_due, on_ticks, consumers
        self._controls, self._errors, self._declarations = controls, errors, declarations
        self._neighbours = Neighbours(self.wakeup.set)
        self._stored: tuple[int, list[Lasting]] | None = None
        # The database's time at the last check, and when this worker received it (time.monotonic).
        self._clock: tuple[datetime, float] | None = None
        self._went_back_s: float | None = None
        self._compared = False
        self._unrescued, self._unexpired, self._unparked = (
            RefusedJobs("rescue"), RefusedJobs("expire"), RefusedJobs("unpark")
        )  # fmt: skip

    async def check(self) -> workers.Surroundings:
        """Read the state of the system, and apply the settings of operators.

        The worker calls this before its first claim, so that jobs of paused tasks do not start.

        Raises:
            StoreUnavailable: the database does not answer.
        """
        sent = time.monotonic()
        seen = await workers.check_upkeep(self._lane, self._me(), self._lease.lease_s)
        self._compare_clocks(seen.now, sent)
        self._controls.apply(seen.paused, seen.limits, seen.elsewhere)
        return seen

    async def run(self) -> None:
        """Check every few seconds, and when the process of a watched worker ends, until stopped."""
        try:
            await super().run()
        finally:
            self._neighbours.close()

    async def tick(self) -> float | None:
        """Check once; return the seconds until the next check, or None for jittered `every_s`."""
        await self._store_failures()
        seen = await self.check()
        self._neighbours.watch(self._me().id, seen.others)
        if self._went_back_s is not None or not self._compared:
            await self._follow_clock_back()
        self._on_due(seen.due)
        for callback in self._on_ticks:
            callback(seen.ticks)
        if seen.uncounted:
            await limits.count_depths(self._lane)
        died = await self._declare_dead(seen.others)
        if died or seen.orphans:
            await self._rescue()
        if seen.expired:
            await self._expire()
        if seen.resumed:
            await self._unpark(seen.resumed)
        await self._declarations.follow(seen)
        if seen.unblocking and await self._unblock():
            return 0.0
        return AFTER_DEATH_S if died else None

    async def _store_failures(self) -> None:
        """Store the lasting failures of this worker's services in its row, if they have changed."""
        now = self._lease.worker_id, self.failures.lasting()
        if now == self._stored or (not now[1] and self._stored is None):
            return
        with suppress(TaskdError):  # if the database does not answer, check() raises an error
            await workers.store_failures(self._lane, *now, time.monotonic())
            self._stored = now

    def _compare_clocks(self, now: datetime, sent: float) -> None:
        """Detect that the database's clock was set back since the last check.

        Args:
            now: the database's time.
            sent: when this worker sent the statement that has read `now` (time.monotonic).
        """
        if self._clock is not None:
            then, received = self._clock
            # The least time between the two reads, by this host's clock: slow replies do not count.
            back_s = (sent - received) - (now - then).total_seconds()
            if back_s > BACK_S_MIN:
                self._went_back_s = max(back_s, self._went_back_s or 0.0)
        self._clock = now, time.monotonic()

    async def _follow_clock_back(self) -> None:
        """Correct times in the database that are in the future, because its clock was set back.

        If no set-back was detected, as after the start of the worker, search for such times.
        """
        corrected = await workers.follow_clock_back(self._lane, self._went_back_s)
        self._went_back_s, self._compared = None, True
        if corrected is not None:
            events.clock_set_back(corrected.ahead_s, corrected.schedules)
            for callback in self._on_ticks:
                callback(TicksIn(0.0, 0.0))

    async def _expire(self) -> None:
        expire = partial(changes.expire, self._lane, EXPIRE_BATCH)
        async for ended in self._unexpired.batches(
            expire, lambda tasks: sum(tasks.values()) == EXPIRE_BATCH
        ):
            if ended:
                events.jobs_expired(ended)
                self._counts["failed"] += sum(ended.values())

    async def _unpark(self, tasks: list[str]) -> None:
        unpark = partial(changes.unpark, self._lane, self._lease.worker_id, tasks, UNPARK_BATCH)
        async for moved in self._unparked.batches(unpark, bool):
            if moved:
                events.jobs_unparked(moved)
            for consumer in self._consumers:
                if consumer.runner.queue in moved:
                    consumer.wakeup.set()

    async def _unblock(self) -> bool:
        """Unblock or cancel dependants of ended jobs; return whether more of them can wait."""
        for _ in range(UNBLOCK_BATCHES):
            if not await workflows.unblock_dependants(self._lane, UNBLOCK_BATCH):
                return False
        return True

    async def _rescue(self) -> None:
        rescue = partial(jobs.rescue, self._lane, RESCUE_BATCH, MAX_CRASHES, MAX_CRASHES_UNPROVED)
        async for rescued in self._unrescued.batches(
            rescue, lambda moved: len(moved) == RESCUE_BATCH
        ):
            if rescued:
                events.jobs_rescued({job_id: each.state for job_id, each in rescued.items()})
                for job_id, each in rescued.items():
                    self._counts["failed"] += each.state is JobState.FAILED
                    self._errors.add(of_rescued_job(job_id, *each))
                self._on_due(DueIn(0.0, 0.0))  # rescued jobs are due now, suspects too

    async def _declare_dead(self, others: Sequence[workers.Other]) -> bool:
        """Declare the workers dead that have ended or are silent; return whether there are any."""
        gone = [other.id for other in others if other.neighbour and is_gone(other)]
        silent = (
            [other.id for other in others if other.silent] if self._lease.may_declare_dead() else []
        )
        for ids, proof in ((gone, "its process has ended"), (silent, "its lease expired")):
            if ids:
                dead = await workers.declare_dead(self._lane, ids, proved=ids is gone)
                if dead:
                    events.workers_declared_dead(dead, proof)
                    for worker in dead:
                        self._errors.add(of_lost_worker(worker, proof))
                    for consumer in self._consumers:
                        consumer.notifications_missed()
        return bool(gone or silent)
