"""Traces of workers: each attempt is a span of the trace in which its job was enqueued.

The parent of the span is the producer's span. So all attempts of a job, and the jobs that their
handlers enqueue, belong to one trace. The attempt's span also links to the producer's span, as
OpenTelemetry's conventions for messages demand of consumers. Attempts have spans only if the app
has set a tracer provider before its worker starts.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from taskd import events
from taskd.client.traces import CARRIED, SYSTEM, carrier, failed, propagators, tracer
from taskd.core.jobs.failure import describe
from taskd.core.jobs.job import Job
from taskd.core.jobs.verdicts import Verdict
from taskd.core.outcomes.process_reports import HandlerRaised
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.running.middleware import inside

ATTEMPT_ENDS = {
    "job.done", "job.retried", "job.failed", "job.cancelled", "job.snoozed", "job.released",
    "job.interrupted", "job.abandoned",
}  # fmt: skip
# How long a stopping worker waits for the export of spans.
FLUSH_S = 2.0
Around = Callable[[Any, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]]


class Traces:
    """The spans of the attempts of one worker."""

    def __init__(self, tracer: Any) -> None:
        from opentelemetry import context, trace

        self._tracer, self._trace, self._context = tracer, trace, context
        self._propagators = propagators()
        self._spans: dict[int, Any] = {}
        self._unsubscribe = events.subscribe(self._on_event)

    async def close(self) -> None:
        """End the open spans without an outcome, and send all spans that wait for their export.

        The app's SDK also sends these spans in an exit handler. But a process in which threads
        still run handlers exits without calling exit handlers.
        """
        self._unsubscribe()
        for span in self._spans.values():
            with suppress(Exception):
                span.end()
        self._spans.clear()
        flush = getattr(self._trace.get_tracer_provider(), "force_flush", None)
        if flush is not None:
            await _flush(flush)

    def with_spans(self, registry: Registry) -> Registry:
        """Return a registry in which each attempt runs inside a span, outside all middleware."""
        return registry.with_tasks([self._with_span(task) for task in registry])

    def _with_span(self, task: Task[..., Any]) -> Task[..., Any]:
        return inside(task, partial(self._around, task, task.around))

    async def _around(
        self,
        task: Task[..., Any],
        middleware: Around | None,
        ctx: AttemptContext,
        attempt: Coroutine[Any, Any, Any],
    ) -> Any:
        job = ctx.job
        span = self._trace.INVALID_SPAN
        # Parts of the app's SDK, such as a sampler, can raise an error, which must not fail a job.
        with suppress(Exception):
            span = self._begin(job)
        try:
            return await (attempt if middleware is None else middleware(ctx, attempt))
        except BaseException as error:
            with suppress(Exception):
                self._record_exception(span, ctx.hide, error)
            raise

    def _begin(self, job: Job) -> Any:
        """Begin an attempt's span, and make it current in the attempt's context."""
        parent = self._parent(job)
        sender = self._trace.get_current_span(parent).get_span_context()
        span = self._spans[job.id] = self._tracer.start_span(
            f"run {job.task}",
            context=parent,
            kind=self._trace.SpanKind.CONSUMER,
            links=[self._trace.Link(sender)] if sender.is_valid else None,
            attributes={
                "messaging.system": SYSTEM,
                "messaging.operation.name": "run",
                "messaging.operation.type": "process",
                "messaging.destination.name": job.queue,
                "messaging.message.id": str(job.id),
                "taskd.task": job.task,
                "taskd.attempt": job.attempt,
                "taskd.wait_s": job.wait_s,
            },
        )
        # This trace context is never detached, because the contextvars belong to this attempt
        # alone.
        self._context.attach(self._trace.set_span_in_context(span, parent))
        return span

    def _parent(self, job: Job) -> Any:
        """Return the trace context in a job's metadata; an empty context if there is none."""
        if job.metadata is None:
            return self._context.Context()
        return _context_of(job.metadata, self._propagators)

    @staticmethod
    def _record_exception(span: Any, hide: Callable[[str], str], error: BaseException) -> None:
        """Add a handler's exception to the span; `hide` redacts the texts of the exception.

        Verdicts and cancellations are not added. HandlerRaised is not added either: the exception
        that it stands for is in another process.
        """
        if not span.is_recording() or isinstance(error, Verdict | HandlerRaised):
            return
        described = describe(error, hide)
        if described.type in {"CancelledError", "GeneratorExit"}:
            return
        span.add_event(
            "exception",
            {
                "exception.type": described.type,
                "exception.message": described.message,
                "exception.stacktrace": described.traceback,
            },
        )

    def _on_event(self, name: str, fields: Mapping[str, Any]) -> None:
        """End the span of an attempt when the event of its end is emitted."""
        span = self._spans.pop(fields["job_id"], None) if name in ATTEMPT_ENDS else None
        if span is not None:
            # Span processors of the app can raise an error, which must not affect the outcome.
            with suppress(Exception):
                self._end(span, name, fields)

    @staticmethod
    def _end(span: Any, name: str, fields: Mapping[str, Any]) -> None:
        span.set_attribute("taskd.outcome", name.removeprefix("job."))
        text = fields.get("error") or fields.get("reason") or fields.get("why") or ""
        if name in {"job.retried", "job.failed", "job.abandoned"}:
            kind = str(fields.get("error") or "").partition(":")[0]
            failed(span, kind or str(fields.get("why") or "failed"), str(text))
        elif text:
            span.set_attribute("taskd.reason", str(text))
        span.end()


