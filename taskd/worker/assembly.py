"""The parts of a worker: its connections, its services, and the order of their start and stop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from taskd.config import Settings
from taskd.core.jobs.job import Job
from taskd.core.jobs.log_lines import KeepLogs
from taskd.core.tasks.registry import Registry
from taskd.core.worker_status import LoopBlocked, WorkerStatus
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import SharedConnections
from taskd.store.connections.transactions import Transactions
from taskd.worker.claiming.consumer import Consumer
from taskd.worker.claiming.listener import (
    Heard,
    Listener,
    Listeners,
    listening_database,
)
from taskd.worker.claiming.poller import IdlePoller
from taskd.worker.claiming.quarantine import Quarantine
from taskd.worker.claiming.shared_listening import ParentListener
from taskd.worker.finishing.acker import Acker
from taskd.worker.finishing.error_queue import ErrorQueue
from taskd.worker.finishing.outcomes import OutcomeRecorder
from taskd.worker.health import Health
from taskd.worker.lease.registration import Registration
from taskd.worker.lease.state import Lease
from taskd.worker.lease_lost import LeaseLost
from taskd.worker.observing.log_buffer import hider
from taskd.worker.observing.log_capture import JobThreads, LogCapture, own_threads
from taskd.worker.observing.log_writer import LogWriter
from taskd.worker.observing.loop_monitor import LoopMonitor, Pulse
from taskd.worker.observing.progress import ProgressWriter
from taskd.worker.operator_settings import Calls, Controls
from taskd.worker.reads import Reads
from taskd.worker.running.calls import Executors
from taskd.worker.running.handler_tasks import HandlerTasks
from taskd.worker.running.job_processes.pool import JobProcesses
from taskd.worker.running.preparation import Shared
from taskd.worker.running.runner import Runner
from taskd.worker.running.shared_slots import SharedSlots
from taskd.worker.running.threads import ThreadSlots
from taskd.worker.sd_notify import Notifier, Notify
from taskd.worker.services.service import Service
from taskd.worker.services.supervisor import Supervisor
from taskd.worker.stopping.emergency_stop import EmergencyStop
from taskd.worker.stopping.parent_watch import ProcessIndex
from taskd.worker.stopping.signals import StopRequests
from taskd.worker.upkeep.declarations import Declarations
from taskd.worker.upkeep.promoter import Promoter
from taskd.worker.upkeep.pruner import Pruner
from taskd.worker.upkeep.reconciler import Reconciler
from taskd.worker.upkeep.rescuer import Rescuer
from taskd.worker.upkeep.schedule_runner import ScheduleRunner
from taskd.worker.upkeep.timer import Timer

# Every statement of a worker finds its rows by ids or along one index, so each statement has only
# one right plan. Without these settings, PostgreSQL plans each batch of acks again, and chooses
# sequential scans if its statistics are old. PostgreSQL also uses bitmap scans. They do not lock
# rows in the order of the ids, so they can cause deadlocks.
PLANS = {
    "plan_cache_mode": "force_generic_plan",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
}


class Assembly:
    """All parts of one worker, created on the event loop that runs them.

    Args:
        limits: the concurrency of each queue, by name.
        registration: registers this process in the database.
        notify: sends messages to the supervisor of this process (systemd, or the parent of
            `--processes`), if there is one.
        process_index: the index of this process among the processes of its parent.

    Attributes:
        connections_max: the maximum number of connections of this process; 0 until the start has
            counted them.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        database: Database,
        limits: dict[str, int],
        lease: Lease,
        pulse: Pulse,
        registration: Registration,
        stops: StopRequests,
        notify: Notify,
        process_index: ProcessIndex,
    ) -> None:
        self.connections_max = 0
        self._pulse, self._loop = pulse, asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._add_lanes(settings, database, limits)
        self._add_logs(settings, registry, lease)
        self._add_runners(settings, registry, database, lease, limits)
        self.emergency_stop = EmergencyStop(
            database, lease, self.acker, self.runners, registry, LoopMonitor(pulse)
        )
        self.reconciler = Reconciler(
            self.claiming_lanes, lease, self.acker, self.runners, settings.statement_timeout_s
        )
        self._add_claiming(settings, registry, lease)
        self._add_upkeep(registry, database, limits, lease, registration)
        self._add_listening(settings, database, process_index)
        self.lease_lost = LeaseLost(
            lease,
            self.runners,
            self.consumers.values(),
            self.quarantine,
            lambda: registration.register_again(self.upkeep),
            stops,
        )
        self.health = Health(
            pulse, lease, self.consumers.values(), self.acker, self.poller, database
        )
        beside: list[Service] = [Timer(self.runners, self.lease_lost, pulse, self.handler_tasks)]
        if notify.active:
            beside.append(Notifier(notify, self.runners, self.counts, lease, self.health))
        self.supervisor = Supervisor(self._tiers(beside))

    def _add_lanes(self, settings: Settings, database: Database, limits: dict[str, int]) -> None:
        self.connections = SharedConnections(database, "work", **PLANS)
        self.claims = self.backlog_claims = self.connections.lane("claim")
        self.claiming_lanes = [self.claims]
        if len(limits) > 1 or any("*" in name for name in settings.queues):
            self.backlog_claims = self.connections.lane("backlog claim")
            self.claiming_lanes.append(self.backlog_claims)
        self.acks = self.connections.lane("ack")
        self.upkeep = self.connections.lane("upkeep")
        self.lanes = (*self.claiming_lanes, self.acks, self.upkeep)

    def _add_logs(self, settings: Settings, registry: Registry, lease: Lease) -> None:
        """Create the log capture and, if a setting or a task keeps log lines, the log writer."""
        together = self._pulse.together
        self._end_log_writer: Callable[[], None] = lambda: None
        self.log_writer: LogWriter | None = None
        keep = KeepLogs(settings.keep_logs)
        if keep is not KeepLogs.OFF or any(task.keep_logs for task in registry):
            self.log_writer = LogWriter(
                self.upkeep,
                registry,
                keep,
                self._ends_later,
                together,
                lambda: lease.trusted_until,
            )
        self.lines = LogCapture(self._works_for, self.log_writer, self._hides, together)

    def _add_runners(
        self,
        settings: Settings,
        registry: Registry,
        database: Database,
        lease: Lease,
        limits: dict[str, int],
    ) -> None:
        """Create the runners, and the parts that run and end their attempts."""
        self.acker = Acker(self.acks)
        self.errors = ErrorQueue(registry.reporters)
        recorder = OutcomeRecorder(self.acker, self.errors)
        self._streaks, self.counts = recorder.streaks, recorder.counts
        self.threads = JobThreads(self._works_for, settings.threads, "taskd-job")
        self.thread_slots = ThreadSlots(settings.threads)
        self.processes = JobProcesses(settings, settings.app, self.log_writer)
        self.transactions = Transactions(database, settings.transaction_connections)
        self.shared = Shared(
            registry=registry,
            recorder=recorder,
            lease=lease,
            pulse=self._pulse,
            executors=Executors(
                threads=self.threads,
                thread_slots=self.thread_slots,
                processes=self.processes,
                transactions=self.transactions,
            ),
            cancel_s=settings.cancel_s,
            reads=Reads(self.upkeep, settings.schema),
            slots=SharedSlots(settings.max_running),
        )
        self.runners = [Runner(queue, limit, self.shared) for queue, limit in limits.items()]
        self.handler_tasks = HandlerTasks(self._pulse, self._runs, self._runs_in)
        self.progress = ProgressWriter(self.upkeep, self._runs)
        self.shared.progress = self.progress.report

    def _add_upkeep(
        self,
        registry: Registry,
        database: Database,
        limits: dict[str, int],
        lease: Lease,
        registration: Registration,
    ) -> None:
        """Create the services of upkeep, such as those that rescue jobs and fire schedules."""
        self.controls = Controls(self.runners, self.shared)
        self.schedule_runners = [ScheduleRunner(self.upkeep), ScheduleRunner(self.upkeep, database)]
        self.declarations = Declarations(self.upkeep, registry, limits, lambda: registration.me)
        self.rescuer = Rescuer(
            self.upkeep,
            lease,
            lambda: registration.me,
            self.counts,
            self.promoter.expect,
            [each.expect for each in self.schedule_runners],
            self.consumers.values(),
            self.controls,
            self.errors,
            self.declarations,
        )
        self.pruner = Pruner(database)

    def _tiers(self, beside: list[Service]) -> list[list[Service]]:
        """Return the services in the order in which they start; they stop in reverse order."""
        upkeep: list[Service] = [
            self.rescuer,
            self.promoter,
            *self.schedule_runners,
            self.reconciler,
            self.poller,
            self.progress,
            *([self.log_writer] if self.log_writer else []),
            self.pruner,
        ]
        return [
            beside,
            [self.acker],  # stops after every attempt has ended
            [*upkeep, *self.listeners],
            [*self.consumers.values(), self.quarantine],  # the services that claim; they stop first
        ]

    def published(self, loop: LoopBlocked | None) -> str:
        """Return the status for this worker's row, as JSON; called on the lease thread.

        Args:
            loop: the recent blockages of the main loop, or None if there were none.
        """
        slots = {runner.queue: runner.limit for runner in self.runners}
        threads = self.thread_slots
        abandoned = [
            each for runner in self.runners for each in runner.attempts.published(threads.threads)
        ]
        status = WorkerStatus(
            slots,
            loop,
            threads.taken(),
            self._streaks.published(),
            self.connections_max,
            tuple(abandoned),
        )
        return msgspec.json.encode(status).decode()

    def _runs(self, job: Job) -> bool:
        """Return whether the handler of this claim runs here, even if the attempt is abandoned."""
        return any(runner.attempts.has(job) for runner in self.runners)

    def _runs_in(self, task: asyncio.Task[Any], job: Job) -> bool:
        """Return whether this asyncio task runs the job of this claim, alone or in a batch."""
        return any(runner.runs_in(task, job) for runner in self.runners)

    def _ends_later(self, job: Job) -> bool:
        """Return whether the end of this attempt is still to be reported.

        True while the handler runs. Also true if the handler completed the job in a transaction,
        and the acker does not know yet whether this transaction has committed.
        """
        return self._runs(job) or self.acker.awaits_reply(job.id)

    def _works_for(self) -> Job | None:
        """Return the job that the main loop runs now; None in any other thread than the loop's."""
        here = threading.get_ident() == self._thread
        return self._pulse.running(self._loop) if here else None

    def _hides(self, job: Job) -> Callable[[str], str] | None:
        """Return the function that redacts the job's arguments; None if its task redacts none."""
        task = self.shared.registry.get(job.task)
        if task is None or not task.redact:
            return None
        return hider(self._pulse.together.get(job.id, [job]), task)

    def begin_lines(self) -> None:
        """Add the job to each log line of a handler from now on; store the lines if configured."""
        own_threads(self._loop, self._works_for)
        self.lines.install()
        if self.log_writer is not None:
            self._end_log_writer = self.log_writer.begin(self._loop.call_soon_threadsafe)

    def end_lines(self) -> None:
        """Undo begin_lines()."""
        self.lines.remove()
        self._end_log_writer()

    def _add_claiming(self, settings: Settings, registry: Registry, lease: Lease) -> None:
        """Create the consumers, the quarantine, and the services that wake them."""
        self.poller = IdlePoller(self.upkeep, settings.poll_s)
        self.quarantine = Quarantine(
            self.claims,
            lease,
            {runner.queue: runner for runner in self.runners},
            registry.names(),
            lambda: self.shared.paused,
            self.reconciler.claim_lost,
            self.shared.slots,
        )
        self.shared.suspect_ended = self.quarantine.wakeup.set
        self.consumers: dict[str, Consumer] = {}
        self.promoter = Promoter(self.upkeep, self.consumers, self.quarantine.wakeup)
        for runner in self.runners:
            self._add_consumer(runner)

    def _add_consumer(self, runner: Runner) -> Consumer:
        consumer = self.consumers[runner.queue] = Consumer(
            runner,
            self.claims,
            self.backlog_claims,
            self.acker,
            self.shared,
            poller=self.poller,
            on_claim_lost=self.reconciler.claim_lost,
            on_empty_claim=self.promoter.wakeup.set,
            on_change=self.promoter.wakeup.set,
        )
        consumer.quiet = self.quarantine.quiet
        self.acker.on_written.append(consumer.written)
        return consumer

    def add_queue(self, queue: str, limit: int) -> Consumer:
        """Create the consumer of a further queue; the caller starts the consumer.

        If attempts of the queue still run, because the worker served it before, the consumer
        continues with their runner.
        """
        runner = next((each for each in self.runners if each.queue == queue), None)
        if runner is None:
            runner = Runner(queue, limit, self.shared)
            self.runners.append(runner)
        self.quarantine.runners[queue] = runner
        return self._add_consumer(runner)

    def stop_queue(self, queue: str) -> Consumer:
        """Claim no more jobs of a queue. Its attempts go on."""
        consumer = self.consumers.pop(queue)
        del self.quarantine.runners[queue]
        self.acker.on_written.remove(consumer.written)
        consumer.stop()
        return consumer

    def forget_queue(self, runner: Runner) -> None:
        """Forget the runner of a queue that is no longer served, and has no attempts left."""
        self.runners.remove(runner)
        runner.forget()

    def listen_again(self) -> None:
        """Replace the listeners that no longer fit the queues of the worker."""
        queues = list(self.consumers)
        if self._parent_listener is not None:
            self._parent_listener.serve(queues)
        elif self._own_listeners is not None:
            for listener in self._own_listeners.serve(queues):
                self.supervisor.add(listener, beside=self.promoter)

    @property
    def listeners(self) -> Sequence[Listener | ParentListener]:
        """The listeners of this process; none if a pooler is in front of the database."""
        if self._parent_listener is not None:
            return [self._parent_listener]
        return [] if self._own_listeners is None else self._own_listeners.active

    def _add_listening(
        self, settings: Settings, database: Database, process_index: ProcessIndex
    ) -> None:
        """Create the listeners; a child whose parent listens gets a ParentListener instead."""
        listening = listening_database(settings, database)
        self._parent_listener: ParentListener | None = None
        self._own_listeners: Listeners | None = None
        # A pooler does not forward notifications. A worker that connects through a pooler therefore
        # has no listener, and polls.
        if listening.pooled:
            return
        calls = Calls(self.shared.lease, self.rescuer.wakeup, self.reconciler.wakeup)
        heard = Heard(self._notified, calls.receive, self._connected)
        queues = list(self.consumers)
        if process_index.listen_socket >= 0:
            self._parent_listener = ParentListener(process_index.listen_socket, queues, heard)
        else:
            self._own_listeners = Listeners(listening, heard, settings.listen_connections)
            self._own_listeners.serve(queues)

    def _notified(self, queue: str) -> None:
        if queue in self.consumers:
            self.consumers[queue].wakeup.set()
        self.promoter.notified()

    def _connected(self, queues: Sequence[str]) -> None:
        for queue in queues:
            if queue in self.consumers:
                self.consumers[queue].notifications_missed()
        self.promoter.notified()
        self.pruner.wakeup.set()  # the connection may lead to another server
