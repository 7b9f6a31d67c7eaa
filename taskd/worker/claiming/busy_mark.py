"""The busy mark: while a worker polls a queue continuously, producers skip the NOTIFY.

A transaction that notifies holds a lock of the whole database cluster until its commit is flushed,
so a NOTIFY for every job slows all producers down. A busy worker therefore marks its queue, and a
producer that reads the mark does not notify. A consumer is in one of three states:

- quiet: there is no mark, every job is notified, and the consumer sleeps until a notification.
- marked: the mark is set and renewed every second, and the consumer claims every few milliseconds.
  This state begins when the consumer no longer sleeps, or when notifying producers wait for each
  other.
- must poll: the mark was cleared, but open transactions may have read it and will not notify. The
  consumer polls until they have ended, claims once more, and is quiet.

A transaction draws its xid when it inserts a job, before it reads the mark. The mark is a sequence,
so every transaction reads its present value. Hence a transaction that has read the mark has a lower
xid than one drawn after the mark was cleared. When all snapshots of the database begin above that
xid, those transactions have ended, and a claim that starts then sees their jobs.

Producers also do not notify a queue without workers. So a worker must poll in the same way as soon
as it listens, and again when it was declared dead and has registered under a new id.

A queue has one mark, which belongs to the worker that wrote it last; another worker cannot clear
it. One polling worker is enough. It notifies the others when its claims are full. A worker whose
claims are not full yields to the mark of another worker and sleeps.

A worker that cannot claim (full of slow jobs, quiet, or stopping) clears its mark, and notifies the
other workers instead of polling. The mark of a dead worker expires after two seconds, or when the
worker is declared dead. The worker that declares it dead, or the idle pollers, find jobs that were
enqueued meanwhile.

The mark is never necessary: if the database refuses a statement about it, producers notify.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from taskd import events
from taskd.errors import TaskdError
from taskd.store.connections.database import Lane
from taskd.store.connections.error_translation import is_outage
from taskd.store.jobs import busy_marks as store
from taskd.worker.lease.state import Lease

# A consumer that has not slept for this long receives notifications faster than it claims.
MARK_AFTER_S = 0.1
# Ten clients that wait for each other's commits send some 1,000 notifications per second, and the
# worker still sleeps between two of them. So a consumer that claims often checks how many producers
# wait. If many jobs arrive, it checks each time it counts them.
OFTEN_CLAIMS_PER_S, MANY_JOBS_PER_S = 50, 600
COUNT_EVERY_S, CHECK_PRODUCERS_EVERY_S = 0.05, 0.2
WAITING_PRODUCERS_MIN = 3
MARK_S = 2.0
# A statement whose connection broke may still run on the server for this long.
WRITTEN_LATER_S = 3.0
RENEW_EVERY_S = 1.0
# How long a polling consumer waits after a claim that found fewer jobs than it asked for.
GAP_S = 0.005
# A consumer that makes no claim for this long clears its mark. It exceeds the 50 ms of work that a
# consumer claims ahead.
CLAIM_AT_LEAST_EVERY_S = 0.06
# If claims find fewer than FEW_JOBS jobs for FEW_FOR_S, notifications are cheap, and faster than
# polling.
FEW_JOBS = 4.0
FEW_FOR_S = 0.1
# A queue is marked at most this often, so that a load near the threshold does not flap.
MARK_AT_MOST_EVERY_S = 1.0
# After the database refused the mark, by an error that will not end by itself.
REFUSED_EVERY_S = 60.0
# How often to notify the other workers: the interval for each of them, and the longest interval for
# a worker that polls alone.
CALL_EVERY_S, CALL_ALONE_EVERY_S_MAX = 0.025, 0.1
# Each wait between two polls is longer than the one before by this factor. Doubling the waits would
# find jobs of a long transaction later.
POLL_AFTER_S, POLL_AFTER_S_MAX, POLL_GROWTH = 0.002, 1.0, 1.25
# A stopping worker waits for open transactions no longer than this; other workers poll.
END_S = 1.0


class BusyMark:
    """The busy mark of one queue, driven by its consumer. Times are time.monotonic().

    Args:
        lane: the lane of the claims, so that marks and claims are sent in one order.
        on_change: called when the state changes. While the queue is marked, jobs that become due
            later are not notified either.

    Attributes:
        marked: the mark is set.
        must_poll: notifications may be missing, so the consumer must poll.
    """

    def __init__(self, lane: Lane, queue: str, lease: Lease, on_change: Callable[[], None]) -> None:
        self.marked = False
        self.must_poll = False
        self._lane, self._queue, self._lease = lane, queue, lease
        self._on_change = on_change
        # The worker id whose mark may be set, also by a statement whose reply was lost.
        self._marked_by: int | None = None
        self._marked_last_by: int | None = (
            None  # the last worker id that set the mark, even if it was cleared since
        )
        self._renew_at = 0.0
        # Until then the mark may be set: uncleared, or, after a lost reply, even if cleared.
        self._expires_at = self._written_until = 0.0
        self._reported_at = -REFUSED_EVERY_S
        self._others, self._alone = 0, False
        self._call_at = 0.0
        self._awake_since = self._claimed_at = self._counted_since = time.monotonic()
        self._claims = self._jobs = 0
        self._producers_checked_at = 0.0
        self._not_before = 0.0
        self._found, self._few_since = 0.0, 0.0
        self._xid: str | None = None
        self._ended = False
        self._polls_begun = 0
        self._must_notify = False
        self._poll_after_s, self._poll_at = POLL_AFTER_S, 0.0

    # Reports from the consumer.

    def notifications_missed(self) -> None:
        """Poll until no notification can be missing: the listener reconnected, or a worker died.

        The database server may have changed, and the new one may still have a cleared mark.
        """
        if not self.marked:
            self._marked_by = self._marked_by or self._marked_last_by
            self._start_polling()

    def slept(self) -> None:
        """Record that the consumer had nothing to do for a moment."""
        self._awake_since = time.monotonic()

    def claimed(self, jobs: int, batch: int) -> None:
        """Record a claim that read everything, or as much as it wanted."""
        self._claimed_at = time.monotonic()
        self._claims += 1
        self._jobs += jobs
        self._found += (jobs - self._found) / 8
        if self._found >= FEW_JOBS:
            self._few_since = self._claimed_at
        if self.must_poll and self._ended and jobs < batch:
            self._stop_polling()

    # Questions of the consumer.

    @property
    def wants_all(self) -> bool:
        """Return whether the next claim is the last poll, which must read the whole queue."""
        return self.must_poll and self._ended

    def pause_s(self, sleep_s: float) -> float:
        """Return how long to wait for a notification; a quiet consumer waits `sleep_s`."""
        if self.marked:
            return GAP_S
        if self.must_poll:
            return min(sleep_s, self._next_poll_s())
        return sleep_s

    # Actions for the consumer.

    async def before_claim(self, *, full: bool, refusing: bool = False) -> None:
        """Before the next claim, set, renew or clear the mark, and check open transactions.

        Args:
            full: the last claim returned as many jobs as it asked for.
            refusing: claims leave out jobs that another worker can run. That worker must be
                notified of them, so the queue is not marked.
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
            now - self._awake_since > MARK_AFTER_S or await self._delays_producers(now)
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
        """Clear the mark and notify the other workers: no claim is made for a while."""
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
            # At each call, because producers did not notify for jobs that were committed since the
            # last one. If polling begins anew during the call, `_ended` is False again.
            if await self._notify_workers() and self._ended:
                self._stop_polling()

    async def end(self) -> None:
        """Clear the mark, as no claim will be made any more."""
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
        """Return whether notifying producers wait for each other."""
        counted_s = now - self._counted_since
        if counted_s < COUNT_EVERY_S:
            return False
        often = self._claims >= OFTEN_CLAIMS_PER_S * counted_s
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
        """Set or renew the mark; return whether this worker polls the queue."""
        self._marked_by = self._marked_last_by = self._lease.worker_id
        self._must_notify = True
        self._renew_at, self._expires_at = now + RENEW_EVERY_S, now + MARK_S + WRITTEN_LATER_S
        try:
            polled = await store.set_busy_mark(
                self._lane, self._queue, self._marked_by, MARK_S, yields=yields
            )
        except TaskdError as error:
            if is_outage(error):
                # A session that was cut off may still set the mark; then the mark expires.
                self._written_until = time.monotonic() + WRITTEN_LATER_S + MARK_S
                return True
            self._not_before = now + REFUSED_EVERY_S
            self._report(error)
            # A sequence keeps what a failed statement has written to it.
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
                # If polling began anew meanwhile, the mark may be on another server.
                if polls_begun == self._polls_begun:
                    self._marked_by = None
            xid = self._xid or await store.draw_xid(self._lane)
            ended = await store.transactions_ended(self._lane, xid)
        except TaskdError as error:
            self._report(error)
            # Another server can answer next, whose xids are lower.
            self._xid = None
            return
        # If polling began anew meanwhile, it needs an xid of its own.
        if polls_begun == self._polls_begun:
            self._xid, self._ended = xid, ended

    async def _cleared(self, worker_id: int) -> bool:
        """Clear the mark; return whether it is clear and stays so, or has expired.

        Raises:
            TaskdError: the database does not answer.
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
        """Log a refusal, at most once a minute. Outages are logged elsewhere."""
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
