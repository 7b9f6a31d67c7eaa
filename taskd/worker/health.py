"""Whether a worker gets on, as probes ask it; the database has no say in that.

A worker that waits for its database must not be killed for it: what it has finished could not be
written, and would run again. So what is looked at is whether the loop turns, and whether those who
claim and write outcomes turn with it, which they do in an outage, too: they try again.
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

# The loop turns four times a second at least.
BLOCKED_S = 5.0
# Each of the others turns again within what its statements may take: connecting to one host after
# the other, an answer, a wait before the next try.
STUCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Condition:
    """How a worker is, in two lines for two probes.

    Attributes:
        stuck: why it had better be started anew; empty: it gets on.
        unready: why it claims nothing; empty: it claims.
    """

    stuck: str = ""
    unready: str = ""


class Health:
    """Looks at the services of one process.

    Attributes:
        begun: it has become ready once.
        quiet: a signal has switched claiming off.
    """

    def __init__(
        self,
        pulse: Pulse,
        lease: Lease,
        consumers: Collection[Consumer],
        acker: Acker,
        poller: IdlePoller,
    ) -> None:
        self._pulse, self._lease, self._consumers = pulse, lease, consumers
        self._acker, self._poller = acker, poller
        # When the acker last tried, as it was seen first, and when that was.
        self._seen = (-1.0, 0.0)
        self.begun = self.quiet = False

    def check(self) -> Condition:
        """How it is now."""
        return Condition(self._stuck(time.monotonic()), self._unready())

    def _stuck(self, now: float) -> str:
        if not self.begun:
            return ""
        if now - self._pulse.ticked > BLOCKED_S:
            return f"the loop has not turned for {now - self._pulse.ticked:.0f} s"
        if self._writes_nothing(now):
            return f"{self._acker.backlog} outcomes wait, and nobody tries to write them"
        if self._lease.draining:
            return ""  # nobody claims any more
        for consumer in self._consumers:
            if consumer.turned_at is not None and now - consumer.turned_at > STUCK_S:
                for_s = now - consumer.turned_at
                return f"the consumer of {consumer.runner.queue} has stood still for {for_s:.0f} s"
        if now - self._poller.turned_at > self._poller.every_s + STUCK_S:
            return f"nobody has looked for jobs for {now - self._poller.turned_at:.0f} s"
        return ""

    def _writes_nothing(self, now: float) -> bool:
        """Whether outcomes wait, and did so when the same try was the last one a while ago."""
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
            return "claiming is switched off by a signal; SIGCONT switches it on"
        if self._lease.declared_dead or not self._lease.trusted or self._lease.outage:
            return "its lease cannot be renewed: the database does not answer"
        delayed = [each.runner.queue for each in self._consumers if each.delayed]
        return f"{', '.join(delayed[:5])}: the last claim did not work" if delayed else ""
