"""What runs on the main loop, and who blocks it: written by the loop, read by the beat thread."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

from taskd import events
from taskd.core.jobs.job import Job

# While something runs the loop ticks every 40 to 60 ms and is looked at ten times a second, so
# who blocks it is named within 0.45 s. To wake thirty times a second is most of what an idle worker
# costs. At rest only what handlers have left behind can block the loop, and 1.05 s will do.
TICK_S, REST_TICK_S = 0.05, 0.25
LOOK_EVERY_S, REST_LOOK_EVERY_S = 0.1, 0.5
# A tick that is so late means that the loop is blocked.
LATE_S = 0.3
# Nothing has begun for so long, and nothing runs: then the worker rests.
REST_AFTER_S = 1.0
# A loop that stays blocked is named again after 1, 2, 4 ... seconds, at most once in 60.
AGAIN_S = 1.0
AGAIN_S_MAX = 60.0
LAG_BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
STACK_FRAMES = 8
STACK_CHARS = 4000


class Pulse:
    """Written by the main loop, read by other threads: single attributes, so no lock.

    Attributes:
        ticked: when the loop last turned (time.monotonic).
        tick_s: it turns at least so often now. Read it before `ticked`: it is written after it.
        lags: how many turns came how late: one number for each of LAG_BOUNDS_S, one for later.
        lag_s: how late all of them came together.
        started: when jobs were last taken over to be run.
        on_wake: what to call on the main loop when the worker rests no more.
        job: the job whose handler is being stepped now.
        owners: the asyncio tasks that handlers have made, and for which job.
        together: the jobs of each batch that runs, by the id of the first, for which it is stepped.
    """

    def __init__(self) -> None:
        self.ticked = self.started = time.monotonic()
        self.tick_s = TICK_S
        self.on_wake: list[Callable[[], None]] = []
        self.job: Job | None = None
        self.owners: dict[asyncio.Task[object], Job] = {}
        self.together: dict[int, list[Job]] = {}
        self.lags = [0] * (len(LAG_BOUNDS_S) + 1)
        self.lag_s = 0.0

    def turn(self, now: float) -> None:
        """The loop turns at `now` (time.monotonic), as it does every `tick_s` give or take 20 %."""
        lag_s = max(0.0, now - self.ticked - 1.2 * self.tick_s)
        self.lags[bisect_left(LAG_BOUNDS_S, lag_s)] += 1
        self.lag_s += lag_s
        self.ticked = now

    @property
    def resting(self) -> bool:
        """Whether nothing runs, so that nobody need look often."""
        return self.tick_s > TICK_S

    def starts(self, now: float) -> None:
        """Jobs are about to run; called on the main loop before they do, with time.monotonic()."""
        self.started = now
        if self.resting:
            # The loop turns, as this is called. What blocks it from now on is late from now on.
            self.ticked = now
            self.tick_s = TICK_S
            for wake in self.on_wake:
                wake()

    def rest(self) -> None:
        """Nothing runs: the next tick may be later."""
        self.tick_s = REST_TICK_S

    def running(self, loop: asyncio.AbstractEventLoop) -> Job | None:
        """The job on whose behalf the loop works at this moment."""
        job = self.job
        if job is None and self.owners:
            current = asyncio.current_task(loop)
            job = None if current is None else self.owners.get(current)
        return job


@dataclass(slots=True)
class _Told:
    """When a task's blockages may be told again, and how many were not."""

    next_at: float = 0.0
    gap_s: float = AGAIN_S
    untold: int = 0


class LoopMonitor:
    """Names who blocks the loop. Made on the main loop; `look` is called by another thread."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._looked = time.monotonic()
        self._since: float | None = None
        self._by: Job | None = None
        self._telling: _Told | None = None
        self._told: dict[str, _Told] = {}

    def look(self) -> None:
        """Look once; to be called every LOOK_EVERY_S, REST_LOOK_EVERY_S while the worker rests."""
        tick_s = self._pulse.tick_s
        now, ticked = time.monotonic(), self._pulse.ticked
        late_s, self._looked = now - self._looked, now
        if self._since is not None and ticked != self._since:
            self._ended(ticked - self._since)
        # Was this whole process stopped, its loop is not to blame.
        if now - ticked < tick_s + LATE_S or late_s > 1.0:
            return
        if self._since is None:
            self._since, self._by = ticked, self._pulse.running(self._loop)
        self._tell(now, now - self._since)

    def stack(self) -> str:
        """Where the main thread is."""
        frame = sys._current_frames().get(self._thread)  # noqa: SLF001 - the only way
        if frame is None:
            return ""
        return "".join(traceback.format_stack(frame, limit=STACK_FRAMES))[-STACK_CHARS:]

    def blocker(self) -> Job | None:
        """The job that the loop works for now."""
        return self._pulse.running(self._loop)

    def _tell(self, now: float, blocked_s: float) -> None:
        told = self._told.setdefault(self._by.task if self._by else "", _Told())
        if now < told.next_at:
            if self._telling is None:
                told.untold += 1
                self._telling = told
            return
        if now > told.next_at + AGAIN_S_MAX:
            told.gap_s = AGAIN_S
        events.loop_blocked(blocked_s, self._by, self.stack(), told.untold)
        self._telling, told.untold = told, 0
        told.next_at, told.gap_s = now + told.gap_s, min(told.gap_s * 2, AGAIN_S_MAX)

    def _ended(self, blocked_s: float) -> None:
        by, told = self._by, self._telling
        self._since = self._by = self._telling = None
        if told is not None and not told.untold:
            events.loop_unblocked(blocked_s, by)
