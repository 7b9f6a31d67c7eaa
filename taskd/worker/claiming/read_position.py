"""The position at which the claims of one queue begin to read the index.

A claim reads the index of queued jobs from its start. While a transaction holds an old snapshot (a
dump, a report, a forgotten session), index entries of claimed jobs cannot be removed and lie before
all others; each claim reads through them again, and rates fall to a quarter within seconds. So
while claims are slow, they begin after the last job that was claimed here.

Separate scans read what lies before that position, and take a twentieth of the time: one for more
urgent priorities and one for everything, each every 50 ms or, if such a scan takes longer than 2.5
ms, after twenty times its duration, and every ten seconds at the latest. A job that comes before
already claimed ones can wait that long: a more urgent, released or rescued job, or one of a
transaction that began earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskd.core.jobs.job import Job
from taskd.store.jobs.jobs import ALL, PRIORITY_MIN, Read

# A claim is slow if it takes three times as long as usual and longer than this. A single slow claim
# may have waited for the disk; dead entries slow all of them down.
SLOW_TIMES = 3.0
SLOW_S = 0.01
SLOW_IN_A_ROW = 3
# The usual time can double within a minute: then the machine is slow, not the index.
USUAL_DOUBLES_S = 60.0
SCAN_SHARE = 20
SCAN_EVERY_S = 0.05
SCAN_AT_LEAST_EVERY_S = 10.0


class _Scan:
    """Something that runs regularly, and takes a limited share of the time."""

    def __init__(self) -> None:
        self._took_before_s = 0.0
        self.due_at = 0.0

    def done(self, now: float, took_s: float) -> None:
        # The smaller of two scans is their cost: a single one may have waited for a lock or the
        # network.
        cost_s, self._took_before_s = min(took_s, self._took_before_s), took_s
        pause_s = max(SCAN_EVERY_S, SCAN_SHARE * cost_s)
        self.due_at = now + min(pause_s, SCAN_AT_LEAST_EVERY_S)


class Reading:
    """Decides where the next claim begins, from the duration of claims. Times are time.monotonic().

    Attributes:
        held: whether claims begin after the last claimed job now.
    """

    def __init__(self) -> None:
        self.held = False
        self._last: Job | None = None
        self._full, self._urgent = _Scan(), _Scan()
        # The usual time of a claim: a fixed part, and a part per job.
        self._usual_s, self._usual_at = 1.0, 0.0
        self._slow = 0

    def next(self, now: float) -> Read:
        """Return what the next claim should read."""
        if not self.held or self._last is None or now >= self._full.due_at:
            return ALL
        if now >= self._urgent.due_at and self._last.priority > PRIORITY_MIN:
            return Read.urgent(self._last)
        return Read.after(self._last)

    def claimed(self, read: Read, jobs: Sequence[Job], now: float, took_s: float) -> None:
        """Note what a claim has brought, the most urgent first, and how long it took."""
        if read.only_urgent:
            self._urgent.done(now, took_s)
        elif jobs:
            self._last = jobs[-1]
        self._slow = self._slow + 1 if self._is_slow(now, took_s, len(jobs)) else 0
        if read is ALL:
            self.held = self._slow > 0 if self.held else self._slow >= SLOW_IN_A_ROW
            self._full.done(now, took_s)

    def at_most(self, wait_s: float, now: float) -> float:
        """Return how long to wait for a notification, at most until the next scan of everything."""
        return min(wait_s, max(self._full.due_at - now, 0.0)) if self.held else wait_s

    def _is_slow(self, now: float, took_s: float, jobs: int) -> bool:
        """Return whether this took much longer than is usual for this many jobs."""
        # As if every claim had a hundred jobs' worth of work beside its jobs.
        share_s = took_s / (100 + jobs)
        # After 17 hours without a claim the power would overflow.
        doublings = min((now - self._usual_at) / USUAL_DOUBLES_S, 64.0)
        drifted_s = self._usual_s * 2**doublings
        self._usual_s, self._usual_at = min(share_s, drifted_s), now
        return share_s > SLOW_TIMES * self._usual_s and took_s > SLOW_S
