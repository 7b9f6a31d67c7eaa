"""`@report_errors`: functions that pass errors on to an error tracker, such as Sentry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, overload

from taskd.core.outcomes.error_reports import (
    ReportedError,
    ServiceFailing,
    TimedOut,
    WorkerLost,
)
from taskd.core.tasks.registry import DEFAULT, Registry
from taskd.core.tasks.reporter import ErrorReport, Reporter

__all__ = [
    "ErrorReport",
    "ReportedError",
    "ServiceFailing",
    "TimedOut",
    "WorkerLost",
    "report_errors",
]

Callback = TypeVar("Callback", bound=Callable[[ErrorReport], object])


@overload
def report_errors(callback: Callback) -> Callback: ...
@overload
def report_errors(
    *, each_attempt: bool = False, registry: Registry = DEFAULT
) -> Callable[[Callback], Callback]: ...
def report_errors(
    callback: Callable[[ErrorReport], object] | None = None,
    *,
    each_attempt: bool = False,
    registry: Registry = DEFAULT,
) -> Any:
    """Register a function that receives an ErrorReport for each error.

    There are three kinds of errors. A job has failed because of an exception, a timeout, or the
    death of its process or its worker. This worker has declared another worker dead. Or a service
    of this worker has crashed. Cancelled jobs, expired jobs and verdicts are not reported. But a
    Retry after the last attempt is reported.

    The function runs in its own thread, with the context variables of the attempt, after the
    outcome was recorded. The function cannot change the outcome, and its exceptions are only
    logged. If the function is slow, up to 1,000 errors wait for it. A worker that stops waits up to
    2 seconds for the function.

    Args:
        callback: a plain function with one parameter.
        each_attempt: also report attempts that failed and are retried.
        registry: where the function is registered.

    Raises:
        TypeError: `callback` is not a plain function with one parameter.
    """
    if callback is None:
        return partial(_registered, each_attempt=each_attempt, registry=registry)
    return _registered(callback, each_attempt=each_attempt, registry=registry)


def _registered(callback: Any, *, each_attempt: bool, registry: Registry) -> Any:
    name = getattr(callback, "__name__", repr(callback))
    if not inspect.isroutine(callback) or inspect.iscoroutinefunction(callback):
        raise TypeError(f"reporter {name}: write `def {name}(report)`, which runs in a thread")
    try:
        inspect.signature(callback).bind(None)
    except TypeError:
        raise TypeError(f"reporter {name}: it must take one parameter, the report") from None
    registry.add_reporter(Reporter(callback, each_attempt))
    return callback
