"""Traces: producers give jobs the context of their trace; nothing is done without a provider."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from opentelemetry import baggage, context, trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from taskd import Client
from taskd.client import traces
from taskd.core.jobs.job import NewJob
from taskd.errors import InvalidJob
from taskd.workflows import chain


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """The finished spans of a real provider, which is installed for the time of a test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
async def client(dsn: str) -> Any:
    async with Client(dsn) as made:
        yield made


async def carried(sql: Any, job_id: int) -> Any:
    said = await sql.fetchval("SELECT metadata FROM taskd.jobs WHERE id = $1", job_id)
    return None if said is None else json.loads(said)


def parent_of(metadata: Any) -> tuple[str, str]:
    _, trace_id, span_id, _ = metadata["traceparent"].split("-")
    return trace_id, span_id


def name_of(span: Any) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def test_a_job_carries_the_context_of_the_span_that_enqueued_it(
    client: Client, sql: Any, spans: InMemorySpanExporter
) -> None:
    with trace.get_tracer_provider().get_tracer("app").start_as_current_span("request"):
        job_id = await client.enqueue(NewJob("t", queue="mail"))
    sent, request = spans.get_finished_spans()
    assert (sent.name, sent.kind) == ("enqueue t", SpanKind.PRODUCER)
    assert sent.parent == request.context
    assert dict(sent.attributes or {}) == {
        "messaging.system": "taskd",
        "messaging.operation.name": "enqueue",
        "messaging.operation.type": "send",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(int(job_id)),
        "taskd.task": "t",
    }
    assert parent_of(await carried(sql, job_id)) == name_of(sent)


async def test_a_batch_is_one_span_and_one_statement(
    client: Client, sql: Any, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = await client.enqueue_many(NewJob("t", queue="mail") for _ in range(3))
    [sent] = spans.get_finished_spans()
    assert sent.attributes is not None
    assert sent.attributes["messaging.batch.message_count"] == 3
    assert {parent_of(await carried(sql, each)) for each in ids} == {name_of(sent)}


async def test_the_context_goes_in_every_way_to_enqueue(
    client: Client, dsn: str, sql: Any, spans: InMemorySpanExporter
) -> None:
    tracer = trace.get_tracer_provider().get_tracer("app")
    job = NewJob("t", queue="mail")

    def without_loop() -> list[int]:
        with tracer.start_as_current_span("sync"), psycopg.connect(dsn) as to_json_type:
            return [client.enqueue_sync(job), client.enqueue_sync(job, conn=to_json_type)]

    ids = {"sync": await asyncio.to_thread(without_loop)}
    connection = await asyncpg.connect(dsn)
    with tracer.start_as_current_span("conn"):
        async with connection.transaction():
            ids["conn"] = [await client.enqueue(job, conn=connection)]
    await connection.close()
    async with client.buffered() as buffer:
        with tracer.start_as_current_span("buffer"):
            receipt = buffer.enqueue(job)
        ids["buffer"] = [await receipt]
    with tracer.start_as_current_span("workflow"):
        started = await chain(job, job).start(client=client)
    ids["workflow"] = list(started.jobs.values())
    roots = {
        each.name: f"{each.context.trace_id:032x}"
        for each in spans.get_finished_spans()
        if each.kind is SpanKind.INTERNAL
    }
    for name, born in ids.items():
        assert born
        for each in born:
            assert parent_of(await carried(sql, each))[0] == roots[name], name


async def test_what_is_given_by_hand_stays(
    client: Client, sql: Any, spans: InMemorySpanExporter
) -> None:
    given = {"traceparent": f"00-{1:032x}-{2:016x}-01", "tenant": "acme"}
    first = await client.enqueue(NewJob("t", queue="mail", metadata=given))
    second = await client.enqueue(NewJob("t", queue="mail", metadata={"tenant": "acme"}))
    assert await carried(sql, first) == given
    said = await carried(sql, second)
    assert set(said) == {"tenant", "traceparent"}


async def test_metadata_that_leaves_no_room_goes_without_a_context(
    client: Client, sql: Any, spans: InMemorySpanExporter
) -> None:
    full = {"x": "y" * 8180}
    job_id = await client.enqueue(NewJob("t", queue="mail", metadata=full))
    assert await carried(sql, job_id) == full


@pytest.mark.parametrize("asked", [False, True])
async def test_baggage_travels_only_if_it_is_asked_for(
    client: Client, sql: Any, spans: Any, monkeypatch: pytest.MonkeyPatch, asked: bool
) -> None:
    monkeypatch.setenv("OTEL_PROPAGATORS", "tracecontext,baggage" if asked else "tracecontext")
    token = context.attach(baggage.set_baggage("user", "ada"))
    try:
        job_id = await client.enqueue(NewJob("t", queue="mail"))
    finally:
        context.detach(token)
    assert (await carried(sql, job_id)).get("baggage") == ("user=ada" if asked else None)


async def test_what_was_not_written_is_an_error_of_its_span(
    client: Client, spans: InMemorySpanExporter
) -> None:
    with pytest.raises(Exception, match="published"):
        await client.enqueue(NewJob("nobody knows"))
    [sent] = spans.get_finished_spans()
    assert sent.status.status_code is StatusCode.ERROR
    assert (sent.attributes or {})["error.type"] == "UnknownTask"


async def test_without_a_provider_nothing_is_carried(client: Client, sql: Any) -> None:
    assert traces.tracer() is None
    assert await carried(sql, await client.enqueue(NewJob("t", queue="mail"))) is None


def test_nothing_of_it_is_imported_unless_the_app_does_so() -> None:
    code = (
        "import sys, taskd, taskd.worker, taskd.cli\n"
        "from taskd.client import traces\n"
        "assert traces.tracer() is None\n"
        "assert not [each for each in sys.modules if each.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "odd", [["a"], {"a": object()}, {"a": "\x00"}, {"a": "x" * 9000}, {"a": "\ud800"}, 7]
)
def test_metadata_that_cannot_be_kept_is_refused(odd: Any) -> None:
    with pytest.raises(InvalidJob, match="metadata"):
        NewJob("t", metadata=odd)


async def test_sql_gives_metadata_and_is_held_to_its_limits(sql: Any) -> None:
    job_id = await sql.fetchval(
        """SELECT taskd.enqueue('t', queue => 'q', metadata => '{"tenant": "acme"}')"""
    )
    assert await carried(sql, job_id) == {"tenant": "acme"}
    for odd, why in (("[]", "JSON object"), (json.dumps({"x": "y" * 9000}), "at most 8192 bytes")):
        with pytest.raises(asyncpg.InvalidParameterValueError, match=why):
            await sql.fetchval("SELECT taskd.enqueue('t', queue => 'q', metadata => $1)", odd)


async def test_a_processor_of_spans_that_raises_does_not_hide_what_was_enqueued(
    client: Client, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Raises(SpanProcessor):
        def on_end(self, span: Any) -> None:
            raise RuntimeError("not told")

    provider = TracerProvider()
    provider.add_span_processor(Raises())
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    job_id = await client.enqueue(NewJob("t", queue="mail"))
    assert "traceparent" in await carried(sql, job_id)
