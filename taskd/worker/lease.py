"""The lease of this process, and the thread that renews it.

The thread has an event loop and a connection of its own, so that a handler which blocks the main
loop does not cost the lease. It renews the lease only while the main loop has ticked within
`STALL_S`, so a process that hangs loses its lease. It also monitors the main loop and names the job
that blocks it.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import CLOCK_BOOTTIME, clock_gettime

from taskd import events
from taskd.errors import StoreUnavailable
from taskd.store import workers
from taskd.store.connections.database import Database, Lane
from taskd.store.connections.error_translation import Down
from taskd.store.schema import migrations
from taskd.worker.observing.loop_monitor import LOOK_EVERY_S, REST_LOOK_EVERY_S, LoopMonitor, Pulse
from taskd.worker.service import RETRY_S_MAX, Backoff, Wakeup, jittered_s

STALL_S = 60.0
STOP_S = 2.0
UNREADABLE = -1


def boottime_s() -> float:
    """Return the seconds since boot, with suspended time, which CLOCK_MONOTONIC leaves out."""
    return clock_gettime(CLOCK_BOOTTIME)


def new_incarnation(app: str) -> workers.Incarnation:
    """Return the identity of this process under a new random id of 63 bits."""
    pid = os.getpid()
    return workers.Incarnation(
        id=random.SystemRandom().randrange(1, 2**63),
        pid=pid,
        pid_started=process_started(pid) or 0,
        host=socket.gethostname(),
        boot_id=_fact(Path("/proc/sys/kernel/random/boot_id").read_text),
        pid_namespace=_fact(lambda: str(Path("/proc/self/ns/pid").readlink())),
        version=_version(),
        app=app,
        schema=migrations.of_this_code(),
    )


def _version() -> str:
    try:
        return version("pgtaskd")
    except PackageNotFoundError:
        return "checkout"


def _fact(read: Callable[[], str]) -> str:
    """Return a fact about this machine; empty if unreadable, which proves nothing."""
    try:
        return read().strip()
    except OSError:
        return ""


def process_started(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None: there is no such process.

    UNREADABLE: the process exists, but cannot be inspected. A zombie counts as gone: it runs
    nothing.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        # Mounted with hidepid, /proc hides the processes of other users.
        return UNREADABLE if _exists(pid) else None
    except OSError:
        return UNREADABLE
    # The name of the command can hold spaces and parentheses; the rest is regular.
    state, *rest = fields.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def is_gone(other: workers.Other) -> bool:
    """Return whether the other worker's process, on this host, has provably ended."""
    started = process_started(other.pid)
    return started is None or (
        started >= 0 and other.pid_started > 0 and started != other.pid_started
    )


class Lease:
    """The state of the lease: the lease thread writes it, the main loop reads it, without a lock.

    Attributes:
        trusted_until: until then (seconds since boot) no other worker can run our jobs: two thirds
            of the lease after the last accepted renewal was *sent*.
        steady_since: renewals have had no gap since then; None before the first one.
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
        """Return whether our own renewals have succeeded for the length of a lease."""
        return (
            self.trusted
            and self.steady_since is not None
            and boottime_s() - self.steady_since >= self.lease_s
        )


class LeaseThread:
    """Renews the lease and monitors the main loop until stopped.

    Args:
        declared_dead: called on the main loop with the id of the worker that was declared dead.
        works_with: called on the main loop when the oldest code that works with the schema changes.
    """

    def __init__(
        self,
        database: Database,
        lease: Lease,
        pulse: Pulse,
        declared_dead: Callable[[int], None],
        works_with: Callable[[int], None],
    ) -> None:
        self._database = database
        self._lease = lease
        self._pulse = pulse
        self._watch = LoopMonitor(pulse)
        self._declared_dead = declared_dead
        self._works_with = works_with
        self._floor = 0
        self._main_loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="taskd-lease", daemon=True)
        self._own_loop: asyncio.AbstractEventLoop | None = None
        self._look_now = Wakeup()
        self._stopping = threading.Event()
        self._ended = asyncio.Event()
        # After an outage others wait for one lease; a worker that retries later would be declared
        # dead.
        self._backoff = Backoff(cap_s=min(RETRY_S_MAX, lease.lease_s / 6))
        pulse.on_wake.append(self._wake)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def _wake(self) -> None:
        """On the main loop: monitor now, and from now on at the present interval."""
        if self._own_loop is not None:
            with suppress(RuntimeError):  # the thread has ended
                self._own_loop.call_soon_threadsafe(self._look_now.set)

    async def stop(self) -> None:
        """Request the end of the thread, and wait for it for two seconds at most."""
        self._stopping.set()
        self._wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self._ended.wait()

    def _run(self) -> None:
        # A loop of its own: this thread must not depend on the main loop.
        try:
            with asyncio.Runner() as runner:
                runner.run(self._renew_and_watch())
        finally:
            with suppress(RuntimeError):  # the main loop was already closed
                self._main_loop.call_soon_threadsafe(self._ended.set)

    async def _renew_and_watch(self) -> None:
        self._own_loop = asyncio.get_running_loop()
        lane = Lane(self._database, "lease")
        renewing = self._start_renewing(lane)
        try:
            while not self._stopping.is_set():
                self._look_now.clear()
                if renewing.done():
                    # It was cancelled; without renewals the worker would lose its jobs to others.
                    renewing = self._start_renewing(lane)
                with suppress(Exception):  # the lease must be renewed even if logging fails
                    self._watch.look()
                every_s = REST_LOOK_EVERY_S if self._pulse.resting else LOOK_EVERY_S
                await self._look_now.wait(every_s)
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

    async def _renew(self, lane: Lane) -> float | None:
        """Renew the lease; return the delay until the next try if it failed."""
        worker_id, sent = self._lease.worker_id, boottime_s()
        try:
            floor = await workers.renew_lease(
                lane, worker_id, self._lease.lease_s, draining=self._lease.draining
            )
        except StoreUnavailable as error:
            # While the server is down no worker can take jobs over. Other failures (no reply, an
            # unknown host name, no free connection) may concern this worker only.
            self._lease.outage = isinstance(error, Down)
            return self._backoff.next_s()
        except Exception as error:  # noqa: BLE001 - whatever it is, the next beat must come
            events.service_crashed("lease", error, crashes=1, delay_s=1.0)
            return 1.0
        self._backoff.reset()
        if floor is None:
            self._main_loop.call_soon_threadsafe(self._declared_dead, worker_id)
            return None
        self._lease.renewed(sent)
        if floor != self._floor:
            self._floor = floor
            self._main_loop.call_soon_threadsafe(self._works_with, floor)
        return None
