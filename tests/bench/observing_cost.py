"""What logs and traces cost: drain no-op jobs with each, and compare.

Each round drains the same jobs in four variants, one after the other: `off`; `lines`: each job logs
one line to a handler that discards it; `kept`: the same with keep_logs="all"; `traces`: the SDK of
OpenTelemetry with an exporter that discards spans, and a trace context in each job. The figures are
CPU microseconds of the worker process per job, and jobs per second; ratios compare with `off` of
the same round.

    TASKD_DSN=postgresql://... python -m tests.bench.observing_cost --jobs 20000 --rounds 5

It needs a migrated database of its own, because it truncates the job tables.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

import asyncpg

VARIANTS = ("off", "lines", "kept", "traces")
FILL = """
INSERT INTO taskd.job (queue, task, metadata)
SELECT 'told', 'nothing', $2::text::jsonb FROM generate_series(1, $1::integer)
"""
CONTEXT = '{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'


class Discard(logging.Handler):
    """Discards log lines."""

    def emit(self, record: logging.LogRecord) -> None:
        """Discard the line."""


async def drain(variant: str, jobs: int) -> dict[str, float]:
    """Run this many jobs; return the seconds and CPU seconds of this process."""
    from taskd.config import Settings
    from taskd.core.tasks.registry import Registry
    from taskd.core.tasks.task import Task
    from taskd.store.connections.database import Database
    from taskd.worker import Worker

    dsn = os.environ["TASKD_DSN"]
    connection = await asyncpg.connect(dsn)
    await connection.execute("TRUNCATE taskd.job, taskd.job_history")
    await connection.execute("DELETE FROM taskd.worker")
    await connection.execute(FILL, jobs, CONTEXT if variant == "traces" else None)
    await connection.execute("VACUUM ANALYZE taskd.job")
    log = logging.getLogger("told")
    log.addHandler(Discard())
    log.setLevel(logging.INFO)
    log.propagate = False
    if variant == "traces":
        _trace()

    async def nothing() -> None:
        pass

    async def says() -> None:
        log.info("done")

    registry = Registry()
    options: dict[str, Any] = {"keep_logs": "all"} if variant == "kept" else {}
    handler = says if variant in {"lines", "kept"} else nothing
    registry.add(Task(handler, name="nothing", queue="told", **options))
    worker = Worker(Settings(dsn=dsn), registry, Database({"dsn": dsn}), until_empty=True)
    began, cpu = time.perf_counter(), _cpu_s()
    await worker.run()
    ended = time.perf_counter() - began, _cpu_s() - cpu
    left = await connection.fetchval("SELECT count(*) FROM taskd.job")
    assert left == 0, left
    await connection.close()
    return {"seconds": ended[0], "cpu_s": ended[1]}


def _trace() -> None:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import (
        BatchSpanProcessor,
        SpanExporter,
        SpanExportResult,
    )

    class DiscardSpans(SpanExporter):
        def export(self, spans: Any) -> SpanExportResult:
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(DiscardSpans()))
    trace.set_tracer_provider(provider)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Measure, and print a table."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--jobs", type=int, default=20_000)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--one", help="one variant in this process")
    given = options.parse_args()
    if given.one:
        import uvloop

        print(json.dumps(uvloop.run(drain(given.one, given.jobs))))
        return
    rounds = [{each: _apart(each, given.jobs) for each in VARIANTS} for _ in range(given.rounds)]
    print(f"{'':8} {'us of CPU a job':>16} {'jobs/s':>8} {'CPU ratio':>10} {'time ratio':>11}")
    for each in VARIANTS:
        cpu = statistics.median(one[each]["cpu_s"] for one in rounds) / given.jobs * 1e6
        rate = given.jobs / statistics.median(one[each]["seconds"] for one in rounds)
        ratios = [
            statistics.median(one[each][what] / one["off"][what] for one in rounds)
            for what in ("cpu_s", "seconds")
        ]
        print(f"{each:8} {cpu:16.1f} {rate:8.0f} {ratios[0]:10.2f} {ratios[1]:11.2f}")


def _apart(variant: str, jobs: int) -> dict[str, float]:
    """Run one drain in a separate process."""
    module = "tests.bench.observing_cost"
    command = [
        sys.executable,
        "-m",
        module,
        "--one",
        variant,
        "--jobs",
        str(jobs),
    ]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(ended.stdout)
    return measured


if __name__ == "__main__":
    main()