def _context_of(metadata: str, propagators: Sequence[Any]) -> Any:
    """Return the trace context in a job's metadata; an empty context if there is no valid one."""
    from opentelemetry import context

    found = context.Context()
    with suppress(msgspec.DecodeError):
        stored = msgspec.json.decode(metadata, type=dict[str, Any])
        carried = {name: stored[name] for name in CARRIED if isinstance(stored.get(name), str)}
        for each in propagators:
            found = each.extract(carried, found)
    return found


def begin() -> Traces | None:
    """Return the traces of a worker that starts; None if the app has set no tracer provider."""
    found = tracer()
    return None if found is None else Traces(found)


async def _flush(flush: Callable[[int], Any]) -> None:
    """Call `flush`, which can block, in a thread; wait for at most FLUSH_S."""
    loop, sent = asyncio.get_running_loop(), asyncio.Event()

    def send() -> None:
        with suppress(Exception):
            flush(int(FLUSH_S * 1000))
        with suppress(RuntimeError):  # the loop may have been closed meanwhile
            loop.call_soon_threadsafe(sent.set)

    # Not in a pool, whose shutdown would wait for an exporter that hangs.
    threading.Thread(target=send, name="taskd-flush", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await sent.wait()


class Firing:
    """The span of one tick of a schedule: the root of the trace of the jobs that the tick enqueues.

    Args:
        schedule: the name of the schedule; with None, no span is made.

    Attributes:
        metadata: the metadata for the jobs, as JSON text; None if there is no span.
    """

    def __init__(self, schedule: str | None) -> None:
        self.metadata: str | None = None
        self._span: Any = None
        found = tracer()
        if found is None or schedule is None:
            return
        from opentelemetry import context, trace

        attributes = {
            "messaging.system": SYSTEM,
            "messaging.operation.name": "fire",
            "messaging.operation.type": "send",
            "taskd.schedule": schedule,
        }
        self._span = found.start_span(
            f"fire {schedule}",
            context=context.Context(),
            kind=trace.SpanKind.PRODUCER,
            attributes=attributes,
        )
        carried = carrier(trace.set_span_in_context(self._span, context.Context()))
        self.metadata = msgspec.json.encode(carried).decode()

    def end(self, jobs: int) -> None:
        """End the span with the number of enqueued jobs; an SDK exports only ended spans."""
        if self._span is not None:
            self._span.set_attribute("messaging.batch.message_count", jobs)
            self._span.end()


def with_trace_context(job: Job) -> Job:
    """Return the job for a handler's process, with the current trace context in its metadata."""
    if tracer() is None:
        return job
    metadata = {**job.read_metadata(), **carrier()}
    return msgspec.structs.replace(job, metadata=msgspec.json.encode(metadata).decode())


def restore_trace_context(job: Job) -> None:
    """Make the trace context of the job current; called in a handler's process."""
    if tracer() is None or job.metadata is None:
        return
    from opentelemetry import context

    context.attach(_context_of(job.metadata, propagators()))
