"""The drain: how a worker passes through the phases of a stop (StopPhase in signals.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from taskd import events
from taskd.config import Settings
from taskd.worker.finishing.acker import Acker
from taskd.worker.finishing.drain_report import DrainReport
from taskd.worker.lease.state import Lease
from taskd.worker.running.runner import Runner
from taskd.worker.services.own_tasks import own_task
from taskd.worker.services.supervisor import Supervisor
from taskd.worker.stopping.signals import StopPhase, StopRequests

UPKEEP_STOP_S = 1.0
FLUSH_S = 5.0


class Drain:
    """Passes through the phases of a stop; another stop request ends the present phase.

    Args:
        report: the numbers for the last log line of the worker, which run() fills in.
        settings: returns the present settings, which a reload can change during the stop.
    """

    def __init__(
        self,
        requests: StopRequests,
        runners: Sequence[Runner],
        supervisor: Supervisor,
        acker: Acker,
        lease: Lease,
        report: DrainReport,
        settings: Callable[[], Settings],
    ) -> None:
        self._requests, self._runners, self._supervisor = requests, runners, supervisor
        self._acker, self._lease, self._report = acker, lease, report
        self._settings = settings

    async def run(self) -> None:
        """Stop claiming, let handlers end, cancel them, abandon the rest, write all outcomes."""
        self._lease.draining = True
        self._report.running = sum(runner.running for runner in self._runners)
        # Runners release the claimed jobs that have not started, and refund their attempts. They do
        # the same with the jobs of a claim whose reply arrives later.
        for runner in self._runners:
            self._report.released += runner.close()
            runner.attempts.warn_all()
        events.worker_draining(self._report.why, self._report.running, self._report.released)
        claims_end = own_task(
            self._supervisor.stop_tier(self._settings().statement_timeout_s + 3.0), "claims-end"
        )
        await self._wait_for_attempts(self._settings().drain_s, StopPhase.CANCEL)
        # The timer abandons the attempts that ignore their cancellation.
        for runner in self._runners:
            runner.attempts.cancel_all("stop")
        await self._wait_for_attempts(self._settings().cancel_s + 0.5, StopPhase.ABANDON)
        for runner in self._runners:
            runner.abandon_all()
        self._report.abandoned = sum(runner.abandoned for runner in self._runners)
        await claims_end
        await self._supervisor.stop_tier(UPKEEP_STOP_S)
        await self._supervisor.stop_tier(FLUSH_S)  # the acker
        self._report.unwritten = self._acker.backlog

    async def _wait_for_attempts(self, timeout_s: float, until: StopPhase) -> None:
        """Wait until no attempt runs, the timeout has passed, or the phase `until` is requested."""
        ends = time.monotonic() + timeout_s
        while self._requests.phase < until and any(runner.running for runner in self._runners):
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return
            await self._requests.wait_for_next(min(left_s, 0.05))
