"""Upkeep: what every worker does beside its jobs.

There is no leader: each statement is idempotent, and any worker runs it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack

from taskd import events
from taskd.core.jobs.job import JobState
from taskd.core.outcomes.ack import Ack
from taskd.errors import StoreUnavailable
from taskd.store import workers, workflows
from taskd.store.connections.database import Database, Lane
from taskd.store.jobs import changes, history, jobs, limits, logs, results
from taskd.store.jobs.jobs import DueIn
from taskd.store.schedules import TicksIn
from taskd.store.workers import RunningJob
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.finishing.acker import Acker
from taskd.worker.lease import Lease, is_gone
from taskd.worker.observing.loop_monitor import REST_AFTER_S, REST_TICK_S, TICK_S, Pulse
from taskd.worker.operator_settings import Controls
from taskd.worker.running.handler_tasks import HandlerTasks
from taskd.worker.running.runner import Runner
from taskd.worker.service import Loop

MAX_CRASHES = 3
RESCUE_BATCH = 1000
EXPIRE_BATCH = UNPARK_BATCH = 1000
SWEEP_EVERY_S_MAX = 5.0
RECONCILE_EVERY_S = 2.0
IDLE_LOOK_EVERY_S = 15.0
HISTORY_EVERY_S = 600.0
FORGET_WORKERS_AFTER_S = 7 * 86400.0


class Timer(Loop):
    """Deadlines, the pulse for the beat thread, the self-fence.

    It turns 20 times a second while something runs, and four times while the worker rests. What
    begins wakes it, so at rest there is no deadline that it could miss.
    """

    name = "ticker"

    def __init__(
        self, runners: Sequence[Runner], lease: Lease, pulse: Pulse, handler_tasks: HandlerTasks
    ) -> None:
        super().__init__(TICK_S)
        self._runners, self._lease, self._pulse = runners, lease, pulse
        self._handler_tasks = handler_tasks
        self._fenced = False
        self._second = 0
        pulse.on_wake.append(self.wakeup.set)

    async def tick(self) -> float | None:
        """Turn once; how soon to turn again at rest."""
        now = time.monotonic()
        self._pulse.turn(now)
        for runner in self._runners:
            runner.tick(now)
        if int(now) != self._second:
            self._second = int(now)
            events.turn_second()
            self._handler_tasks.look()
        self._fence_if_silent()
        if now - self._pulse.started < REST_AFTER_S or any(map(_works, self._runners)):
            return None
        self._pulse.rest()
        return REST_TICK_S

    def _fence_if_silent(self) -> None:
        """Cancel before others may run our jobs: silence can mean that we alone are cut off."""
        if self._lease.trusted or self._lease.outage or self._lease.buried:
            self._fenced = False
        elif not self._fenced:
            self._fenced = True
            events.worker_fenced(self._lease.silent_s + self._lease.lease_s * 2 / 3)
            for runner in self._runners:
                runner.give_back()
                runner.cancel_all("fence")


def _works(runner: Runner) -> bool:
    """Whether handlers run, or are about to; those that were abandoned can block the loop, too."""
    return not runner.idle or runner.abandoned > 0


class Rescuer(Loop):
    """Looks around: buries dead workers, takes their jobs back, tells others what is due.

    Args:
        counts: how jobs ended here; those that it fails as `crashed` count too.
        on_due: called with the next due times.
        on_ticks: called with the next ticks of schedules.
        consumers: look again when a worker was buried: for its queues nobody may have rung.
        controls: told what operators have set.
    """

    name = "sweeper"

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
    ) -> None:
        super().__init__(min(lease.lease_s / 6, SWEEP_EVERY_S_MAX))
        self._lane, self._lease, self._me, self._counts = lane, lease, me, counts
        self._on_due, self._on_ticks, self._consumers = on_due, on_ticks, consumers
        self._controls = controls

    async def look(self) -> workers.Surroundings:
        """Look around, and heed what operators have set; a worker does so before its first claim.

        Raises:
            StoreUnavailable: not now.
        """
        seen = await workers.check_upkeep(self._lane, self._me(), self._lease.lease_s)
        self._controls.heed(seen.paused, seen.limits)
        return seen

    async def tick(self) -> None:
        """Sweep once; without a database there is nothing to sweep."""
        try:
            seen = await self.look()
            self._on_due(seen.due)
            for told in self._on_ticks:
                told(seen.ticks)
            if seen.uncounted:
                await limits.count_depths(self._lane)
            if await self._bury(seen.others) or seen.orphans:
                await self._rescue()
            if seen.expired:
                await self._expire()
            if seen.resumed:
                await self._unpark(seen.resumed)
        except StoreUnavailable:
            return

    async def _expire(self) -> None:
        while ended := await changes.expire(self._lane, EXPIRE_BATCH):
            events.jobs_expired(ended)
            self._counts["failed"] += sum(ended.values())
            if sum(ended.values()) < EXPIRE_BATCH:
                return

    async def _unpark(self, tasks: list[str]) -> None:
        while moved := await changes.unpark(self._lane, tasks, UNPARK_BATCH):
            events.jobs_unparked(moved)
            for consumer in self._consumers:
                if consumer.runner.queue in moved:
                    consumer.wakeup.set()

    async def _rescue(self) -> None:
        while True:
            states = await jobs.rescue(self._lane, RESCUE_BATCH, MAX_CRASHES)
            if states:
                events.jobs_rescued(states)
                self._counts["failed"] += list(states.values()).count(JobState.FAILED)
                self._on_due(DueIn(None, 0.0))  # a suspect may be due now
            if len(states) < RESCUE_BATCH:
                return

    async def _bury(self, others: Sequence[workers.Other]) -> bool:
        """Bury the dead; whether there were any."""
        gone = [other.id for other in others if other.neighbour and is_gone(other)]
        silent = [other.id for other in others if other.silent] if self._lease.may_bury() else []
        for ids, proof in ((gone, "its process has ended"), (silent, "its lease ran out")):
            if ids:
                buried = await workers.declare_dead(self._lane, ids, proved=ids is gone)
                if buried:
                    events.workers_declared_dead(buried, proof)
                    for consumer in self._consumers:
                        consumer.doubt()
        return bool(gone or silent)


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


class Pruner(Loop):
    """Makes history partitions ahead, drops expired ones, forgets old workers, keys, workflows."""

    name = "historian"

    def __init__(self, database: Database) -> None:
        super().__init__(HISTORY_EVERY_S)
        self._database = database

    async def tick(self) -> None:
        """Keep house once, on a connection that is closed again."""
        lane = Lane(self._database, "history", lock_timeout=str(history.LOCK_TIMEOUT_MS))
        try:
            await self._keep_house(lane)
        finally:
            await lane.close()

    async def _keep_house(self, lane: Lane) -> None:
        try:
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
