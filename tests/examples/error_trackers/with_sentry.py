"""Errors go to Sentry."""

import os
from collections.abc import Iterator

import sentry_sdk

from taskd import Context, resource
from taskd.middleware import CallNext, middleware
from taskd.reporting import ErrorReport, report_errors

sentry_sdk.init(dsn=os.environ["SENTRY_DSN"])


@report_errors
def to_sentry(report: ErrorReport) -> None:
    with sentry_sdk.new_scope() as scope:
        scope.set_tag("task", report.task or report.service)
        scope.set_context("job", {"id": report.job_id, "attempt": report.attempt})
        sentry_sdk.capture_exception(report.exception)


@middleware
async def own_scope(ctx: Context, call_next: CallNext) -> object:
    # Tags and breadcrumbs of an attempt, such as its log lines, then belong to it alone.
    scope = sentry_sdk.get_isolation_scope().fork()
    scope.clear_breadcrumbs()
    sentry_sdk.Scope.set_isolation_scope(scope)
    return await call_next()


@resource
def sentry() -> Iterator[None]:
    yield
    sentry_sdk.flush(timeout=2)  # when the worker stops
