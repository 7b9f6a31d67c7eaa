"""/metrics: every metric, with bounded labels, in any state of the database."""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any

import pytest

from taskd import Retry
from taskd.core.outcomes.attempt_ends import INTERRUPTIONS
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.reading.metrics import Value, read
from taskd.web.metrics.database_metrics import CACHE_S, NOTHING, Figures, Reading
from taskd.web.metrics.exposition import write
from taskd.web.metrics.vocabulary import METRICS
from taskd.worker.health import Condition
from taskd.worker.observing import counters
from taskd.worker.observing.counters import Counters
from taskd.worker.processes.stats_socket import StatsClient, StatsServer
from taskd.worker.status import take
from tests.web.conftest import Serve, samples
from tests.worker.conftest import Desk, until


def job(task: str = "t", queue: str = "q", wait_s: float = 0.2) -> Any:
    made: Any = type("J", (), {})()
    made.id, made.task, made.queue, made.wait_s, made.attempt = 1, task, queue, wait_s, 1
    return made


def written(counted: Counters) -> dict[str, float]:
    snapshot = take(1, Condition(), counted.counted, None)
    return samples(write([snapshot], None).decode())


def families(text: str) -> dict[str, tuple[str, ...]]:
    """The labels of each metric that has samples, without the labels that a histogram adds."""
    found = {}
    for line in text.splitlines():
        match = re.match(r"(\w+?)(?:_bucket|_sum|_count)?(?:\{(.*)\})? ", line)
        if line.startswith("#") or match is None:
            continue
        name = line.partition("{")[0].partition(" ")[0]
        name = name if name in METRICS else match[1]
        labels = set(re.findall(r'(\w+)="', match[2] or "")) - {"le"}
        found[name] = tuple(sorted(labels))
    return found


# What is counted.


async def test_attempts_are_counted_by_how_they_ended(desk: Desk, serve: Serve) -> None:
    @desk.task()
    async def fine() -> None: ...

    @desk.task(max_attempts=1)
    async def hopeless() -> None:
        raise ValueError

    @desk.task()
    async def flaky(ctx: Any) -> None:
        if ctx.attempt == 1:
            raise Retry(delay_s=0)

    async with serve() as served:
        ids = await desk.enqueue(*[fine.job() for _ in range(3)], hopeless.job(), flaky.job())
        await desk.settled(*ids)
        found = await served.metrics()
        events = {name for name in found if name.startswith("taskd_events_total")}

    def attempts(task: str, outcome: str) -> float | None:
        labels = f'outcome="{outcome}",process="1",queue="default",task="{task}"'
        return found.get(f"taskd_attempts_total{{{labels}}}")

    assert (attempts("fine", "done"), attempts("hopeless", "failed")) == (3, 1)
    assert (attempts("flaky", "retried"), attempts("flaky", "done")) == (1, 1)
    run = 'taskd_attempt_run_seconds_count{process="1",queue="default",task="flaky"}'
    assert found[run] == 2
    waited = 'taskd_job_wait_seconds_count{process="1",queue="default"}'
    claimed = 'taskd_claim_jobs_sum{process="1",queue="default"}'
    assert found[waited] == found[claimed] == 6
    assert found['taskd_ack_jobs_sum{process="1"}'] == 6
    assert 'taskd_events_total{event="job.failed",process="1"}' in events
    assert any('source="notify"' in name and found[name] for name in found)


async def test_ended_jobs_are_counted_by_their_attempts(desk: Desk, serve: Serve) -> None:
    @desk.task(max_attempts=3)
    async def flaky(ctx: Any, succeeds: bool) -> None:
        if ctx.attempt < 3 or not succeeds:
            raise Retry(delay_s=0)

    @desk.task()
    async def fine() -> None: ...

    async with serve() as served:
        jobs = (flaky.job(succeeds=True), flaky.job(succeeds=False), fine.job())
        await desk.settled(*await desk.enqueue(*jobs))
        found = await served.metrics()

    def upto(task: str, bound: str) -> float | None:
        labels = f'le="{bound}",process="1",queue="default",task="{task}"'
        return found.get(f"taskd_job_attempts_bucket{{{labels}}}")

    assert [upto("flaky", bound) for bound in ("1.0", "2.0", "3.0", "+Inf")] == [0, 0, 2, 2]
    assert [upto("fine", bound) for bound in ("1.0", "3.0", "+Inf")] == [1, 1, 1]
    labels = 'process="1",queue="default"'
    assert found[f'taskd_job_attempts_sum{{{labels},task="flaky"}}'] == 6
    assert found[f'taskd_job_attempts_sum{{{labels},task="fine"}}'] == 1


