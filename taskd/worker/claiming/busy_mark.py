"""Attendance: while a queue is claimed from all the time, producers need not ring for it.

A transaction that notifies holds a lock of the whole database cluster until its commit is flushed;
16 clients that rang with every job fell to 0.27 of their rate. So a worker that is busy marks its
queue, and whoever enqueues reads the mark and keeps silent. Three states:

- quiet: nothing is said, every job rings, the consumer sleeps until it hears one. When it does not
  come to sleep any more, or those who ring wait for each other, it attends.
- attending: a mark is out, renewed every second; the consumer claims every few milliseconds.
- handing over: the mark is taken back, but transactions may be open that have read it and will
  not ring. The consumer goes on looking until they have ended, looks once more, and is quiet.

Which transactions may have read the mark? They drew their xid before they read it, by the insert of
a job, and a mark counts as it is at that moment (a sequence knows no snapshots). So all have a
lower xid than one that is drawn after the mark was gone.
When the snapshots of the database begin above that one, they have ended, and a claim that starts
then sees what they have left.

The same way in: who serves a queue is read as well, by a snapshot that is younger than the xid,
and nobody rings for a queue without workers, nor looks for them while a sequence says that none
lives. So a worker doubts as soon as it listens, and again when it was buried and has begun anew.

A queue has one mark, that of the worker that wrote it last. Another one that takes its own back
leaves it: whoever attends the queue answers for what is enqueued meanwhile. One is enough, which
calls the others when it cannot keep up: a worker whose claims are not full gives way to a mark
that it finds, and sleeps. (When all that were rung for attended, up to three of four claimed each
5 ms for jobs that one could have done, and took the processor from the producers.)

A worker that cannot claim (full of slow jobs, told to be quiet, about to stop) hands over as well;
instead of looking itself it calls the other workers. One that dies leaves its mark for two seconds,
or until it is buried; what came meanwhile is found by whoever buries it, or by the others' polls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taskd import events
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Lane
from taskd.store.jobs import busy_marks as store
from taskd.worker.lease import Lease

# Rings come faster than claims are made: from then on they cost more than they tell.
ATTEND_AFTER_S = 0.1
# Ten clients that wait for each other's commits ring some 1,000 times per second, and the worker
# sleeps between two of them: 0.31 of plain inserts. So one that claims often looks how many wait,
# also where each claim finds several jobs and the next one comes up to GAP_S later.
# Where so many jobs come as only several producers make, it looks at each count.
OFTEN_CLAIMS_PER_S, MANY_JOBS_PER_S = 50, 600
COUNT_EVERY_S, LOOK_AT_PRODUCERS_EVERY_S = 0.05, 0.2
PRODUCERS_HELD_UP = 3
MARK_S = 2.0
# A statement whose connection broke may run on the server for so long; most end at once.
WRITTEN_LATER_S = 3.0
RENEW_EVERY_S = 1.0
# How long an attending consumer waits after a claim that found less than it asked for.
GAP_S = 0.005
# So long it may make no claim before it hands over: a consumer that has claimed 50 ms' worth of
# work ahead is not full.
CLAIM_AT_LEAST_EVERY_S = 0.06
# Fewer jobs per claim than this, for so long: rings would not hurt, and be quicker than the gap.
FEW_JOBS = 4.0
FEW_FOR_S = 0.1
# A load between the two must not have it change its mind ten times a second: so long after it began
# it may begin again. (Counted from when it left, a load that paused for 0.3 s rang for a second.)
NOT_AGAIN_FOR_S = 1.0
# For each of the others, so that all who attend call as often as one would, and who attends alone
# does not have a crowd at each claim; but that one leaves nobody waiting for longer than 0.1 s.
CALL_EVERY_S, CALL_ALONE_EVERY_S_MAX = 0.025, 0.1
# Each wait between two looks is so much longer than the one before: what a transaction leaves is
# found later by a quarter of the time that it was open. When the waits doubled it was all of it: in
# 300 trials of tests.system.wakeups on one queue p99 was 40 ms, and is 15 ms.
LOOK_AFTER_S, LOOK_AFTER_S_MAX, LOOK_GROWTH = 0.002, 1.0, 1.25
# At its end a worker waits for open transactions no longer than this; the others poll.
END_S = 1.0


class BusyMark:
    """Of one queue, by one consumer, which tells it what it does. Times are time.monotonic().

    Args:
        lane: the lane of the claims: marks and claims go out in one order.
        on_change: called when rings cease or begin to tell of all, as of jobs that will be due.

    Attributes:
        attending: a mark is out.
        doubtful: NOTIFY cannot be trusted alone yet.
    """

    def __init__(self, lane: Lane, queue: str, lease: Lease, on_change: Callable[[], None]) -> None:
        self.attending = False
        self.doubtful = False
        self._lane, self._queue, self._lease = lane, queue, lease
        self._on_change = on_change
        # Whose mark may be out: a statement whose reply was lost may have written it.
        self._marked_by: int | None = None
        self._marked_last_by: int | None = None  # whose was the last, also when it was taken back
        self._renew_at = 0.0
        self._written_until = 0.0
        self._others, self._alone = 0, False
        self._call_at = 0.0
        self._awake_since = self._claimed_at = self._counted_since = time.monotonic()
        self._claims = self._jobs = 0
        self._looked_at_producers = 0.0
        self._not_before = 0.0
        self._found, self._few_since = 0.0, 0.0
        self._xid: str | None = None
        self._ended = False
        self._doubts = 0
        self._owes_call = False
        self._look_after_s, self._look_at = LOOK_AFTER_S, 0.0

    # What the consumer tells.

    def doubt(self) -> None:
        """Something may have been missed: a connection was made anew, a worker was buried.

        Another server may answer since, which has not heard that a mark was taken back.
        """
        if not self.attending:
            self._marked_by = self._marked_by or self._marked_last_by
            self._begin_to_doubt()

    def slept(self) -> None:
        """The consumer had nothing to do for a moment."""
        self._awake_since = time.monotonic()

    def claimed(self, jobs: int, batch: int) -> None:
        """A claim that read everything, or as much as it wanted, was answered."""
        self._claimed_at = time.monotonic()
        self._claims += 1
        self._jobs += jobs
        self._found += (jobs - self._found) / 8
        if self._found >= FEW_JOBS:
            self._few_since = self._claimed_at
        if self.doubtful and self._ended and jobs < batch:
            self._be_certain()

    # What it asks.

    @property
    def wants_all(self) -> bool:
        """Whether the next claim is the last look, which must not leave anything out."""
        return self.doubtful and self._ended

    def pause_s(self, sleep_s: float) -> float:
        """How long to wait for a ring, where one that is quiet would wait `sleep_s`."""
        if self.attending:
            return GAP_S
        if self.doubtful:
            return min(sleep_s, self._next_look_s())
        return sleep_s

    # What it has it do.

    async def before_claim(self, *, full: bool) -> None:
        """What there is to say to the database before the next claim.

        Args:
            full: the last claim brought as much as it had asked for.
        """
        now = time.monotonic()
        if self.attending:
            if now - self._few_since > FEW_FOR_S or (
                now >= self._renew_at and not await self._mark(now, gives_way=not full)
            ):
                await self._leave()
        elif now >= self._not_before and (
            now - self._awake_since > ATTEND_AFTER_S or await self._holds_producers_up(now)
        ):
            self._not_before = now + NOT_AGAIN_FOR_S
            if await self._mark(now, gives_way=not full):
                self.attending, self.doubtful = True, False
                self._found, self._few_since = FEW_JOBS, now
                events.queue_polled(self._queue)
                self._on_change()
        if self.doubtful:
            await self._look()
        busy = self.attending or self.doubtful
        if busy and full and self._others and now >= self._call_at:
            every_s = CALL_EVERY_S * self._others
            self._call_at = now + (min(every_s, CALL_ALONE_EVERY_S_MAX) if self._alone else every_s)
            await self._call()

    async def cannot_claim(self) -> None:
        """No claim is being made for a while: have the others look."""
        now = time.monotonic()
        if now - self._claimed_at < CLAIM_AT_LEAST_EVERY_S:
            return
        self.slept()
        if self.attending:
            await self._leave()
            await self._call()
        if self.doubtful and now >= self._look_at:
            self._look_at = now + self._next_look_s()
            await self._look()
            # Each time: what was committed since is rung for by nobody else. A doubt that comes up
            # during the call takes `_ended` back.
            if await self._call() and self._ended:
                self._be_certain()

    async def end(self) -> None:
        """No claim will be made any more."""
        if self.attending:
            await self._leave()
        ends = time.monotonic() + END_S
        while self._owes_call and self.doubtful:
            await self._look()
            late = time.monotonic() >= ends
            if (self._ended or late) and (await self._call() or late):
                return
            await asyncio.sleep(self._next_look_s())

    # How it is done.

    async def _holds_producers_up(self, now: float) -> bool:
        """Whether those who ring wait for each other."""
        counted_s = now - self._counted_since
        if counted_s < COUNT_EVERY_S:
            return False
        often = self._claims >= OFTEN_CLAIMS_PER_S * counted_s
        many = self._jobs >= MANY_JOBS_PER_S * counted_s
        self._counted_since, self._claims, self._jobs = now, 0, 0
        due = many or now - self._looked_at_producers >= LOOK_AT_PRODUCERS_EVERY_S
        if not (often and due):
            return False
        self._looked_at_producers = now
        try:
            return await store.count_waiting_notifiers(self._lane) >= PRODUCERS_HELD_UP
        except StoreUnavailable:
            return False

    async def _mark(self, now: float, *, gives_way: bool) -> bool:
        """Write the mark, or renew it; whether this worker attends."""
        self._marked_by = self._marked_last_by = self._lease.worker_id
        self._owes_call = True
        self._renew_at = now + RENEW_EVERY_S
        try:
            attended = await store.set_busy_mark(
                self._lane, self._queue, self._marked_by, MARK_S, gives_way=gives_way
            )
        except StoreUnavailable:
            # It may be written yet, by a session that is cut off from us; then it lapses.
            self._written_until = time.monotonic() + WRITTEN_LATER_S + MARK_S
            return True
        if attended is not None:
            self._alone, self._others = attended
        return attended is not None

    async def _leave(self) -> None:
        self.attending = False
        self._begin_to_doubt()
        await self._look()
        events.queue_unpolled(self._queue)

    async def _look(self) -> None:
        """Take the mark back, draw an xid, see whether all before it have ended."""
        self._ended = False
        doubts = self._doubts
        try:
            if self._marked_by is not None:
                await store.clear_busy_mark(self._lane, self._queue, self._marked_by)
                if time.monotonic() < self._written_until:
                    return
                # After a doubt that came up meanwhile it may be another server's.
                if doubts == self._doubts:
                    self._marked_by = None
            xid = self._xid or await store.draw_xid(self._lane)
            ended = await store.transactions_ended(self._lane, xid)
        except StoreUnavailable:
            # Another server may answer next, whose xids are lower.
            self._xid = None
            return
        # A doubt that came up meanwhile wants an xid of its own.
        if doubts == self._doubts:
            self._xid, self._ended = xid, ended

    async def _call(self) -> bool:
        try:
            await store.wake_workers(self._lane, self._queue)
        except StoreUnavailable:
            return False
        return True

    def _begin_to_doubt(self) -> None:
        self.doubtful, self._ended, self._xid = True, False, None
        self._doubts += 1
        self._look_after_s, self._look_at = LOOK_AFTER_S, 0.0
        self._on_change()

    def _be_certain(self) -> None:
        self.doubtful = self._owes_call = False
        self._on_change()

    def _next_look_s(self) -> float:
        look_s, self._look_after_s = (
            self._look_after_s,
            min(self._look_after_s * LOOK_GROWTH, LOOK_AFTER_S_MAX),
        )
        return look_s
