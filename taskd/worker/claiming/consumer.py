"""The consumer of one queue: claims in batches for all that its runner can start."""

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

# One claim is under way at a time; what it waits for, a flush and this process, leaves a fifth of
# two cores idle at 1,000 jobs per claim and per ack. 500 drained 89,000 no-op jobs per second,
# 1,000 came to 106,600 and 2,000 to 117,100 (medians of five, eight and eight runs). A second lane
# beside it gave nothing: 114,300 and 118,400, medians of five.
BATCH_MAX = 2000
# Claimed ahead is what can start within this time at the measured rate: fast jobs by the hundred,
# slow ones one per free coroutine, so that nobody hoards while another worker is idle.
PREFETCH_S = 0.05
# And more where four claims take longer than that: the next one begins when half of it is left, and
# the runner is to have enough until its answer. On a slow machine 2,000 jobs took 41 ms to claim
# and 30 to run, so that the runner often had nothing to do: it drained 35,500 jobs per second with
# 50 ms ahead, 37,800 with the time of two claims, 45,000 so (medians of five runs in turns).
CLAIMS_AHEAD = 4
PREFETCH_S_MAX = 0.2
RATE_WINDOW_S = 0.005
# How soon the scout is to look where something has just been found, or was rung for: an empty claim
# does not see rows that others have locked. After each look in vain it waits twice as long.
POLL_UNSURE_S = 1.0
# So soon after a claim that found less than it asked for there is no next one: at 700 rings per
# second each job would else have a claim of its own, and the producers less of the machine. With
# 2 ms a job waited at 500 per second for 0.82 ms (p99 3.5), with 1 ms for 0.75 (2.6).
CLAIM_EVERY_S = 0.001
# And for so long for each job that claims have found: where more than 1,400 come per second, fewer
# and larger claims follow, until the queue is attended and nobody rings for it any more. One client
# that enqueued beside a worker reached 1,740 per second without, and 2,430 so; at 500 per second
# nothing changes. (With 1 ms for each it came to that at 1,000 per second, and jobs waited 3 ms.)
PER_JOB_S = 0.0007
# Every worker of a queue hears each ring, and one of them finds the job; and whoever may connect
# can ring, in vain and without end (500 claims a second were wasted so). After two claims in a row
# that were rung for and found nothing, the next waits, each time twice as long: so the rings go
# to whoever was quicker before, until it is full.
VAIN_CLAIMS_MAX = 2
VAIN_PAUSE_S, VAIN_PAUSE_S_MAX = 0.002, 0.04


class Consumer:
    """Service: one per queue.

    Args:
        claims: the lane of all consumers' claims.
        backlog_claims: that of a claim after one that was full, so that a large one of a queue that
            has a backlog keeps no other queue waiting: beside 40,000 jobs per second a single job
            of another queue began after 39 ms (p99 254), and so after 19 ms (59); medians of three
            runs. With one queue it is the same lane.
        scout: looks for jobs while the consumer sleeps.
        on_doubt: called when the reply to a claim was lost: it may have been committed.
        on_vain_ring: called when a ring brought no job: it may have told of one that will be due.
        on_change: called when the queue is attended from now on, or no longer (attendance.py).

    Attributes:
        delayed: the last claim did not work.
        turned_at: when it last came to the head of its loop; None: it sleeps until it is called.
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
        # An operator has limited the queue; then a place may be free when a job of ours has ended.
        self._limited = False
        self._opens_s: float | None = None

    async def run(self) -> None:
        """Claim while there is work and room; else wait for a ring, the scout or room."""
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
                continue  # told so meanwhile
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
        """Claim nothing more. A claim in flight is awaited, and its rows are given back."""
        self._stopping = True
        self._stopped.set()
        self.wakeup.set()
        self.runner.room.set()

    def doubt(self) -> None:
        """Something may have been missed: look until nobody can have been overheard."""
        self.attendance.doubt()
        self.wakeup.set()

    def be_limited(self, *, limited: bool) -> None:
        """Whether an operator has limited the queue."""
        if limited != self._limited:
            self._limited = limited
            self.wakeup.set()

    def written(self) -> None:
        """Outcomes of jobs were written: a limited queue may have room."""
        if self._limited:
            self.wakeup.set()

    async def _wanted(self) -> int:
        """How many jobs to claim now; 0, after waiting a little: it may not, or has no room."""
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
        """Wait for a ring, or until it is time to look by itself; whether it rang.

        A call of the scout is no ring: whoever found nothing there is called again ever later.
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
        """How many jobs to claim now."""
        self._measure()
        waiting = self.runner.waiting
        # The rate alone would mistake a hundred slow jobs that end together for fast ones.
        rate = min(self._rate, self.runner.limit / max(self._mean_s, 1e-6))
        ahead_s = min(max(PREFETCH_S, CLAIMS_AHEAD * self._claim_s), PREFETCH_S_MAX)
        ahead = int(rate * ahead_s) if self._mean_s < PREFETCH_S else 0
        # Half empty before it is filled again: a claim for every single job that ends would cost
        # a round trip each.
        self.runner.low = ahead // 2
        if waiting > self.runner.low:
            ahead = 0
        return min(self._batch_max, max(self.runner.free, ahead - waiting))

    def _measure(self) -> None:
        """How many attempts end per second, and how long one keeps its place."""
        now, ended, waited_s = time.perf_counter(), self.runner.ended, self.runner.waited_s
        since, ended_then, waited_then_s = self._measured
        if now - since < RATE_WINDOW_S:
            return
        self._rate = (self._rate + (ended - ended_then) / (now - since)) / 2
        if ended > ended_then:
            self._mean_s = (self._mean_s + (waited_s - waited_then_s) / (ended - ended_then)) / 2
        self._measured = (now, ended, waited_s)

    async def _claim(self, batch: int, lane: Lane) -> list[Job]:
        """Claim, and hand over to the runner what came; the jobs."""
        began = self._began = time.monotonic()
        read = ALL if self.attendance.wants_all or self._limited else self._reading.next(began)
        try:
            jobs = await self._claim_jobs(batch, read, lane)
        except StoreUnavailable as error:
            if isinstance(error, HeldUp | Silence):
                # Arguments of 256 KB, two thousand times, may be too much for one statement.
                self._batch_max = max(1, batch // 2)
            if not self.delayed:
                self.delayed = True
                events.claims_delayed(self.runner.queue, str(error))
            # It may have been committed: the reconciler looks for rows that nobody received.
            self._on_doubt()
            await self._stopped.wait(self._backoff.next_s())
            self.attendance.slept()
            return []
        except BaseException:
            # A handler may cancel whatever it finds: the claim has run, and its rows go nowhere.
            self._on_doubt()
            raise
        took_s = time.monotonic() - began
        if jobs:
            self._claim_s = took_s
            self._take(jobs)
            if len(jobs) < batch:
                # There is time now: the jobs begin before the rest of this. From the reply to the
                # handler of a job that comes alone it was 172 us, and so 118, of 1.2 ms.
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
        """The jobs whose task is not paused; the others are given back."""
        parked = [job for job in jobs if job.task in paused]
        if not parked:
            return jobs
        for name, count in Counter(job.task for job in parked).items():
            events.jobs_parked(name, self.runner.queue, count)
        self.runner.park(parked)
        return [job for job in jobs if job.task not in paused]
