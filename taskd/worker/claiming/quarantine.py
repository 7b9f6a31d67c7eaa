"""The quarantine: starts suspects (possible poison pills) in small groups.

A suspect was running when its worker crashed, so the suspect may have killed the worker. Most jobs
that kill their worker do so within `OUTLIVED_S` of their start. So a group is over when each of its
jobs has ended or has run for `OUTLIVED_S`. The next group can be twice as large. If the worker
crashes, the crash is charged to the suspects of the last group, not to those of earlier groups
(rescue_jobs in sql/queries/lease.sql). The suspects of the last group are then isolated: each
starts as a group of its own, after all other suspects. If the worker crashes while an isolated
suspect is the last group, the crash is charged to no other suspect. The isolated suspect fails if
this is at least its third charged crash.

The worker's row in taskd.worker names the last group. When the group is over and no suspect is left
to claim, the row names no group any more. If a group has only one suspect, the row names it
until the suspect has ended or has run for `PROVEN_S`. If the worker crashes while its row names no
group, the crash is charged to all jobs of the worker. A suspect with three charged crashes is
isolated, too. Such a suspect delays other isolated suspects until it has ended or has run for
`PROVEN_S`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from taskd import events
from taskd.core.jobs.job import Job
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.jobs.jobs import Among
from taskd.worker.claiming.refused_jobs import RefusedJobs
from taskd.worker.lease.state import Lease
from taskd.worker.running.runner import Runner
from taskd.worker.running.shared_slots import SharedSlots
from taskd.worker.services.service import Loop

# The interval between ticks if nothing wakes the quarantine. The promoter wakes the quarantine when
# a suspect is due. A runner wakes the quarantine when it has recorded the outcome of a suspect.
LOOK_EVERY_S = 30.0
# The interval while the worker must not claim, and after a failed claim.
NOT_NOW_S = 0.2
# The interval while a queue has no free slot for a suspect, or isolated suspects must wait.
NO_SLOT_S = 1.0
# A suspect that kills its worker immediately has done so after this time. Groups of 32 start 1,000
# suspects within 9 s, and a crash isolates at most 31 innocent ones.
OUTLIVED_S = 0.2
GROUP_MAX = 32
# An isolated suspect starts only when every running suspect that is not isolated has run for this
# long. Then none of the others is a likely cause of the next crash.
SETTLED_S = 2.0
# A suspect that was charged with this many crashes is a likely cause of the next crash. Its start
# delays isolated suspects by PROVEN_S, and other groups by DISPLACED_S.
UNPROVEN_CRASHES = 3
PROVEN_S = 30.0
DISPLACED_S = 2.0


class Member(NamedTuple):
    """A suspect that this worker has started."""

    runner: Runner
    job: Job
    started_at: float

    @property
    def runs(self) -> bool:
        """Whether the suspect has neither ended nor been abandoned."""
        return self.runner.has_job(self.job.id)

    @property
    def unproven(self) -> bool:
        """Whether the suspect was charged with so many crashes that it is a likely cause."""
        return self.job.crashes >= UNPROVEN_CRASHES

    @property
    def settled_at(self) -> float:
        """When the suspect has run long enough to be an unlikely cause (time.monotonic)."""
        return self.started_at + (PROVEN_S if self.unproven else SETTLED_S)


class Quarantine(Loop):
    """Service: claims the next group of suspects once the last group is over.

    Args:
        tasks: names of the tasks that this worker can run.
        paused: returns the names of the paused tasks, whose suspects are not claimed.
        on_claim_lost: called when a claim has failed or was cancelled. PostgreSQL may have
            committed the claim, although the quarantine received no rows.

    Attributes:
        runners: the runners of the queues that the worker serves, by queue.
        claiming: whether a claim is in flight. Its jobs go to one of these runners.
        quiet: whether claiming is switched off.
    """

    name = "quarantine"
    again_s = NOT_NOW_S

    def __init__(
        self,
        claims: Lane,
        lease: Lease,
        runners: dict[str, Runner],
        tasks: Sequence[str],
        paused: Callable[[], Collection[str]],
        on_claim_lost: Callable[[], None],
        shared_slots: SharedSlots,
    ) -> None:
        super().__init__(LOOK_EVERY_S)
        self._claims, self._lease, self._on_claim_lost = claims, lease, on_claim_lost
        self.runners, self._tasks, self._paused = runners, list(tasks), paused
        self._slots = shared_slots
        self._group: list[Member] = []
        # The number of suspects with which the last group started, and the largest size of the next
        # group.
        self._group_size, self._width = 0, 1
        # Running suspects. An isolated suspect starts only after the `settled_at` of all of them.
        self._settling: list[Member] = []
        self._refused = RefusedJobs("claim")
        self.claiming = self.quiet = False

    async def tick(self) -> float | None:
        """Claim the next group if the last group is over; return the delay until the next tick."""
        now = time.monotonic()
        self._group = [each for each in self._group if each.runs]
        self._settling = [each for each in self._settling if each.runs]
        age_s = min((now - each.started_at for each in self._group), default=math.inf)
        unproven = any(each.unproven for each in self._group)
        wait_s = (DISPLACED_S if unproven else OUTLIVED_S) - age_s
        if wait_s > 0:
            return wait_s
        if self.quiet or not self._lease.trusted:
            return NOT_NOW_S
        slots = {queue: each.suspect_slots for queue, each in self.runners.items()}
        shared = self._slots.reserve(self.wakeup, GROUP_MAX)
        if not shared:
            return NOT_NOW_S
        slots = {queue: min(free, shared) for queue, free in slots.items() if free > 0}
        self.claiming = True
        try:
            return await self._start_next(slots, min(self._width, shared), age_s)
        finally:
            self.claiming = False
            self._slots.settle(self.wakeup)

    async def _start_next(self, slots: Mapping[str, int], width: int, age_s: float) -> float | None:
        """Claim the next group; return the delay until the next tick.

        Args:
            slots: the number of suspects that each queue can start.
            width: the largest size of a group that is not isolated.
            age_s: seconds since the start of the newest member of the last group.
        """
        now = time.monotonic()
        # The worker's row names a single suspect as the last group until the suspect has ended or
        # has run for PROVEN_S. A new group replaces it earlier.
        over = self._group_size > 1 or age_s >= PROVEN_S
        if slots and await self._start(slots, width, isolated=False, clear=over):
            self._settling += self._group
            self._width = min(2 * self._width, GROUP_MAX)
            return OUTLIVED_S
        # An isolated suspect must not start while another suspect is a likely cause of a crash.
        wait_s = max((each.settled_at - now for each in self._settling), default=0.0)
        if wait_s > 0:
            return min(wait_s, NO_SLOT_S)
        if slots and await self._start(slots, 1, isolated=True, clear=over):
            self._settling += [each for each in self._group if each.unproven]
            return OUTLIVED_S
        self._width = 1
        if len(slots) < len(self.runners):
            return NO_SLOT_S
        return PROVEN_S - age_s if self._group and not over else None

    async def _start(
        self, slots: Mapping[str, int], batch: int, *, isolated: bool, clear: bool
    ) -> bool:
        """Claim and start a group.

        Args:
            slots: the number of suspects that each queue can start.
            batch: the largest size of the group.
            isolated: True claims only isolated suspects; False claims only suspects that are not
                isolated.
            clear: remove the last group from the row of the worker, even if no suspect is claimed.

        Returns:
            Whether a suspect was claimed.
        """
        claimed: list[Job] = []
        runners = dict(self.runners)
        still_run = [
            job_id for runner in runners.values() for job_id in runner.attempts.still_run()
        ]

        async def claim(among: Among) -> None:
            # After a refused claim, this function is called for several ranges of ids. The group
            # must come from one range only, because the row of the worker names one group.
            if not claimed:
                claimed.extend(
                    await jobs.claim_suspects(
                        self._claims,
                        self._lease.worker_id,
                        slots,
                        [task for task in self._tasks if task not in self._paused()],
                        batch,
                        isolated=isolated,
                        clear=clear,
                        among=among.without_also(still_run),
                    )
                )

        try:
            await self._refused.run(claim)
        except BaseException:
            self._on_claim_lost()
            raise
        by_queue: dict[str, list[Job]] = {}
        for job in claimed:
            by_queue.setdefault(job.queue, []).append(job)
        started_at = time.monotonic()
        for queue, group in by_queue.items():
            runner = runners[queue]
            runner.add_suspects(self._not_paused(runner, group))
        if claimed:
            self._group = [Member(runners[job.queue], job, started_at) for job in claimed]
        if claimed or clear:
            self._group_size = len(claimed)
        return bool(claimed)

    def _not_paused(self, runner: Runner, group: Sequence[Job]) -> list[Job]:
        """Release jobs whose task was paused after the claim was sent; return the others."""
        paused = [job for job in group if job.task in self._paused()]
        for job in paused:
            events.jobs_parked(job.task, job.queue, 1)
        runner.release_paused(paused)
        return [job for job in group if job.task not in self._paused()]
