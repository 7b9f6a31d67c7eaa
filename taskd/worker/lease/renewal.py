"""The thread that renews the lease.

The thread has an event loop and a connection of its own. So the worker keeps its lease while a
handler blocks the main loop. If the main loop has not ticked for `STALL_S` seconds, the thread
stops renewing, so that a process that hangs loses its lease. The thread also runs the loop monitor,
which names the job that blocks the main loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from taskd import events
from taskd.core.worker_status import LoopBlocked
from taskd.errors import StoreUnavailable
from taskd.store import workers
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import Down
from taskd.store.connections.lanes import Lane
from taskd.worker.lease.state import Lease, boottime_s
from taskd.worker.observing.loop_monitor import (
    CHECK_EVERY_S,
    REST_CHECK_EVERY_S,
    LoopMonitor,
    Pulse,
)
from taskd.worker.services.service import RETRY_S_MAX, Backoff, Wakeup, jittered_s

STALL_S = 60.0
STOP_S = 2.0


class LeaseThread:
    """Renews the lease and monitors the main loop until stopped.

    Args:
        declared_dead: called on the main loop if this worker was declared dead, with the id under
            which it was registered.
        works_with: called on the main loop with the version of the oldest code that works with the
            applied and announced migrations. Called again only if this version has changed.
        published: called on the lease thread before each renewal, with the recent blockages of the
            main loop. Returns the status to store in the worker's row, as JSON.
        died: called on the main loop if the thread has ended without stop(), for whatever reason.
    """

    def __init__(
        self,
        database: Database,
        lease: Lease,
        pulse: Pulse,
        declared_dead: Callable[[int], None],
        works_with: Callable[[int], None],
        published: Callable[[LoopBlocked | None], str],
        died: Callable[[], None],
    ) -> None:
        self._database = database
        self._lease = lease
        self._pulse = pulse
        self._monitor = LoopMonitor(pulse)
        self._declared_dead = declared_dead
        self._works_with, self._published, self._died = works_with, published, died
        self._floor = 0
        self._main_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="taskd-lease", daemon=True)
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._check_now = Wakeup()
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        # After an outage, other workers wait for the length of a lease before they declare a worker
        # dead. So this worker must retry several times within a lease.
        self._backoff = Backoff(cap_s=min(RETRY_S_MAX, lease.lease_s / 6))
        pulse.on_wake.append(self._wake)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _wake(self) -> None:
        """Make the lease thread check the main loop now; called on the main loop.

        After that, the thread checks at the present interval.
        """
        if self._own_loop is not None:
            with suppress(RuntimeError):  # the thread has ended
                self._own_loop.call_soon_threadsafe(self._check_now.set)

    async def stop(self) -> None:
        """Request the end of the thread, and wait at most STOP_S seconds until it has ended."""
        self._stopping.set()
        self._wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._ended.wait()

    def _run(self) -> None:
        # A loop of its own: this thread must not depend on the main loop.
        error: BaseException | None = None
        try:
            with asyncio.Runner() as runner:
                runner.run(self._renew_and_watch())
        except BaseException as raised:  # noqa: BLE001 - without this thread the lease expires
            error = raised
        with suppress(RuntimeError):  # the main loop was already closed
            if not self._stopping.is_set():
                self._main_loop.call_soon_threadsafe(self._died)
            self._main_loop.call_soon_threadsafe(self._ended.set)
        if not self._stopping.is_set():
            events.lease_thread_ended(error)

    async def _renew_and_watch(self) -> None:
        self._own_loop = asyncio.get_running_loop()
        lane = Lane(self._database, "lease")
        renewing = self._start_renewing(lane)
        try:
            while not self._stopping.is_set():
                self._check_now.clear()
                if renewing.done():
                    # The task was cancelled; without renewals the worker would lose its lease.
                    renewing = self._start_renewing(lane)
                with suppress(Exception):  # the lease must be renewed even if logging fails
                    self._monitor.check()
                every_s = REST_CHECK_EVERY_S if self._pulse.resting else CHECK_EVERY_S
                await self._check_now.wait(every_s)
        finally:
            renewing.cancel()
            await lane.close()
            await asyncio.wait({renewing})

    def _start_renewing(self, lane: Lane) -> asyncio.Task[None]:
        return asyncio.create_task(self._renew_forever(lane), name="lease")

    async def _renew_forever(self, lane: Lane) -> None:
        while True:
            delay_s = jittered_s(self._lease.lease_s / 6)
            stalled = time.monotonic() - self._pulse.ticked >= STALL_S
            if not stalled and not self._lease.declared_dead:
                delay_s = await self._renew(lane) or delay_s
            await asyncio.sleep(delay_s)

    def _status(self) -> str:
        # The lease must be renewed even if the status cannot be encoded.
        with suppress(Exception):
            return self._published(self._monitor.recent())
        return "{}"

    async def _renew(self, lane: Lane) -> float | None:
        """Renew the lease once.

        Returns:
            The seconds until the next renewal if PostgreSQL did not answer or the statement failed;
            None if PostgreSQL accepted the renewal, or this worker was declared dead.
        """
        worker_id, sent = self._lease.worker_id, boottime_s()
        try:
            floor = await workers.renew_lease(
                lane,
                worker_id,
                self._lease.lease_s,
                draining=self._lease.draining,
                status=self._status(),
            )
        except StoreUnavailable as error:
            # While the server is down, no worker can rescue the jobs of others. Any other failure
            # (no reply, an unknown host name, no free connection) may concern only this worker.
            self._lease.outage = isinstance(error, Down)
            return self._backoff.next_s()
        except Exception as error:  # noqa: BLE001 - no error must end the renewals
            events.service_crashed("lease", error, crashes=1, delay_s=1.0)
            return 1.0
        self._backoff.reset()
        if floor is None:
            self._main_loop.call_soon_threadsafe(self._declared_dead, worker_id)
            return None
        self._lease.renewed(sent)
        trouble = self._database.trouble
        ended_s = None if trouble is None else trouble.ended_s()
        if ended_s is not None:
            events.store_back(ended_s)
        if floor != self._floor:
            self._floor = floor
            self._main_loop.call_soon_threadsafe(self._works_with, floor)
        return None
