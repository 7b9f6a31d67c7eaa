"""The read position: where in the index the next claim of a queue begins to read.

Usually a claim reads the index of queued jobs from its start. A transaction with an old snapshot (a
dump, a report, a forgotten session) keeps PostgreSQL from removing index entries of jobs claimed
since. Each claim then reads through all of these entries again. So while claims are slow, a claim
begins to read after the last job that this consumer has claimed.

Jobs can later be inserted before this position: more urgent jobs, released jobs, and jobs of
transactions that began earlier. Two kinds of scans find such jobs. An urgent scan reads the more
urgent priorities from the start of the index; a full scan reads the whole index. Between two scans
of a kind, the pause is 20 times the scan's duration: at least 50 ms and at most ten seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskd.core.jobs.job import PRIORITY_MIN, Job
from taskd.store.jobs.jobs import ALL, Read

# A claim is slow if it takes SLOW_TIMES times as long as usual, and longer than SLOW_S. Only
# several slow claims in a row show that dead index entries slow down every claim. A single slow
# claim may have waited for the disk.
SLOW_TIMES = 3.0
SLOW_S = 0.01
SLOW_IN_A_ROW = 3
# If claims get slower, their usual duration follows, but at most doubles in this time. Durations
# that grow so slowly come from the load of the machine, and not from dead index entries.
USUAL_DOUBLES_S = 60.0
# The pause after a scan is this many times the duration of the scan, within the two bounds below.
SCAN_SHARE = 20
SCAN_EVERY_S = 0.05
SCAN_AT_LEAST_EVERY_S = 10.0


class _Scan:
    """When the next scan of a kind is due."""

    def __init__(self) -> None:
        self._took_before_s = 0.0
        self.due_at = 0.0

    def done(self, now: float, took_s: float) -> None:
        # The shorter of the last two durations counts, because a single scan may have waited for a
        # lock or for the network.
        cost_s, self._took_before_s = min(took_s, self._took_before_s), took_s
        pause_s = max(SCAN_EVERY_S, SCAN_SHARE * cost_s)
        self.due_at = now + min(pause_s, SCAN_AT_LEAST_EVERY_S)


class ReadPosition:
    """Decides which part of the index the next claim reads.

    The decision depends on the durations of earlier claims. All times are those of
    time.monotonic().

    Attributes:
        held: whether claims begin to read after the last claimed job, except for scans.
    """

    def __init__(self) -> None:
        self.held = False
        self._last: Job | None = None
        self._full, self._urgent = _Scan(), _Scan()
        # The usual duration of a claim per unit of work (see _is_slow), and when it was computed.
        self._usual_s, self._usual_at = 1.0, 0.0
        self._slow = 0

    def next(self, now: float) -> Read:
        """Return which part of the index the next claim reads."""
        if not self.held or self._last is None or now >= self._full.due_at:
            return ALL
        if now >= self._urgent.due_at and self._last.priority > PRIORITY_MIN:
            return Read.urgent(self._last)
        return Read.after(self._last)

    def claimed(self, read: Read, jobs: Sequence[Job], now: float, took_s: float) -> None:
        """Record the jobs of a claim, in the order of the index, and its duration."""
        if read.only_urgent:
            self._urgent.done(now, took_s)
        elif jobs:
            self._last = jobs[-1]
        self._slow = self._slow + 1 if self._is_slow(now, took_s, len(jobs)) else 0
        if read is ALL:
            self.held = self._slow > 0 if self.held else self._slow >= SLOW_IN_A_ROW
            self._full.done(now, took_s)

    def at_most(self, wait_s: float, now: float) -> float:
        """Return the wait for a notification, shortened so that the next full scan is in time."""
        return min(wait_s, max(self._full.due_at - now, 0.0)) if self.held else wait_s

    def _is_slow(self, now: float, took_s: float, jobs: int) -> bool:
        """Return whether a claim took much longer than usual for its number of jobs."""
        # The unit of work is one job. The fixed cost of a claim counts as a hundred jobs.
        share_s = took_s / (100 + jobs)
        # Without the bound, the power would overflow after 17 hours without a claim.
        doublings = min((now - self._usual_at) / USUAL_DOUBLES_S, 64.0)
        drifted_s = self._usual_s * 2**doublings
        self._usual_s, self._usual_at = min(share_s, drifted_s), now
        return share_s > SLOW_TIMES * self._usual_s and took_s > SLOW_S
