"""The worker: its start, its reaction to signals, and its stop.

assembly.py creates the parts of the worker; stopping/drain.py has the phases of a stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context as ContextVars
from contextvars import copy_context
from dataclasses import asdict
from enum import Enum, auto
from functools import partial
from typing import Any

from taskd import events
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.errors import ConfigError, TaskdError
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from taskd.worker.assembly import Assembly
from taskd.worker.attempt_variables import copier
from taskd.worker.finishing.drain_report import DrainReport
from taskd.worker.health import Condition
from taskd.worker.lease.registration import Registration
from taskd.worker.lease.renewal import LeaseThread
from taskd.worker.lease.state import Lease
from taskd.worker.observing.counters import Counters
from taskd.worker.observing.loop_monitor import Pulse
from taskd.worker.observing.timer_slack import exact_timers
from taskd.worker.queue_changes import QueueChanges
from taskd.worker.running import traces
from taskd.worker.running.job_processes.lookup import check_found
from taskd.worker.running.middleware import with_middleware
from taskd.worker.sd_notify import Notify
from taskd.worker.services.own_tasks import OwnTask, own_task, uncancel, undisturbed
from taskd.worker.services.service import Service
from taskd.worker.services.supervisor import Supervisor
from taskd.worker.starting.django_connections import with_django
from taskd.worker.starting.resources import CANCEL_S, CLOSE_S_MAX, Resources
from taskd.worker.starting.served_queues import patterns, queue_limits
from taskd.worker.starting.startup import check_connections, publish_app, when_connections_are_free
from taskd.worker.status import WorkerStatus, take
from taskd.worker.stopping.drain import Drain
from taskd.worker.stopping.parent_watch import EXIT_ABANDONED, ProcessIndex
from taskd.worker.stopping.signals import Signals, StopPhase, StopRequests, dump_stacks
from taskd.worker.until_empty import emptied
from taskd.worker.upkeep.sequences import mend_sequences

BESIDE_S = 2.0


class _Phase(Enum):
    """The phase of the worker, on which the longest duration of a stop depends."""

    STARTING = auto()
    RUNNING = auto()
    CLOSING = auto()


class Worker:
    """One worker process.

    Args:
        settings: see taskd.config.
        registry: the tasks that the worker runs.
        database: the database with the jobs.
        app: the name of the app that defines the tasks.
        until_empty: stop when the queues hold no job that this worker could run soon.
        reload: called on SIGHUP; returns the new settings. With None, SIGHUP does nothing.
        on_close: functions that close connections of built-in tasks; awaited after the app's
            resources are closed.
        notify: sends messages to the supervisor of this process: systemd, or the parent of
            `--processes`.
        process_index: the index of this process among the processes of its parent.
        last: whether the process ends with this worker. If so, later stop signals are ignored.

    Attributes:
        beside: services that start before everything else and stop last, such as the HTTP server.
        counters: the event counters; None until begin_counting() is called.
        limits: the concurrency of each queue that the worker serves, by name, as configured.
        parts: the parts of the worker; missing until the schema was checked.
        ready: set once the worker claims.
        report: the drain report, whose fields are filled in during the stop.
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
        notify: Notify | None = None,
        process_index: ProcessIndex | None = None,
        last: bool = False,
    ) -> None:
        self.settings = settings
        self.registry = registry = with_middleware(with_django(registry))
        self.database = database
        self.report = DrainReport()
        self.limits = queue_limits(settings, registry)
        check_found(registry)
        self.ready = asyncio.Event()
        self._until_empty = until_empty
        self._reload = reload
        self._on_close = on_close
        self._notify = notify or Notify()
        self._process_index = process_index or ProcessIndex()
        self._last = last
        self._lease = Lease(settings.lease_s)
        self._registration = Registration(
            app, self._lease, self.limits, registry, settings.environment, settings.name
        )
        self._pulse = Pulse()
        self._stops = StopRequests()
        self._resources = Resources(registry, self._resources_cancelled)
        self._phase = _Phase.STARTING
        self._traces: traces.Traces | None = None
        self.beside: list[Service] = []
        self.counters: Counters | None = None

    def begin_counting(self) -> None:
        """Count events from now on, for the metrics."""
        self.counters = Counters(self.limits)
        events.measure(self.counters)

    def condition(self) -> Condition:
        """Return the condition of the worker, for probes."""
        parts: Assembly | None = getattr(self, "parts", None)
        if parts is None:
            return Condition(unready="the worker is starting")
        return parts.health.check()

    def status(self) -> WorkerStatus:
        """Return the counters and the present state, for the metrics."""
        counted = Counters(self.limits) if self.counters is None else self.counters
        parts: Assembly | None = getattr(self, "parts", None)
        return take(self._process_index.number, self.condition(), counted.copy(), parts)

    async def run(self) -> int:
        """Start, work until stopped, and stop; return the exit code.

        Raises:
            SchemaError, AppError, ConfigError, ResourceError, StoreUnavailable, PermissionDenied:
                the worker cannot start.
        """
        self._beside = Supervisor([self.beside])
        self._beside.start()
        try:
            with exact_timers():
                return await self._run()
        finally:
            await self._end_beside()

    async def _run(self) -> int:
        await when_connections_are_free(
            lambda: migrations.check(self.database), self._stops.requested
        )
        self.parts = Assembly(
            self.settings,
            self.registry,
            self.database,
            self.limits,
            self._lease,
            self._pulse,
            self._registration,
            self._stops,
            self._notify,
            self._process_index,
        )
        self.report.jobs = self.parts.counts
        self.parts.thread_slots.on_lost = self._thread_lost
        signals = Signals(
            self.stop,
            self._quiet,
            self._reload_settings,
            patience_s=self._patience_s,
            leave=self._leave,
            last=self._last,
        )
        signals.install()
        self._notify.starting()
        try:
            if await self._prepared():
                await self._begin()
                await self._wait_for_stop()
                await self._drain()
        finally:
            if self._phase is _Phase.STARTING:
                self._phase = _Phase.CLOSING
            # A signal that arrives from now on must not interrupt the clean-up.
            try:
                await self._close()
            finally:
                signals.remove()
        return self.report.exit_code

    def stop(self, why: str = "") -> None:
        """Request a stop: the first call drains, the second cancels, the third abandons.

        Args:
            why: the name of a signal or another reason. SIGQUIT abandons immediately, and writes
                the stacks of all threads to stderr.
        """
        if not self.report.why:
            self.report.why = why or "asked"
        if why == "SIGQUIT":
            dump_stacks()
        self._stops.add(at_once=why == "SIGQUIT")

    def _patience_s(self, phase: StopPhase) -> float:
        """Return the maximum time, in seconds, that a stop takes after the request for a phase."""
        match self._phase:
            case _Phase.STARTING:
                return 0.0
            case _Phase.RUNNING:
                return phase.patience_s(self.settings)
            case _Phase.CLOSING:
                return CLOSE_S_MAX + CANCEL_S

    def _leave(self) -> int:
        """Log what blocks the event loop, and write all outcomes; return the exit code."""
        self.parts.emergency_stop()
        match self._phase:
            case _Phase.STARTING:
                return 0
            case _Phase.RUNNING:
                return EXIT_ABANDONED
            case _Phase.CLOSING:
                return self.report.exit_code

    async def _prepared(self) -> bool:
        """Run _prepare() until a stop is requested; return whether _prepare() has finished."""
        # The asyncio tasks of _prepare() and of the resources have the same context variables. So
        # copier() finds the variables that the resources have set.
        variables = copy_context()
        preparing = own_task(self._prepare(variables), "prepare", variables)
        stopping = own_task(self._stops.requested.wait(), "stop-requested")
        try:
            either: set[OwnTask[Any]] = {preparing, stopping}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.end()
            preparing.end()
            await asyncio.wait({preparing})
        if preparing.cancelled():
            return False
        preparing.result()
        return True

    async def _prepare(self, variables: ContextVars) -> None:
        """Do the part of the start that can take long, and that a stop can interrupt."""
        if self.database.pooled:
            events.store_pooled()
            if not self.parts.listeners:
                events.listeners_none()
        if self.database.binds_channel:
            events.store_verified()
        await when_connections_are_free(self.parts.upkeep.open, self._stops.requested)
        self._connections = await check_connections(
            self.settings, self.registry, self.parts, self._process_index
        )
        await self._registration.check_environment(self.parts.upkeep)
        await mend_sequences(self.parts.upkeep)
        await self._registration.check_name(self.parts.upkeep)
        await publish_app(self.parts)
        self.parts.begin_lines()
        await self._resources.open(variables)
        self.parts.shared.resources = self._resources.made
        self.parts.shared.new_variables = copier()
        if self._last:
            # Objects that exist now live until the end. Without freeze(), the garbage collector
            # would search them, and block all handlers for up to 30 ms each time.
            gc.collect()
            gc.freeze()
        self._traces = traces.begin()
        if self._traces is not None:
            self.parts.shared.registry = self._traces.with_spans(self.registry)
        self.parts.errors.begin()
        self.parts.handler_tasks.watch()

    async def _begin(self) -> None:
        """Register, start the services, and claim."""
        self._phase = _Phase.RUNNING
        await self._registration.register(self.parts.upkeep, **self._connections)
        await self.parts.declarations.settle()
        self.database.begin_use(events.store_unusable)
        # Before the first claim, so that no job of a paused task starts.
        await self.parts.rescuer.check()
        self._queue_changes = QueueChanges(
            self.parts, self.registry, lambda: self.settings, self.limits
        )
        if patterns(self.settings):
            with contextlib.suppress(TaskdError):  # the service repeats it
                await self._queue_changes.tick()
        self.parts.supervisor.add(self._queue_changes, beside=self.parts.quarantine)
        self._lease_thread = LeaseThread(
            self.database,
            self._lease,
            self._pulse,
            self.parts.lease_lost.declared_dead,
            self._works_with,
            self.parts.published,
            self._lease_thread_died,
        )
        # The timer has not ticked yet, and the start may have taken long.
        self._pulse.ticked = time.monotonic()
        self._lease_thread.start()
        self.parts.supervisor.start()
        self._watchers = [
            own_task(undisturbed(partial(self._watch, each)), "watch-supervisor")
            for each in (self.parts.supervisor, self._beside)
        ]
        if self._until_empty:
            self._watchers.append(own_task(undisturbed(self._watch_empty), "watch-empty"))
        # The worker does not wait long for its listeners, because it polls until they listen.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                for listener in self.parts.listeners:
                    await listener.connected.wait()
        events.worker_ready(list(self.limits))
        self.parts.health.begun = True
        self.ready.set()
        self._notify.ready()

    def _resources_cancelled(self) -> None:
        """Stop, because a resource has failed while handlers use it."""
        if not self._stops.requested.is_set():
            self.report.gave_up = True
            self.stop("a resource was cancelled")

    def _lease_thread_died(self) -> None:
        """Stop: without renewals, other workers would soon run the jobs of this one."""
        self.report.gave_up = True
        if not self._stops.requested.is_set():
            self.stop("the lease thread ended")

    def _thread_lost(self) -> None:
        """Log the lost threads, and stop if there are `max_lost_threads` of them."""
        if self._stops.requested.is_set():
            return
        by_task = self.parts.thread_slots.lost
        lost, most = sum(by_task.values()), self.settings.max_lost_threads
        events.worker_threads_lost(lost, self.parts.thread_slots.threads, by_task)
        if most is not None and lost >= most:
            self.stop(f"{lost} lost threads")

    def _works_with(self, oldest: int) -> None:
        """Stop if the schema, or an announced migration, requires newer code than this process has.

        Args:
            oldest: the number of the oldest code that works with the schema.
        """
        newest = self._registration.me.schema.newest
        if oldest > newest and not self.report.outgrown:
            events.worker_outgrown(newest, oldest)
            self.report.outgrown = True
            if not self._stops.requested.is_set():
                self.stop(
                    f"the schema works with code {oldest:04d} and later: "
                    "upgrade taskd on this machine"
                )

    def _quiet(self, quiet: bool) -> None:
        """Stop claiming (SIGTSTP), or claim again (SIGCONT)."""
        # systemd and `timeout` send SIGCONT after their SIGTERM: it must not resume claiming.
        if quiet == self.parts.quarantine.quiet or self._stops.requested.is_set():
            return
        self.parts.quarantine.quiet = quiet
        for consumer in self.parts.consumers.values():
            consumer.quiet = quiet
        self.parts.health.quiet = quiet
        events.worker_quiet(quiet)

    def _reload_settings(self) -> None:
        """Apply queues, concurrencies, log settings, drain times; other settings need a restart."""
        if self._reload is None:
            return
        ready = self.ready.is_set()
        if ready:
            self._notify.reloading()
        self._read_settings(self._reload)
        if ready:
            self._notify.ready()

    def _read_settings(self, read: Callable[[], Settings]) -> None:
        try:
            settings = read()
            limits = queue_limits(settings, self.registry)
        except ConfigError as error:
            events.service_crashed("reload", error, crashes=1, delay_s=0.0)
            return
        self.parts.controls.configure(limits)
        self.settings = settings
        self.parts.shared.cancel_s = settings.cancel_s
        self.parts.shared.slots.most = settings.max_running
        events.configure(
            settings.log_format,
            settings.log_level,
            job_lines_per_s=settings.job_lines_per_s,
            stream=events.log_stream(),
        )
        self.parts.lines.relevel()
        events.worker_reloaded(
            {runner.queue: runner.limit for runner in self.parts.runners if runner.queue in limits}
        )
        if hasattr(self, "_queue_changes"):
            self._queue_changes.wakeup.set()

    async def _watch(self, supervisor: Supervisor) -> None:
        await supervisor.gave_up.wait()
        self.report.gave_up = True
        self.stop("a service kept crashing")

    async def _watch_empty(self) -> None:
        self.report.left = await emptied(self.parts, self.registry.names())
        self.stop("empty")

    async def _wait_for_stop(self) -> None:
        while not self._stops.requested.is_set():
            try:
                await self._stops.requested.wait()
            except asyncio.CancelledError as error:
                me = asyncio.current_task()
                if not self._last or me is None:
                    raise  # the caller of run() has cancelled it
                # Code of the app has cancelled all asyncio tasks. The worker continues.
                uncancel(me)
                events.service_crashed("main", error, crashes=0, delay_s=0.0)

    async def _drain(self) -> None:
        began = time.monotonic()
        self._notify.stopping()
        parts = self.parts
        await Drain(
            self._stops,
            parts.runners,
            parts.supervisor,
            parts.acker,
            self._lease,
            self.report,
            lambda: self.settings,
        ).run()
        # The lease thread ends before the row is closed. The lease thread would take a closed row
        # for a sign that other workers have declared this worker dead.
        await self._lease_thread.stop()
        await self._registration.retire(self.parts.upkeep)
        self._phase = _Phase.CLOSING
        self.report.drain_s = round(time.monotonic() - began, 2)

    async def _close(self) -> None:
        self.parts.supervisor.closing()
        for watcher in getattr(self, "_watchers", ()):
            watcher.end()
        self.parts.lease_lost.close()
        if hasattr(self, "_lease_thread"):
            await self._lease_thread.stop()
        self.parts.handler_tasks.unwatch()
        self.parts.end_lines()
        if self._traces is not None:
            await self._traces.close()
        await self.parts.processes.close()
        await self.parts.transactions.close()
        await self.parts.errors.close()
        await self._resources.close()
        for close in self._on_close:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(2.0):
                    await close()
        left = self.parts.supervisor.kill()
        self.parts.connections.close()
        for lane in self.parts.lanes:
            await lane.close()
        if left:
            await asyncio.wait(left, timeout=1.0)
        self.parts.threads.shutdown(wait=False, cancel_futures=True)
        events.turn_second()
        # A parent of several processes logs the sum of their reports.
        if self.ready.is_set() and not await self._notify.report(asdict(self.report)):
            events.worker_stopped(**self.report.log_fields())

    async def _end_beside(self) -> None:
        if self.beside:
            await self._beside.stop_tier(BESIDE_S)
            if left := self._beside.kill():
                await asyncio.wait(left, timeout=1.0)
        if self.counters is not None:
            events.measure(None)
