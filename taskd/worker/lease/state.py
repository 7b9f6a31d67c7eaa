"""The state of the lease of this process."""

from __future__ import annotations

from time import CLOCK_BOOTTIME, clock_gettime


def boottime_s() -> float:
    """Return the seconds since boot, including suspended time, unlike CLOCK_MONOTONIC."""
    return clock_gettime(CLOCK_BOOTTIME)


class Lease:
    """The state of the lease: the lease thread writes it, the main loop reads it, without a lock.

    Attributes:
        trusted_until: until then (seconds since boot) no other worker can run our jobs: two thirds
            of the lease after the last accepted renewal was *sent*.
        steady_since: since when renewals have had no gap; None before the first renewal.
        outage: the database server is down, so no other worker can take jobs over.
        declared_dead: this worker was declared dead; its jobs belong to others.
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
        """Record that a worker was registered by a statement sent at `sent`."""
        self.worker_id = worker_id
        self.declared_dead = False
        self.renewed(sent)

    def renewed(self, sent: float) -> None:
        """Record that the renewal sent at `sent` was accepted."""
        if self.steady_since is None or sent > self.trusted_until:
            self.steady_since = sent
        self.trusted_until = sent + self.lease_s * 2 / 3
        self.outage = False

    @property
    def trusted(self) -> bool:
        """Whether new jobs can be started."""
        return clock_gettime(CLOCK_BOOTTIME) < self.trusted_until and not self.declared_dead

    @property
    def silent_s(self) -> float:
        """Return seconds since the lease was last safe; negative while it is."""
        return boottime_s() - self.trusted_until

    def may_declare_dead(self) -> bool:
        """Return whether this worker's own renewals have succeeded for the length of a lease."""
        return (
            self.trusted
            and self.steady_since is not None
            and boottime_s() - self.steady_since >= self.lease_s
        )
