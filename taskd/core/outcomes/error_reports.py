"""Error reports: what the app's reporters get about failed attempts, lost workers and services."""

from __future__ import annotations

import msgspec

from taskd.core.jobs.failure import Failure, describe
from taskd.core.jobs.job import Job, JobState
from taskd.core.jobs.verdicts import Retry, Verdict
from taskd.core.outcomes import attempt_ends
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import (
    AttemptEnd,
    CancelRequested,
    DecidedElsewhere,
    Interrupted,
    Raised,
    Returned,
    error_of,
)
from taskd.core.outcomes.process_reports import HandlerRaised
from taskd.core.tasks.reporter import ErrorReport


class ReportedError(Exception):
    """An error for which this process has no exception; the message describes the error."""


class TimedOut(ReportedError):
    """An attempt exceeded its timeout. The traceback shows where the handler was cancelled."""


class WorkerLost(ReportedError):
    """A worker died or lost its lease, possibly while it ran jobs."""


class ServiceFailing(ReportedError):
    """A service of the worker has failed repeatedly, although PostgreSQL answers."""


class TracebackThere(Exception):
    """The traceback of an exception in another process, as text: the cause of HandlerRaised."""

    def __str__(self) -> str:
        """Return the text on lines of its own."""
        return f"\n{self.args[0]}"


def of_attempt(job: Job, happened: AttemptEnd, ack: Ack) -> ErrorReport | None:
    """Return the report of an attempt; None if the attempt has no error.

    The cleanup of a cancelled attempt can have an error, although the attempt has not failed.

    A verdict is not an error, because the handler has chosen it. But a Retry after the last attempt
    is an error.
    """
    if ack.error is None:
        return None
    failure = msgspec.json.decode(ack.error, type=Failure)
    final = ack.state is JobState.FAILED
    if _is_verdict(happened, failure, final=final):
        return None
    return ErrorReport(
        _exception(happened, failure), failure.type, failure.message, final,
        job.task, job.queue, job.id, job.attempt,
    )  # fmt: skip


def of_service(service: str, error: BaseException | str) -> ErrorReport:
    """Return the report of a service that crashed with an exception, or whose error is a text."""
    exception = ServiceFailing(error) if isinstance(error, str) else error
    described = describe(exception)
    return ErrorReport(exception, described.type, described.message, service=service)


def of_lost_worker(worker: str, proof: str) -> ErrorReport:
    """Return the report for the jobs of a worker that was declared dead. `proof` says why."""
    text = f"worker {worker} was declared dead: {proof}; its jobs run again"
    return ErrorReport(WorkerLost(text), WorkerLost.__name__, text)


def of_rescued_job(
    job_id: int, state: JobState, task: str, queue: str, attempt: int, crashed: bool
) -> ErrorReport | None:
    """Return the report of a job of a dead worker; None if the job was cancelled."""
    if state is JobState.CANCELLED:
        return None
    how = "crashed" if crashed else "lost its lease, or was stopped"
    text = f"the worker that ran this attempt {how}"
    return ErrorReport(
        WorkerLost(text), WorkerLost.__name__, text, state is JobState.FAILED,
        task, queue, job_id, attempt,
    )  # fmt: skip


def _is_verdict(happened: AttemptEnd, failure: Failure, *, final: bool) -> bool:
    match happened:
        case Raised(error=value) | Returned(value=value):
            kind = type(value)
            return issubclass(kind, Verdict) and not (final and issubclass(kind, Retry))
        case DecidedElsewhere(decided=decided):
            return decided and not (final and failure.type == Retry.__name__)
    return False


def _cause(error: BaseException) -> BaseException:
    """Return the error because of which a verdict was raised, or else the verdict itself."""
    try:
        cause = error.__cause__
    except BaseException:  # noqa: BLE001 - a subclass can redefine the attribute
        return error
    return error if cause is None else cause


def _exception(happened: AttemptEnd, failure: Failure) -> BaseException:
    match happened:
        case Raised(error=error):
            return _cause(error) if issubclass(type(error), Verdict) else error
        case DecidedElsewhere():
            raised = HandlerRaised(happened)
            raised.__cause__ = TracebackThere(failure.traceback) if failure.traceback else None
            return raised
        case attempt_ends.TimedOut(error=error):
            late = TimedOut(failure.message)
            return late.with_traceback(None if error is None else error.__traceback__)
        case Interrupted() | CancelRequested():
            return error_of(happened) or ReportedError(f"{failure.type}: {failure.message}")
    return ReportedError(failure.message)
