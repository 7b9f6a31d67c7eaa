"""The loop monitor: detect that the main loop is blocked, and name the job that blocks it.

The main loop records its ticks and the running job in a `Pulse`. The lease thread reads them with
a `LoopMonitor`.
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

# While attempts run, the timer ticks every 40 to 60 ms and the lease thread checks ten times a
# second. So a job that blocks the loop is named within 0.45 s. These 30 wake-ups per second would
# be most of the cost of an idle worker. While no attempt runs, only asyncio tasks that handlers
# have left can block the loop, and naming their jobs within 1.05 s is enough.
TICK_S, REST_TICK_S = 0.05, 0.25
CHECK_EVERY_S, REST_CHECK_EVERY_S = 0.1, 0.5
# A tick this late means that the loop is blocked.
LATE_S = 0.3
# The worker rests if no attempt runs, and it has received no jobs for this long.
REST_AFTER_S = 1.0
# A tick this late ends a standstill. By then, the monitor has named the blocking job.
STANDSTILL_S = 1.0
# While a task blocks the loop, it is logged again after 1, 2, 4 ... seconds, later once a minute.
AGAIN_S = 1.0
AGAIN_S_MAX = 60.0
LAG_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
STACK_FRAMES = 8
STACK_CHARS = 4000
# The status in the worker's row sums up the blockages of this many past seconds.
RECENT_S = 60.0


@dataclass(frozen=True, slots=True)
class Standstill:
    """A period in which the loop did not run, and by which deadlines of attempts are extended.

    Attributes:
        lasted_s: how long the tick at the end of the period was late.
        process: whether the whole process was suspended, and not only the loop blocked.
        by: the ids of the jobs that blocked the loop; empty if they are unknown, or if `process` is
            True.
    """

    lasted_s: float
    process: bool
    by: frozenset[int]


class Pulse:
    """The state of the main loop for other threads, which read each attribute without a lock.

    Attributes:
        ticked: when the timer last ran on the loop (time.monotonic).
        tick_s: the present interval of ticks, which vary by 20 %. Other threads read `tick_s`
            before `ticked`, because the loop writes `ticked` first.
        lags: histogram of the lateness of ticks: a count for each bound of LAG_BOUNDS_S, and one
            for later ticks.
        lag_s: the total lateness of ticks in seconds.
        started: when a runner last received jobs (time.monotonic).
        on_wake: called on the main loop when the worker no longer rests.
        job: the job whose handler the loop runs at this moment; `job` is also None while the loop
            runs an asyncio task that a handler has made.
        blocked: the latest blockage that the monitor has found: the value of `ticked` at its start,
            and the blocking job, if known. The monitor writes this attribute.
        owners: the job of each asyncio task that a handler has made.
        together: the jobs of each running batch, by the id of the first job.
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
        """Record a tick of the timer.

        Args:
            now: time.monotonic().

        Returns:
            The standstill that ends with this tick; None if there was none, or if a handler that
            the monitor could not identify may have caused it.
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
            # The process used the CPU, so code that held the GIL has blocked the monitor, too.
            return None
        return Standstill(lag_s, process=True, by=frozenset())

    @property
    def resting(self) -> bool:
        """Return whether ticks and checks are rare, because no attempt runs."""
        return self.tick_s > TICK_S

    def starts(self, now: float) -> None:
        """Record that a runner has received jobs and will start them.

        Args:
            now: time.monotonic().
        """
        self.started = now
        if self.resting:
            # The loop runs at this moment: a blockage by these jobs begins later.
            self.ticked = now
            self.tick_s = TICK_S
            for wake in self.on_wake:
                wake()

    def rest(self) -> None:
        """Make ticks and checks rare, because no attempt runs."""
        self.tick_s = REST_TICK_S

    def running(self, loop: asyncio.AbstractEventLoop) -> Job | None:
        """Return the job whose handler, or whose asyncio task, the loop runs at this moment."""
        job = self.job
        if job is None and self.owners:
            current = asyncio.current_task(loop)
            job = None if current is None else self.owners.get(current)
        return job


@dataclass(slots=True)
class _Report:
    """The last logged blockage by one task.

    Attributes:
        next_at: when a blockage by this task can be logged again (time.monotonic).
        gap_s: the time between the next log line and the one after it.
        suppressed: the number of blockages since the last log line.
    """

    next_at: float = 0.0
    gap_s: float = AGAIN_S
    suppressed: int = 0


def stack_of(thread: int | None) -> str:
    """Return the innermost frames of a thread's stack; empty if the thread does not run."""
    frame = sys._current_frames().get(thread or 0)  # noqa: SLF001 - the only way
    if frame is None:
        return ""
    return "".join(traceback.format_stack(frame, limit=STACK_FRAMES))[-STACK_CHARS:]


class LoopMonitor:
    """Names the job that blocks the loop.

    The main loop creates the monitor. Other threads call its methods.
    """

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._checked = time.monotonic()
        self._since: float | None = None
        self._by: Job | None = None
        self._current: _Report | None = None
        self._reports: dict[str, _Report] = {}
        # The start, the end and the task of each blockage.
        self._recent: deque[tuple[float, float, str | None]] = deque()
        self._series_since = 0.0

    def check(self) -> None:
        """Check once; called every CHECK_EVERY_S, or REST_CHECK_EVERY_S while the worker rests."""
        tick_s = self._pulse.tick_s
        now, ticked = time.monotonic(), self._pulse.ticked
        late_s, self._checked = now - self._checked, now
        if self._since is not None and ticked != self._since:
            self._ended(ticked - self._since)
        # If this check is late, too, the whole process was suspended, and no job blocks the loop.
        if now - ticked < tick_s + LATE_S or late_s > 1.0:
            return
        if self._since is None:
            self._since, self._by = ticked, self._pulse.running(self._loop)
            self._pulse.blocked = ticked, self._by
        self._log(now, now - self._since)

    def recent(self) -> LoopBlocked | None:
        """Sum up the blockages of the last RECENT_S seconds; return None if there were none."""
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
        """Return the innermost frames of the main thread's stack."""
        return stack_of(self._thread)

    def blocker(self) -> Job | None:
        """Return the job that the loop runs at this moment, or None."""
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
