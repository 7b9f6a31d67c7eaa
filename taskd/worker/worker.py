"""The worker: what it consists of, how it starts, and how it stops.

Its anatomy is in assembly.py; read `_drain` here for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any

from taskd import events
from taskd.config import Settings
from taskd.core.registry import Registry
from taskd.errors import ConfigError, TaskdError
from taskd.store import migrations, workers
from taskd.store.database import Database
from taskd.worker.app import queue_limits
from taskd.worker.assembly import Assembly
from taskd.worker.lease import BeatThread, Lease, Pulse, boottime_s, new_incarnation
from taskd.worker.report import Report
from taskd.worker.service import Backoff
from taskd.worker.signals import Signals

UPKEEP_STOP_S = 1.0
FLUSH_S = 5.0
RETIRE_S = 1.0
EMPTY_CHECK_EVERY_S = 0.2
EMPTY_CHECK_AT_LEAST_EVERY_S = 2.0

# A connection each for claims, acks, upkeep and beats, and one now and then for the history.
CONNECTIONS_BESIDE_LISTENERS = 5


class Worker:
    """One worker process.

    Args:
        settings: see taskd.config.
        registry: the tasks it runs.
        database: where the jobs are.
        app: whose tasks these are.
        until_empty: end when the queues hold nothing that this worker could run soon.
        reload: called on SIGHUP; returns the settings as they are now.
        on_close: awaited at the very end, such as closing connections of built-in tasks.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        database: Database,
        *,
        app: str = "taskd",
        until_empty: bool = False,
        reload: Callable[[], Settings] | None = None,
        on_close: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.database = database
        self.report = Report()
        self.limits = queue_limits(settings, registry)
        self.ready = asyncio.Event()
        self._app = app
        self._until_empty = until_empty
        self._reload = reload
        self._on_close = on_close
        self._me = new_incarnation(app)
        self._lease = Lease(settings.lease_s)
        self._pulse = Pulse()
        self._stops = 0
        self._stop_asked = asyncio.Event()
        self._stop_changed = asyncio.Event()
        self._reborn: asyncio.Task[None] | None = None

    # Life.

    async def run(self) -> int:
        """Work until stopped; the exit code.

        Raises:
            SchemaError, AppError, ConfigError, StoreUnavailable, PermissionDenied: it cannot start.
        """
        await migrations.check(self.database)
        self.parts = Assembly(
            self.settings,
            self.registry,
            self.database,
            self.limits,
            self._lease,
            self._pulse,
            lambda: self._me,
        )
        self.report.jobs = self.parts.counts
        signals = Signals(self.stop, self._quiet, self._reload_settings)
        signals.install()
        try:
            await self._start()
            await self._stop_asked.wait()
            await self._drain()
        finally:
            signals.remove()
            await self._close()
        return self.report.exit_code

    def stop(self, signal: str = "") -> None:
        """Ask to stop: the first time to drain, the second to cancel, the third to abandon."""
        self._stops = 3 if signal == "SIGQUIT" else self._stops + 1
        if not self.report.signal:
            self.report.signal = signal or "asked"
        if signal == "SIGQUIT":
            import faulthandler

            faulthandler.dump_traceback(all_threads=True)
        self._stop_asked.set()
        self._stop_changed.set()

    async def _start(self) -> None:
        for lane in self.parts.lanes:
            await lane.open()
        await self._check_connections()
        self.parts.shared.database_key = await workers.identify(self.parts.upkeep)
        await workers.publish(self.parts.upkeep, self._app, self.registry, list(self.limits))
        await self._register()
        self._beat = BeatThread(self.database, self._lease, self._pulse, self._buried)
        self._beat.start()
        self.parts.supervisor.start()
        self._watchers = [asyncio.create_task(self._watch_supervisor(), name="watch-supervisor")]
        if self._until_empty:
            self._watchers.append(asyncio.create_task(self._watch_empty(), name="watch-empty"))
        # Without LISTEN it works by polling; the start does not wait for it for long.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                for listener in self.parts.listeners:
                    await listener.connected.wait()
        events.worker_ready(list(self.limits))
        self.ready.set()

    async def _check_connections(self) -> None:
        """The connection budget, checked against the server before it is used."""
        needed = CONNECTIONS_BESIDE_LISTENERS + len(self.limits)
        server = await workers.connections(self.parts.upkeep)
        usable = server.allowed - server.reserved
        if needed > usable:
            raise ConfigError(
                f"this worker needs {needed} connections ({CONNECTIONS_BESIDE_LISTENERS} and one "
                f"per queue); the server allows {usable}. Serve fewer queues, or raise its "
                "max_connections."
            )
        self._connections = {
            "connections": needed,
            "server_has": usable,
            "server_used": server.used,
        }

    async def _register(self) -> None:
        sent = boottime_s()
        await workers.register(
            self.parts.upkeep,
            self._me,
            self.settings.lease_s,
            list(self.limits),
            self.registry.names(),
        )
        self._lease.begin(self._me.id, sent)
        events.worker_started(
            self._me.id,
            self.limits,
            app=self._app,
            host=self._me.host,
            pid=self._me.pid,
            tasks=len(self.registry),
            threads=self.settings.threads,
            **self._connections,
        )

    # What may happen meanwhile.

    def _buried(self, worker_id: int) -> None:
        """This incarnation was declared dead: its jobs are others' now. Drop them, start anew."""
        if worker_id != self._lease.worker_id or self._lease.buried:
            return
        self._lease.buried = True
        events.worker_buried(worker_id)
        for runner in self.parts.runners:
            runner.give_back()
            runner.cancel_all("fence")
        if not self._stop_asked.is_set():
            self._reborn = asyncio.create_task(self._be_reborn(), name="reborn")

    async def _be_reborn(self) -> None:
        backoff = Backoff()
        while True:
            # A new id each time: the row of a try whose answer was lost may be there.
            self._me = new_incarnation(self._app)
            try:
                await self._register()
            except Exception as error:  # noqa: BLE001 - a worker without a lease is of no use
                delay_s = backoff.next_s()
                events.service_crashed("reborn", error, crashes=1, delay_s=delay_s)
                await asyncio.sleep(delay_s)
            else:
                # What they claimed for a dead worker was nothing.
                self.parts.slow_lane.wakeup.set()
                for consumer in self.parts.consumers.values():
                    consumer.wakeup.set()
                return

    def _quiet(self, quiet: bool) -> None:
        """SIGTSTP and SIGCONT: claim nothing more; claim again."""
        self.parts.slow_lane.quiet = quiet
        for consumer in self.parts.consumers.values():
            consumer.quiet = quiet
        events.worker_quiet(quiet)

    def _reload_settings(self) -> None:
        """SIGHUP: limits, log level, drain times; everything else needs a restart."""
        if self._reload is None:
            return
        try:
            settings = self._reload()
            limits = queue_limits(settings, self.registry)
        except ConfigError as error:
            events.service_crashed("reload", error, crashes=1, delay_s=0.0)
            return
        for runner in self.parts.runners:
            runner.limit = limits.get(runner.queue, runner.limit)
        self.settings = settings
        self.parts.shared.cancel_s = settings.cancel_s
        events.configure(
            settings.log_format, settings.log_level, job_lines_per_s=settings.job_lines_per_s
        )
        events.worker_reloaded({runner.queue: runner.limit for runner in self.parts.runners})

    async def _watch_supervisor(self) -> None:
        await self.parts.supervisor.gave_up.wait()
        self.stop("a service kept crashing")

    async def _watch_empty(self) -> None:
        """End when the queues hold nothing that this worker could run soon."""
        delay_s = EMPTY_CHECK_EVERY_S
        while True:
            await asyncio.sleep(delay_s)
            if self.parts.acker.backlog or not all(runner.idle for runner in self.parts.runners):
                delay_s = EMPTY_CHECK_EVERY_S
                continue
            # It reads every row of the queues, future ones too: less often while others work.
            delay_s = min(delay_s * 2, EMPTY_CHECK_AT_LEAST_EVERY_S)
            try:
                left = await workers.left(
                    self.parts.upkeep, list(self.limits), self.registry.names()
                )
            except TaskdError:
                continue
            if left.runnable:
                for consumer in self.parts.consumers.values():
                    consumer.wakeup.set()
            elif not left.running and not left.soon:
                counts = left._asdict()
                self.report.left = {
                    why: counts[why]
                    for why in ("future", "paused", "unknown", "later_retries")
                    if counts[why]
                }
                self.stop("empty")
                return

    # Its end.

    async def _drain(self) -> None:
        """The phases of a stop; each is bounded, and a further signal skips ahead."""
        began = time.monotonic()
        self._lease.draining = True
        self.report.running = sum(runner.running for runner in self.parts.runners)
        # 0 and 1: no new claim; what was claimed and not started goes back, its attempt refunded,
        # and so does what a claim in flight still brings, so that nothing has to wait for it.
        for runner in self.parts.runners:
            self.report.released += runner.close()
            runner.warn_all()
        events.worker_draining(self.report.signal, self.report.running, self.report.released)
        claims_end = asyncio.create_task(
            self.parts.supervisor.stop_tier(self.settings.statement_timeout_s + 3.0),
            name="claims-end",
        )
        # 2: running handlers may end.
        await self._wait_for_attempts(self.settings.drain_s, stops=2)
        # 3: they are cancelled; what ignores that is abandoned by the ticker after cancel_s.
        for runner in self.parts.runners:
            runner.cancel_all("stop")
        await self._wait_for_attempts(self.settings.cancel_s + 0.5, stops=3)
        # 4: the rest is left behind.
        for runner in self.parts.runners:
            runner.abandon_all()
        self.report.abandoned = sum(runner.abandoned for runner in self.parts.runners)
        # 5: outcomes out, row closed.
        await claims_end
        await self.parts.supervisor.stop_tier(UPKEEP_STOP_S)
        await self._flush()
        self.report.drain_s = round(time.monotonic() - began, 2)

    async def _wait_for_attempts(self, timeout_s: float, stops: int) -> None:
        """Wait until nothing runs, or the time is over, or enough stops were asked for."""
        ends = time.monotonic() + timeout_s
        while self._stops < stops and any(r.running for r in self.parts.runners):
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return
            self._stop_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 0.05)):
                    await self._stop_changed.wait()

    async def _flush(self) -> None:
        await self.parts.supervisor.stop_tier(FLUSH_S)
        self.report.unwritten = self.parts.acker.backlog
        # A beat that finds the row closed would take it for a burial.
        await self._beat.stop()
        retiring = asyncio.create_task(
            workers.retire(self.parts.upkeep, self._me.id), name="retire"
        )
        await asyncio.wait({retiring}, timeout=RETIRE_S)
        if retiring.done():
            with contextlib.suppress(TaskdError):
                retiring.result()
        retiring.cancel()

    async def _close(self) -> None:
        for watcher in getattr(self, "_watchers", ()):
            watcher.cancel()
        if self._reborn is not None:
            self._reborn.cancel()
        if hasattr(self, "_beat"):
            await self._beat.stop()
        for close in self._on_close:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2.0):
                    await close()
        left = self.parts.supervisor.kill()
        for lane in self.parts.lanes:
            await lane.close()
        if left:
            await asyncio.wait(left, timeout=1.0)
        self.parts.threads.shutdown(wait=False, cancel_futures=True)
        events.flush_folded()
        if self.ready.is_set():
            report: dict[str, Any] = {
                k: v for k, v in asdict(self.report).items() if v or k == "jobs"
            }
            report["jobs"] = {k: v for k, v in self.report.jobs.items() if v}
            events.worker_stopped(**report)
