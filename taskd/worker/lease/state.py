"""The state of the lease of this process."""

from __future__ import annotations

import time
from time import clock_gettime

# Linux has CLOCK_BOOTTIME. On macOS, CLOCK_MONOTONIC also counts the time for which the host was
# suspended. Without such a clock, a worker on a suspended host trusts its lease too long, by up to
# two thirds of the lease. PostgreSQL still refuses its late outcomes.
BOOTTIME: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def boottime_s() -> float:
    """Return the seconds since boot. They include the time for which the host was suspended."""
    return clock_gettime(BOOTTIME)


class Lease:
    """The state of the lease, which the main loop and the lease thread share without a lock.

    All times are those of boottime_s().

    Attributes:
        trusted_until: until this time, no other worker can run the jobs of this one. It is two
            thirds of the lease after the worker *sent* the last renewal that PostgreSQL accepted.
        steady_since: when the worker sent the first renewal of the present series. A series ends
            if a renewal is sent after `trusted_until`. None before the registration.
        outage: the last renewal failed because the database server was down, so that no other
            worker can rescue the jobs of this one.
        declared_dead: another worker declared this one dead, and this one has not registered again.
        draining: the worker drains; the renewals store this in its row.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self.worker_id = 0
        self.trusted_until = 0.0
        self.steady_since: float | None = None
        self.outage = False
        self.declared_dead = False
        self.draining = False

    def begin(self, worker_id: int, sent: float) -> None:
        """Record that the statement sent at `sent` registered the worker under this id."""
        self.worker_id = worker_id
        self.declared_dead = False
        self.renewed(sent)

    def renewed(self, sent: float) -> None:
        """Record that PostgreSQL accepted the renewal sent at `sent`."""
        if self.steady_since is None or sent > self.trusted_until:
            self.steady_since = sent
        self.trusted_until = sent + self.lease_s * 2 / 3
        self.outage = False

    @property
    def trusted(self) -> bool:
        """Return whether no other worker can run the jobs of this one now."""
        return clock_gettime(BOOTTIME) < self.trusted_until and not self.declared_dead

    @property
    def silent_s(self) -> float:
        """Return the seconds since `trusted_until`; negative before that time."""
        return boottime_s() - self.trusted_until

    def may_declare_dead(self) -> bool:
        """Return whether this worker's renewals have had no gap for the length of a lease.

        Otherwise an outage may have expired the leases of all workers.
        """
        return (
            self.trusted
            and self.steady_since is not None
            and boottime_s() - self.steady_since >= self.lease_s
        )
