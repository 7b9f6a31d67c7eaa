"""Attempts are spans of the trace in which their job was enqueued."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from opentelemetry import context, trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from taskd import Client
from taskd.core.jobs.backoff import Fixed
from taskd.core.jobs.job import Job, NewJob
from taskd.core.jobs.verdicts import Snooze
from taskd.core.tasks.batch import Item
from taskd.schedules import every, schedule
from taskd.store.jobs import jobs
from taskd.worker.running import traces
from taskd.workflows import pipeline, stage
from tests.worker import process_app
from tests.worker.conftest import Desk, until

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(autouse=True)
def all_the_time_there_is(request: pytest.FixtureRequest) -> None:
    """Nothing here is about time: each test waits for what must come."""
    if "desk" in request.fixturenames:
        request.getfixturevalue("patient")


@dataclass
class Thing:
    n: int = 1


ROOT = {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def runs(spans: InMemorySpanExporter) -> list[Any]:
    return [each for each in spans.get_finished_spans() if each.kind is SpanKind.CONSUMER]


async def test_an_attempt_is_a_span_behind_its_producer(
    desk: Desk, spans: InMemorySpanExporter
) -> None:
    @desk.task(queue="mail")
    async def works() -> None:
        await asyncio.sleep(0)
        with trace.get_tracer_provider().get_tracer("app").start_as_current_span("inner"):
            await asyncio.sleep(0)

    [job_id] = await desk.enqueue(NewJob("works", queue="mail", metadata=ROOT))
    started = await desk.start()
    await desk.settled(job_id)
    await started.stop()
    [run] = runs(spans)
    assert run.name == "run works"
    assert (run.context.trace_id, run.parent.span_id) == (0xABC, 0xDEF)
    assert [each.context.span_id for each in run.links] == [0xDEF]
    said = dict(run.attributes)
    assert said.pop("taskd.wait_s") >= 0
    assert said == {
        "messaging.system": "taskd",
        "messaging.operation.name": "run",
        "messaging.operation.type": "process",
        "messaging.destination.name": "mail",
        "messaging.message.id": str(job_id),
        "taskd.task": "works",
        "taskd.attempt": 1,
        "taskd.outcome": "done",
    }
    [inner] = [each for each in spans.get_finished_spans() if each.name == "inner"]
    assert inner.parent.span_id == run.context.span_id


async def test_every_kind_of_handler_has_its_span_and_works_within_it(
    desk: Desk, spans: InMemorySpanExporter
) -> None:
    def inner(name: str) -> None:
        with trace.get_tracer_provider().get_tracer("app").start_as_current_span(name):
            pass

    @desk.task()
    async def at_once() -> None:
        inner("at_once")

    @desk.task()
    def plain() -> None:
        inner("plain")

    @desk.task(transaction=True)
    async def commits(ctx: Any) -> None:
        inner("commits")

    @desk.task(batch=2)
    async def gathers(items: list[Item[Thing]]) -> None:
        pass

    desk.registry.add(process_app.adds)
    ids = await desk.enqueue(
        at_once.job(), plain.job(), commits.job(), gathers.job(Thing()), gathers.job(Thing()),
        process_app.adds.job(1),
    )  # fmt: skip
    started = await desk.start(app="tests.worker.process_app")
    rows = await desk.settled(*ids)
    await started.stop()
    assert {row["state"] for row in rows} == {"done"}
    found = {each.context.span_id: each for each in runs(spans)}
    # A process that does not start in time, on a starved machine, is an attempt with its span, too.
    done = [each.name for each in found.values() if each.attributes["taskd.outcome"] == "done"]
    assert sorted(done) == [
        "run adds", "run at_once", "run commits", "run gathers", "run gathers", "run plain",
    ]  # fmt: skip
    for each in spans.get_finished_spans():
        if each.kind is SpanKind.INTERNAL:
            assert found[each.parent.span_id].name == f"run {each.name}"


async def test_retries_are_spans_of_one_trace_and_say_what_went_wrong(
    desk: Desk, spans: InMemorySpanExporter
) -> None:
    @desk.task(backoff=Fixed(0.01), redact=["token"], max_attempts=2)
    async def fails(ctx: Any, token: str) -> None:
        await asyncio.sleep(0)
        if ctx.fence == 1:
            raise Snooze(0.01)
        raise RuntimeError(f"refused {token}")

    [job_id] = await desk.enqueue(
        NewJob("fails", '{"token": "hunter22"}', queue="default", metadata=ROOT)
    )
    started = await desk.start()
    await desk.settled(job_id)
    await started.stop()
    found = runs(spans)
    assert [each.attributes["taskd.outcome"] for each in found] == ["snoozed", "retried", "failed"]
    assert {each.context.trace_id for each in found} == {0xABC}
    snoozed, *failed = found
    assert snoozed.status.status_code is StatusCode.UNSET
    assert snoozed.events == ()
    for each in failed:
        assert each.status.status_code is StatusCode.ERROR
        assert each.status.description == "RuntimeError: refused ***"
        assert each.attributes["error.type"] == "RuntimeError"
        [event] = each.events
        assert event.name == "exception"
        assert event.attributes["exception.message"] == "refused ***"
        assert "in fails" in event.attributes["exception.stacktrace"]
    assert "hunter22" not in json.dumps([json.loads(each.to_json()) for each in found])


async def test_an_attempt_that_takes_too_long_says_so(
    desk: Desk, spans: InMemorySpanExporter
) -> None:
    @desk.task(timeout_s=0.05, max_attempts=1)
    async def slow() -> None:
        await asyncio.sleep(60)

    [job_id] = await desk.enqueue(slow.job())
    started = await desk.start()
    await desk.settled(job_id)
    await started.stop()
    [run] = runs(spans)
    assert (run.attributes["taskd.outcome"], run.attributes["error.type"]) == ("failed", "TimedOut")
    assert run.events == ()


async def test_what_a_handler_enqueues_and_what_follows_it_keep_the_trace(
    desk: Desk, spans: InMemorySpanExporter
) -> None:
    client = Client(desk.dsn)

    @desk.task()
    async def first() -> int:
        await client.enqueue(NewJob("second", queue="default"))
        return 1

    @desk.task()
    async def second() -> None:
        pass

    @desk.task()
    async def one() -> int:
        return 7

    @desk.task()
    async def two(n: int) -> None:
        assert n == 7

    await desk.enqueue(NewJob("first", queue="default", metadata=ROOT))
    tracer = trace.get_tracer_provider().get_tracer("app")
    with tracer.start_as_current_span("request") as request:
        line = pipeline("line", stage("one", one), stage("two", two), registry=None)
        await line.start(client=client)
    started = await desk.start()
    await until(lambda: len(runs(spans)) == 4)
    await started.stop()
    await client.close()
    by_name = {each.name: each.context.trace_id for each in runs(spans)}
    line = request.get_span_context().trace_id
    assert by_name == {
        "run first": 0xABC,
        "run second": 0xABC,
        "run one": line,
        "run two": line,
    }


async def test_a_schedule_begins_a_trace(desk: Desk, spans: InMemorySpanExporter) -> None:
    @desk.task(backoff=Fixed(0.01))
    async def ticks(ctx: Any) -> None:
        if ctx.attempt == 1:
            raise RuntimeError

    schedule("often", ticks, every(3600), catch_up="all", registry=desk.registry)
    started = await desk.start()
    await desk.sql.execute("UPDATE taskd.schedule SET next_at = now() - interval '1 s'")
    for firer in started.worker.parts.schedule_runners:
        firer.wakeup.set()
    await until(lambda: len(runs(spans)) == 2)
    await started.stop()
    [fired] = [each for each in spans.get_finished_spans() if each.name == "fire often"]
    assert (fired.kind, fired.parent) == (SpanKind.PRODUCER, None)
    assert fired.attributes["messaging.batch.message_count"] == 1
    for each in runs(spans):
        assert each.parent.span_id == fired.context.span_id


@pytest.mark.parametrize(
    "odd",
    [
        '{"traceparent": 7}',
        '{"traceparent": "nonsense", "tracestate": ["x"]}',
        '{"traceparent": {}}',
    ],
)
async def test_a_context_that_is_none_harms_no_other_job(
    desk: Desk, spans: InMemorySpanExporter, odd: str
) -> None:
    @desk.task()
    async def works() -> None:
        pass

    job_id = await desk.sql.fetchval(
        "SELECT taskd.enqueue('works', queue => 'default', metadata => $1)", odd
    )
    started = await desk.start()
    await desk.settled(job_id)
    await started.stop()
    [run] = runs(spans)
    assert run.parent is None
    assert run.links == ()


@pytest.mark.parametrize("when", ["on_start", "on_end"])
async def test_a_processor_of_spans_that_raises_fails_no_job(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    class Raises(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            assert when != "on_start"

        def on_end(self, span: Any) -> None:
            assert when != "on_end"

    provider = TracerProvider()
    provider.add_span_processor(Raises())
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    tries: list[int] = []

    @desk.task(backoff=Fixed(0.01))
    async def works(ctx: Any) -> None:
        tries.append(ctx.attempt)
        if ctx.attempt == 1:
            raise RuntimeError("once")

    job_id = await desk.sql.fetchval("SELECT taskd.enqueue('works', queue => 'default')")
    started = await desk.start()
    [row] = await desk.settled(job_id)
    assert await started.stop() == 0
    assert (row["state"], tries) == ("done", [1, 2])
    assert not desk.emitted.of("service.crashed")


def test_a_process_takes_an_odd_context_for_none(spans: InMemorySpanExporter) -> None:
    job = Job(1, 1, "t", "{}", 1, None, None, 100, 0, 0.0, 0.0, metadata='{"traceparent": 5}')
    before = context.get_current()
    traces.restore_trace_context(job)
    assert not trace.get_current_span().get_span_context().is_valid
    context.attach(before)


async def test_without_a_provider_attempts_know_of_nothing(desk: Desk) -> None:
    @desk.task()
    async def works() -> None:
        pass

    started = await desk.start()
    assert started.worker.parts.shared.registry is started.worker.registry
    assert works.around is None


async def test_metadata_stays_with_a_job_through_its_life(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def fails() -> None:
        raise RuntimeError

    said = {"tenant": "acme", "nothing": None}
    [job_id] = await desk.enqueue(NewJob("fails", queue="default", metadata=said))
    await desk.start()
    await desk.settled(job_id)
    assert await jobs.retry(desk.lane, [job_id], delay_s=3600.0) == [job_id]
    row = await desk.row(job_id)
    assert (row["state"], json.loads(row["metadata"])) == ("scheduled", said)
    await jobs.cancel(desk.lane, [job_id], "")
    row = await desk.row(job_id)
    assert (row["state"], json.loads(row["metadata"])) == ("cancelled", said)
