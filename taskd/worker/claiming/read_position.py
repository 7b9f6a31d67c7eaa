"""The read position: where in the index the next claim of a queue begins to read.

A claim reads the index of queued jobs from its start. While a transaction holds an old snapshot (a
dump, a report, a forgotten session), PostgreSQL cannot clean up the entries of jobs that were
claimed since, and each claim reads through all of them again. So while claims are slow, they begin
behind the last job that was claimed here.

Two scans read the entries before that position: one reads more urgent priorities, the other reads
all of them. Each takes at most a twentieth of the time: it runs every 50 ms or, if it takes longer
than 2.5 ms, after a pause of 20 times its duration, but at least every ten seconds. A job that is
inserted before the position (a more urgent, released or rescued job, or one of a transaction that
began earlier) waits for such a scan.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskd.core.jobs.job import Job
from taskd.store.jobs.jobs import ALL, PRIORITY_MIN, Read

# A claim is slow if it takes three times as long as usual and longer than this. Only several slow
# claims in a row count: a single one may have waited for the disk, but dead entries slow down every
# claim.
SLOW_TIMES = 3.0
SLOW_S = 0.01
SLOW_IN_A_ROW = 3
# The usual duration may double in a minute: then the machine is slow, not the index.
USUAL_DOUBLES_S = 60.0
SCAN_SHARE = 20
SCAN_EVERY_S = 0.05
SCAN_AT_LEAST_EVERY_S = 10.0


class _Scan:
    """A scan that takes a bounded share of the time."""

    def __init__(self) -> None:
        self._took_before_s = 0.0
        self.due_at = 0.0

    def done(self, now: float, took_s: float) -> None:
        # The shorter of the last two durations counts: a single scan may have waited for a lock or
        # for the network.
        cost_s, self._took_before_s = min(took_s, self._took_before_s), took_s
        pause_s = max(SCAN_EVERY_S, SCAN_SHARE * cost_s)
        self.due_at = now + min(pause_s, SCAN_AT_LEAST_EVERY_S)


class ReadPosition:
    """Decides, from the duration of claims, where the next one begins. Times are time.monotonic().

    Attributes:
        held: whether claims begin after the last claimed job now.
    """

    def __init__(self) -> None:
        self.held = False
        self._last: Job | None = None
        self._full, self._urgent = _Scan(), _Scan()
        # The usual duration of a claim per share of work: for the claim itself, and for each job.
        self._usual_s, self._usual_at = 1.0, 0.0
        self._slow = 0

    def next(self, now: float) -> Read:
        """Return what the next claim must read."""
        if not self.held or self._last is None or now >= self._full.due_at:
            return ALL
        if now >= self._urgent.due_at and self._last.priority > PRIORITY_MIN:
            return Read.urgent(self._last)
        return Read.after(self._last)

    def claimed(self, read: Read, jobs: Sequence[Job], now: float, took_s: float) -> None:
        """Record the jobs of a claim, most urgent first, and its duration."""
        if read.only_urgent:
            self._urgent.done(now, took_s)
        elif jobs:
            self._last = jobs[-1]
        self._slow = self._slow + 1 if self._is_slow(now, took_s, len(jobs)) else 0
        if read is ALL:
            self.held = self._slow > 0 if self.held else self._slow >= SLOW_IN_A_ROW
            self._full.done(now, took_s)

    def at_most(self, wait_s: float, now: float) -> float:
        """Shorten a wait for notifications so that it ends when the next full scan is due."""
        return min(wait_s, max(self._full.due_at - now, 0.0)) if self.held else wait_s

    def _is_slow(self, now: float, took_s: float, jobs: int) -> bool:
        """Return whether a claim took much longer than usual for that number of jobs."""
        # The fixed cost of a claim counts as a hundred jobs.
        share_s = took_s / (100 + jobs)
        # After 17 hours without a claim the power would overflow.
        doublings = min((now - self._usual_at) / USUAL_DOUBLES_S, 64.0)
        drifted_s = self._usual_s * 2**doublings
        self._usual_s, self._usual_at = min(share_s, drifted_s), now
        return share_s > SLOW_TIMES * self._usual_s and took_s > SLOW_S
