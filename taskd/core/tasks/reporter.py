"""Reporters: functions of the app that receive a report of each error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """An error that taskd reports to the app: see report_errors.

    Attributes:
        exception: the exception that the handler raised, with its traceback, or the exception of a
            service of the worker. In other cases, an exception that describes the error: TimedOut,
            ProcessDied, HandlerRaised (raised in another process) or WorkerLost.
        type: the type of the error, as it is stored with the job; for HandlerRaised, the type of
            the original exception.
        message: the message of the exception, without the values of redacted arguments.
        final: False if there will be another attempt; True if the job has failed, or if the error
            belongs to no job.
        task: the name of the job's task; None if the error belongs to no job.
        queue: the queue of the job, or None.
        job_id: the id of the job, or None.
        attempt: the number of the attempt, from 1, or None.
        service: the name of the worker's service that has failed; None if the error is not of a
            service.
    """

    exception: BaseException
    type: str
    message: str
    final: bool = True
    task: str | None = None
    queue: str | None = None
    job_id: int | None = None
    attempt: int | None = None
    service: str | None = None


class Reporter(NamedTuple):
    """A function of the app that receives error reports.

    Attributes:
        callback: the function.
        each_attempt: whether the function also receives errors after which the job is retried.
    """

    callback: Callable[[ErrorReport], object]
    each_attempt: bool = False
