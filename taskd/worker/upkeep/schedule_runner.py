"""The schedule runner: enqueues the jobs of due ticks.

Every worker has a schedule runner; a row lock decides which worker fires a tick
(sql/queries/schedules.sql). The worker computes the ticks from the database's time, never from its
own clock.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from taskd import events
from taskd.core.schedule import CatchUp, Cron, Overlap, catch_up_of
from taskd.core.schedule import due as due_ticks
from taskd.errors import InvalidSchedule, TaskdError
from taskd.store import schedules
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import HeldUp, may_concern_one_row
from taskd.store.connections.lanes import Lane
from taskd.store.schedules import DueSchedule, TicksIn
from taskd.worker.running.traces import Firing
from taskd.worker.services.service import Loop

BATCH = 100
# The statement timeout of a tick whose schedule has a query; the statement also inserts the jobs.
QUERY_TIMEOUT_S = 60.0
AT_MOST_EVERY_S = 0.02
AGAIN_S = 1.0
# The interval between two log lines about a schedule whose tick PostgreSQL refuses repeatedly.
REPORT_EVERY_S = 600.0
# The longest wait: over longer times, the clocks of worker and database could drift apart.
TIMER_S_MAX = 60.0
# The wait while no schedule has a next tick. The rescuer reads new schedules, and then calls
# expect().
NOTHING_S = 3600.0


class ScheduleRunner(Loop):
    """Service: fires the schedules without a query, or, with `queries`, the schedules with a query.

    A query can be slow. So the schedules with queries have a runner and a connection of their own,
    and do not delay the other schedules. The connection is opened when ticks are due, and closed
    afterwards.

    Args:
        queries: the database for the schedules with queries.
    """

    again_s = AGAIN_S

    def __init__(self, lane: Lane, queries: Database | None = None) -> None:
        super().__init__(TIMER_S_MAX)
        self.name = "schedules" if queries is None else "schedules with queries"
        self._lane, self._queries = lane, queries
        self._next_check_at = 0.0
        # When the delay of a schedule can be logged again (time.monotonic).
        self._report_at: dict[str, float] = {}

    def expect(self, ticks: TicksIn) -> None:
        """Wake up if the next tick is due before the timer ends; the rescuer calls this."""
        tick_s = self._mine(ticks)
        if tick_s is not None and time.monotonic() + tick_s < self._next_check_at - AGAIN_S / 10:
            self.wakeup.set()

    def _mine(self, ticks: TicksIn) -> float | None:
        return ticks.plain_s if self._queries is None else ticks.query_s

    async def tick(self) -> float:
        """Fire the due schedules; return the seconds until the next tick of this service."""
        wait_s = await self._fire()
        self._next_check_at = time.monotonic() + wait_s
        return wait_s

    async def _fire(self) -> float:
        due = await schedules.due(self._lane, BATCH, with_query=self._queries is not None)
        least_s = AT_MOST_EVERY_S
        if due:
            async with self._firing_lane() as lane:
                done = [await self._one(lane, each) for each in due]
            # If other workers have fired all due schedules, wait longer. Otherwise more schedules
            # can be due already.
            least_s = AT_MOST_EVERY_S if any(done) else AGAIN_S
        next_s = self._mine(await schedules.next_ticks(self._lane))
        return NOTHING_S if next_s is None else min(max(next_s, least_s), TIMER_S_MAX)

    async def _one(self, lane: Lane, read: DueSchedule) -> bool:
        try:
            fired = await fire(lane, read)
        except TaskdError as error:
            # Continue with the other schedules if another session has locked a job that this tick
            # would cancel. Do the same if a trigger of the user refuses the tick.
            if not (isinstance(error, HeldUp) or may_concern_one_row(error)):
                raise
            self._delayed(read, str(error))
            return False
        self.failures.worked(schedules.as_service(read.name))
        self._report_at.pop(read.name, None)
        return fired

    def _delayed(self, read: DueSchedule, error: str) -> None:
        self.failures.failed(schedules.as_service(read.name), error)
        now = time.monotonic()
        if now < self._report_at.get(read.name, now):
            return
        # Schedules that were deleted, or that another worker has fired since, drop out.
        self._report_at = {name: at for name, at in self._report_at.items() if at > now}
        self._report_at[read.name] = now + REPORT_EVERY_S
        events.schedule_delayed(read.name, read.next_at, error)

    @asynccontextmanager
    async def _firing_lane(self) -> AsyncIterator[Lane]:
        if self._queries is None:
            yield self._lane
            return
        # This lane does not have the planner settings of the other lanes, because users write these
        # queries.
        lane = Lane(self._queries.with_timeout(QUERY_TIMEOUT_S), "schedules")
        try:
            yield lane
        finally:
            await lane.close()


async def fire(lane: Lane, read: DueSchedule) -> bool:
    """Fire the due ticks of one schedule, and store its next tick.

    A schedule whose next tick cannot be computed is paused.

    Args:
        read: the schedule, as due() has read it.

    Returns:
        False if another worker has fired these ticks, or if they wait for a live job.
    """
    try:
        when = read.when()
        rule = catch_up_of(CatchUp(read.catch_up), Overlap(read.overlap), waits=read.waits)
        args = (when, read.next_at, read.now, rule, read.catch_up_max)
        # The ticks of 600 zones would block the event loop for a tenth of a second.
        per_row = isinstance(when, Cron) and when.per_row
        found = await asyncio.to_thread(due_ticks, *args) if per_row else due_ticks(*args)
    except InvalidSchedule as error:
        if await schedules.pause_invalid(lane, read, str(error)):
            events.schedule_stalled(read.name, str(error))
        return True
    firing = Firing(read.name if found.ticks else None)
    fired = await schedules.fire(lane, read, found, firing.metadata)
    if fired.outcome is None:
        return False
    if found.missed:
        events.schedule_missed(read.name, read.next_at, len(found.ticks))
    if fired.outcome == "fired":
        # Of several ticks, overlap `wait` fires the first tick now. It fires the other ticks when
        # the job of the first tick has ended.
        tick = found.ticks[0 if read.overlap == Overlap.WAIT else -1]
        firing.end(fired.jobs)
        events.schedule_fired(read.name, tick, fired.jobs, (read.now - tick).total_seconds())
        if fired.error is not None:
            events.schedule_rows_left_out(read.name, tick, fired.error)
    elif fired.outcome == "skipped":
        events.schedule_skipped(read.name, found.ticks[-1])
    elif fired.outcome == "waits":
        if not read.waits:
            events.schedule_waits(read.name, found.ticks[0])
        return False
    elif fired.outcome == "failed":
        events.schedule_failed(read.name, found.ticks[-1], fired.error)
    return True
