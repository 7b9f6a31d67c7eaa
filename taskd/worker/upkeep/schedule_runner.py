"""The schedule runner: enqueues the jobs of due ticks, on a timer set to the next tick.

Every worker runs it; a row lock decides which worker fires a tick (sql/queries/schedules.sql). All
times are the database's. This module only computes which tick follows the due ones.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from taskd import events
from taskd.core.schedule import CatchUp
from taskd.core.schedule import due as due_ticks
from taskd.errors import InvalidSchedule, TaskdError
from taskd.store import schedules
from taskd.store.connections.database import Database, Lane
from taskd.store.connections.error_translation import HeldUp, may_concern_one_row
from taskd.store.schedules import DueSchedule, TicksIn
from taskd.worker.running.traces import Firing
from taskd.worker.service import Loop

BATCH = 100
# How long the query of a schedule may take, with the insertion of its jobs.
QUERY_TIMEOUT_S = 60.0
AT_MOST_EVERY_S = 0.02
AGAIN_S = 1.0
# Clocks drift: a long wait is cut into short ones.
TIMER_S_MAX = 60.0
# Without a schedule there is nothing to do; the rescuer announces a new one.
NOTHING_S = 3600.0


class ScheduleRunner(Loop):
    """Service: fires either the schedules without a query or those with one.

    Schedules with queries have a runner of their own, which opens a connection for each run:
    queries may be slow, and the other schedules must not be late.

    Args:
        queries: the database in which queries run; None: fire the schedules without queries.
    """

    again_s = AGAIN_S

    def __init__(self, lane: Lane, queries: Database | None = None) -> None:
        super().__init__(TIMER_S_MAX)
        self.name = "schedules" if queries is None else "schedules with queries"
        self._lane, self._queries = lane, queries
        self._next_check_at = 0.0

    def expect(self, ticks: TicksIn) -> None:
        """Wake up if the next tick, which the rescuer has read, comes before the timer ends."""
        tick_s = self._mine(ticks)
        if tick_s is not None and time.monotonic() + tick_s < self._next_check_at - AGAIN_S / 10:
            self.wakeup.set()

    def _mine(self, ticks: TicksIn) -> float | None:
        return ticks.plain_s if self._queries is None else ticks.query_s

    async def tick(self) -> float:
        """Fire what is due; return the seconds until the next tick."""
        wait_s = await self._fire()
        self._next_check_at = time.monotonic() + wait_s
        return wait_s

    async def _fire(self) -> float:
        due = await schedules.due(self._lane, BATCH, with_query=self._queries is not None)
        least_s = AT_MOST_EVERY_S
        if due:
            async with self._firing_lane() as lane:
                done = [await self._one(lane, each) for each in due]
            # If another worker has fired all due schedules, wait longer; otherwise more may be due
            # at once.
            least_s = AT_MOST_EVERY_S if any(done) else AGAIN_S
        next_s = self._mine(await schedules.next_ticks(self._lane))
        return NOTHING_S if next_s is None else min(max(next_s, least_s), TIMER_S_MAX)

    async def _one(self, lane: Lane, read: DueSchedule) -> bool:
        try:
            return await fire(lane, read)
        except TaskdError as error:
            # Continue with the other schedules: a lock on a job that this one would cancel may
            # delay it for long, or a trigger of the user refuses it.
            if not (isinstance(error, HeldUp) or may_concern_one_row(error)):
                raise
            events.schedule_delayed(read.name, read.next_at, str(error))
            return False

    @asynccontextmanager
    async def _firing_lane(self) -> AsyncIterator[Lane]:
        if self._queries is None:
            yield self._lane
            return
        # Without the planner settings of the other lanes, as the queries are the users'.
        lane = Lane(self._queries.with_timeout(QUERY_TIMEOUT_S), "schedules")
        try:
            yield lane
        finally:
            await lane.close()


async def fire(lane: Lane, read: DueSchedule) -> bool:
    """Fire the due ticks of one schedule; return whether this worker did."""
    try:
        when = read.when()
        found = due_ticks(when, read.next_at, read.now, CatchUp(read.catch_up), read.catch_up_max)
    except InvalidSchedule as error:
        if await schedules.pause_invalid(lane, read, str(error)):
            events.schedule_stalled(read.name, str(error))
        return True
    firing = Firing(read.name if found.ticks else None)
    fired = await schedules.fire(lane, read, found.ticks, found.next_at, firing.metadata)
    if fired.outcome is None:
        return False
    if found.missed:
        events.schedule_missed(read.name, read.next_at, len(found.ticks))
    if fired.outcome == "fired":
        late_s = (read.now - found.ticks[-1]).total_seconds()
        firing.end(fired.jobs)
        events.schedule_fired(read.name, found.ticks[-1], fired.jobs, late_s)
    elif fired.outcome == "skipped":
        events.schedule_skipped(read.name, found.ticks[-1])
    elif fired.outcome == "failed":
        events.schedule_failed(read.name, found.ticks[-1], fired.error)
    return True
