"""Prepare claimed jobs: find the task, check whether the job can start, create the coroutine."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextvars import Context as ContextVars
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from taskd import events
from taskd.core.jobs.failure import ARGS_UNFIT, describe
from taskd.core.jobs.job import Job
from taskd.core.outcomes import policy
from taskd.core.outcomes.attempt_ends import (
    ArgsNewer,
    ArgsUnfit,
    AttemptEnd,
    AttemptsSpent,
    Expired,
    Raised,
    RunsElsewhere,
    TaskUnknown,
)
from taskd.core.outcomes.unknown_tasks import Elsewhere, Unknown
from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import InvalidArgs
from taskd.worker.attempt_context import AttemptContext, ReportsProgress
from taskd.worker.finishing.outcomes import OutcomeRecorder
from taskd.worker.lease.state import Lease
from taskd.worker.observing.loop_monitor import Pulse
from taskd.worker.reads import Reads
from taskd.worker.running.batches import Batches
from taskd.worker.running.calls import Call, Executors, call_of
from taskd.worker.running.shared_slots import SharedSlots
from taskd.worker.running.transactions import TransactionAttemptContext


@dataclass(slots=True)
class Shared:
    """The state that the runners of a worker share.

    Attributes:
        executors: the threads, processes and connections that handlers need.
        cancel_s: seconds that a cancelled attempt can take to end.
        reads: the connection over which handlers read the results of parent jobs.
        database_key: identifies this database, for idempotency keys.
        resources: objects that the app made for its handlers when the worker started, by name.
        suspect_ended: called when the outcome of a suspect was recorded.
        paused: names of the paused tasks (see operator_settings.py).
        elsewhere: the jobs that another live worker can run and this worker cannot.
        progress: called with the job and its progress when a handler reports progress.
        new_variables: makes the context variables of an attempt.
        slots: the slots that all queues of the worker share.
    """

    registry: Registry
    recorder: OutcomeRecorder
    lease: Lease
    pulse: Pulse
    executors: Executors
    cancel_s: float
    reads: Reads
    database_key: str = ""
    resources: dict[str, Any] = field(default_factory=dict)
    suspect_ended: Callable[[], None] = field(default=lambda: None)
    paused: frozenset[str] = frozenset()
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    progress: ReportsProgress = field(default=lambda *_: None)
    new_variables: Callable[[], ContextVars] = ContextVars
    slots: SharedSlots = field(default_factory=SharedSlots)


# The task, the coroutine before its first step, the context and the call of an attempt. Every job
# needs such a tuple, and a plain tuple is the cheapest type.
Prepared = tuple[Task[..., Any], Coroutine[Any, Any, Any], AttemptContext | None, Call | None]


class Refused(NamedTuple):
    """An attempt that ends before its handler starts."""

    context: AttemptContext | None
    end: AttemptEnd


class Preparation:
    """Prepares the claimed jobs of one queue."""

    def __init__(self, queue: str, shared: Shared, batches: Batches) -> None:
        self._queue, self._shared, self._batches = queue, shared, batches
        self._unknown, self._unfit = Unknown(), Unknown()

    def look_up(self, job: Job, began: float) -> tuple[Task[..., Any] | None, AttemptEnd | None]:
        """Look up the task of a job, and check whether the job can start.

        Returns:
            A pair. The first value is the task; None if this worker does not know the task. The
            second value is the end to record; None if the job can start. At least one value is not
            None.
        """
        task = self._shared.registry.get(job.task)
        if job.late:
            return task, Expired()
        if task is None:
            if self._leaves(job, 0):
                return None, RunsElsewhere()
            return None, TaskUnknown(self._unknown.delay_s(job.task, 0, began))
        if job.args_version is not None and task.versions.is_newer(job.args_version):
            if self._leaves(job, task.versions.args_version):
                return task, RunsElsewhere()
            return task, self._newer(job, job.args_version, began)
        return task, None

    def _leaves(self, job: Job, newest: int) -> bool:
        """Return whether another live worker can run the job.

        If so, the claims of this worker from now on leave out the jobs of this task that this
        worker cannot run.
        """
        elsewhere = self._shared.elsewhere
        if not elsewhere.runs(self._queue, job.task, job.args_version or 1):
            return False
        elsewhere.leave(self._queue, job.task, newest)
        return True

    def start(self, job: Job, task: Task[..., Any], began: float) -> Prepared | Refused:
        """Return the coroutine before its first step, or the end of a job that cannot start."""
        if policy.attempts_spent(job, task):
            return Refused(None, AttemptsSpent(policy.attempts_limit(job, task)))
        context: AttemptContext | None = None
        try:
            if task.takes_context:
                context = self._context(job, task, began)
            call: Call | None = None
            if task.kind is HandlerKind.ASYNC:
                coro = task.call(context, task.decode(job.args, job.args_version))
            else:
                call = call_of(job, task, context, self._shared.executors, self._batches)
                coro = call.run()
            if task.around is not None:
                coro = task.around(context, coro)
        except InvalidArgs as error:
            return Refused(context, self._args_unfit(job, task, error, began))
        except BaseException as error:  # noqa: BLE001 - such as a RecursionError of odd arguments
            return Refused(context, Raised(error))
        return task, coro, context, call

    def _newer(self, job: Job, args_version: int, began: float) -> ArgsNewer:
        if not self._unknown.has_met(job.task, args_version):
            events.task_outdated(job.task, self._queue, args_version)
        return ArgsNewer(self._unknown.delay_s(job.task, args_version, began))

    def _args_unfit(
        self, job: Job, task: Task[..., Any], error: InvalidArgs, began: float
    ) -> ArgsUnfit:
        described = msgspec.structs.replace(
            describe(error, policy.hider([job], task)), type=ARGS_UNFIT
        )
        version = job.args_version or 1
        if not self._unfit.has_met(job.task, version):
            events.task_args_unfit(job, described.message)
        return ArgsUnfit(described.to_json(), self._unfit.delay_s(job.task, version, began))

    def _context(self, job: Job, task: Task[..., Any], began: float) -> AttemptContext:
        timeout_s = timeout_s_of(job, task)
        kind = TransactionAttemptContext if task.kind is HandlerKind.TRANSACTION else AttemptContext
        return kind(
            job,
            f"{self._shared.database_key}-{job.id}",
            policy.max_attempts_of(job, task),
            None if timeout_s is None else began + timeout_s,
            self._shared.resources,
            self._shared.reads,
            self._shared.progress,
            policy.hider([job], task),
        )


def timeout_s_of(job: Job, task: Task[..., Any]) -> float | None:
    """Return the timeout of an attempt, or None. A batch has the timeout of its task."""
    return task.timeout_s if task.kind is HandlerKind.BATCH else job.timeout_s or task.timeout_s
