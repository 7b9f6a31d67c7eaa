"""The consumer of one queue: claims jobs in batches for its runner."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from taskd import events
from taskd.core.jobs.job import Job
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Lane
from taskd.store.connections.error_translation import HeldUp, Silence
from taskd.store.jobs import jobs as store
from taskd.store.jobs import limits
from taskd.store.jobs.jobs import ALL
from taskd.worker.claiming.busy_mark import GAP_S, BusyMark
from taskd.worker.claiming.poller import IdlePoller
from taskd.worker.claiming.read_position import Reading
from taskd.worker.finishing.acker import Acker
from taskd.worker.running.runner import Runner, Shared
from taskd.worker.service import Backoff, Wakeup

# One claim is in flight at a time. Smaller batches leave the server and this process idle while
# they wait; larger ones or a second lane gained less than 5 %.
BATCH_MAX = 2000
# Claim ahead what can start within this time at the measured rate: many fast jobs, but slow ones
# only for free slots, so that no worker hoards jobs while another is idle.
PREFETCH_S = 0.05
# Claim more if four claims take longer than that: the next claim begins when half of the jobs are
# left, and the runner must have enough until its answer. On a slow machine this drains 1.3 times as
# many jobs.
CLAIMS_AHEAD = 4
PREFETCH_S_MAX = 0.2
RATE_WINDOW_S = 0.005
# How soon the idle poller polls a queue where a job was just found or notified: an empty claim does
# not see rows that others have locked. The wait doubles after each poll in vain.
POLL_UNSURE_S = 1.0
# The shortest time between a claim that found less than it asked for and the next one: otherwise
# each job of a fast producer would have a claim of its own, and slow the producer down.
CLAIM_EVERY_S = 0.001
# And per job that recent claims have found: where many jobs come, fewer and larger claims follow,
# until the queue is polled continuously and producers stop notifying.
PER_JOB_S = 0.0007
# Every worker of a queue receives each notification, and one of them finds the job; any user can
# send false ones. After two notified claims in a row that found nothing, the next waits, each time
# twice as long: so the fastest worker gets the jobs, until it is full.
VAIN_CLAIMS_MAX = 2
VAIN_PAUSE_S, VAIN_PAUSE_S_MAX = 0.002, 0.04


class Consumer:
    """Service: one per queue.

    Args:
        claims: the lane of all consumers' claims.
        backlog_claims: the lane of a claim after a full one, so that a large claim of a queue with
            a backlog delays no other queue. With one queue it is the same lane.
        scout: polls for jobs while the consumer sleeps.
        on_doubt: called when the reply to a claim was lost: it may have been committed.
        on_vain_ring: called when a notification brought no job: it may have announced a later one.
        on_change: called when the queue is polled continuously from now on, or no longer.

    Attributes:
        delayed: the last claim failed.
        turned_at: when its loop last began; None: it sleeps until it is notified.
    """

    def __init__(
        self,
        runner: Runner,
        claims: Lane,
        backlog_claims: Lane,
        acker: Acker,
        shared: Shared,
        *,
        scout: IdlePoller,
        on_doubt: Callable[[], None],
        on_vain_ring: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self.name = f"consumer:{runner.queue}"
        self.runner = runner
        self.wakeup = Wakeup()
        self.quiet = False
        self.turned_at: float | None = time.monotonic()
        self.delayed = False
        self.attendance = BusyMark(claims, runner.queue, shared.lease, on_change)
        self._claims, self._backlog_claims = claims, backlog_claims
        self._acker, self._shared = acker, shared
        self._scout, self._on_doubt, self._on_vain_ring = scout, on_doubt, on_vain_ring
        self._poll_s = POLL_UNSURE_S
        self._stopping = False
        self._stopped = Wakeup()
        self._backoff = Backoff()
        self._began = 0.0
        self._found = 0.0
        self._rate = 0.0
        self._mean_s = 0.0
        self._claim_s = 0.0
        self._measured = (time.perf_counter(), 0, 0.0)
        self._batch_max = BATCH_MAX
        self._reading = Reading()
        # An operator has limited the queue, so the end of a job can free room for another one.
        self._limited = False
        self._opens_s: float | None = None

    async def run(self) -> None:
        """Claim while there is work and room; else wait for a notification, a poll or room."""
        self._poll_s, vain_claims, full, rang = POLL_UNSURE_S, 0, False, False
        self.attendance.slept()
        while not self._stopping:
            self.turned_at = time.monotonic()
            batch = await self._wanted()
            if batch <= 0:
                await self.attendance.cannot_claim()
                continue
            self.wakeup.clear()
            await self.attendance.before_claim(full=full)
            if self.quiet:
                continue  # stopped meanwhile
            jobs = await self._claim(batch, self._backlog_claims if full else self._claims)
            full = len(jobs) == batch
            vain_claims = vain_claims + 1 if rang and not jobs else 0
            if full:
                continue
            if not jobs and self.runner.idle:
                self._rate = 0.0
            self._poll_s = POLL_UNSURE_S if jobs else self._scout.later(self._poll_s)
            if rang and not jobs:
                self._on_vain_ring()
            self.turned_at = None
            self._found += (len(jobs) - self._found) / 8
            rang = await self._rung()
            if rang:
                self._poll_s = POLL_UNSURE_S
                await self._pause_after(vain_claims)
        await self.attendance.end()

    def stop(self) -> None:
        """Claim nothing more. A claim in flight is awaited, and its jobs are released."""
        self._stopping = True
        self._stopped.set()
        self.wakeup.set()
        self.runner.room.set()

    def doubt(self) -> None:
        """Notifications may be missing: poll until none can have been missed."""
        self.attendance.doubt()
        self.wakeup.set()

    def be_limited(self, *, limited: bool) -> None:
        """Return whether an operator has limited the queue."""
        if limited != self._limited:
            self._limited = limited
            self.wakeup.set()

    def written(self) -> None:
        """Outcomes were written: a limited queue may have room."""
        if self._limited:
            self.wakeup.set()

    async def _wanted(self) -> int:
        """Return how many jobs to claim now; 0, after a short wait: not allowed, or no room."""
        if self.quiet or not self._shared.lease.trusted:
            await self.wakeup.wait(0.2)
            self.wakeup.clear()
            return 0
        if not self._acker.has_room():
            await self._acker.room(0.2)
            return 0
        batch = self._appetite()
        if batch <= 0:
            self.runner.room.clear()
            await self.runner.room.wait(PREFETCH_S)
        return batch

    async def _rung(self) -> bool:
        """Wait for a notification or the time of a poll; return whether a notification came.

        A wake-up by the idle poller is no notification: after a claim in vain it comes ever later.
        """
        if not self.attendance.attending:
            await self._keep_distance()
        if self.wakeup.is_set():
            events.queue_woken(self.runner.queue, "ring")
            return True
        pause_s = self.attendance.pause_s(self._reading.at_most(math.inf, time.monotonic()))
        if self._opens_s is not None:
            pause_s = min(pause_s, max(self._opens_s, CLAIM_EVERY_S))
        if self.attendance.attending:
            rang = await self.wakeup.wait(pause_s)
            events.queue_woken(self.runner.queue, "ring" if rang else "time")
            return rang
        sleeper = self._scout.watch(self.runner.queue, self.wakeup, self._poll_s)
        try:
            rang = await self.wakeup.wait(None if pause_s == math.inf else pause_s)
        finally:
            self._scout.leave(self.runner.queue)
        self._poll_s = sleeper.poll_s
        self.attendance.slept()
        source = "scout" if sleeper.woken else "ring" if rang else "time"
        events.queue_woken(self.runner.queue, source)
        return source == "ring"

    async def _keep_distance(self) -> None:
        distance_s = max(CLAIM_EVERY_S, min(PER_JOB_S * self._found, GAP_S))
        wait_s = self._began + distance_s - time.monotonic()
        if wait_s > 0:
            await self._stopped.wait(wait_s)

    async def _pause_after(self, vain_claims: int) -> None:
        if vain_claims >= VAIN_CLAIMS_MAX and not self.attendance.attending:
            pause_s = VAIN_PAUSE_S * 2.0 ** min(vain_claims - VAIN_CLAIMS_MAX, 10)
            await self._stopped.wait(min(pause_s, VAIN_PAUSE_S_MAX))
            self.attendance.slept()

    def _appetite(self) -> int:
        """Return how many jobs to claim now."""
        self._measure()
        waiting = self.runner.waiting
        # The rate alone would mistake a hundred slow jobs that end together for fast ones.
        rate = min(self._rate, self.runner.limit / max(self._mean_s, 1e-6))
        ahead_s = min(max(PREFETCH_S, CLAIMS_AHEAD * self._claim_s), PREFETCH_S_MAX)
        ahead = int(rate * ahead_s) if self._mean_s < PREFETCH_S else 0
        # Refill when half is left: a claim for each job that ends would cost a round trip each.
        self.runner.low = ahead // 2
        if waiting > self.runner.low:
            ahead = 0
        return min(self._batch_max, max(self.runner.free, ahead - waiting))

    def _measure(self) -> None:
        """Return how many attempts end per second, and how long one keeps its slot."""
        now, ended, waited_s = time.perf_counter(), self.runner.ended, self.runner.waited_s
        since, ended_then, waited_then_s = self._measured
        if now - since < RATE_WINDOW_S:
            return
        self._rate = (self._rate + (ended - ended_then) / (now - since)) / 2
        if ended > ended_then:
            self._mean_s = (self._mean_s + (waited_s - waited_then_s) / (ended - ended_then)) / 2
        self._measured = (now, ended, waited_s)

    async def _claim(self, batch: int, lane: Lane) -> list[Job]:
        """Claim, and give the jobs to the runner; return them."""
        began = self._began = time.monotonic()
        read = ALL if self.attendance.wants_all or self._limited else self._reading.next(began)
        try:
            jobs = await self._claim_jobs(batch, read, lane)
        except StoreUnavailable as error:
            if isinstance(error, HeldUp | Silence):
                # Two thousand arguments of 256 KB can be too much for one statement.
                self._batch_max = max(1, batch // 2)
            if not self.delayed:
                self.delayed = True
                events.claims_delayed(self.runner.queue, str(error))
            # It may have been committed: the reconciler looks for rows that were never received.
            self._on_doubt()
            await self._stopped.wait(self._backoff.next_s())
            self.attendance.slept()
            return []
        except BaseException:
            # A handler can cancel any task: the claim has run, and its jobs have no receiver.
            self._on_doubt()
            raise
        took_s = time.monotonic() - began
        if jobs:
            self._claim_s = took_s
            self._take(jobs)
            if len(jobs) < batch:
                # Yield to the event loop: the jobs start before the rest of this function, so a
                # single job starts sooner.
                await asyncio.sleep(0)
        self._backoff.reset()
        self.delayed = False
        self._batch_max = min(BATCH_MAX, self._batch_max * 2)
        self._reading.claimed(read, jobs, began + took_s, took_s)
        self.attendance.claimed(len(jobs), batch)
        events.queue_claimed(self.runner.queue, jobs, batch, took_s)
        if read.only_urgent and len(jobs) < batch:
            jobs += await self._claim(batch - len(jobs), lane)
        return jobs

    async def _claim_jobs(self, batch: int, read: store.Read, lane: Lane) -> list[Job]:
        me, queue, stride = self._shared.lease.worker_id, self.runner.queue, lane.stride
        if not self._limited:
            return await store.claim(lane, me, queue, batch, read, stride)
        claimed = await limits.claim(lane, me, queue, batch, stride)
        self._opens_s = claimed.opens_s
        return claimed.jobs

    def _take(self, jobs: list[Job]) -> None:
        registry, paused = self._shared.registry, self._shared.paused
        if paused:
            jobs = self._without(paused, jobs)
        unknown = [job.task for job in jobs if job.task not in registry]
        for name, count in Counter(unknown).items() if unknown else ():
            events.task_unknown(name, self.runner.queue, count)
        self.runner.add(jobs)

    def _without(self, paused: frozenset[str], jobs: list[Job]) -> list[Job]:
        """Return the jobs whose task is not paused; release the others."""
        parked = [job for job in jobs if job.task in paused]
        if not parked:
            return jobs
        for name, count in Counter(job.task for job in parked).items():
            events.jobs_parked(name, self.runner.queue, count)
        self.runner.park(parked)
        return [job for job in jobs if job.task not in paused]
