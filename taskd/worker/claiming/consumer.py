"""The consumer of one queue: claims jobs in batches, about as many as its runner can start soon."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable

from taskd import events
from taskd.core.jobs.job import Job
from taskd.errors import StoreUnavailable
from taskd.store.connections.error_translation import HeldUp, Silence
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs as store
from taskd.store.jobs import limits
from taskd.store.jobs.jobs import ALL, Among
from taskd.worker.claiming.busy_mark import GAP_S, BusyMark
from taskd.worker.claiming.poller import IdlePoller
from taskd.worker.claiming.read_position import ReadPosition
from taskd.worker.claiming.refused_jobs import RefusedJobs
from taskd.worker.finishing.acker import Acker
from taskd.worker.running.preparation import Shared
from taskd.worker.running.runner import Runner
from taskd.worker.services.service import Backoff, Wakeup

# 2,000: with 1,000 jobs per claim and per ack, a fifth of two cores stayed idle.
BATCH_MAX = 2000
# If an attempt takes less than PREFETCH_S on average, the consumer claims ahead the number of jobs
# that end within PREFETCH_S. It does not claim slow jobs ahead, so that no worker holds jobs while
# another worker is idle.
PREFETCH_S = 0.05
# If CLAIMS_AHEAD claims take longer than PREFETCH_S, the consumer claims ahead for this longer
# time, up to PREFETCH_S_MAX. It sends the next claim when half of the jobs claimed ahead are left,
# and this half must last until the reply.
CLAIMS_AHEAD = 4
PREFETCH_S_MAX = 0.2
# The rate of attempts is measured over at least this time.
RATE_WINDOW_S = 0.005
# The first interval of the idle poller after a claim that found jobs, or after a notification. The
# interval doubles with each poll that finds nothing. The first interval is short, because a claim
# skips rows that other transactions have locked, and so can miss jobs.
POLL_UNSURE_S = 1.0
# The minimum time between two claims without a busy mark, after a claim that found fewer jobs than
# it asked for. So notifications cause at most 1,000 claims per second.
CLAIM_EVERY_S = 0.001
# The minimum time between two claims grows with their size: PER_JOB_S for each job of an average
# recent claim, up to GAP_S. So above 1,400 jobs per second, claims become fewer and larger.
PER_JOB_S = 0.0007
# Every worker of a queue receives each notification, and only one worker finds the job. Any user
# who can connect can also send notifications without end. So after EMPTY_CLAIMS_MAX claims in a row
# that followed a notification and found nothing, the consumer pauses before the next claim. Each
# further pause is twice as long.
EMPTY_CLAIMS_MAX = 2
EMPTY_PAUSE_S, EMPTY_PAUSE_S_MAX = 0.002, 0.04


class Consumer:
    """Service: claims the jobs of one queue.

    Args:
        claims: the lane for claims, which all consumers of the worker share.
        backlog_claims: the lane for a claim that follows a full claim, so that a queue with a
            backlog does not delay the others. A worker with one queue passes the same lane twice.
        poller: polls the queue while the consumer sleeps.
        on_claim_lost: called when a claim has failed or was cancelled. PostgreSQL may have
            committed the claim, although the consumer received no rows.
        on_empty_claim: called when a claim that followed a notification found no job. The
            notification may have announced a job that is due later.
        on_change: called when the state of the busy mark changes (busy_mark.py).

    Attributes:
        claim_failed: whether PostgreSQL was unavailable for the last claim.
        ended: whether run() has returned.
        turned_at: when the last iteration of the loop in run() began (time.monotonic); None while
            the consumer sleeps.
    """

    def __init__(
        self,
        runner: Runner,
        claims: Lane,
        backlog_claims: Lane,
        acker: Acker,
        shared: Shared,
        *,
        poller: IdlePoller,
        on_claim_lost: Callable[[], None],
        on_empty_claim: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        self.name = f"consumer:{runner.queue}"
        self.runner = runner
        self.wakeup = Wakeup()
        runner.abandoned_ended = self.wakeup.set
        self.quiet = False
        self.turned_at: float | None = time.monotonic()
        self.claim_failed = self.ended = False
        self.busy_mark = BusyMark(claims, runner.queue, shared.lease, on_change)
        self._claims, self._backlog_claims = claims, backlog_claims
        self._acker, self._shared = acker, shared
        self._poller, self._on_claim_lost, self._on_empty_claim = (
            poller,
            on_claim_lost,
            on_empty_claim,
        )
        self._poll_s = POLL_UNSURE_S
        self._stopping = False
        self._stopped = Wakeup()
        self._backoff = Backoff()
        self._began = 0.0
        self._found = 0.0
        self._rate = 0.0
        self._mean_slot_s = 0.0
        self._claim_s = 0.0
        self._measured = (time.perf_counter(), 0, 0.0)
        self._batch_max = BATCH_MAX
        self._read_position = ReadPosition()
        # Whether an operator has limited the queue. If so, another job of the queue may be allowed
        # to start when a job of this worker ends. Then the consumer must claim again.
        self._limited = False
        self._opens_s: float | None = None
        self._refused = RefusedJobs("claim")

    async def run(self) -> None:
        """Claim jobs until stopped, and wait while there are no jobs or no free slots."""
        self._poll_s, empty_claims, full, notified = POLL_UNSURE_S, 0, False, False
        self.busy_mark.slept()
        while not self._stopping:
            self._shared.slots.settle(self.runner.freed)
            self.turned_at = time.monotonic()
            batch = await self._next_batch()
            if batch <= 0:
                await self.busy_mark.cannot_claim()
                continue
            self.wakeup.clear()
            refusing = bool(
                self._shared.elsewhere.refused(self.runner.queue) or self.runner.abandoned
            )
            await self.busy_mark.before_claim(full=full, refusing=refusing)
            if self.quiet:
                continue  # `quiet` was set while before_claim() waited
            jobs = await self._claim(batch, self._backlog_claims if full else self._claims)
            self._shared.slots.settle(self.runner.freed)
            full = len(jobs) == batch
            empty_claims = empty_claims + 1 if notified and not jobs else 0
            if full:
                continue
            if not jobs and self.runner.idle:
                self._rate = 0.0
            self._poll_s = POLL_UNSURE_S if jobs else self._poller.later(self._poll_s)
            if notified and not jobs:
                self._on_empty_claim()
            self.turned_at = None
            self._found += (len(jobs) - self._found) / 8
            notified = await self._wait_for_work()
            if notified:
                self._poll_s = POLL_UNSURE_S
                await self._pause_after(empty_claims)
        self._shared.slots.settle(self.runner.freed)
        await self.busy_mark.end()
        self.ended = True

    def stop(self) -> None:
        """Stop claiming. run() still waits for the claim in flight."""
        self._stopping = True
        self._stopped.set()
        self.wakeup.set()
        self.runner.freed.set()

    def notifications_missed(self) -> None:
        """Poll until all jobs are found for which no notification arrived."""
        self.busy_mark.notifications_missed()
        self.wakeup.set()

    def set_limited(self, *, limited: bool) -> None:
        """Set whether an operator has limited the queue."""
        if limited != self._limited:
            self._limited = limited
            self.wakeup.set()

    def written(self) -> None:
        """Claim again if the queue is limited, because outcomes of this worker were written."""
        if self._limited:
            self.wakeup.set()

    async def _next_batch(self) -> int:
        """Return how many jobs to claim.

        If no job can be claimed, return 0 or less after a short wait.
        """
        if self.quiet or not self._shared.lease.trusted:
            await self.wakeup.wait(0.2)
            self.wakeup.clear()
            return 0
        if not self._acker.has_room():
            await self._acker.room(0.2)
            return 0
        self.runner.freed.clear()
        batch = self._claim_size()
        if batch > 0:
            each = self.runner.jobs_per_slot
            batch = min(
                batch, each * self._shared.slots.reserve(self.runner.freed, -(-batch // each))
            )
        if batch <= 0:
            await self.runner.freed.wait(PREFETCH_S)
        return batch

    async def _wait_for_work(self) -> bool:
        """Wait until the consumer is woken, or must claim without being woken.

        Returns:
            True if a notification or a service other than the idle poller woke the consumer. The
            caller then resets the interval between polls. False if the idle poller woke the
            consumer, or the wait timed out; the interval then continues to grow.
        """
        if not self.busy_mark.marked:
            await self._space_claims()
        if self.wakeup.is_set():
            events.queue_woken(self.runner.queue, "notify")
            return True
        pause_s = self.busy_mark.pause_s(self._read_position.at_most(math.inf, time.monotonic()))
        if self._opens_s is not None:
            pause_s = min(pause_s, max(self._opens_s, CLAIM_EVERY_S))
        if self.busy_mark.marked:
            notified = await self.wakeup.wait(pause_s)
            events.queue_woken(self.runner.queue, "notify" if notified else "time")
            return notified
        sleeper = self._poller.add(self.runner.queue, self.wakeup, self._poll_s)
        try:
            notified = await self.wakeup.wait(None if pause_s == math.inf else pause_s)
        finally:
            self._poller.remove(self.runner.queue)
        self._poll_s = sleeper.poll_s
        self.busy_mark.slept()
        source = "idle_poll" if sleeper.woken else "notify" if notified else "time"
        events.queue_woken(self.runner.queue, source)
        return source == "notify"

    async def _space_claims(self) -> None:
        distance_s = max(CLAIM_EVERY_S, min(PER_JOB_S * self._found, GAP_S))
        wait_s = self._began + distance_s - time.monotonic()
        if wait_s > 0:
            await self._stopped.wait(wait_s)

    async def _pause_after(self, empty_claims: int) -> None:
        if empty_claims >= EMPTY_CLAIMS_MAX and not self.busy_mark.marked:
            pause_s = EMPTY_PAUSE_S * 2.0 ** min(empty_claims - EMPTY_CLAIMS_MAX, 10)
            await self._stopped.wait(min(pause_s, EMPTY_PAUSE_S_MAX))
            self.busy_mark.slept()

    def _claim_size(self) -> int:
        """Return how many jobs to claim now."""
        self._measure()
        waiting = self.runner.waiting
        # If a hundred slow jobs end together, the measured rate alone looks like the rate of fast
        # jobs.
        rate = min(self._rate, self.runner.limit / max(self._mean_slot_s, 1e-6))
        ahead_s = min(max(PREFETCH_S, CLAIMS_AHEAD * self._claim_s), PREFETCH_S_MAX)
        ahead = int(rate * ahead_s) if self._mean_slot_s < PREFETCH_S else 0
        # Claim again when half of the jobs claimed ahead are left. A claim after each job would
        # cost a round trip per job.
        self.runner.low = ahead // 2
        if waiting > self.runner.low:
            ahead = 0
        return min(self._batch_max, max(self.runner.free, ahead - waiting))

    def _measure(self) -> None:
        """Measure how many attempts end per second, and how long an attempt takes on average."""
        now, ended, slot_s = time.perf_counter(), self.runner.ended, self.runner.slot_s
        since, ended_then, waited_then_s = self._measured
        if now - since < RATE_WINDOW_S:
            return
        self._rate = (self._rate + (ended - ended_then) / (now - since)) / 2
        if ended > ended_then:
            self._mean_slot_s = (
                self._mean_slot_s + (slot_s - waited_then_s) / (ended - ended_then)
            ) / 2
        self._measured = (now, ended, slot_s)

    async def _claim(self, batch: int, lane: Lane) -> list[Job]:
        """Claim jobs for the runner, and return them; none if PostgreSQL is unavailable."""
        began = self._began = time.monotonic()
        read = ALL if self.busy_mark.wants_all or self._limited else self._read_position.next(began)
        try:
            jobs = await self._claim_jobs(batch, read, lane)
        except StoreUnavailable as error:
            if isinstance(error, HeldUp | Silence):
                # One statement may not be able to claim 2,000 jobs with large arguments in time.
                self._batch_max = max(1, batch // 2)
            if not self.claim_failed:
                self.claim_failed = True
                events.claims_delayed(self.runner.queue, str(error))
            self._on_claim_lost()
            await self._stopped.wait(self._backoff.next_s())
            self.busy_mark.slept()
            return []
        except BaseException:
            # The error can be a cancellation, because code of the app can cancel any asyncio task.
            self._on_claim_lost()
            raise
        took_s = time.monotonic() - began
        if jobs:
            self._claim_s = took_s
            self._take(jobs)
            if len(jobs) < batch:
                # There is no backlog, so latency counts: let the jobs start first.
                await asyncio.sleep(0)
        self._backoff.reset()
        self.claim_failed = False
        self._batch_max = min(BATCH_MAX, self._batch_max * 2)
        self._read_position.claimed(read, jobs, began + took_s, took_s)
        self.busy_mark.claimed(len(jobs), batch)
        events.queue_claimed(self.runner.queue, jobs, batch, took_s)
        if read.only_urgent and len(jobs) < batch:
            jobs += await self._claim(batch - len(jobs), lane)
        return jobs

    async def _claim_jobs(self, batch: int, read: store.Read, lane: Lane) -> list[Job]:
        me, queue = self._shared.lease.worker_id, self.runner.queue
        left_out = self._shared.elsewhere.refused(queue)
        jobs: list[Job] = []
        still_run = self.runner.attempts.still_run()

        async def claim(among: Among) -> None:
            size = batch - len(jobs)
            if not size:
                return
            if still_run:
                among = among.without_also(still_run)
            if not self._limited:
                jobs.extend(
                    await store.claim(lane, me, queue, size, read, refused=left_out, among=among)
                )
                return
            claimed = await limits.claim(lane, me, queue, size, refused=left_out, among=among)
            self._opens_s = claimed.opens_s
            jobs.extend(claimed.jobs)

        await self._refused.run(claim)
        return jobs

    def _take(self, jobs: list[Job]) -> None:
        registry, paused = self._shared.registry, self._shared.paused
        if paused:
            jobs = self._without(paused, jobs)
        unknown = [job.task for job in jobs if job.task not in registry]
        for name, count in Counter(unknown).items() if unknown else ():
            elsewhere = self._shared.elsewhere.runs(self.runner.queue, name, 1)
            events.task_unknown(name, self.runner.queue, count, elsewhere=elsewhere)
        self.runner.add(jobs)

    def _without(self, paused: frozenset[str], jobs: list[Job]) -> list[Job]:
        """Release the jobs whose task is paused; return the others."""
        parked = [job for job in jobs if job.task in paused]
        if not parked:
            return jobs
        for name, count in Counter(job.task for job in parked).items():
            events.jobs_parked(name, self.runner.queue, count)
        self.runner.release_paused(parked)
        return [job for job in jobs if job.task not in paused]