async def test_a_worker_without_an_endpoint_counts_nothing(desk: Desk) -> None:
    @desk.task()
    async def fine() -> None: ...

    started = await desk.start()
    await desk.settled(*await desk.enqueue(fine.job()))
    assert started.worker.counters is None
    assert started.worker.status().counted.tasks == []


def test_names_of_tasks_without_end_make_labels_that_have_one() -> None:
    counted = Counters(["q"])
    for number in range(counters.TASKS_MAX * 2):
        counted.done(job(f"t{number}"), 0.1)
        counted.done(job(f"t{number}"), 0.1)
    found = written(counted)
    tasks = {name for name in found if name.startswith("taskd_attempts_total")}
    assert len({re.findall('task="(.*?)"', name)[0] for name in tasks}) == counters.TASKS_MAX + 1
    other = 'taskd_attempts_total{outcome="done",process="1",queue="q",task="other"}'
    assert found[other] == 2 * counters.TASKS_MAX


@pytest.mark.parametrize("value", [0, 0.0005, 0.001, 0.0011, 0.2, 1800, 1801, 1e9])
def test_a_value_lies_in_the_buckets_that_end_at_it_or_above_it(value: float) -> None:
    counted = Counters(["q"])
    counted.done(job(), value)
    counted.claimed("q", [job(wait_s=value)], value)
    found = written(counted)
    for metric, labels in (
        ("taskd_attempt_run_seconds", ',process="1",queue="q",task="t"'),
        ("taskd_job_wait_seconds", ',process="1",queue="q"'),
        ("taskd_claim_seconds", ',process="1",queue="q"'),
    ):
        for name, number in found.items():
            if match := re.match(rf'{metric}_bucket{{le="(.*?)"{re.escape(labels)}', name):
                assert number == (value <= float(match[1])), name
        assert found[f"{metric}_sum{{{labels[1:]}}}"] == pytest.approx(value)


def test_what_a_scrape_writes_does_not_change_meanwhile() -> None:
    counted = Counters(["q"])
    counted.done(job(), 0.1)
    found = counted.copy()
    assert found == counted.counted
    counted.done(job(), 0.1)
    counted.on_event("job.failed", {"queue": "q", "task": "t", "duration_ms": 5})
    assert (found.tasks[0].done, found.tasks[0].outcomes) == (1, {})
    assert counted.copy().tasks[0].done == 2


def test_every_reason_of_an_interruption_is_counted() -> None:
    counted = Counters(["q"])
    for why in INTERRUPTIONS:
        fields = {"queue": "q", "task": "t", "why": why, "duration_ms": 5}
        counted.on_event("job.interrupted", fields)
    name = "taskd_interrupted_attempts_total"
    found = {key: number for key, number in written(counted).items() if key.startswith(name)}
    assert found == {f'{name}{{process="1",why="{why}"}}': 1.0 for why in INTERRUPTIONS}


def test_the_waits_of_a_batch_are_those_of_its_jobs() -> None:
    waits = [0.0, 0.005, 0.0051, 0.3, 0.3, 7200, 7201, 1e9]
    together, apart = Counters(["q"]), Counters(["q"])
    together.claimed("q", [job(wait_s=each) for each in waits], 0.1)
    for each in waits:
        apart.claimed("q", [job(wait_s=each)], 0.1)
    assert together.counted.queues[0].wait == apart.counted.queues[0].wait


def test_odd_names_of_tasks_are_written_so_that_they_can_be_read() -> None:
    counted = Counters(["q"])
    for name in ('a"b', "a\\b", "é{}=,", "x" * 200):
        counted.done(job(name), 0.1)
    assert len([name for name in written(counted) if 'outcome="done"' in name]) == 4


# Metrics of the database.


