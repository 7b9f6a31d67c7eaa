"""Errors go to Rollbar."""

import os

import rollbar

from taskd.reporting import ErrorReport, report_errors

# The reporter has a thread of its own, so it can wait for the request.
rollbar.init(os.environ["ROLLBAR_TOKEN"], environment="production", handler="blocking")


@report_errors
def to_rollbar(report: ErrorReport) -> None:
    error = report.exception
    rollbar.report_exc_info(
        (type(error), error, error.__traceback__),
        extra_data={"task": report.task, "job_id": report.job_id, "attempt": report.attempt},
    )
