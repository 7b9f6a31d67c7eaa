"""The timer: timeouts of attempts, the ticks of the main loop, and the check of the lease."""

from __future__ import annotations

import time
from collections.abc import Sequence

from taskd import events
from taskd.worker.lease_lost import LeaseLost
from taskd.worker.observing.loop_monitor import REST_AFTER_S, REST_TICK_S, TICK_S, Pulse
from taskd.worker.running.handler_tasks import HandlerTasks
from taskd.worker.running.runner import Runner
from taskd.worker.services.service import Loop


class Timer(Loop):
    """Service: enforces timeouts, records that the main loop runs, and checks the lease.

    The timer ticks 20 times a second while attempts run, and 4 times a second while the worker
    rests. When a resting worker receives jobs, the timer ticks immediately, so that no timeout is
    missed.
    """

    name = "timer"

    def __init__(
        self,
        runners: Sequence[Runner],
        lease_lost: LeaseLost,
        pulse: Pulse,
        handler_tasks: HandlerTasks,
    ) -> None:
        super().__init__(TICK_S)
        self._runners, self._lease_lost, self._pulse = runners, lease_lost, pulse
        self._handler_tasks = handler_tasks
        self._second = 0
        pulse.on_wake.append(self.wakeup.set)

    async def tick(self) -> float | None:
        """Tick once; return the seconds until the next tick, or None for jittered `every_s`."""
        now = time.monotonic()
        standstill = self._pulse.turn(now)
        # Before the timeouts: after a long standstill, other workers may own the jobs.
        self._lease_lost.fence_if_silent()
        for runner in self._runners:
            if standstill is not None:
                runner.attempts.postpone(standstill, now)
            runner.tick(now)
        if int(now) != self._second:
            self._second = int(now)
            events.turn_second()
            self._handler_tasks.check()
        if now - self._pulse.started < REST_AFTER_S or any(map(_works, self._runners)):
            return None
        self._pulse.rest()
        return REST_TICK_S


def _works(runner: Runner) -> bool:
    """Return whether jobs wait or run here. Abandoned attempts count: they can block the loop."""
    return not runner.idle or runner.abandoned > 0
