"""Check the health of a worker, for probes: whether it must be restarted, and whether it claims.

A worker that waits for its database must not be restarted: a restart would lose its unwritten
outcomes, and the jobs would run again. So a worker counts as stuck only if the event loop, a
consumer, the poller or the acker makes no progress. During an outage they make progress, because
they retry.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from taskd.store.connections.database import Database
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.claiming.poller import IdlePoller
from taskd.worker.finishing.acker import Acker
from taskd.worker.lease.state import Lease
from taskd.worker.observing.loop_monitor import Pulse

# The worker is stuck if its loop has not ticked for this long. An idle loop ticks about 4 times a
# second, a busy one more often.
BLOCKED_S = 5.0
# During an outage, a service retries more often than this. Before the next try, it may have to
# connect to each host of the DSN, wait for a reply, and pause.
STUCK_S = 60.0


@dataclass(frozen=True, slots=True)
class Condition:
    """The condition of a worker, as one text for each probe.

    Attributes:
        stuck: why the worker should be restarted; empty if it makes progress.
        unready: why the worker claims nothing; empty if it claims.
    """

    stuck: str = ""
    unready: str = ""


class Health:
    """Checks the services of one process.

    Attributes:
        begun: whether the worker has started its services.
        quiet: whether SIGTSTP has switched claiming off.
    """

    def __init__(
        self,
        pulse: Pulse,
        lease: Lease,
        consumers: Collection[Consumer],
        acker: Acker,
        poller: IdlePoller,
        database: Database,
    ) -> None:
        self._database = database
        self._pulse, self._lease, self._consumers = pulse, lease, consumers
        self._acker, self._poller = acker, poller
        # The acker's `tried_at`, and when a check first found this value (time.monotonic).
        self._seen = (-1.0, 0.0)
        self.begun = self.quiet = False

    def check(self) -> Condition:
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
            return ""  # consumers and poller have ended, or will
        for consumer in self._consumers:
            if consumer.turned_at is not None and now - consumer.turned_at > STUCK_S:
                for_s = now - consumer.turned_at
                queue = consumer.runner.queue
                return f"the consumer of {queue} has made no progress for {for_s:.0f} s"
        if now - self._poller.turned_at > self._poller.every_s + STUCK_S:
            return f"the queues have not been polled for {now - self._poller.turned_at:.0f} s"
        return ""

    def _writes_nothing(self, now: float) -> bool:
        """Return whether outcomes wait, and the acker has sent no statement for STUCK_S."""
        tried_at, since = self._seen
        if not self._acker.backlog or tried_at != self._acker.tried_at:
            self._seen = (self._acker.tried_at, now)
            return False
        return now - since > STUCK_S

    def _unready(self) -> str:
        if not self.begun:
            return "the worker is starting"
        if self._lease.draining:
            return "the worker is stopping"
        if self.quiet:
            return "claiming is switched off by a signal; SIGCONT switches it on"
        if self._lease.declared_dead or not self._lease.trusted or self._lease.outage:
            return f"the lease cannot be renewed: {self.missing or 'the database does not answer'}"
        failed = ", ".join([each.runner.queue for each in self._consumers if each.claim_failed][:5])
        if not failed:
            return ""
        return f"{failed}: the last claim failed" + (f": {self.missing}" if self.missing else "")

    @property
    def missing(self) -> str:
        """Return what the database lacks or refuses; empty if the worker has what it needs."""
        return str(self._database.trouble or "")
