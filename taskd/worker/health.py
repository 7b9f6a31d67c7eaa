"""Whether a worker makes progress, for probes; an outage of the database does not count.

A worker that waits for its database must not be killed for it: outcomes that it could not write
would be lost, and their jobs would run again. So the probes check that the loop runs, and that
consumers and the acker run with it; in an outage they do, as they retry.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from taskd.worker.claiming.consumer import Consumer
from taskd.worker.claiming.poller import IdlePoller
from taskd.worker.finishing.acker import Acker
from taskd.worker.lease import Lease
from taskd.worker.observing.loop_monitor import Pulse

# The loop runs at least four times a second.
BLOCKED_S = 5.0
# Each service runs again within the time of its statements: connecting to several hosts in turn, an
# answer, a wait before the next try.
STUCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of a worker, in a line for each of two probes.

    Attributes:
        stuck: why it should be restarted; empty: it makes progress.
        unready: why it does not claim; empty: it claims.
    """

    stuck: str = ""
    unready: str = ""


class Health:
    """Checks the services of one process.

    Attributes:
        begun: it has been ready once.
        quiet: a signal has paused claiming.
    """

    def __init__(
        self,
        pulse: Pulse,
        lease: Lease,
        consumers: Collection[Consumer],
        acker: Acker,
        scout: IdlePoller,
    ) -> None:
        self._pulse, self._lease, self._consumers = pulse, lease, consumers
        self._acker, self._scout = acker, scout
        # The last try of the acker, when it was first seen, and that time.
        self._seen = (-1.0, 0.0)
        self.begun = self.quiet = False

    def look(self) -> Condition:
        """Return the present condition."""
        return Condition(self._stuck(time.monotonic()), self._unready())

    def _stuck(self, now: float) -> str:
        if not self.begun:
            return ""
        if now - self._pulse.ticked > BLOCKED_S:
            return f"the event loop has not run for {now - self._pulse.ticked:.0f} s"
        if self._writes_nothing(now):
            return f"{self._acker.backlog} outcomes wait, and the acker does not try to write them"
        if self._lease.draining:
            return ""  # the consumers have been stopped
        for consumer in self._consumers:
            if consumer.turned_at is not None and now - consumer.turned_at > STUCK_S:
                for_s = now - consumer.turned_at
                return f"the consumer of {consumer.runner.queue} has not run for {for_s:.0f} s"
        if now - self._scout.turned_at > self._scout.every_s + STUCK_S:
            return f"the idle poller has not run for {now - self._scout.turned_at:.0f} s"
        return ""

    def _writes_nothing(self, now: float) -> bool:
        """Return whether outcomes wait, and the acker has not tried to write them for a while."""
        tried_at, since = self._seen
        if not self._acker.backlog or tried_at != self._acker.tried_at:
            self._seen = (self._acker.tried_at, now)
            return False
        return now - since > STUCK_S

    def _unready(self) -> str:
        if not self.begun:
            return "it starts"
        if self._lease.draining:
            return "it stops"
        if self.quiet:
            return "a signal has paused claiming; SIGCONT resumes it"
        if self._lease.buried or not self._lease.trusted or self._lease.outage:
            return "its lease cannot be renewed: the database does not answer"
        delayed = [each.runner.queue for each in self._consumers if each.delayed]
        return f"{', '.join(delayed[:5])}: the last claim failed" if delayed else ""
