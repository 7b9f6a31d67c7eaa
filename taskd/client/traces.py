"""Traces of producers: a job carries the context of the trace in which it was enqueued.

taskd uses OpenTelemetry only if the app does. This module does not import OpenTelemetry before the
app has imported it. It makes no span before the app has set a tracer provider. The context is
stored in the metadata of the job in the W3C form (`traceparent`, `tracestate`). SQL clients can
also set it there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from taskd.core.jobs.job import NewJob
from taskd.errors import InvalidJob

T = TypeVar("T")
SYSTEM = "taskd"
CARRIED = ("traceparent", "tracestate", "baggage")

_last: tuple[Any, Any] = (None, None)


def tracer() -> Any | None:
    """Return the tracer of this process; None while the app has set no tracer provider."""
    global _last  # noqa: PLW0603 - a provider makes a new tracer each time
    api: Any = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    provider = api.get_tracer_provider()
    if isinstance(provider, api.ProxyTracerProvider | api.NoOpTracerProvider):
        return None
    if _last[0] is not provider:
        _last = (provider, provider.get_tracer(SYSTEM))
    return _last[1]


def propagators() -> list[Any]:
    """Return the W3C propagators, which write the context of a trace into a job and read it.

    Baggage consists of values that services have added to a request. The propagator of baggage is
    included only if OTEL_PROPAGATORS contains `baggage`.
    """
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    wants_baggage = "baggage" in os.environ.get("OTEL_PROPAGATORS", "").split(",")
    return [TraceContextTextMapPropagator(), *([W3CBaggagePropagator()] if wants_baggage else [])]


def carrier(context: Any = None) -> dict[str, str]:
    """Return the context of a trace as values of metadata; by default, of the current trace."""
    carried: dict[str, str] = {}
    for each in propagators():
        each.inject(carried, context)
    return carried


def with_context(job: NewJob, carried: dict[str, str]) -> NewJob:
    """Return the job with this context in its metadata.

    If the metadata would be too large, only `traceparent` is added, or nothing. If the metadata
    already has a `traceparent`, the job is returned unchanged.
    """
    metadata = dict(job.metadata or {})
    if "traceparent" in metadata or not carried:
        return job
    try:
        return replace(job, metadata=metadata | carried)
    except InvalidJob:
        least = {"traceparent": carried["traceparent"]} if "traceparent" in carried else {}
    try:
        return replace(job, metadata=metadata | least)
    except InvalidJob:
        return job


class Sending:
    """The span of a producer that enqueues jobs."""

    def __init__(self, tracer: Any, name: str, operation_type: str) -> None:
        from opentelemetry import trace

        attributes = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "enqueue",
            "messaging.operation.type": operation_type,
        }
        self._name = name
        self._span = tracer.start_span(name, kind=trace.SpanKind.PRODUCER, attributes=attributes)
        self._carried = carrier(trace.set_span_in_context(self._span))
        self._seen: dict[tuple[str, str | None], int] = {}

    def jobs(self, jobs: Iterable[NewJob]) -> Iterator[NewJob]:
        """Yield the jobs, each with the context of the span in its metadata."""
        for job in jobs:
            kind = (job.task, job.queue)
            self._seen[kind] = self._seen.get(kind, 0) + 1
            yield with_context(job, self._carried)

    def end(self, ids: Sequence[int] | None = None, error: BaseException | None = None) -> None:
        """End the span.

        Args:
            ids: ids of the jobs that were written.
            error: the exception for which the span is marked as failed.
        """
        # The jobs may already be written. An error of tracing must not reach the caller, who would
        # enqueue the jobs again.
        with suppress(Exception):
            self._describe(ids, error)

    def _describe(self, ids: Sequence[int] | None, error: BaseException | None) -> None:
        span, count = self._span, sum(self._seen.values())
        tasks, queues = ({each[index] for each in self._seen} - {None} for index in (0, 1))
        if len(queues) == 1:
            span.set_attribute("messaging.destination.name", queues.pop())
        if len(tasks) == 1:
            (task,) = tasks
            span.set_attribute("taskd.task", task)
            span.update_name(f"{self._name} {task}")
        if count != 1:
            span.set_attribute("messaging.batch.message_count", count)
        elif ids:
            span.set_attribute("messaging.message.id", str(int(ids[0])))
        if error is not None:
            failed(span, type(error).__qualname__, "")
        span.end()


def failed(span: Any, kind: str, message: str) -> None:
    """Mark a span as failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message or kind))


@contextmanager
def sending(tracer: Any) -> Iterator[Sending]:
    """Make a span around the writing of jobs.

    If the block raises an exception, the span ends here. Otherwise the caller must end the span.
    """
    span = Sending(tracer, "enqueue", "send")
    try:
        yield span
    except BaseException as error:
        span.end(error=error)
        raise


def with_own_span(job: NewJob) -> NewJob:
    """Return the job with the context of its own span, which has already ended.

    A buffer uses this, because the buffer writes the job later.
    """
    found = tracer()
    if found is None:
        return job
    span = Sending(found, "enqueue", "create")
    [carried] = span.jobs([job])
    span.end()
    return carried


def traced(
    write: Callable[[list[NewJob]], Coroutine[Any, Any, T]], jobs: list[NewJob]
) -> Coroutine[Any, Any, T]:
    """Write jobs that belong together, such as those of a workflow, within one span."""
    found = tracer()
    if found is None:
        return write(jobs)

    async def within_span() -> T:
        with sending(found) as span:
            written = await write(list(span.jobs(jobs)))
        span.end()
        return written

    return within_span()