async def test_the_database_shows_what_waits_and_what_is_wrong(
    desk: Desk, serve: Serve, sql: Any, other: Any
) -> None:
    @desk.task(queue="email")
    async def mail() -> None: ...

    @desk.task(queue="slow")
    async def waits() -> None:
        await asyncio.sleep(60)

    async with serve(queues=("slow",), concurrency=1) as served:
        await desk.enqueue(waits.job(), *[mail.job() for _ in range(3)], mail.job().after(3600))
        await desk.emitted.wait("job.started")
        await sql.execute(
            "UPDATE taskd.job SET run_at = now() - interval '1 hour' WHERE state = 'queued'"
        )
        await sql.execute(
            "UPDATE taskd.job SET started_at = now() - interval '2 hours' WHERE state = 'running'"
        )
        await sql.execute(
            "INSERT INTO taskd.job (queue, task, state, run_at, attempt) "
            "VALUES ('email', 't', 'scheduled', now() + interval '1 hour', 2)"
        )
        await sql.execute(
            "INSERT INTO taskd.job_history (id, enqueued_at, run_at, finished_at, expires_at, "
            "fence, state, priority, attempt, crashes, interrupts, queue, task, args, errors) "
            "SELECT 1000 + n, now(), now(), now(), now() + interval '1 day', 1, "
            "(CASE WHEN n = 3 THEN 'cancelled' ELSE 'failed' END)::taskd.job_state, 100, 1, 0, 0, "
            "CASE WHEN n = 1 THEN 'email' ELSE 'gone' END, 't', '{}', '[]' "
            "FROM generate_series(1, 4) AS n"
        )
        await sql.execute(
            "INSERT INTO taskd.queue (name, paused_at) VALUES ('email', now() - interval '3 hours')"
        )
        await sql.execute(
            "UPDATE taskd.task SET paused_at = now() - interval '4 hours' WHERE name = 'mail'"
        )
        snapshot = other.transaction(isolation="repeatable_read")
        await snapshot.start()
        await other.fetchval("SELECT count(*) FROM taskd.job")
        found = await served.metrics()
        await snapshot.rollback()
    assert found['taskd_jobs{queue="email",state="queued"}'] == 3
    assert found['taskd_jobs{queue="email",state="scheduled"}'] == 1
    assert found['taskd_jobs{queue="email",state="retrying"}'] == 1
    assert found['taskd_jobs{queue="slow",state="retrying"}'] == 0
    assert found['taskd_failed_jobs{queue="email"}'] == 1
    assert found['taskd_failed_jobs{queue="gone"}'] == 2
    assert found['taskd_failed_jobs{queue="slow"}'] == 0
    assert found['taskd_jobs{queue="slow",state="running"}'] == 1
    assert found['taskd_jobs{queue="slow",state="queued"}'] == 0
    assert found["taskd_jobs_sampled_ratio"] == 1
    assert 3600 <= found['taskd_oldest_due_seconds{queue="email"}'] < 3700
    assert found['taskd_oldest_due_seconds{queue="slow"}'] == 0
    assert 7200 <= found['taskd_running_longest_seconds{queue="slow"}'] < 7300
    assert found['taskd_queue_workers{queue="email"}'] == 0
    assert found['taskd_queue_workers{queue="slow"}'] == 1
    assert 10800 <= found['taskd_queue_paused_seconds{queue="email"}'] < 10900
    assert found['taskd_queue_paused_seconds{queue="slow"}'] == 0
    assert 14400 <= found['taskd_task_paused_seconds{task="mail"}'] < 14500
    assert (found['taskd_workers{state="live"}'], found['taskd_workers{state="silent"}']) == (1, 0)
    assert 0 < found["taskd_held_snapshot_seconds"] < 60
    assert found["taskd_database_connections"] >= 8
    assert found["taskd_database_connections_max"] > found["taskd_database_connections"]
    assert found['taskd_dead_tuples{table="job"}'] >= 0
    assert found["taskd_database_up"] == 1


async def test_a_large_table_is_sampled_and_the_counts_are_scaled(
    sql: Any, database: Database
) -> None:
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, run_at)"
        " SELECT CASE WHEN n <= 50 THEN 'small' ELSE 'q' || n % 2 END, 't',"
        " (CASE WHEN n % 8 > 1 THEN 'queued' ELSE 'scheduled' END)::taskd.job_state,"
        " now() + interval '1 hour' FROM generate_series(1, 40050) AS n"
    )
    lane = Lane(database, "test")
    blocks = await sql.fetchval("SELECT pg_relation_size('taskd.job') / 8192")
    sampled = jobs_of(
        [Value(*row) for row in await lane.fetch("read_metrics", blocks // 2, 100, 9)]
    )
    exact = jobs_of([Value(*row) for row in await lane.fetch("read_metrics", blocks, 100, 9)])
    await lane.close()
    assert 0.49 < sampled.pop(("", "")) <= 0.5
    assert exact.pop(("", "")) == 1
    assert exact["small", "queued"] == sampled["small", "queued"] > 30
    assert exact["q0", "queued"] == exact["q1", "queued"] == 15_000
    for key in ("q0", "queued"), ("q1", "queued"), ("q1", "scheduled"):
        assert 0.7 < sampled[key] / exact[key] < 1.3


def jobs_of(values: list[Value]) -> dict[tuple[str, str], float]:
    """Counts by queue and state; how much was read, by nothing."""
    return {
        (each.first or "", each.second or ""): each.value
        for each in values
        if each.metric in {"jobs", "jobs_sampled_ratio"}
    }


async def test_the_oldest_due_job_is_found_behind_newer_and_more_urgent_ones(
    sql: Any, database: Database
) -> None:
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, priority, run_at)"
        " SELECT 'q' || n % 3, 't', n % 5, now() - make_interval(secs => n)"
        " FROM generate_series(1, 1500) AS n"
    )
    lane = Lane(database, "test")
    found = {
        each.first: each.value for each in await read(lane) if each.metric == "oldest_due_seconds"
    }
    await lane.close()
    assert {queue: round(value, -1) for queue, value in found.items()} == dict.fromkeys(
        ("q0", "q1", "q2"), 1500
    )


