"""Traces of producers: a job carries the context of the trace in which it was enqueued.

By OpenTelemetry, if the app uses it: nothing is imported here before the app has done so, and
nothing is done before it has set a tracer provider. The context travels as W3C says, in the
job's metadata (`traceparent`, `tracestate`), where clients of SQL may put it as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from taskd.client.enqueueing import BuiltIns, is_placed, no_built_ins
from taskd.client.enqueueing import produce as produce_untraced
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import Enqueued
from taskd.errors import InvalidJob
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs as stored_jobs

T = TypeVar("T")
SYSTEM = "taskd"
CARRIED = ("traceparent", "tracestate", "baggage")

_last: tuple[Any, Any] = (None, None)


def tracer() -> Any | None:
    """The tracer of this process; None while the app has set no tracer provider."""
    global _last  # noqa: PLW0603 - to ask a provider for a tracer makes a new one each time
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
    """What writes the context of a trace into a job and reads it there; W3C's.

    Baggage is for who asks for it: with it, what others have put into a request would be kept in
    the database.
    """
    from opentelemetry.baggage.propagation import W3CBaggagePropagator
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    asked = "baggage" in os.environ.get("OTEL_PROPAGATORS", "").split(",")
    return [TraceContextTextMapPropagator(), *([W3CBaggagePropagator()] if asked else [])]


def carrier(context: Any = None) -> dict[str, str]:
    """The context of a trace, the current one by default, as a job carries it."""
    carried: dict[str, str] = {}
    for each in propagators():
        each.inject(carried, context)
    return carried


def with_context(job: NewJob, carried: dict[str, str]) -> NewJob:
    """The job with a context; one that was given to it by hand stays."""
    metadata = dict(job.metadata or {})
    if "traceparent" in metadata or not carried:
        return job
    try:
        return replace(job, metadata=metadata | carried)
    except InvalidJob:  # there is no room for all of it
        least = {"traceparent": carried["traceparent"]} if "traceparent" in carried else {}
    try:
        return replace(job, metadata=metadata | least)
    except InvalidJob:
        return job


class Sending:
    """The span of a producer, from when its jobs are taken to when they are written."""

    def __init__(self, tracer: Any, name: str, operation_type: str) -> None:
        from opentelemetry import trace

        said = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "enqueue",
            "messaging.operation.type": operation_type,
        }
        self._name = name
        self._span = tracer.start_span(name, kind=trace.SpanKind.PRODUCER, attributes=said)
        self._carried = carrier(trace.set_span_in_context(self._span))
        self._seen: dict[tuple[str, str | None], int] = {}

    def jobs(self, jobs: Iterable[NewJob]) -> Iterator[NewJob]:
        """The jobs with the context of the span, as they are taken."""
        for job in jobs:
            kind = (job.task, job.queue)
            self._seen[kind] = self._seen.get(kind, 0) + 1
            yield with_context(job, self._carried)

    def end(self, ids: Sequence[int] | None = None, error: BaseException | None = None) -> None:
        """They were written, or were not."""
        # What is written is written: who enqueued must not hear of an error of tracing, and again.
        with suppress(Exception):
            self._told(ids, error)

    def _told(self, ids: Sequence[int] | None, error: BaseException | None) -> None:
        span, count = self._span, sum(self._seen.values())
        tasks, queues = ({each[place] for each in self._seen} - {None} for place in (0, 1))
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
    """Say that what a span tells of has failed."""
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(Status(StatusCode.ERROR, message or kind))


@contextmanager
def sending(tracer: Any) -> Iterator[Sending]:
    """A span for jobs that are written meanwhile."""
    span = Sending(tracer, "enqueue", "send")
    try:
        yield span
    except BaseException as error:
        span.end(error=error)
        raise


async def produce(
    on: Fetches, jobs: Iterable[NewJob], built_ins: BuiltIns = no_built_ins
) -> list[Enqueued]:
    """As producing.produce(), which it is while there is no tracer provider.

    Raises:
        As producing.produce().
    """
    found = tracer()
    if found is None:
        return await produce_untraced(on, jobs, built_ins)
    with sending(found) as span:
        enqueued = await produce_untraced(on, span.jobs(jobs), built_ins)
    span.end(enqueued)
    return enqueued


def produce_one(
    on: Fetches, job: NewJob, built_ins: BuiltIns = no_built_ins
) -> Coroutine[Any, Any, Enqueued]:
    """As produce(), of one job.

    Most jobs go straight to the store, for nobody traces them, and nothing is to be looked up for
    them: as lists through five coroutines more, Python's part was 5.0 us, and is 3.2.
    """
    if is_placed(job) and job.unique is None and tracer() is None:
        return stored_jobs.enqueue_one(on, job)
    return _produce_only(on, job, built_ins)


async def _produce_only(on: Fetches, job: NewJob, built_ins: BuiltIns) -> Enqueued:
    return (await produce(on, [job], built_ins))[0]


def taken(job: NewJob) -> NewJob:
    """A job that a buffer takes now and writes later, with the context of now."""
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
    """What `write` makes of jobs that belong together, such as those of a workflow."""
    found = tracer()
    if found is None:
        return write(jobs)

    async def within_span() -> T:
        with sending(found) as span:
            written = await write(list(span.jobs(jobs)))
        span.end()
        return written

    return within_span()
