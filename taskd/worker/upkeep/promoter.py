"""The promoter: queues scheduled jobs that are due, and blocked jobs that their limits admit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from functools import partial

from taskd import events
from taskd.store.connections.error_translation import HeldUp
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from taskd.store.jobs.jobs import DueIn
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.claiming.refused_jobs import RefusedJobs
from taskd.worker.services.service import Loop, Wakeup, jittered_s

PROMOTE_BATCH = 1000
PROMOTE_AT_MOST_EVERY_S = 0.05
# Most notifications announce a job that is queued already, so the promoter does not read the due
# times after each notification.
CHECK_AT_MOST_EVERY_S = 0.5
# The maximum time between two reads of the due times by the promoter. The rescuer reads the due
# times more often, and passes them to expect().
TIMER_S_MAX = 30.0
# The maximum time between two reads while a consumer polls its queue continuously.
TIMER_BUSY_S = 1.0
# The minimum time between two reads while PostgreSQL refuses to change a job that is due.
REFUSED_EVERY_S = 1.0


class Promoter(Loop):
    """Service: queues jobs at their due times, and wakes the quarantine when a suspect is due.

    Args:
        consumers: the consumers of the queues that this worker serves. While one of them polls its
            queue continuously, producers do not notify for jobs that are due later. So the promoter
            then reads the due times every TIMER_BUSY_S.
        suspects: the wake-up of the quarantine.
    """

    name = "promoter"
    again_s = 1.0

    def __init__(self, lane: Lane, consumers: Mapping[str, Consumer], suspects: Wakeup) -> None:
        super().__init__(TIMER_S_MAX)
        self._lane, self._consumers, self._suspects = lane, consumers, suspects
        self._next_check_at = 0.0
        self._checked_at = 0.0
        self._check_timer: asyncio.TimerHandle | None = None
        self._unpromoted, self._unadmitted = RefusedJobs("promote"), RefusedJobs("admit")
        self._admission_timed_out = False

    def notified(self) -> None:
        """Read the due times within CHECK_AT_MOST_EVERY_S: a notification has arrived.

        The notification can announce a job that is due later. If a consumer claims after the
        notification and finds no job, it wakes this service earlier.
        """
        if self._check_timer is None:
            wait_s = max(0.0, self._checked_at + CHECK_AT_MOST_EVERY_S - time.monotonic())
            self._check_timer = asyncio.get_running_loop().call_later(wait_s, self.wakeup.set)

    def expect(self, due: DueIn) -> None:
        """Wake up if a job is due before the timer ends.

        The rescuer calls this with the due times that it reads every few seconds, also to find jobs
        whose notification was lost.
        """
        self._update_limited(due)
        soon = [each for each in (due.job_s, due.suspect_s, due.gate_s) if each is not None]
        if soon and time.monotonic() + min(soon) < self._next_check_at - PROMOTE_AT_MOST_EVERY_S:
            self.wakeup.set()

    async def tick(self) -> float:
        """Queue due jobs; return the seconds until the next tick."""
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None
        self._checked_at = time.monotonic()
        wait_s = await self._promote()
        # A pause between two reads, because every enqueue can send a notification.
        pause_s = min(wait_s or PROMOTE_AT_MOST_EVERY_S, PROMOTE_AT_MOST_EVERY_S)
        await asyncio.sleep(pause_s)
        busy = any(
            each.busy_mark.marked or each.busy_mark.must_poll for each in self._consumers.values()
        )
        timer_s = TIMER_BUSY_S if busy else jittered_s(TIMER_S_MAX)
        timer_s = min(max(wait_s - pause_s, 0.0), timer_s)
        self._next_check_at = time.monotonic() + timer_s
        return timer_s

    async def _promote(self) -> float:
        """Queue due jobs, and wake the quarantine if a suspect is due.

        Returns:
            The seconds until the next due time; TIMER_S_MAX if there is none.
        """
        due = await jobs.next_due(self._lane)
        promote = partial(jobs.promote, self._lane, PROMOTE_BATCH)
        while due.job_s is not None and due.job_s <= 0:
            answers = await self._unpromoted.run(promote)
            for moved in filter(None, answers):
                events.jobs_promoted(moved)
                self._wake(moved)
            due = await jobs.next_due(self._lane)
            if not any(answers):
                break  # other workers are promoting the other due jobs
        due = await self._admit(due)
        self._update_limited(due)
        # A job that PostgreSQL refuses to change stays due: do not read again immediately.
        wait_s = TIMER_S_MAX if due.job_s is None else max(due.job_s, _least_s(self._unpromoted))
        if due.gate_s is not None:
            wait_s = min(wait_s, max(due.gate_s, _least_s(self._unadmitted)))
        if due.suspect_s is not None:
            if due.suspect_s <= 0:
                self._suspects.set()
            else:
                wait_s = min(wait_s, due.suspect_s)
        return wait_s

    async def _admit(self, due: DueIn) -> DueIn:
        """Admit blocked jobs as far as their limits allow; return the due times read afterwards."""
        checked, after_name = 0, ""
        while due.gate_s is not None and due.gate_s <= 0:
            admit = partial(limits.admit, self._lane, PROMOTE_BATCH, after_name=after_name)
            try:
                answers = await self._unadmitted.run(admit)
            except HeldUp as error:
                if not self._admission_timed_out:
                    self._admission_timed_out = True
                    events.admission_timed_out(str(error))
                raise
            self._admission_timed_out = False
            for admitted in answers:
                if admitted.queues:
                    events.jobs_admitted(admitted.queues)
                    self._wake(admitted.queues)
            due = await jobs.next_due(self._lane)
            checked += sum(each.checked for each in answers)
            after_name = min((each.last_name for each in answers), default="")
            if not after_name:
                if not checked:
                    break  # other workers are admitting these jobs, or hold a lock
                checked = 0
        return due

    def _wake(self, queues: Mapping[str, int]) -> None:
        for queue in queues.keys() & self._consumers.keys():
            self._consumers[queue].wakeup.set()

    def _update_limited(self, due: DueIn) -> None:
        """Pass to each consumer whether an operator has limited its queue."""
        if due.limited is not None:
            for queue, consumer in self._consumers.items():
                consumer.set_limited(limited=queue in due.limited)


def _least_s(refused: RefusedJobs) -> float:
    return REFUSED_EVERY_S if refused else 0.0