async def test_several_scrapes_read_the_database_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures, reads = Figures(database), 0

    async def counted(lane: Lane) -> list[Value]:
        nonlocal reads
        reads += 1
        return await read(lane)

    monkeypatch.setattr("taskd.store.reading.metrics.read", counted)
    together = await asyncio.gather(*(figures.read() for _ in range(5)))
    again = await figures.read()
    assert reads == 1
    assert all(each is again and each.up for each in together)
    monkeypatch.setattr("taskd.web.metrics.database_metrics.CACHE_S", 0.0)
    figures._until = 0.0
    await figures.read()
    assert (reads, CACHE_S > 1) == (2, True)
    await figures.close()


async def test_a_statement_that_takes_too_long_is_not_waited_for(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = asyncio.Event()

    async def slow(_lane: Lane) -> list[Value]:
        await done.wait()
        return []

    monkeypatch.setattr("taskd.store.reading.metrics.read", slow)
    monkeypatch.setattr("taskd.web.metrics.database_metrics.WAIT_S", 0.05)
    figures = Figures(database)
    assert await figures.read() is NOTHING
    assert await figures.read() is NOTHING
    done.set()
    await until(lambda: figures._read is None)
    assert (await figures.read()).up
    await figures.close()


async def test_a_scrape_may_leave_the_database_out(serve: Serve) -> None:
    async with serve() as served:
        found = await served.metrics("/metrics?database=off")
    assert not [name for name in found if name.partition("{")[0].rstrip() in DATABASE]
    assert 'taskd_process_ready{process="1"}' in found


DATABASE = {name for name, metric in METRICS.items() if metric.of_database}


# The vocabulary.


async def test_every_metric_is_written_with_its_labels(desk: Desk, serve: Serve, sql: Any) -> None:
    @desk.task()
    async def fine() -> None: ...

    async with serve() as served:
        await desk.settled(*await desk.enqueue(fine.job()))
        served.worker.counters.counted.crashes["acker"] = 1
        served.worker.parts.thread_slots.lose("fine")
        _, text = await served.get("/metrics")
    samples = families(text)
    labels = {
        "task_paused_seconds": "task",
        "schedule_late_seconds": "schedule",
        "schedule_waiting_seconds": "schedule",
        "schedule_late_jobs": "schedule",
        "schedule_ended_late_jobs": "schedule",
        "schedule_expired_jobs": "schedule",
        "running_longest_seconds": "queue",
    }
    rest = write([], Reading(True, [Value(name, "x", None, 1.0) for name in labels], 0.1)).decode()
    samples |= families(rest)
    wanted = {name: tuple(sorted(each.all_labels)) for name, each in METRICS.items()}
    assert samples == wanted


def test_names_end_in_their_unit_and_counters_in_total() -> None:
    units = ("_seconds", "_ratio", "_jobs", "_jobs_total", "_tuples", "_connections", "_attempts")
    for name, each in METRICS.items():
        assert name.startswith("taskd_")
        assert (each.kind == "counter") == name.endswith("_total"), name
        if each.kind == "histogram":
            assert name.endswith(units), name
        if "how long" in each.help.lower() or "age of" in each.help:
            assert name.endswith("_seconds"), name


# Several processes.


async def test_a_child_answers_its_parent_over_its_own_pair_of_sockets() -> None:
    asker = StatsClient()
    counted = Counters(["q"])
    counted.done(job(), 0.1)
    answerer = StatsServer(
        os.dup(asker.theirs), lambda: take(3, Condition("", ""), counted.counted, None)
    )
    asker.close_theirs()
    running = asyncio.create_task(answerer.run())
    answers = await asyncio.gather(*(asker.ask() for _ in range(3)))
    assert [each.process for each in answers if each] == [3, 3, 3]
    assert answers[0].counted == counted.counted  # type: ignore[union-attr]
    answerer.stop()
    await running
    asker.close()


async def test_an_answer_that_comes_too_late_is_not_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("taskd.worker.processes.stats_socket.ANSWER_S", 0.1)
    asker = StatsClient()
    answered = 0

    def slowly() -> Any:
        nonlocal answered
        answered += 1
        if answered == 1:
            time.sleep(0.3)
        return take(answered, Condition(), Counters(["q"]).counted, None)

    answerer = StatsServer(os.dup(asker.theirs), slowly)
    asker.close_theirs()
    running = asyncio.create_task(answerer.run())
    assert await asker.ask() is None
    second = await asker.ask()
    assert second is not None
    assert second.process == 2
    answerer.stop()
    await running
    assert await asker.ask() is None, "it has gone"
    asker.close()
