"""Busy marks: while workers poll a queue continuously, producers need not notify.

A transaction that notifies holds a lock of the whole database cluster until its commit is flushed:
with 16 clients that notify for every job, the rate fell to 0.27. So a busy worker marks its queue,
and producers read the mark and skip the NOTIFY. A queue has three states:

- quiet: there is no mark, every enqueue notifies, and the consumer sleeps until a notification. It
  changes to polled when the consumer no longer sleeps, or when producers wait for each other.
- polled: a mark is set and renewed every second; the consumer claims every few milliseconds.
- handing over: the mark is cleared, but transactions that have read it may be open, and will not
  notify. The consumer polls until they have ended, polls once more, and is quiet.

Which transactions may have read the mark? Their xid was assigned by the insert of a job, before
they read the mark, and they read its value at that moment (a sequence has no snapshots). So their
xids are lower than one that is drawn after the mark was cleared. When the snapshots of the database
begin above that xid, these transactions have ended, and a claim that starts then sees their jobs.

The start works in the same way. A producer reads who serves the queue with a snapshot that is
younger than its xid. It does not notify for a queue without workers, and does not even look for
workers while a sequence says that none is live. So a worker doubts notifications when it starts to
listen, and again when it was declared dead and has restarted.

A queue has one mark, that of the worker that wrote it last. Another worker that clears its own mark
leaves this one: the worker of the mark is responsible for later jobs. One such worker is enough,
and notifies the others when it cannot keep up. A worker whose claims are not full gives way to
another worker's mark, and sleeps: otherwise several workers would claim every 5 ms for jobs that
one could run.

A worker that cannot claim (full of slow jobs, paused, or about to stop) hands over as well; instead
of polling itself it notifies the other workers. The mark of a worker that dies expires after two
seconds, or when the worker is declared dead. Jobs that came meanwhile are found by the worker that
declares it dead, or by the others' polls.
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

# Above this rate of notifications, they cost more than they tell.
ATTEND_AFTER_S = 0.1
# Ten clients that wait for each other's commits notify some 1,000 times per second, while the
# worker sleeps between two notifications. So a worker that claims often checks how many
# transactions wait, also where each claim finds several jobs and the next one follows up to GAP_S
# later. At a rate that only several producers reach, it checks at each count.
OFTEN_CLAIMS_PER_S, MANY_JOBS_PER_S = 50, 600
COUNT_EVERY_S, LOOK_AT_PRODUCERS_EVERY_S = 0.05, 0.2
PRODUCERS_HELD_UP = 3
MARK_S = 2.0
# A statement whose connection broke can run on the server for this long; most end at once.
WRITTEN_LATER_S = 3.0
RENEW_EVERY_S = 1.0
# How long a polling consumer waits after a claim that found less than it asked for.
GAP_S = 0.005
# After this time without a claim it hands over: a consumer that has claimed 50 ms of work ahead is
# not full.
CLAIM_AT_LEAST_EVERY_S = 0.06
# With fewer jobs per claim than this, for this time, notifications cost little and are quicker than
# the gap.
FEW_JOBS = 4.0
FEW_FOR_S = 0.1
# It polls again at the earliest this long after it last began, so that a load between the two
# bounds does not make it switch ten times a second.
NOT_AGAIN_FOR_S = 1.0
# Per other worker, so that all polling workers together notify as often as one would, and a worker
# that polls alone does not wake many at each claim; at most 0.1 s, so that no job waits longer.
CALL_EVERY_S, CALL_ALONE_EVERY_S_MAX = 0.025, 0.1
# Factor between two polls while handing over: a job is found later by at most a quarter of the time
# that its transaction was open.
LOOK_AFTER_S, LOOK_AFTER_S_MAX, LOOK_GROWTH = 0.002, 1.0, 1.25
# When a worker stops, it waits for open transactions no longer than this; the others poll.
END_S = 1.0


class BusyMark:
    """The busy mark of one queue; its consumer reports to it. Times are time.monotonic().

    Args:
        lane: the lane of the claims, so that marks and claims are sent in one order.
        on_change: called when notifications stop or start to announce every job.

    Attributes:
        attending: a mark is set.
        doubtful: notifications alone cannot be trusted yet.
    """

    def __init__(self, lane: Lane, queue: str, lease: Lease, on_change: Callable[[], None]) -> None:
        self.attending = False
        self.doubtful = False
        self._lane, self._queue, self._lease = lane, queue, lease
        self._on_change = on_change
        # Workers whose mark may be set: a statement without an answer may have written it.
        self._marked_by: int | None = None
        self._marked_last_by: int | None = (
            None  # the last worker that set it, also after it was cleared
        )
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

    # Reports of the consumer.

    def doubt(self) -> None:
        """Notifications may be missing: a connection was made anew, or a worker was declared dead.

        Another server may answer from now on, which does not know that a mark was cleared.
        """
        if not self.attending:
            self._marked_by = self._marked_by or self._marked_last_by
            self._begin_to_doubt()

    def slept(self) -> None:
        """The consumer had nothing to do for a moment."""
        self._awake_since = time.monotonic()

    def claimed(self, jobs: int, batch: int) -> None:
        """A claim was answered that read everything, or as much as it wanted."""
        self._claimed_at = time.monotonic()
        self._claims += 1
        self._jobs += jobs
        self._found += (jobs - self._found) / 8
        if self._found >= FEW_JOBS:
            self._few_since = self._claimed_at
        if self.doubtful and self._ended and jobs < batch:
            self._be_certain()

    # Questions of the consumer.

    @property
    def wants_all(self) -> bool:
        """Return whether the next claim is the last poll, which must read everything."""
        return self.doubtful and self._ended

    def pause_s(self, sleep_s: float) -> float:
        """Return how long to wait for a notification; a quiet consumer waits `sleep_s`."""
        if self.attending:
            return GAP_S
        if self.doubtful:
            return min(sleep_s, self._next_look_s())
        return sleep_s

    # Actions for the consumer.

    async def before_claim(self, *, full: bool) -> None:
        """Send what is due to the database before the next claim.

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
        """No claim is made for a while: let the other workers poll."""
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
            # Each time: no other worker is notified of the jobs committed since. A doubt that comes
            # up during the call clears `_ended`.
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

    # Details.

    async def _holds_producers_up(self, now: float) -> bool:
        """Return whether producers that notify wait for each other."""
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
        """Set the mark, or renew it; return whether this worker polls."""
        self._marked_by = self._marked_last_by = self._lease.worker_id
        self._owes_call = True
        self._renew_at = now + RENEW_EVERY_S
        try:
            attended = await store.set_busy_mark(
                self._lane, self._queue, self._marked_by, MARK_S, gives_way=gives_way
            )
        except StoreUnavailable:
            # A session that is cut off may write it later; it then expires.
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
        """Clear the mark, draw an xid, and check whether all transactions before it have ended."""
        self._ended = False
        doubts = self._doubts
        try:
            if self._marked_by is not None:
                await store.clear_busy_mark(self._lane, self._queue, self._marked_by)
                if time.monotonic() < self._written_until:
                    return
                # After a doubt that came up meanwhile, it may come from another server.
                if doubts == self._doubts:
                    self._marked_by = None
            xid = self._xid or await store.draw_xid(self._lane)
            ended = await store.transactions_ended(self._lane, xid)
        except StoreUnavailable:
            # Another server can answer next, whose xids are lower.
            self._xid = None
            return
        # A doubt that came up meanwhile needs a new xid.
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
