"""What a worker does when its lease expires, or another worker has declared it dead.

- The lease is not renewed in time. The worker releases the jobs that it has not started, and
  cancels its handlers, before other workers can run these jobs. The timer checks the lease
  (upkeep/timer.py).
- Another worker declared this one dead, and rescues its jobs. The worker drops its jobs in the same
  way, and registers under a new id. The lease thread detects that the worker was declared dead
  (lease/renewal.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence

from taskd import events
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.claiming.quarantine import Quarantine
from taskd.worker.lease.state import Lease
from taskd.worker.running.runner import Runner
from taskd.worker.services.own_tasks import OwnTask, own_task, undisturbed
from taskd.worker.services.service import Backoff
from taskd.worker.stopping.signals import StopRequests


class LeaseLost:
    """Handles the loss of the lease, on the main loop.

    Args:
        register: registers this process under a new id.
        stops: once a stop is requested, the worker does not register again.
    """

    def __init__(
        self,
        lease: Lease,
        runners: Sequence[Runner],
        consumers: Collection[Consumer],
        quarantine: Quarantine,
        register: Callable[[], Awaitable[None]],
        stops: StopRequests,
    ) -> None:
        self._lease, self._runners, self._consumers = lease, runners, consumers
        self._quarantine, self._register, self._stops = quarantine, register, stops
        self._fenced = False
        self._registering: OwnTask[None] | None = None

    def fence_if_silent(self) -> None:
        """Drop all jobs once the lease is no longer trusted: other workers can run them soon.

        While the database server is down, no other worker can rescue jobs, so attempts continue.
        """
        if self._lease.trusted or self._lease.outage or self._lease.declared_dead:
            self._fenced = False
        elif not self._fenced:
            self._fenced = True
            events.worker_fenced(self._lease.silent_s + self._lease.lease_s * 2 / 3)
            self._drop_jobs()

    def declared_dead(self, worker_id: int) -> None:
        """Drop all jobs, and register under a new id.

        Args:
            worker_id: the id that was declared dead. If the process has registered again since,
                nothing happens.
        """
        if worker_id != self._lease.worker_id or self._lease.declared_dead:
            return
        self._lease.declared_dead = True
        events.worker_declared_dead(worker_id)
        self._drop_jobs()
        if not self._stops.requested.is_set():
            again = undisturbed(self._register_again)
            self._registering = own_task(again, "register-again")

    def close(self) -> None:
        """Stop trying to register again."""
        if self._registering is not None:
            self._registering.end()

    def _drop_jobs(self) -> None:
        """Release the jobs that have not started, and cancel all handlers."""
        for runner in self._runners:
            runner.release_waiting()
            runner.attempts.cancel_all("fence")

    async def _register_again(self) -> None:
        backoff = Backoff()
        while True:
            try:
                await self._register()
            except Exception as error:  # noqa: BLE001 - a worker without a lease is of no use
                delay_s = backoff.next_s()
                events.service_crashed("register-again", error, crashes=1, delay_s=delay_s)
                await asyncio.sleep(delay_s)
            else:
                # Since the old id was declared dead, claims under this id found no jobs, and
                # producers may have sent no notifications.
                self._quarantine.wakeup.set()
                for consumer in self._consumers:
                    consumer.notifications_missed()
                return
