"""The attempts of one runner that did not end in the first step of their coroutine."""

from __future__ import annotations

import time
from collections.abc import Iterator

from taskd.core.jobs.job import Job
from taskd.core.outcomes.attempt_ends import AttemptEnd, IdTaken, StillRuns
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.worker_status import JOBS_NAMED_MAX, Abandoned
from taskd.worker.observing.loop_monitor import Standstill
from taskd.worker.running.attempt import Attempt

# How long an attempt waits for a free thread, process, connection or batch before its job is
# released.
SLOT_WAIT_S = 5.0
# A fence that no claim has, so an ack with this fence changes no row.
NO_FENCE = -1
# Handlers of these kinds continue to run while another handler blocks the event loop.
OFF_THE_LOOP = (HandlerKind.THREAD, HandlerKind.PROCESS)


class AttemptTable:
    """Running and abandoned attempts by job id, and the cancellation of running ones.

    Attributes:
        running: attempts without an outcome.
        abandoned: attempts whose outcome is recorded although their handlers can still run.
    """

    def __init__(self) -> None:
        self.running: dict[int, Attempt] = {}
        self.abandoned: dict[int, Attempt] = {}

    def __iter__(self) -> Iterator[Attempt]:
        """Iterate over a copy of the running attempts."""
        return iter(list(self.running.values()))

    def has(self, job: Job) -> bool:
        """Return whether the attempt of exactly this claim is in the table, abandoned or not."""
        attempt = self.running.get(job.id) or self.abandoned.get(job.id)
        return attempt is not None and attempt.job is job

    def still_run(self) -> list[int]:
        """Return the ids of the jobs whose abandoned attempts still run: claims leave them out."""
        return list(self.abandoned)

    def claimed_again(self, job: Job) -> AttemptEnd | None:
        """Decide what happens to a claimed job whose id is in this table already.

        Returns:
            The end to record for the claimed job; None if the attempt in the table continues under
            the new claim.
        """
        attempt = self.running.get(job.id)
        if attempt is None:
            # The attempt was abandoned after the claim was sent, so the claim did not leave out the
            # job.
            return StillRuns()
        if _same_job(attempt.job, job):
            # A failover lost the first claim, and the job was claimed again. Adopt the new claim.
            attempt.job.fence, attempt.job.worker_id = job.fence, job.worker_id
            return None
        # A failover lost the job that runs here, and PostgreSQL gave its id to the claimed job. The
        # outcome of the lost job must change no row.
        attempt.job.fence = NO_FENCE
        return IdTaken()

    def postpone(self, standstill: Standstill, now: float) -> None:
        """Extend the deadlines of the attempts whose handlers could not run during a standstill.

        The deadlines of the jobs that blocked the event loop do not change. Nor do the deadlines of
        handlers in threads and processes, unless the whole process stood still.
        """
        for attempt in self.running.values():
            ran = not standstill.process and attempt.task.kind in OFF_THE_LOOP
            if not ran and attempt.job.id not in standstill.by:
                attempt.postpone(standstill.lasted_s, now)

    def cancel_overdue(self, now: float, cancel_s: float) -> list[Attempt]:
        """Cancel attempts that have exceeded their timeout, or waited too long for a slot.

        Args:
            now: time.monotonic().
            cancel_s: seconds that a cancelled attempt can take to end.

        Returns:
            The attempts that were cancelled at least `cancel_s` ago and have not ended.
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

    def published(self, threads: int) -> list[Abandoned]:
        """Return the abandoned attempts that still run, by task; called on the lease thread.

        Args:
            threads: number of threads of the worker.
        """
        now = time.monotonic()
        by_task: dict[str, list[Attempt]] = {}
        for attempt in list(self.abandoned.values()):
            by_task.setdefault(attempt.task.name, []).append(attempt)
        return [
            Abandoned(
                task,
                len(attempts),
                tuple(each.job.id for each in attempts[:JOBS_NAMED_MAX]),
                round(max(now - (each.cancelled_at or now) for each in attempts), 1),
                threads if attempts[0].in_thread else 0,
            )
            for task, attempts in by_task.items()
        ]

    def cancel_all(self, why: str) -> None:
        """Cancel every running attempt, for the reason `why` (see Attempt)."""
        now = time.monotonic()
        for attempt in self:
            attempt.cancel(why, now)

    def warn_all(self) -> None:
        """Set `ctx.stopping` of all running attempts."""
        for attempt in self:
            if attempt.context is not None:
                attempt.context.stopping = True


def _same_job(one: Job, other: Job) -> bool:
    """Return whether two claims with the same id are of the same job, by task, args and time."""
    return (one.task, one.args, one.due_at_s) == (other.task, other.args, other.due_at_s)
