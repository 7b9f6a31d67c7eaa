"""Record the outcome of an attempt: decide it, count it, log it, queue its ack."""

from __future__ import annotations

import time
from contextvars import Context as ContextVars
from typing import Any

from taskd import events
from taskd.core.jobs.job import FINISHED, Job, JobState
from taskd.core.outcomes import policy
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import (
    ArgsNewer,
    ArgsUnfit,
    AttemptEnd,
    IdTaken,
    Interrupted,
    Raised,
    Returned,
    RunsElsewhere,
    TaskPaused,
    TaskUnknown,
    error_of,
)
from taskd.core.outcomes.error_reports import of_attempt
from taskd.core.tasks.task import Task
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.finishing.acker import Acker
from taskd.worker.finishing.error_queue import ErrorQueue
from taskd.worker.finishing.tracebacks import forget_locals
from taskd.worker.observing.failure_streaks import FailureStreaks

COUNTED = (
    "done",
    "retried",
    "failed",
    "cancelled",
    "snoozed",
    "released",
    "interrupted",
    "abandoned",
    "lost",
)

GIVEN_BACK = RunsElsewhere | TaskUnknown | IdTaken | ArgsNewer | ArgsUnfit | TaskPaused


class NotCommitted(Exception):
    """A handler completed its job in a transaction that was not committed."""


class OutcomeRecorder:
    """Records the end of every attempt of this worker.

    Args:
        errors: receives a report of each failed attempt.

    Attributes:
        counts: the number of attempts by how they ended, with the keys of COUNTED. `lost` counts
            the outcomes that would have ended a job but were not written, because the job belongs
            to another claim or does not exist any more.
        streaks: counts the failures of each task since its last success.
    """

    def __init__(self, acker: Acker, errors: ErrorQueue) -> None:
        self._acker, self._errors = acker, errors
        acker.on_lost.append(self._lost)
        acker.on_refused_result.append(self._result_refused)
        self.counts = dict.fromkeys(COUNTED, 0)
        self.streaks = FailureStreaks()
        self._wrong_delays: set[str] = set()  # tasks whose wrong delay was logged

    def succeeded(
        self,
        job: Job,
        task: Task[..., Any],
        context: AttemptContext | None,
        began: float,
        value: Any,
    ) -> None:
        """Record that a handler returned. The hot path is a handler that returns None.

        Jobs of workflows are not on the hot path, because they can be stages of a pipeline. The
        statement of the hot path does not start the next stage.
        """
        if value is None and job.workflow_id is None and (context is None or not context.completed):
            self.counts["done"] += 1
            self.streaks.succeeded(job.task)
            self._acker.done(job)
            events.job_done(job, time.monotonic() - began)
        else:
            self.record(job, task, context, Returned(value), began)

    def record(
        self,
        job: Job,
        task: Task[..., Any] | None,
        context: AttemptContext | None,
        happened: AttemptEnd,
        began: float,
        variables: ContextVars | None = None,
    ) -> None:
        """Decide the outcome of an attempt, queue its ack, count it, log it, and report its error.

        Args:
            variables: the context variables of the attempt, if its handler has started.
        """
        if context is not None and (
            # After the commit, an error of middleware does not change the outcome.
            context.committed or (context.completed and isinstance(happened, Returned))
        ):
            self._completed(job, task, context, time.monotonic() - began, variables)
            forget_locals(error_of(happened))
            return
        try:
            ack = policy.decide(job, task, happened, None if context is None else context.hide)
        except BaseException as error:  # noqa: BLE001 - a hostile exception or value harms one job
            text = f"the outcome could not be described: {type(error).__name__}"
            ack = policy.decide(job, task, Raised(RuntimeError(text)))
        self._acker.outcome(ack)
        if ack.wrong_delay is not None and job.task not in self._wrong_delays:
            self._wrong_delays.add(job.task)
            events.task_delay_invalid(job, ack.wrong_delay, ack.delay_s)
        if isinstance(happened, GIVEN_BACK):
            # Other code logs these outcomes, once for many jobs, or they are not logged at all.
            self.counts["released"] += 1
        else:
            why = happened.why if isinstance(happened, Interrupted) else "stop"
            self._report(job, ack, time.monotonic() - began, why)
        if not (self._errors.begun and self._errors.add(of_attempt(job, happened, ack), variables)):
            forget_locals(error_of(happened))

    def _completed(
        self,
        job: Job,
        task: Task[..., Any] | None,
        context: AttemptContext,
        duration_s: float,
        variables: ContextVars | None,
    ) -> None:
        """Record the outcome of a job that was completed in a transaction.

        Unless the transaction is known to have committed, queue the ack of a failed attempt. This
        ack waits while the transaction is open. It changes the row if the transaction was rolled
        back, and changes nothing if the transaction was committed.
        """
        if context.committed:
            self._report(job, _completion(job, context), duration_s)
            return
        happened = Raised(NotCommitted(context.NOT_COMMITTED))
        ack = policy.decide(job, task, happened)

        def on_written(took: bool | None) -> None:
            if took is None:
                self.counts["lost"] += 1
            else:
                self._report(job, ack if took else _completion(job, context), duration_s)
            if took:
                self._errors.add(of_attempt(job, happened, ack), variables)

        self._acker.outcome(ack, on_written)

    def _lost(self, outcome: Job | Ack) -> None:
        """Count a lost outcome as lost instead of by its state."""
        state = JobState.DONE if isinstance(outcome, Job) else outcome.state
        if state in FINISHED:
            self.counts[state.value] -= 1
            self.counts["lost"] += 1

    def _result_refused(self, ack: Ack) -> None:
        """Count a success as a failure, because PostgreSQL failed the job."""
        self.counts["done"] -= 1
        self.counts["failed"] += 1
        events.job_result_refused(ack.id)

    def _report(self, job: Job, ack: Ack, duration_s: float, why: str = "stop") -> None:
        """Count the outcome, and log it; `why` is the reason if the attempt was interrupted."""
        counts = self.counts
        match ack.state:
            case _ if ack.interrupted:
                counts["interrupted"] += 1
                events.job_interrupted(job, ack, duration_s, why)
            case JobState.DONE:
                counts["done"] += 1
                self.streaks.succeeded(job.task)
                events.job_done(job, duration_s)
                if ack.reason is not None:
                    events.job_result_unstored(job, ack.reason)
            case JobState.FAILED:
                counts["failed"] += 1
                self.streaks.failed(job.task, ack.error)
                events.job_failed(job, ack, duration_s)
            case JobState.CANCELLED:
                counts["cancelled"] += 1
                events.job_cancelled(job, ack, duration_s)
            case JobState.QUEUED:
                counts["released"] += 1
                events.job_released(job)
            case _ if ack.refund:
                counts["snoozed"] += 1
                events.job_snoozed(job, ack, duration_s)
            case _:
                counts["retried"] += 1
                self.streaks.failed(job.task, ack.error)
                events.job_retried(job, ack, duration_s)


def _completion(job: Job, context: AttemptContext) -> Ack:
    """Return the outcome that a transaction has written."""
    return Ack(job.id, job.worker_id, job.fence, JobState.DONE, reason=context.unstored)
