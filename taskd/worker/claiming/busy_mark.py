"""The busy mark: while a worker polls a queue continuously, producers skip the NOTIFY.

A transaction that notifies holds a lock of the whole database cluster until its commit is flushed.
So a NOTIFY for every job slows all producers down. A busy worker therefore marks its queue, and a
producer that reads the mark does not notify. A consumer is in one of three states:

- asleep: this worker has set no mark, and the consumer sleeps until a notification arrives.
- marked: this worker renews its mark every second, and the consumer claims every few milliseconds.
  The consumer enters this state when it no longer finds time to sleep, or when producers wait for
  each other's NOTIFY.
- must poll: the mark was cleared, but producers with open transactions may have read the mark
  before, and will not notify. The consumer polls until those transactions have ended, claims once
  more, and can then sleep.

The consumer uses transaction ids (xids) to find out when those transactions have ended. Each
transaction draws its xid when it inserts a job, and reads the mark afterwards. The mark is a
sequence, so every transaction reads the present value of the mark, whatever the snapshot of the
transaction is. An xid that the consumer draws after the mark was cleared is higher than the xids of
all transactions that have read the mark. When all transactions with lower xids have ended, a claim
sees their jobs.

Producers also do not notify for a queue that no live worker serves. So a consumer must poll in the
same way after the worker has begun to listen. It must also poll in this way after its worker was
declared dead and has registered under a new id.

The mark belongs to the worker that set it last. Other workers do not clear the mark before it
expires, unless they declare its worker dead. One polling worker per queue is enough. While the
claims of the polling worker are full (each claim returns as many jobs as it asked for), this worker
wakes the other workers. A worker whose claims are not full leaves the mark of another worker in
place, and its own consumer sleeps.

A worker that cannot claim clears its mark, and wakes the other workers instead of polling. It
cannot claim while slow jobs use all slots, after a signal has switched claiming off, or during a
stop. The mark of a worker that crashed expires after two seconds, or is cleared when the worker is
declared dead. Jobs that were enqueued meanwhile are found by idle pollers, and by the worker that
declares the crashed worker dead.

The mark is only an optimization: if PostgreSQL refuses the statement that sets it, producers
notify.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taskd import events
from taskd.errors import TaskdError
from taskd.store.connections.error_translation import is_outage
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import busy_marks as store
from taskd.worker.lease.state import Lease

# A consumer that has not slept for this long, and whose claims have all found jobs, sets the mark.
# A claim without jobs is no sign of load, because any user who can connect can send enough
# notifications to keep the consumer awake.
MARK_AFTER_S = 0.1
# A consumer that still finds time to sleep also sets the mark if producers wait for the lock of
# NOTIFY. Ten clients that wait for each other's commits send only some 1,000 notifications per
# second. The consumer counts its claims and jobs every COUNT_EVERY_S. If the consumer claims often,
# it counts the waiting producers every CHECK_PRODUCERS_EVERY_S. If the consumer also gets many
# jobs, it counts them every COUNT_EVERY_S.
OFTEN_CLAIMS_PER_S, MANY_JOBS_PER_S = 50, 600
COUNT_EVERY_S, CHECK_PRODUCERS_EVERY_S = 0.05, 0.2
WAITING_PRODUCERS_MIN = 3
# A mark that is not renewed expires after this time.
MARK_S = 2.0
# A statement whose connection broke may still run on the server for this long.
WRITTEN_LATER_S = 3.0
RENEW_EVERY_S = 1.0
# How long a consumer with a mark waits after a claim that found fewer jobs than it asked for.
GAP_S = 0.005
# A consumer that makes no claim for this long clears its mark. This is longer than the time for
# which a consumer usually claims jobs ahead (PREFETCH_S).
CLAIM_AT_LEAST_EVERY_S = 0.06
# A consumer whose claims find fewer than FEW_JOBS jobs on average for FEW_FOR_S clears its mark. At
# this rate, notifications cost little, and are faster than polling.
FEW_JOBS = 4.0
FEW_FOR_S = 0.1
# The minimum time between two marks, so that a load near a threshold does not set and clear the
# mark all the time.
MARK_AT_MOST_EVERY_S = 1.0
# How long the consumer sets no mark after PostgreSQL has refused to set it. This is also the
# minimum time between two log lines about refused statements.
REFUSED_EVERY_S = 60.0
# A consumer that cannot keep up, or leaves jobs for other workers, wakes the other workers
# repeatedly. The interval is CALL_EVERY_S times the number of the other workers. If no other worker
# has marked the queue, the interval is CALL_ALONE_EVERY_S_MAX at most.
CALL_EVERY_S, CALL_ALONE_EVERY_S_MAX = 0.025, 0.1
# The first and the longest wait between two polls after the mark was cleared, and the factor by
# which the wait grows. With a factor of 2, the jobs of long transactions would be found later.
POLL_AFTER_S, POLL_AFTER_S_MAX, POLL_GROWTH = 0.002, 1.0, 1.25
# A stopping worker waits for open transactions no longer than this. Other workers poll as well.
END_S = 1.0


class BusyMark:
    """The busy mark of one queue, driven by its consumer. Times are time.monotonic().

    Args:
        lane: the lane of the claims, so that statements about the mark run in order with claims.
        on_change: called when `marked` or `must_poll` changes. While `marked` or `must_poll` is
            True, notifications of jobs that are due later can be missing, too.

    Attributes:
        marked: whether this worker has set the mark, as far as it knows.
        must_poll: whether notifications may be missing, so that the consumer must poll.
    """

    def __init__(self, lane: Lane, queue: str, lease: Lease, on_change: Callable[[], None]) -> None:
        self.marked = False
        self.must_poll = False
        self._lane, self._queue, self._lease = lane, queue, lease
        self._on_change = on_change
        # The worker id under which the mark may be set; None after the mark was cleared.
        self._marked_by: int | None = None
        # The worker id under which the mark was last set, even if the mark was cleared since.
        self._marked_last_by: int | None = None
        self._renew_at = 0.0
        # When the last mark expires if it is not cleared.
        self._expires_at = 0.0
        # Until this time, a statement that got no reply can set the cleared mark again.
        self._written_until = 0.0
        self._reported_at = -REFUSED_EVERY_S
        self._others, self._alone = 0, False
        self._call_at = 0.0
        # When the first claim of the present series returned. In a series, every claim finds jobs.
        self._awake_since: float | None = None
        self._claimed_at = self._counted_since = time.monotonic()
        self._claims = self._jobs = 0
        self._producers_checked_at = 0.0
        self._not_before = 0.0
        self._found, self._few_since = 0.0, 0.0
        self._xid: str | None = None
        self._ended = False
        self._polls_begun = 0
        self._must_notify = False
        self._poll_after_s, self._poll_at = POLL_AFTER_S, 0.0

    # Events that the consumer reports.

    def notifications_missed(self) -> None:
        """Poll until all jobs are found for which no notification arrived.

        This is necessary when the listener has connected, when another worker was declared dead,
        and when this worker has a new id.
        """
        if not self.marked:
            # After a failover, another server can answer, on which the cleared mark is still set.
            self._marked_by = self._marked_by or self._marked_last_by
            self._start_polling()

    def slept(self) -> None:
        """Record that the consumer had nothing to do for a moment."""
        self._awake_since = None

    def claimed(self, jobs: int, batch: int) -> None:
        """Record that a claim of up to `batch` jobs returned `jobs` jobs."""
        self._claimed_at = time.monotonic()
        self._claims += 1
        self._jobs += jobs
        if not jobs:
            self._awake_since = None
        elif self._awake_since is None:
            self._awake_since = self._claimed_at
        self._found += (jobs - self._found) / 8
        if self._found >= FEW_JOBS:
            self._few_since = self._claimed_at
        if self.must_poll and self._ended and jobs < batch:
            self._stop_polling()

    # State that the consumer reads.

    @property
    def wants_all(self) -> bool:
        """Return whether the next claim is the last poll, which must read the whole queue."""
        return self.must_poll and self._ended

    def pause_s(self, sleep_s: float) -> float:
        """Return how long to wait for a notification; this is `sleep_s` if polls are not needed."""
        if self.marked:
            return GAP_S
        if self.must_poll:
            return min(sleep_s, self._next_poll_s())
        return sleep_s

    # Statements that the consumer awaits.

    async def before_claim(self, *, full: bool, refusing: bool = False) -> None:
        """Set, renew or clear the mark, check open transactions, and wake the other workers.

        Steps that are not necessary now are skipped. The consumer calls before_claim() before each
        claim.

        Args:
            full: the last claim returned as many jobs as it asked for.
            refusing: claims leave out jobs that only another worker can run. That worker needs
                notifications, so the queue is not marked.
        """
        now = time.monotonic()
        if self.marked:
            if (
                refusing
                or now - self._few_since > FEW_FOR_S
                or (now >= self._renew_at and not await self._mark(now, yields=not full))
            ):
                await self._clear()
        elif (not refusing and now >= self._not_before) and (
            (self._awake_since is not None and now - self._awake_since > MARK_AFTER_S)
            or await self._delays_producers(now)
        ):
            self._not_before = now + MARK_AT_MOST_EVERY_S
            if await self._mark(now, yields=not full):
                self.marked, self.must_poll = True, False
                self._found, self._few_since = FEW_JOBS, now
                events.queue_polled(self._queue)
                self._on_change()
        if self.must_poll:
            await self._check_transactions()
        busy = self.marked or self.must_poll
        if busy and (refusing or (full and self._others)) and now >= self._call_at:
            every_s = CALL_EVERY_S * max(self._others, 1)
            self._call_at = now + (min(every_s, CALL_ALONE_EVERY_S_MAX) if self._alone else every_s)
            await self._notify_workers()

    async def cannot_claim(self) -> None:
        """Clear the mark and wake the other workers, if no claim was made for a while.

        The consumer calls this repeatedly while it cannot claim.
        """
        now = time.monotonic()
        if now - self._claimed_at < CLAIM_AT_LEAST_EVERY_S:
            return
        self.slept()
        if self.marked:
            await self._clear()
            await self._notify_workers()
        if self.must_poll and now >= self._poll_at:
            self._poll_at = now + self._next_poll_s()
            await self._check_transactions()
            # Repeated until `_ended`, because open transactions commit jobs without a notification.
            # If polling began anew during the call, `_ended` is False.
            if await self._notify_workers() and self._ended:
                self._stop_polling()

    async def end(self) -> None:
        """Clear the mark of a consumer that stops.

        After that, open transactions may commit jobs without a notification. Wake the other workers
        until these transactions have ended, but for at most END_S.
        """
        if self.marked:
            await self._clear()
        ends = time.monotonic() + END_S
        while self._must_notify and self.must_poll:
            await self._check_transactions()
            late = time.monotonic() >= ends
            if (self._ended or late) and (await self._notify_workers() or late):
                return
            await asyncio.sleep(self._next_poll_s())

    async def _delays_producers(self, now: float) -> bool:
        """Return whether producers wait for each other's NOTIFY.

        Also return False if the next count is not due, or PostgreSQL does not answer.
        """
        counted_s = now - self._counted_since
        if counted_s < COUNT_EVERY_S:
            return False
        often = self._jobs > 0 and self._claims >= OFTEN_CLAIMS_PER_S * counted_s
        many = self._jobs >= MANY_JOBS_PER_S * counted_s
        self._counted_since, self._claims, self._jobs = now, 0, 0
        due = many or now - self._producers_checked_at >= CHECK_PRODUCERS_EVERY_S
        if not (often and due):
            return False
        self._producers_checked_at = now
        try:
            return await store.count_waiting_notifiers(self._lane) >= WAITING_PRODUCERS_MIN
        except TaskdError:
            return False

    async def _mark(self, now: float, *, yields: bool) -> bool:
        """Set or renew the mark.

        Args:
            yields: leave the mark of another worker in place.

        Returns:
            Whether the mark of this worker is set; True also if the reply was lost, because the
            mark may be set then.
        """
        self._marked_by = self._marked_last_by = self._lease.worker_id
        self._must_notify = True
        self._renew_at, self._expires_at = now + RENEW_EVERY_S, now + MARK_S + WRITTEN_LATER_S
        try:
            polled = await store.set_busy_mark(
                self._lane, self._queue, self._marked_by, MARK_S, yields=yields
            )
        except TaskdError as error:
            if is_outage(error):
                # The server may still run the statement, and so set a mark. This mark then expires.
                self._written_until = time.monotonic() + WRITTEN_LATER_S + MARK_S
                return True
            self._not_before = now + REFUSED_EVERY_S
            self._report(error)
            # The mark may be set, because PostgreSQL does not roll back changes of sequences.
            if not self.marked:
                self._start_polling()
            return False
        if polled is not None:
            self._alone, self._others = polled
        return polled is not None

    async def _clear(self) -> None:
        self.marked = False
        self._start_polling()
        await self._check_transactions()
        events.queue_unpolled(self._queue)

    async def _check_transactions(self) -> None:
        """Clear the mark, draw an xid, and check whether all transactions before it have ended."""
        self._ended = False
        polls_begun = self._polls_begun
        try:
            if self._marked_by is not None:
                if not await self._cleared(self._marked_by):
                    return
                # If polling began anew meanwhile, another server may have the mark.
                if polls_begun == self._polls_begun:
                    self._marked_by = None
            xid = self._xid or await store.draw_xid(self._lane)
            ended = await store.transactions_ended(self._lane, xid)
        except TaskdError as error:
            self._report(error)
            # Another server may answer next, on which this xid was not drawn yet.
            self._xid = None
            return
        # If polling began anew meanwhile, it needs a new xid.
        if polls_begun == self._polls_begun:
            self._xid, self._ended = xid, ended

    async def _cleared(self, worker_id: int) -> bool:
        """Clear the mark; return whether it is certain to stay cleared under this worker id.

        Raises:
            TaskdError: the database does not answer. Other errors are logged.
        """
        try:
            await store.clear_busy_mark(self._lane, self._queue, worker_id)
        except TaskdError as error:
            if is_outage(error):
                raise
            self._report(error)
            return time.monotonic() >= self._expires_at
        return time.monotonic() >= self._written_until

    async def _notify_workers(self) -> bool:
        try:
            await store.wake_workers(self._lane, self._queue)
        except TaskdError as error:
            self._report(error)
            return False
        return True

    def _report(self, error: TaskdError) -> None:
        """Log that PostgreSQL refused a statement, every REFUSED_EVERY_S at most.

        Outages are not logged here: claims fail as well, and the consumer logs that.
        """
        now = time.monotonic()
        if is_outage(error) or now - self._reported_at < REFUSED_EVERY_S:
            return
        self._reported_at = now
        events.queue_mark_refused(self._queue, str(error))

    def _start_polling(self) -> None:
        self.must_poll, self._ended, self._xid = True, False, None
        self._polls_begun += 1
        self._poll_after_s, self._poll_at = POLL_AFTER_S, 0.0
        self._on_change()

    def _stop_polling(self) -> None:
        self.must_poll = self._must_notify = False
        self._on_change()

    def _next_poll_s(self) -> float:
        wait_s, self._poll_after_s = (
            self._poll_after_s,
            min(self._poll_after_s * POLL_GROWTH, POLL_AFTER_S_MAX),
        )
        return wait_s
