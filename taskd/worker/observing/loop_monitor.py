"""The loop monitor: what runs on the main loop, and which job blocks it.

The loop writes it, and the lease thread reads it.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from taskd import events
from taskd.core.jobs.job import Job
from taskd.core.worker_status import LoopBlocked

# While attempts run, the loop ticks every 40 to 60 ms and is checked ten times a second, so a
# blocking job is named within 0.45 s. Thirty wake-ups per second would be most of an idle worker's
# cost. When idle, only leftovers of handlers can block the loop, and 1.05 s is enough.
TICK_S, REST_TICK_S = 0.05, 0.25
CHECK_EVERY_S, REST_CHECK_EVERY_S = 0.1, 0.5
# A tick this late means that the loop is blocked.
LATE_S = 0.3
# Nothing has started for this long, and nothing runs: then the worker is idle.
REST_AFTER_S = 1.0
# A standstill is this long at least. The monitor has named the job that blocks the loop by then.
STANDSTILL_S = 1.0
# A blocked loop is logged again after 1, 2, 4 ... seconds, at most once in 60.
AGAIN_S = 1.0
AGAIN_S_MAX = 60.0
LAG_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
STACK_FRAMES = 8
STACK_CHARS = 4000
# Blockages are summed up over this time for the status that the worker publishes.
RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Standstill:
    """The loop did not run, although handlers had deadlines.

    Attributes:
        lasted_s: how long, without the usual time between two ticks.
        process: the whole process stood still, and not only the loop.
        by: the ids of the jobs that blocked the loop.
    """

    lasted_s: float
    process: bool
    by: frozenset[int]


class Pulse:
    """Written by the main loop, read by other threads: single attributes need no lock.

    Attributes:
        ticked: when the loop last ran (time.monotonic).
        tick_s: the present longest time between two runs of the loop. Read `tick_s` before
            `ticked`, because it is written after `ticked`.
        lags: number of late turns: one count per bound of LAG_BOUNDS_S, and one for later turns.
        lag_s: total lateness.
        started: when jobs were last taken over.
        on_wake: called on the main loop when the worker is no longer idle.
        job: the job whose handler runs now.
        blocked: written by the monitor: since when it has seen the loop blocked, as the value of
            `ticked`, and by which job, if it knows.
        owners: asyncio tasks of handlers, and their jobs.
        together: the jobs of each running batch, by the id of the first.
    """

    def __init__(self) -> None:
        self.ticked = self.started = time.monotonic()
        self.tick_s = TICK_S
        self.on_wake: list[Callable[[], None]] = []
        self.job: Job | None = None
        self.blocked: tuple[float, Job | None] | None = None
        self.owners: dict[asyncio.Task[object], Job] = {}
        self.together: dict[int, list[Job]] = {}
        self.lags = [0] * (len(LAG_BOUNDS_S) + 1)
        self.lag_s = 0.0
        self._cpu_s = time.process_time()

    def turn(self, now: float) -> Standstill | None:
        """The loop runs at `now` (time.monotonic), as it does every `tick_s` plus or minus 20 %.

        Returns:
            The standstill that ends with this turn; None: there was none.
        """
        lag_s = max(0.0, now - self.ticked - 1.2 * self.tick_s)
        self.lags[bisect_left(LAG_BOUNDS_S, lag_s)] += 1
        self.lag_s += lag_s
        ticked, self.ticked = self.ticked, now
        cpu_s = time.process_time()
        used_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        if lag_s < STANDSTILL_S:
            return None
        if self.blocked is not None and self.blocked[0] == ticked:
            job = self.blocked[1]
            jobs = [] if job is None else self.together.get(job.id, [job])
            return Standstill(lag_s, process=False, by=frozenset(each.id for each in jobs))
        if used_s > lag_s / 2:
            # Code that holds the GIL stops the monitor, too. Nobody knows whose it is.
            return None
        return Standstill(lag_s, process=True, by=frozenset())

    @property
    def resting(self) -> bool:
        """Return whether nothing runs, so that rare checks are enough."""
        return self.tick_s > TICK_S

    def starts(self, now: float) -> None:
        """Jobs are about to run; called on the main loop before they do, with time.monotonic()."""
        self.started = now
        if self.resting:
            # The loop runs, as it calls this: blocking counts from now on.
            self.ticked = now
            self.tick_s = TICK_S
            for wake in self.on_wake:
                wake()

    def rest(self) -> None:
        """Record that nothing runs: the next tick can be later."""
        self.tick_s = REST_TICK_S

    def running(self, loop: asyncio.AbstractEventLoop) -> Job | None:
        """Return the job for which the loop works at this moment."""
        job = self.job
        if job is None and self.owners:
            current = asyncio.current_task(loop)
            job = None if current is None else self.owners.get(current)
        return job


@dataclass(slots=True)
class _Report:
    """When blockages by a task can be logged again, and how many were not logged."""

    next_at: float = 0.0
    gap_s: float = AGAIN_S
    suppressed: int = 0


class LoopMonitor:
    """Names the job that blocks the loop. Made on the main loop; another thread calls `check`."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._checked = time.monotonic()
        self._since: float | None = None
        self._by: Job | None = None
        self._current: _Report | None = None
        self._reports: dict[str, _Report] = {}
        # When blockages began and ended, and the task of each.
        self._recent: deque[tuple[float, float, str | None]] = deque()
        self._series_since = 0.0

    def check(self) -> None:
        """Check once; called every CHECK_EVERY_S, REST_CHECK_EVERY_S while the worker is idle."""
        tick_s = self._pulse.tick_s
        now, ticked = time.monotonic(), self._pulse.ticked
        late_s, self._checked = now - self._checked, now
        if self._since is not None and ticked != self._since:
            self._ended(ticked - self._since)
        # If the whole process was stopped, its loop is not to blame.
        if now - ticked < tick_s + LATE_S or late_s > 1.0:
            return
        if self._since is None:
            self._since, self._by = ticked, self._pulse.running(self._loop)
            self._pulse.blocked = ticked, self._by
        self._log(now, now - self._since)

    def recent(self) -> LoopBlocked | None:
        """Return how the loop was blocked within the last RECENT_S; None: it was not."""
        now = time.monotonic()
        spans = [*self._recent]
        if self._since is not None:
            spans.append((self._since, now, self._by.task if self._by else None))
        blocked: dict[str | None, float] = {}
        for began, ended, task in spans:
            within_s = ended - max(began, now - RECENT_S)
            if within_s > 0:
                blocked[task] = blocked.get(task, 0.0) + within_s
        if not blocked:
            return None
        since = self._series_since if self._recent else spans[0][0]
        worst = max(blocked, key=lambda task: blocked[task])
        return LoopBlocked(round(sum(blocked.values()), 1), round(now - since, 1), worst)

    def stack(self) -> str:
        """Return where the main thread is."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the only way
        if frame is None:
            return ""
        return "".join(traceback.format_stack(frame, limit=STACK_FRAMES))[-STACK_CHARS:]

    def blocker(self) -> Job | None:
        """Return the job for which the loop works now."""
        return self._pulse.running(self._loop)

    def _log(self, now: float, blocked_s: float) -> None:
        report = self._reports.setdefault(self._by.task if self._by else "", _Report())
        if now < report.next_at:
            if self._current is None:
                report.suppressed += 1
                self._current = report
            return
        if now > report.next_at + AGAIN_S_MAX:
            report.gap_s = AGAIN_S
        events.loop_blocked(blocked_s, self._by, self.stack(), report.suppressed)
        self._current, report.suppressed = report, 0
        report.next_at, report.gap_s = now + report.gap_s, min(report.gap_s * 2, AGAIN_S_MAX)

    def _ended(self, blocked_s: float) -> None:
        by, report = self._by, self._current
        if self._since is not None:
            self._remember(self._since, self._since + blocked_s, by.task if by else None)
        self._since = self._by = self._current = None
        if report is not None and not report.suppressed:
            events.loop_unblocked(blocked_s, by)

    def _remember(self, began: float, ended: float, task: str | None) -> None:
        while self._recent and self._recent[0][1] < began - RECENT_S:
            self._recent.popleft()
        if not self._recent:
            self._series_since = began
        self._recent.append((began, ended, task))
