"""The consumer of one queue: claims in batches for all that its runner can start."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from taskd import events
from taskd.core.job import Job
from taskd.errors import StoreUnavailable
from taskd.store import jobs as store
from taskd.store.database import Lane
from taskd.store.translate import HeldUp, Silence
from taskd.worker.acker import Acker
from taskd.worker.reading import Reading
from taskd.worker.runner import Runner, Shared
from taskd.worker.service import Backoff, Wakeup, jittered_s

# 100 gives 60 % and 500 all of the speed that batching has to give.
BATCH_MAX = 500
# Claimed ahead is what can start within this time at the measured rate: fast jobs by the hundred,
# slow ones one per free coroutine, so that nobody hoards while another worker is idle.
PREFETCH_S = 0.05
RATE_WINDOW_S = 0.005
# How soon an empty claim is repeated without a ring: it does not see rows that others have locked.
POLL_UNSURE_S = 1.0
# Whoever may connect can ring, in vain and without end (500 claims a second were wasted so). After
# this many claims in a row that were rung for and found nothing, the next waits this long.
VAIN_CLAIMS_MAX = 10
VAIN_CLAIM_EVERY_S = 0.02


class Consumer:
    """Service: one per queue.

    Args:
        claims: the lane of all consumers' claims.
        on_doubt: called when the reply to a claim was lost: it may have been committed.
    """

    def __init__(
        self,
        runner: Runner,
        claims: Lane,
        acker: Acker,
        shared: Shared,
        *,
        poll_s: float,
        on_doubt: Callable[[], None],
    ) -> None:
        self.name = f"consumer:{runner.queue}"
        self.runner = runner
        self.wakeup = Wakeup()
        self.quiet = False
        self._claims, self._acker, self._shared = claims, acker, shared
        self._poll_s, self._on_doubt = poll_s, on_doubt
        self._stopping = False
        self._stopped = Wakeup()
        self._backoff = Backoff()
        self._delayed = False
        self._rate = 0.0
        self._mean_s = 0.0
        self._measured = (time.perf_counter(), 0, 0.0)
        self._batch_max = BATCH_MAX
        self._reading = Reading()

    async def run(self) -> None:
        """Claim while there is work and room; else wait for a ring, a poll or room."""
        poll_s = POLL_UNSURE_S
        vain_claims = 0
        while not self._stopping:
            if not await self._may_claim():
                continue
            batch = self._appetite()
            if batch <= 0:
                self.runner.room.clear()
                await self.runner.room.wait(PREFETCH_S)
                continue
            self.wakeup.clear()
            jobs = await self._claim(batch)
            if jobs:
                self._take(jobs)
            vain_claims = 0 if jobs else vain_claims + 1
            if len(jobs) == batch:
                continue
            if not jobs and self.runner.idle:
                self._rate = 0.0
            poll_s = POLL_UNSURE_S if jobs else min(poll_s * 2, self._poll_s)
            if not await self.wakeup.wait(
                self._reading.at_most(jittered_s(poll_s), time.monotonic())
            ):
                vain_claims = 0
                continue
            poll_s = POLL_UNSURE_S
            if vain_claims >= VAIN_CLAIMS_MAX:
                await self._stopped.wait(VAIN_CLAIM_EVERY_S)

    def stop(self) -> None:
        """Claim nothing more. A claim in flight is awaited, and its rows are given back."""
        self._stopping = True
        self._stopped.set()
        self.wakeup.set()
        self.runner.room.set()

    async def _may_claim(self) -> bool:
        if self.quiet or not self._shared.lease.trusted:
            await self.wakeup.wait(0.2)
            self.wakeup.clear()
            return False
        if not self._acker.has_room():
            await self._acker.room(0.2)
            return False
        return True

    def _appetite(self) -> int:
        """How many jobs to claim now."""
        self._measure()
        waiting = self.runner.waiting
        # The rate alone would mistake a hundred slow jobs that end together for fast ones.
        rate = min(self._rate, self.runner.limit / max(self._mean_s, 1e-6))
        ahead = int(rate * PREFETCH_S) if self._mean_s < PREFETCH_S else 0
        # Half empty before it is filled again: a claim for every single job that ends would cost
        # a round trip each.
        if waiting > ahead // 2:
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

    async def _claim(self, batch: int) -> list[Job]:
        began = time.monotonic()
        read = self._reading.next(began)
        try:
            jobs = await store.claim(
                self._claims, self._shared.lease.worker_id, self.runner.queue, batch, read
            )
        except StoreUnavailable as error:
            if isinstance(error, HeldUp | Silence):
                # Arguments of 256 KB, five hundred times, may be too much for one statement.
                self._batch_max = max(1, batch // 2)
            if not self._delayed:
                self._delayed = True
                events.claims_delayed(self.runner.queue, str(error))
            # It may have been committed: the reconciler looks for rows that nobody received.
            self._on_doubt()
            await self._stopped.wait(self._backoff.next_s())
            return []
        self._backoff.reset()
        self._delayed = False
        self._batch_max = min(BATCH_MAX, self._batch_max * 2)
        took_s = time.monotonic() - began
        self._reading.claimed(read, jobs, began + took_s, took_s)
        events.queue_claimed(self.runner.queue, len(jobs), batch, took_s)
        if read.only_urgent and len(jobs) < batch:
            jobs += await self._claim(batch - len(jobs))
        return jobs

    def _take(self, jobs: list[Job]) -> None:
        registry = self._shared.registry
        unknown = Counter(job.task for job in jobs if job.task not in registry)
        for name, count in unknown.items():
            events.task_unknown(name, self.runner.queue, count)
        self.runner.add(jobs)
