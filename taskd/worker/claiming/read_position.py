"""Where the claims of one queue begin to read.

A claim reads the index of queued jobs from its start. While some transaction holds an old snapshot
(a dump, a report, a forgotten session), the entries of jobs that were claimed long ago cannot be
cleaned up and lie before all others; each claim reads through them again. Measured on hand-written
SQL of the same shape, before taskd: 124,000 jobs/s fell to 30,000 within eight seconds. So while
claims are slow, they begin behind the last job that was claimed here.

What lies before that place is looked at by scans of their own, which take a twentieth of the time:
more urgent priorities, and everything, each every 50 ms or, when such a scan takes longer than
2.5 ms, after twenty times as long as it took, and every ten seconds whatever it takes. So long a
job may wait that is put before others that were claimed already: more urgent, given back, brought
back by a rescue, or of a transaction that had begun earlier.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskd.core.jobs.job import Job
from taskd.store.jobs.jobs import ALL, PRIORITY_MIN, Read

# A claim is slow when it takes three times as long as usual and longer than this. One may have
# waited for the disk; dead entries are in the way of all of them.
SLOW_TIMES = 3.0
SLOW_S = 0.01
SLOW_IN_A_ROW = 3
# What is usual may double in a minute: the machine is slow, not the index.
USUAL_DOUBLES_S = 60.0
SCAN_SHARE = 20
SCAN_EVERY_S = 0.05
SCAN_AT_LEAST_EVERY_S = 10.0


class _Scan:
    """Something that is done now and then, and takes a bounded share of the time."""

    def __init__(self) -> None:
        self._took_before_s = 0.0
        self.due_at = 0.0

    def done(self, now: float, took_s: float) -> None:
        # What two scans have in common is their cost; one alone may have waited for a lock or for
        # the network (a reply that came after an outage of 2 s had put the next scan off by 49 s).
        cost_s, self._took_before_s = min(took_s, self._took_before_s), took_s
        pause_s = max(SCAN_EVERY_S, SCAN_SHARE * cost_s)
        self.due_at = now + min(pause_s, SCAN_AT_LEAST_EVERY_S)


class Reading:
    """Decides, from how long claims take, where the next one begins. Times are time.monotonic().

    Attributes:
        held: whether claims begin behind the last one now.
    """

    def __init__(self) -> None:
        self.held = False
        self._last: Job | None = None
        self._full, self._urgent = _Scan(), _Scan()
        # What a claim takes when nothing is in its way: for itself, and for each job.
        self._usual_s, self._usual_at = 1.0, 0.0
        self._slow = 0

    def next(self, now: float) -> Read:
        """What the next claim is to read."""
        if not self.held or self._last is None or now >= self._full.due_at:
            return ALL
        if now >= self._urgent.due_at and self._last.priority > PRIORITY_MIN:
            return Read.urgent(self._last)
        return Read.after(self._last)

    def claimed(self, read: Read, jobs: Sequence[Job], now: float, took_s: float) -> None:
        """Take in what a claim has brought, most urgent first, and how long it took."""
        if read.only_urgent:
            self._urgent.done(now, took_s)
        elif jobs:
            self._last = jobs[-1]
        self._slow = self._slow + 1 if self._is_slow(now, took_s, len(jobs)) else 0
        if read is ALL:
            self.held = self._slow > 0 if self.held else self._slow >= SLOW_IN_A_ROW
            self._full.done(now, took_s)

    def at_most(self, wait_s: float, now: float) -> float:
        """Seconds to wait for a ring: no longer than until everything is to be looked at again."""
        return min(wait_s, max(self._full.due_at - now, 0.0)) if self.held else wait_s

    def _is_slow(self, now: float, took_s: float, jobs: int) -> bool:
        """Whether this took much longer than is usual for so many jobs."""
        # As if every claim had a hundred jobs' worth of work beside its jobs.
        share_s = took_s / (100 + jobs)
        # After 17 hours without a claim the power alone would overflow.
        doublings = min((now - self._usual_at) / USUAL_DOUBLES_S, 64.0)
        drifted_s = self._usual_s * 2**doublings
        self._usual_s, self._usual_at = min(share_s, drifted_s), now
        return share_s > SLOW_TIMES * self._usual_s and took_s > SLOW_S
