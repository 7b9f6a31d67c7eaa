"""The attempts of one runner whose handlers wait for something, by job id."""

from __future__ import annotations

import time
from collections.abc import Iterator

from taskd.core.jobs.job import Job
from taskd.core.outcomes.attempt_ends import AttemptEnd, IdTaken, StillRuns
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.worker.observing.loop_monitor import Standstill
from taskd.worker.running.attempt import Attempt

# How long an attempt waits for a free thread, process or connection before its job is released.
SLOT_WAIT_S = 5.0
# A worker id that no claim has.
NO_FENCE = -1
# These handlers run on while a handler blocks the event loop.
OFF_THE_LOOP = (HandlerKind.THREAD, HandlerKind.PROCESS)


class AttemptTable:
    """Running and abandoned attempts, and the cancellations that apply to them.

    Attributes:
        running: attempts without an outcome.
        abandoned: attempts whose outcome is recorded although they still run.
    """

    def __init__(self) -> None:
        self.running: dict[int, Attempt] = {}
        self.abandoned: dict[int, Attempt] = {}

    def __iter__(self) -> Iterator[Attempt]:
        """Iterate over a copy of the running attempts."""
        return iter(list(self.running.values()))

    def has(self, job: Job) -> bool:
        """Return whether an attempt of exactly this claim is here, abandoned or not."""
        attempt = self.running.get(job.id) or self.abandoned.get(job.id)
        return attempt is not None and attempt.job is job

    def claimed_again(self, job: Job) -> AttemptEnd | None:
        """Return the end of a claimed job whose id is here already; None: its attempt continues."""
        attempt = self.running.get(job.id)
        if attempt is None:
            # An abandoned attempt of it still runs in this process.
            return StillRuns()
        if _same_job(attempt.job, job):
            # The same job was claimed again because a failover lost the first claim: adopt the new
            # claim.
            attempt.job.fence, attempt.job.worker_id = job.fence, job.worker_id
            return None
        # A failover lost the running job and gave its id to another job: the outcome of the lost
        # one is not needed.
        attempt.job.fence = NO_FENCE
        return IdTaken()

    def postpone(self, standstill: Standstill, now: float) -> None:
        """Move the deadlines of the attempts whose handlers could not run during a standstill.

        The time counts for the handler that blocked the loop, and for threads and processes that
        ran meanwhile.
        """
        for attempt in self.running.values():
            ran = not standstill.process and attempt.task.kind in OFF_THE_LOOP
            if not ran and attempt.job.id not in standstill.by:
                attempt.postpone(standstill.lasted_s, now)

    def cancel_overdue(self, now: float, cancel_s: float) -> list[Attempt]:
        """Cancel attempts at their timeouts; return those that ignore their cancellation.

        Args:
            now: time.monotonic().
            cancel_s: seconds that a cancelled attempt can take to end.
        """
        ignored = []
        for attempt in self.running.values():
            if attempt.cancelled_at is not None:
                if now - attempt.cancelled_at >= cancel_s:
                    ignored.append(attempt)
            elif attempt.waits_for_slot:
                if attempt.ran_s(now) >= SLOT_WAIT_S:
                    attempt.cancel("no slot", now)
            elif attempt.timeout_s is not None and attempt.ran_s(now) >= attempt.timeout_s:
                attempt.cancel("timeout", now)
        return ignored

    def cancel_all(self, why: str) -> None:
        """Cancel every running attempt."""
        now = time.monotonic()
        for attempt in self:
            attempt.cancel(why, now)

    def warn_all(self) -> None:
        """Set `ctx.stopping` for all handlers."""
        for attempt in self:
            if attempt.context is not None:
                attempt.context.stopping = True


def _same_job(one: Job, other: Job) -> bool:
    """Return whether two claims of one id are of the same job."""
    return (one.task, one.args, one.due_at_s) == (other.task, other.args, other.due_at_s)
