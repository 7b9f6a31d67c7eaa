"""/metrics: counters of the processes and values from the database, in Prometheus' format.

Processes count in plain numbers, and each scrape formats these with prometheus-client. Counters of
prometheus-client are not used, because they take a lock at each change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Executor
from itertools import accumulate
from typing import Any, cast

from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from taskd.core.outcomes.attempt_ends import INTERRUPTIONS
from taskd.store.reading.metrics import Value
from taskd.web.app import RequestLimit
from taskd.web.metrics.database_metrics import Figures, Reading
from taskd.web.metrics.vocabulary import METRICS, PREFIX
from taskd.worker.observing.counters import (
    ATTEMPT_BOUNDS,
    BATCH_BOUNDS,
    RUN_BOUNDS_S,
    STATEMENT_BOUNDS_S,
    WAIT_BOUNDS_S,
)
from taskd.worker.observing.loop_monitor import LAG_BOUNDS_S
from taskd.worker.status import WorkerStatus

ReadStatuses = Callable[[], Awaitable[Sequence[WorkerStatus]]]
# Maximum number of scrapes that are answered at a time: enough for two Prometheus servers.
SCRAPES_MAX = 16
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Outcomes and events that are exposed as 0 before the first one: otherwise an alert does not see
# the first increase.
OUTCOMES_FROM_START = ("retried", "failed")
EVENTS_FROM_START = (
    *("schedule.failed", "schedule.rows_left_out", "schedule.stalled", "schedules.withdrawn"),
    *("workers.declared_dead", "loop.blocked"),
)
SOURCES = ("notify", "idle_poll", "time")
STATES = ("blocked", "scheduled", "retrying", "queued", "running")


def metrics_route(statuses: ReadStatuses, figures: Figures, thread: Executor) -> Route:
    """Return the route of /metrics; with `?database=off` the database is not read.

    Args:
        statuses: reads the counters of the processes.
        figures: reads the database.
        thread: formats the text, one scrape at a time, so that the event loop is free for handlers.
    """

    async def metrics(request: Request) -> Response:
        reads_database = request.query_params.get("database") != "off"
        status, reading = await asyncio.gather(
            statuses(), figures.read() if reads_database else _nothing()
        )
        text = await asyncio.get_running_loop().run_in_executor(thread, write, status, reading)
        return Response(text, headers={"content-type": CONTENT_TYPE})

    few = Middleware(RequestLimit, requests_max=SCRAPES_MAX, what="metrics")
    return Route("/metrics", metrics, middleware=[few])


async def _nothing() -> None:
    return None


def write(statuses: Sequence[WorkerStatus], reading: Reading | None) -> bytes:
    """Return all metrics as text."""
    page = Page()
    for each in statuses:
        _process(page, each)
    if reading is not None:
        _database(page, reading)
    text: bytes = generate_latest(cast("Any", page))
    return text


class Page:
    """The metric families of one scrape, as a collector of prometheus-client.

    A family is made when its first sample is added.
    """

    def __init__(self) -> None:
        self._families: dict[str, Metric] = {}

    def collect(self) -> Iterable[Metric]:
        """Yield all families, in the order of the vocabulary."""
        return [self._families[name] for name in METRICS if name in self._families]

    def add(self, name: str, value: float, *labels: str) -> None:
        """Add one sample of a counter or a gauge."""
        family = self._family(name)
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)

    def add_histogram(
        self,
        name: str,
        bounds: Sequence[float],
        counts: Sequence[float],
        total: float,
        *labels: str,
    ) -> None:
        """Add one histogram: `counts` has one more entry than `bounds`."""
        family = self._family(name)
        assert isinstance(family, HistogramMetricFamily)
        upto = list(accumulate(counts))
        names = [*map(floatToGoString, bounds), "+Inf"]
        family.add_metric(labels, list(zip(names, upto, strict=True)), total)

    def _family(self, name: str) -> Metric:
        if name not in self._families:
            kind = METRICS[name]
            self._families[name] = KINDS[kind.kind](name, kind.help, labels=kind.all_labels)
        return self._families[name]


KINDS: dict[str, Any] = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}
JOBS = {
    "jobs.rescued": "taskd_rescued_jobs_total",
    "jobs.reconciled": "taskd_reconciled_jobs_total",
    "jobs.expired": "taskd_expired_jobs_total",
    "task.unknown": "taskd_unknown_task_jobs_total",
    "jobs.parked": "taskd_parked_jobs_total",
}


def _process(page: Page, status: WorkerStatus) -> None:
    me, counted = str(status.process), status.counted
    for task in counted.tasks:
        outcomes = dict.fromkeys(OUTCOMES_FROM_START, 0) | task.outcomes
        for outcome, number in {"done": task.done, **outcomes}.items():
            page.add("taskd_attempts_total", number, me, task.queue, task.task, outcome)
        of = (me, task.queue, task.task)
        _histogram(page, "taskd_attempt_run_seconds", RUN_BOUNDS_S, task.run, *of)
        _histogram(page, "taskd_job_attempts", ATTEMPT_BOUNDS, task.attempts_per_job(), *of)
    for queue in counted.queues:
        name = queue.queue
        _histogram(page, "taskd_job_wait_seconds", WAIT_BOUNDS_S, queue.wait, me, name)
        _histogram(page, "taskd_claim_jobs", BATCH_BOUNDS, queue.batches, me, name)
        _histogram(page, "taskd_claim_seconds", STATEMENT_BOUNDS_S, queue.claims, me, name)
        for source in SOURCES:
            number = queue.wakeups.get(source, 0)
            page.add("taskd_wakeups_total", number, me, name, source)
    _histogram(page, "taskd_ack_jobs", BATCH_BOUNDS, counted.ack_batches, me)
    _histogram(page, "taskd_ack_seconds", STATEMENT_BOUNDS_S, counted.acks, me)
    for event, metric in JOBS.items():
        page.add(metric, counted.jobs.get(event, 0), me)
    for event, number in sorted((dict.fromkeys(EVENTS_FROM_START, 0) | counted.events).items()):
        page.add("taskd_events_total", number, me, event)
    for why in INTERRUPTIONS:
        number = counted.interruptions.get(why, 0)
        page.add("taskd_interrupted_attempts_total", number, me, why)
    for service, number in sorted(counted.crashes.items()):
        page.add("taskd_service_crashes_total", number, me, service)
    _now(page, status)


def _now(page: Page, status: WorkerStatus) -> None:
    """Add the present state of a process."""
    me = str(status.process)
    for metric, by_queue in {
        "taskd_attempts_running": status.running,
        "taskd_attempts_limit": status.limits,
        "taskd_jobs_buffered": status.waiting,
    }.items():
        for queue, number in by_queue.items():
            page.add(metric, number, me, queue)
    for task, number in status.lost_threads.items():
        page.add("taskd_threads_lost", number, me, task)
    page.add("taskd_acks_unwritten", status.unwritten, me)
    if status.lags:
        page.add_histogram("taskd_loop_lag_seconds", LAG_BOUNDS_S, status.lags, status.lag_s, me)
        page.add("taskd_lease_left_seconds", status.trusted_s, me)
    page.add("taskd_process_ready", not status.condition.unready, me)
    page.add("taskd_process_stuck", bool(status.condition.stuck), me)
    page.add("taskd_process_up_seconds", status.up_s, me)


def _database(page: Page, reading: Reading) -> None:
    page.add("taskd_database_up", reading.up)
    if not reading.up:
        return
    page.add("taskd_database_read_seconds", reading.took_s)
    for value in (*reading.values, *_zeros(reading.values)):
        labels = [each for each in (value.first, value.second) if each is not None]
        page.add(PREFIX + value.metric, value.value, *labels)


def _zeros(values: Sequence[Value]) -> Iterable[Value]:
    """Yield a 0 for each missing state of a queue: without a sample, charts do not drop to 0."""
    jobs = {(each.first, each.second) for each in values if each.metric == "jobs"}
    waiting = {each.first for each in values if each.metric == "oldest_due_seconds"}
    queues = {each.first for each in values if each.metric == "queue_workers"}
    for queue in sorted(queues | {queue for queue, _ in jobs}, key=str):
        yield from (
            Value("jobs", queue, state, 0.0) for state in STATES if (queue, state) not in jobs
        )
        if queue not in waiting:
            yield Value("oldest_due_seconds", queue, None, 0.0)


def _histogram(
    page: Page, name: str, bounds: Sequence[float], found: Sequence[float], *labels: str
) -> None:
    """Add a histogram from `found`: its counts, followed by its sum (counters.py)."""
    page.add_histogram(name, bounds, found[:-1], found[-1], *labels)
