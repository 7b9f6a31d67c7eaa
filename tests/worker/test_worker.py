"""The worker as a whole: until-empty, services that crash, starting, draining, quiet, reload."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from taskd.config import Settings
from taskd.core.jobs.backoff import Fixed
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.verdicts import Snooze
from taskd.core.tasks.registry import Registry
from taskd.errors import AppError, ConfigError
from taskd.store import queues, workers
from taskd.worker.claiming import consumer
from taskd.worker.claiming.quarantine import Quarantine
from taskd.worker.starting import startup
from taskd.worker.starting.served_queues import queue_limits
from taskd.worker.upkeep import promoter
from taskd.worker.upkeep.pruner import Pruner
from taskd.worker.upkeep.reconciler import Reconciler
from taskd.worker.upkeep.rescuer import Rescuer
from taskd.worker.upkeep.timer import Timer
from tests.worker.conftest import Desk, Emitted, until


async def test_until_empty_ends_when_there_is_nothing_to_run_soon(desk: Desk) -> None:
    tries: list[int] = []

    @desk.task(max_attempts=2)
    async def flaky(ctx: Any) -> None:
        tries.append(ctx.attempt)
        if ctx.attempt == 1:
            raise ValueError

    flaky.backoff = Fixed(0.3)

    @desk.task(backoff=Fixed(3600))
    async def later() -> None:
        raise ValueError

    @desk.task(queue="paused")
    async def rests() -> None: ...

    await queues.pause(desk.lane, ["paused"], None, None)
    await desk.enqueue(
        *(flaky.job() for _ in range(5)),
        later.job(),
        later.job(),
        rests.job(),
        rests.job().after(100),
        flaky.job().after(3600),
        NewJob("unknown", queue="default"),
        NewJob("elsewhere", queue="nobody"),
    )
    worker = desk.worker(until_empty=True)
    assert await worker.end() == 0
    assert worker.worker.report.left == {"future": 1, "paused": 2, "unknown": 1, "later_retries": 2}
    assert worker.worker.report.why == "empty"
    assert sorted(tries) == [1] * 5 + [2] * 5


async def test_the_timers_of_a_worker_are_exact_while_it_runs(desk: Desk) -> None:
    slack_ns = Path(f"/proc/{threading.get_native_id()}/timerslack_ns")
    found: list[str] = []

    @desk.task()
    async def sleeps() -> None:
        found.append(slack_ns.read_text().strip())

    had = slack_ns.read_text().strip()
    await desk.enqueue(sleeps.job())
    await desk.worker(until_empty=True).end()
    assert found == ["1000"]
    assert slack_ns.read_text().strip() == had != "1000"


async def test_a_worker_works_where_its_timers_cannot_be_made_exact(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(path: Path, *_: Any, **__: Any) -> int:
        tried.append(path.name)
        raise PermissionError

    @desk.task()
    async def quick() -> None: ...

    tried: list[str] = []
    monkeypatch.setattr(Path, "write_text", refuses)
    await desk.enqueue(quick.job())
    await desk.worker(until_empty=True).end()
    assert tried == ["timerslack_ns"] * 2
    assert len(desk.emitted.of("job.done")) == 1


async def test_until_empty_says_whether_a_job_failed(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def fails() -> None:
        raise ValueError

    assert await desk.worker(until_empty=True).end() == 0
    await desk.enqueue(fails.job())
    worker = desk.worker(until_empty=True)
    assert await worker.end() == 1
    assert worker.worker.report.left == {}
    # It failed in an earlier run.
    assert await desk.worker(until_empty=True).end() == 0


async def test_until_empty_waits_for_jobs_that_run_elsewhere(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.other_worker(42)
    (job,) = await desk.enqueue(quick.job())
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = 42, fence = 1, attempt = 1"
    )
    worker = desk.worker(until_empty=True, lease_s=1.0)
    await worker.ready()
    await until(lambda: bool(desk.emitted.of("queue.claimed", count=0)))
    assert not worker.task.done()
    # Its worker is lost: rescued and run here.
    await desk.sql.execute("DELETE FROM taskd.worker WHERE id = 42")
    assert await worker.end() == 0
    row = await desk.row(job)
    assert (row["crashes"], row["interrupts"], row["attempt"]) == (0, 1, 1)


async def test_until_empty_waits_for_a_snoozed_job_although_its_attempt_did_not_count(
    desk: Desk,
) -> None:
    @desk.task()
    async def naps(ctx: Any) -> None:
        if ctx.fence == 1:
            raise Snooze(1.0)

    (job,) = await desk.enqueue(naps.job())
    worker = desk.worker(until_empty=True)
    assert await worker.end() == 0
    assert (await desk.row(job))["state"] == "done"


async def test_until_empty_counts_a_job_that_was_failed_for_its_crashes(desk: Desk) -> None:
    @desk.task()
    async def pill() -> None: ...

    (job,) = await desk.enqueue(pill.job())
    await desk.other_worker(42)
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = 42, fence = 3, attempt = 3, "
        "crashes = 2, isolated = true"
    )
    await desk.sql.execute(
        "UPDATE taskd.worker SET died_at = now(), crashed = true, suspects = $1 WHERE id = 42",
        [job],
    )
    worker = desk.worker(until_empty=True, lease_s=1.0)
    assert await worker.end() == 1
    assert worker.worker.report.jobs["failed"] == 1


async def test_a_history_that_somebody_altered_stops_its_upkeep_only(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    # The last partition ahead: the one of a day that ends at midnight is not needed any more.
    leaf = await desk.sql.fetchval(
        "SELECT max(inhrelid::regclass::text) FROM pg_inherits "
        "WHERE inhparent = 'taskd.job_history'::regclass AND inhrelid::regclass::text ~ '_20'"
    )
    await desk.sql.execute(f"ALTER TABLE {leaf} RENAME TO renamed_by_hand")
    worker = await desk.start()
    found = await desk.emitted.wait("upkeep.failed")
    assert found[0]["what"] == "make partitions of the history"
    assert not desk.emitted.of("service.crashed")
    (job,) = await desk.enqueue(quick.job())
    await desk.settled(job)
    assert await worker.stop() == 0


SERVICES = {
    "timer": Timer, "rescuer": Rescuer, "promoter": promoter.Promoter,
    "reconciler": Reconciler, "pruner": Pruner,
    "quarantine": Quarantine,
}  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_that_crashes_is_started_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    @desk.task(max_attempts=1)
    async def waits() -> None:
        await asyncio.sleep(0.2)

    kind: Any = SERVICES[name]
    tick, crashed = kind.tick, []

    async def crashing(self: Any) -> Any:
        if len(crashed) < 2:
            crashed.append(name)
            raise RuntimeError("on purpose")
        return await tick(self)

    monkeypatch.setattr(kind, "tick", crashing)
    one = await desk.enqueue(waits.job(), waits.job().after(0.3))
    worker = await desk.start()
    said = await desk.emitted.wait("service.crashed", 2, service=name)
    assert said[0]["error"] == "RuntimeError: on purpose"
    rows = await desk.settled(*one)
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
    assert await worker.stop() == 0


async def test_consumer_acker_and_listener_survive_a_crash(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd.worker.claiming.listener import Listener
    from taskd.worker.finishing.acker import Acker

    crashed: list[Any] = []

    def once(kind: Any, method: str) -> None:
        real = getattr(kind, method)

        async def crashing(self: Any, *args: Any) -> Any:
            if kind not in crashed:
                crashed.append(kind)
                raise RuntimeError("on purpose")
            return await real(self, *args)

        monkeypatch.setattr(kind, method, crashing)

    @desk.task(max_attempts=1)
    async def quick(n: int) -> int | None:
        return n or None

    once(consumer.Consumer, "_claim")
    once(Acker, "_write")
    once(Listener, "_listen")
    ids = await desk.enqueue(*(quick.job(n % 2) for n in range(200)))
    await desk.start()
    rows = await desk.settled(*ids)
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
    assert {had["service"] for had in desk.emitted.of("service.crashed")} == {
        "acker", "consumer:default", "listener:default"
    }  # fmt: skip
    assert not desk.emitted.of("job.lost")


async def test_a_service_that_keeps_crashing_stops_the_worker(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd.worker.services import supervisor

    @desk.task()
    async def quick() -> None: ...

    async def crashing(_: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(Rescuer, "tick", crashing)
    monkeypatch.setattr(supervisor, "CRASHES_MAX", 3)
    worker = await desk.start()
    assert await worker.end() == 1
    assert worker.worker.report.why == "a service kept crashing"


async def test_the_upkeep_stays_out_of_the_way_without_permission(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd.errors import PermissionDenied
    from taskd.store.jobs import history

    @desk.task()
    async def quick() -> None: ...

    async def denied(_: Any) -> Any:
        raise PermissionDenied("PostgreSQL: permission denied. Grant it.")

    monkeypatch.setattr(history, "make_partitions", denied)
    await desk.start()
    await desk.emitted.wait("upkeep.failed")
    assert not desk.emitted.of("service.crashed")


async def test_what_cannot_be_served_is_refused_at_the_start(desk: Desk) -> None:
    with pytest.raises(ConfigError, match="there are no tasks"):
        desk.worker(Registry())

    @desk.task()
    async def sends(to: str) -> None: ...

    for queues_, wrong in (
        (("a:0",), "name:concurrency"),
        (("a:x",), "name:concurrency"),
        (("A",), "is not a queue"),
    ):
        with pytest.raises(ConfigError, match=wrong):
            desk.worker(queues=queues_)
    await desk.sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
        "VALUES ('sends', 'another', 'x', 'default', 1, '{}')"
    )
    with pytest.raises(AppError, match="'sends' of app 'another'"):
        await desk.start()
    # Nothing of it stays.
    await until(lambda: len(asyncio.all_tasks()) <= 2)


def test_queues_of_plain_functions_claim_no_more_than_there_are_threads() -> None:
    from taskd.core.tasks.task import Task

    registry = Registry()

    def plain() -> None: ...
    async def quick() -> None: ...

    registry.add(Task(plain, name="one", queue="plain"))
    registry.add(Task(plain, name="two", queue="mixed"))
    registry.add(Task(quick, name="three", queue="mixed"))
    limits = queue_limits(Settings(threads=4, concurrency=50), registry)
    assert limits == {"mixed": 50, "plain": 4}


async def test_a_stop_gives_back_what_was_not_started_and_lets_the_rest_end(desk: Desk) -> None:
    stopping: list[bool] = []

    @desk.task()
    async def waits(ctx: Any) -> None:
        for _ in range(1000):
            await asyncio.sleep(0.01)
            if ctx.stopping:
                stopping.append(ctx.stopping)
                return

    @desk.task()
    async def never_ends() -> None:
        await asyncio.sleep(60)

    ids = await desk.enqueue(
        *(waits.job() for _ in range(4)), never_ends.job(), *(waits.job() for _ in range(20))
    )
    worker = await desk.start(concurrency=5, drain_s=0.5)
    runner = worker.worker.parts.runners[0]
    await until(lambda: runner.running == 5)
    assert await worker.stop() == 0
    states = await desk.states()
    assert states == {"done": 4, "queued": 21}
    rows = [await desk.row(job) for job in ids[4:]]
    assert {(row["attempt"], row["worker_id"]) for row in rows} == {(0, None)}
    assert [row["interrupts"] for row in rows] == [1] + [0] * 20
    assert stopping == [True] * 4
    assert not await desk.sql.fetchval("SELECT count(*) FROM taskd.worker WHERE died_at IS NULL")


async def test_a_stop_whose_last_statement_is_cancelled_ends_well(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def quick() -> None: ...

    async def cancelled(*_: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    worker = await desk.start()
    monkeypatch.setattr(workers, "retire", cancelled)
    assert await worker.stop() == 0


async def test_a_claim_in_flight_at_the_stop_is_given_back(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start(poll_s=60)
    await desk.emitted.wait("queue.claimed", 2)
    reached, go = asyncio.Event(), asyncio.Event()
    fetch = worker.worker.parts.claims.fetch

    async def slowly(name: str, *args: Any) -> Any:
        rows = await fetch(name, *args)
        if name == "claim_jobs" and rows:
            reached.set()
            await go.wait()
        return rows

    worker.worker.parts.claims.fetch = slowly  # type: ignore[method-assign]
    ids = await desk.enqueue(*(quick.job() for _ in range(7)))
    await reached.wait()
    stopping = asyncio.create_task(worker.stop())
    await desk.emitted.wait("worker.draining")
    go.set()
    assert await stopping == 0
    assert await desk.states() == {"queued": 7}
    assert {(await desk.row(job))["attempt"] for job in ids} == {0}


async def test_a_worker_whose_run_is_cancelled_leaves_nothing_running(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    before = asyncio.all_tasks()
    worker = await desk.start()
    worker.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await worker.task
    await until(lambda: asyncio.all_tasks() <= before)


async def test_signals_make_it_quiet_and_loud_again(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start()
    os.kill(os.getpid(), signal.SIGTSTP)
    await desk.emitted.wait("worker.quiet", quiet=True)
    # A claim that was on its way may still find it.
    await until(lambda: not worker.worker.parts.claims.busy)
    (job,) = await desk.enqueue(quick.job())
    claims = len(desk.emitted.of("queue.claimed"))
    began = time.monotonic()
    await until(lambda: time.monotonic() > began + 0.5)
    assert len(desk.emitted.of("queue.claimed")) <= claims + 1
    assert (await desk.row(job))["state"] == "queued"
    os.kill(os.getpid(), signal.SIGCONT)
    await desk.settled(job)


async def test_a_reload_changes_limits_and_drain_times(desk: Desk) -> None:
    @desk.task()
    async def waits() -> None:
        await asyncio.sleep(0.5)

    worker = await desk.start(concurrency=1)
    inner = worker.worker
    reloaded: list[Any] = [replace(inner.settings, concurrency=6, cancel_s=0.25)]
    inner._reload = lambda: reloaded[0]
    await desk.enqueue(*(waits.job() for _ in range(12)))
    await until(lambda: inner.parts.runners[0].running == 1)
    os.kill(os.getpid(), signal.SIGHUP)
    (said,) = await desk.emitted.wait("worker.reloaded")
    assert said["queues"] == {"default": 6}
    assert inner.parts.shared.cancel_s == 0.25
    await until(lambda: inner.parts.runners[0].running == 6)

    def wrong() -> Settings:
        raise ConfigError("TASKD_CONCURRENCY: no number")

    inner._reload = wrong
    os.kill(os.getpid(), signal.SIGHUP)
    (said,) = await desk.emitted.wait("service.crashed", service="reload")
    assert "TASKD_CONCURRENCY" in said["error"]
    assert inner.parts.runners[0].limit == 6


async def test_the_same_queue_twice_in_one_process(desk: Desk, emitted: Emitted) -> None:
    @desk.task()
    async def quick() -> None: ...

    workers = [await desk.start() for _ in range(3)]
    ids = await desk.enqueue(*(quick.job() for _ in range(600)))
    rows = await desk.settled(*ids)
    assert {row["fence"] for row in rows} == {1}
    await until(lambda: len(emitted.of("job.done")) == 600)
    assert [await each.stop() for each in workers] == [0, 0, 0]


async def test_a_stop_during_the_start_is_not_forgotten(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.enqueue(quick.job())
    worker = desk.worker()
    assert await worker.stop() == 0
    assert set(await desk.states()) <= {"queued", "done"}
    assert not await desk.sql.fetchval("SELECT count(*) FROM taskd.worker WHERE died_at IS NULL")


async def test_a_job_claimed_again_while_it_runs_here_is_adopted(desk: Desk) -> None:
    go = asyncio.Event()
    runs = []

    @desk.task()
    async def waits(ctx: Any) -> str:
        runs.append(ctx.fence)
        await go.wait()
        return "once"

    (job,) = await desk.enqueue(waits.job())
    worker = await desk.start()
    await until(lambda: worker.worker.parts.runners[0].running == 1)
    # A failover to a standby that had not received the claim.
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'queued', worker_id = NULL, fence = 4, attempt = 0"
    )
    await desk.sql.execute("NOTIFY taskd_default")
    await desk.emitted.wait("queue.claimed", 2, count=1)
    go.set()
    (row,) = await desk.settled(job)
    assert (row["state"], row["result"], row["fence"], runs) == ("done", '"once"', 5, [1])
    assert not desk.emitted.of("job.lost")


async def test_a_job_with_the_id_of_one_that_a_failover_lost_runs_itself(desk: Desk) -> None:
    go = asyncio.Event()
    runs = []

    @desk.task()
    async def waits(name: str) -> str:
        runs.append(name)
        await go.wait()
        return name

    (job,) = await desk.enqueue(waits.job(name="lost"))
    worker = await desk.start()
    runner = worker.worker.parts.runners[0]
    await until(lambda: runner.running == 1)
    # A standby that had not received the job has become the primary, and gives its id to another.
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'queued', worker_id = NULL, fence = 0, attempt = 0, "
        "run_at = clock_timestamp(), args = jsonb_build_object('name', 'new')"
    )
    await desk.sql.execute("NOTIFY taskd_default")
    await until(lambda: worker.worker.parts.counts["released"] == 1)
    go.set()
    await until(lambda: runner.running == 0)
    await desk.sql.execute("UPDATE taskd.job SET run_at = clock_timestamp()")
    await desk.sql.execute("NOTIFY taskd_default")
    (row,) = await desk.settled(job)
    assert (row["state"], row["result"], row["attempt"], runs) == (
        "done",
        '"new"',
        1,
        ["lost", "new"],
    )


async def test_a_claim_after_a_failover_takes_no_fence_of_before_it(desk: Desk) -> None:
    go = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        await go.wait()

    (job,) = await desk.enqueue(waits.job())
    worker = await desk.start(concurrency=1)
    runner = worker.worker.parts.runners[0]
    await until(lambda: runner.running == 1)
    before = await desk.row(job)
    # The connections break, and the next server has given the job's id to an unclaimed job.
    await desk.sql.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name = 'taskd work' AND datname = current_database()"
    )
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'queued', worker_id = NULL, fence = 0, attempt = 0"
    )
    worker.worker.parts.runners[0].resize(2)
    await desk.sql.execute("NOTIFY taskd_default")
    after = await until(lambda: _running(desk, job))
    assert (before["fence"], after["fence"] > 1) == (1, True)
    go.set()
    await desk.settled(job)


async def _running(desk: Desk, job: int) -> Any:
    row = await desk.row(job)
    return row if row["state"] == "running" else None


async def test_it_goes_on_while_all_its_connections_are_cut(desk: Desk) -> None:
    @desk.task()
    async def waits() -> None:
        await asyncio.sleep(0.01)

    worker = await desk.start()
    ids = []
    for _ in range(5):
        ids += await desk.enqueue(*(waits.job() for _ in range(100)))
        await desk.sql.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = "
            "current_database() AND application_name LIKE 'taskd %' "
            "AND application_name <> 'taskd desk'"
        )
    worker.worker.parts.reconciler.every_s = 0.1
    worker.worker.parts.reconciler._grace_s = 1.0
    rows = await desk.settled(*ids)
    assert {(row["state"], row["attempt"], row["crashes"]) for row in rows} == {("done", 1, 0)}
    assert not desk.emitted.of("job.lost")
    assert not desk.emitted.of("service.crashed")


async def test_too_many_connections_are_refused_and_too_few_free_ones_are_reported(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def works() -> None: ...

    server = await workers.connections(desk.lane)
    usable = server.allowed - server.reserved
    assert 0 < server.used <= usable
    [job] = await desk.enqueue(works.job())
    # All that the server allows; some are in use, this test's own at least.
    monkeypatch.setattr(startup, "CONNECTIONS", usable - 4)  # three lanes, and a listener
    await desk.start()
    await desk.settled(job)
    [event] = desk.emitted.of("connections.short")
    assert event["needed"] == usable > event["free"] > 0
    monkeypatch.setattr(startup, "CONNECTIONS", usable - 3)
    with pytest.raises(ConfigError, match=f"needs {usable + 1} connections.*allows {usable}"):
        await desk.start()
