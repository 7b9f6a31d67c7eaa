"""The supervisor: starts services in tiers, restarts crashed services, stops tiers in reverse."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain

from taskd import events
from taskd.worker.services.failures import Failures
from taskd.worker.services.own_tasks import OwnTask, own_task, uncancel
from taskd.worker.services.service import Backoff, Loop, Service

# A service that crashes this often in a row will not recover.
CRASHES_MAX = 20
# If a service ran for longer than this before it crashed, its earlier crashes do not count.
STEADY_S = 60.0


class Supervisor:
    """Owns the asyncio task of every service, and restarts services that crash.

    Attributes:
        gave_up: set when a service has crashed CRASHES_MAX times in a row.
        failures: counts the failures of all services.
    """

    def __init__(self, tiers: Sequence[Sequence[Service]]) -> None:
        self._tiers = [list(tier) for tier in tiers]
        self._tasks: list[list[OwnTask[None]]] = []
        self._late: list[OwnTask[None]] = []
        self._closing = False
        self.failures = Failures()
        for service in chain.from_iterable(tiers):
            if isinstance(service, Loop):
                service.failures = self.failures
        self.gave_up = asyncio.Event()

    def start(self) -> None:
        """Start every tier, in order."""
        for tier in self._tiers:
            self._tasks.append([own_task(self._keep(service), service.name) for service in tier])

    def add(self, service: Service, beside: Service | None = None) -> None:
        """Add a service to the tier of another service; start it if that tier has been started.

        If that tier has been stopped, the service does not start.

        Args:
            beside: the other service; None for the last tier.
        """
        if isinstance(service, Loop):
            service.failures = self.failures
        for at, tier in enumerate(self._tiers):
            if beside in tier or (beside is None and tier is self._tiers[-1]):
                tier.append(service)
                if self._tasks:
                    self._tasks[at].append(own_task(self._keep(service), service.name))

    def forget_ended(self) -> None:
        """Forget the services that have ended, such as those that were stopped one by one."""
        # Before start(), there are no tasks.
        for tier, tasks in zip(self._tiers, self._tasks, strict=False):
            for at in [n for n, task in enumerate(tasks) if task.done()][::-1]:
                del tier[at], tasks[at]

    async def stop_tier(self, within_s: float) -> None:
        """Stop the last tier that still runs; wait at most `within_s` seconds for its services."""
        tier, tasks = self._tiers.pop(), self._tasks.pop()
        for service in tier:
            service.stop()
        _, late = await asyncio.wait(tasks, timeout=within_s) if tasks else ((), ())
        self._late.extend(task for task in tasks if task in late)

    def closing(self) -> None:
        """From now on, let a cancelled service end. Until then, it is restarted."""
        self._closing = True

    def kill(self) -> list[OwnTask[None]]:
        """Cancel all services that still run; return their asyncio tasks."""
        self.closing()
        left = [*self._late, *(task for tasks in self._tasks for task in tasks)]
        for task in left:
            task.end()
        return left

    async def _keep(self, service: Service) -> None:
        """Run a service; log each crash, and restart the service after a delay.

        Return when the service has returned, or has crashed CRASHES_MAX times in a row.
        """
        loop, me = asyncio.get_running_loop(), asyncio.current_task()
        assert me is not None
        backoff, crashes, delay_s = Backoff(), 0, 0.0
        while True:
            began = loop.time()
            try:
                await asyncio.sleep(delay_s)
                return await service.run()
            except asyncio.CancelledError as error:
                # The app can cancel this task, because asyncio.all_tasks() contains it.
                if self._closing:
                    raise
                uncancel(me)
                events.service_crashed(service.name, error, crashes=crashes, delay_s=delay_s)
            except Exception as error:  # noqa: BLE001 - any error of a service is a crash
                if loop.time() - began > STEADY_S:
                    backoff.reset()
                    crashes = 0
                crashes += 1
                delay_s = backoff.next_s()
                self.failures.failed(service.name, f"{type(error).__name__}: {error}")
                events.service_crashed(service.name, error, crashes=crashes, delay_s=delay_s)
                if crashes >= CRASHES_MAX:
                    self.gave_up.set()
                    return None
