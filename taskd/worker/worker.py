"""The worker: what it consists of, how it starts, and how it stops.

Read `_assemble` for its anatomy and `_drain` for its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from taskd import events
from taskd.config import Settings
from taskd.core.job import check_queue
from taskd.core.registry import Registry
from taskd.errors import ConfigError, InvalidJob, TaskdError
from taskd.store import migrations, workers
from taskd.store.database import Database, Lane
from taskd.worker.acker import Acker
from taskd.worker.consumer import Consumer
from taskd.worker.lease import BeatThread, Lease, Pulse, boottime_s, new_incarnation
from taskd.worker.listener import Listener
from taskd.worker.runner import Runner, Shared
from taskd.worker.service import Backoff, Service
from taskd.worker.settler import COUNTED, Settler
from taskd.worker.signals import Signals
from taskd.worker.slow_lane import SlowLane
from taskd.worker.supervisor import Supervisor
from taskd.worker.upkeep import Historian, Promoter, Reconciler, Sweeper, Ticker

UPKEEP_STOP_S = 1.0
FLUSH_S = 5.0
RETIRE_S = 1.0
EMPTY_CHECK_EVERY_S = 0.2

# A connection each for claims, acks, upkeep and beats, and one now and then for the history.
CONNECTIONS_BESIDE_LISTENERS = 5

# Every statement of a worker goes by ids, or along one index: nothing is left to choose, whatever
# the statistics say. A generic plan that flipped to a scan took 20 ms in place of 3 for 500 acks; a
# claim that was planned while the table was empty took 100 ms after a burst of 200,000 jobs; and a
# bitmap scan locks rows in another order than ids, which deadlocked with a cancel.
PLANS = {
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
}


@dataclass(slots=True)
class Report:
    """The drain report.

    Attributes:
        left: for `--until-empty`: what stays in the queues, by reason.
        abandoned: attempts that were left behind and still run; `jobs` counts all that ever were.
        unwritten: outcomes that the database did not take any more.
    """

    signal: str = ""
    running: int = 0
    released: int = 0
    abandoned: int = 0
    unwritten: int = 0
    drain_s: float = 0.0
    jobs: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTED, 0))
    left: dict[str, int] | None = None

    @property
    def exit_code(self) -> int:
        """0 drained, 1 a job failed (`--until-empty` only), 75 something was abandoned."""
        if self.abandoned or self.unwritten:
            return 75
        return 1 if self.left is not None and self.jobs["failed"] else 0


class Worker:
    """One worker process.

    Args:
        settings: see taskd.config. registry: the tasks it runs. database: where the jobs are.
        app: whose tasks these are. until_empty: end when the queues hold nothing that this worker
        could run soon. reload: called on SIGHUP; returns the settings as they are now. on_close:
        awaited at the very end, such as the closing of kept connections of built-in tasks.
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
        self._assemble()
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

    def _assemble(self) -> None:
        """Read downwards it starts, upwards it stops."""
        settings, database = self.settings, self.database
        self._claims = Lane(database, "claim", **PLANS)
        self._acks = Lane(database, "ack", **PLANS)
        self._upkeep = Lane(database, "upkeep", **PLANS)
        self._lanes = (self._claims, self._acks, self._upkeep)
        self._acker = Acker(self._acks)
        self._threads = ThreadPoolExecutor(settings.threads, thread_name_prefix="taskd-job")
        settler = Settler(self._acker)
        self.report.jobs = settler.counts
        self._shared = shared = Shared(
            registry=self.registry,
            settler=settler,
            lease=self._lease,
            pulse=self._pulse,
            threads=self._threads,
            thread_slots=asyncio.Semaphore(settings.threads),
            cancel_s=settings.cancel_s,
        )
        self._runners = [Runner(queue, limit, shared) for queue, limit in self.limits.items()]
        self._reconciler = Reconciler(
            self._claims, self._lease, self._acker, self._runners, settings.statement_timeout_s
        )
        self._consumers = {
            runner.queue: Consumer(
                runner,
                self._claims,
                self._acker,
                shared,
                poll_s=settings.poll_s,
                on_doubt=self._reconciler.doubt,
            )
            for runner in self._runners
        }
        self._slow_lane = SlowLane(
            self._claims,
            self._lease,
            {runner.queue: runner for runner in self._runners},
            self.registry.names(),
            self._reconciler.doubt,
        )
        shared.suspect_ended = self._slow_lane.wakeup.set
        self._promoter = Promoter(
            self._upkeep,
            {queue: consumer.wakeup for queue, consumer in self._consumers.items()},
            self._slow_lane.wakeup,
        )
        listening = database
        if settings.listen_dsn is not None:
            listening = Database(
                {"dsn": settings.listen_dsn}, statement_timeout_s=settings.statement_timeout_s
            )
        self._listeners = [
            Listener(listening, queue, consumer.wakeup, self._promoter.wakeup)
            for queue, consumer in self._consumers.items()
        ]
        upkeep: list[Service] = [
            Sweeper(self._upkeep, self._lease, lambda: self._me),
            self._promoter,
            self._reconciler,
            Historian(database),
        ]
        self._supervisor = Supervisor(
            [
                [Ticker(self._runners, self._lease, self._pulse)],
                [self._acker],  # outlives every attempt
                [*upkeep, *self._listeners],
                [*self._consumers.values(), self._slow_lane],  # to stop is to claim nothing more
            ]
        )

    async def _start(self) -> None:
        for lane in self._lanes:
            await lane.open()
        await self._check_connections()
        await workers.publish(self._upkeep, self._app, self.registry, list(self.limits))
        await self._register()
        self._beat = BeatThread(self.database, self._lease, self._pulse, self._buried)
        self._beat.start()
        self._supervisor.start()
        self._watchers = [asyncio.create_task(self._watch_supervisor(), name="watch-supervisor")]
        if self._until_empty:
            self._watchers.append(asyncio.create_task(self._watch_empty(), name="watch-empty"))
        # Without LISTEN it works by polling; the start does not wait for it for long.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                for listener in self._listeners:
                    await listener.connected.wait()
        events.worker_ready(list(self.limits))
        self.ready.set()

    async def _check_connections(self) -> None:
        """The connection budget, checked against the server before it is used."""
        needed = CONNECTIONS_BESIDE_LISTENERS + len(self.limits)
        server = await workers.connections(self._upkeep)
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
            self._upkeep, self._me, self.settings.lease_s, list(self.limits), self.registry.names()
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
        for runner in self._runners:
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
                self._slow_lane.wakeup.set()
                for consumer in self._consumers.values():
                    consumer.wakeup.set()
                return

    def _quiet(self, quiet: bool) -> None:
        """SIGTSTP and SIGCONT: claim nothing more; claim again."""
        self._slow_lane.quiet = quiet
        for consumer in self._consumers.values():
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
        for runner in self._runners:
            runner.limit = limits.get(runner.queue, runner.limit)
        self.settings = settings
        self._shared.cancel_s = settings.cancel_s
        events.configure(
            settings.log_format, settings.log_level, job_lines_per_s=settings.job_lines_per_s
        )
        events.worker_reloaded({runner.queue: runner.limit for runner in self._runners})

    async def _watch_supervisor(self) -> None:
        await self._supervisor.gave_up.wait()
        self.stop("a service kept crashing")

    async def _watch_empty(self) -> None:
        """End when the queues hold nothing that this worker could run soon."""
        while True:
            await asyncio.sleep(EMPTY_CHECK_EVERY_S)
            if self._acker.backlog or not all(runner.idle for runner in self._runners):
                continue
            try:
                left = await workers.left(self._upkeep, list(self.limits), self.registry.names())
            except TaskdError:
                continue
            if left.runnable:
                for consumer in self._consumers.values():
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
        self.report.running = sum(runner.running for runner in self._runners)
        # 0 and 1: no new claim; what was claimed and not started goes back, its attempt refunded,
        # and so does what a claim in flight still brings, so that nothing has to wait for it.
        for runner in self._runners:
            self.report.released += runner.close()
            runner.warn_all()
        events.worker_draining(self.report.signal, self.report.running, self.report.released)
        claims_end = asyncio.create_task(
            self._supervisor.stop_tier(self.settings.statement_timeout_s + 3.0), name="claims-end"
        )
        # 2: running handlers may end.
        await self._wait_for_attempts(self.settings.drain_s, stops=2)
        # 3: they are cancelled; what ignores that is abandoned by the ticker after cancel_s.
        for runner in self._runners:
            runner.cancel_all("stop")
        await self._wait_for_attempts(self.settings.cancel_s + 0.5, stops=3)
        # 4: the rest is left behind.
        for runner in self._runners:
            runner.abandon_all()
        self.report.abandoned = sum(runner.abandoned for runner in self._runners)
        # 5: outcomes out, row closed.
        await claims_end
        await self._supervisor.stop_tier(UPKEEP_STOP_S)
        await self._flush()
        self.report.drain_s = round(time.monotonic() - began, 2)

    async def _wait_for_attempts(self, timeout_s: float, stops: int) -> None:
        """Wait until nothing runs, or the time is over, or enough stops were asked for."""
        ends = time.monotonic() + timeout_s
        while self._stops < stops and any(r.running for r in self._runners):
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return
            self._stop_changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(left_s, 0.05)):
                    await self._stop_changed.wait()

    async def _flush(self) -> None:
        await self._supervisor.stop_tier(FLUSH_S)
        self.report.unwritten = self._acker.backlog
        # A beat that finds the row closed would take it for a burial.
        await self._beat.stop()
        retiring = asyncio.create_task(workers.retire(self._upkeep, self._me.id), name="retire")
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
        left = self._supervisor.kill()
        for lane in self._lanes:
            await lane.close()
        if left:
            await asyncio.wait(left, timeout=1.0)
        self._threads.shutdown(wait=False, cancel_futures=True)
        events.flush_folded()
        if self.ready.is_set():
            report: dict[str, Any] = {
                k: v for k, v in asdict(self.report).items() if v or k == "jobs"
            }
            report["jobs"] = {k: v for k, v in self.report.jobs.items() if v}
            events.worker_stopped(**report)


def queue_limits(settings: Settings, registry: Registry) -> dict[str, int]:
    """Queue names and how many attempts each may run: `--queue email --queue reports:4`.

    Raises:
        ConfigError: a name or a number is wrong, or there is nothing to serve.
    """
    if not len(registry):
        raise ConfigError(
            "there are no tasks to run: name your module with --app, or set TASKD_SMTP_HOST to "
            "turn the built-in send_email on"
        )
    limits: dict[str, int] = {}
    for text in settings.queues or sorted({task.queue for task in registry}):
        name, _, number = text.partition(":")
        try:
            limit = int(number) if number else settings.concurrency
        except ValueError:
            limit = 0
        if not 1 <= limit <= 10_000:
            raise ConfigError(f"queue {text!r}: write name or name:concurrency, from 1 to 10000")
        try:
            limits[check_queue(name)] = limit
        except InvalidJob as error:
            raise ConfigError(str(error)) from None
        # What waits here for a thread could run in another worker's.
        if {task.is_async for task in registry if task.queue == name} == {False}:
            limits[name] = min(limit, settings.threads)
    return limits
