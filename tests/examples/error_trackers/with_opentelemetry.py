"""Errors are spans of OpenTelemetry."""

from opentelemetry import trace

from taskd.reporting import ErrorReport, report_errors

tracer = trace.get_tracer("shop.errors")


@report_errors
def to_opentelemetry(report: ErrorReport) -> None:
    attributes = {"task": report.task or "", "job_id": report.job_id or 0}
    with tracer.start_as_current_span("error", attributes=attributes) as span:
        span.record_exception(report.exception)
        span.set_status(trace.StatusCode.ERROR, report.message)
