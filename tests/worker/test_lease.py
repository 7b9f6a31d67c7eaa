"""Leases: which workers are dead, which are only cut off, and what happens to their jobs."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from taskd.store import workers
from taskd.store.connections.error_translation import Down, Silence
from taskd.store.connections.statements import statement
from taskd.store.jobs.jobs import ANY_JOB
from taskd.worker.lease import process_identity
from taskd.worker.lease.neighbours import Neighbours
from taskd.worker.lease.process_identity import is_gone, process_started
from taskd.worker.upkeep import rescuer
from tests.worker.conftest import Desk, until

BURY = "UPDATE taskd.worker SET died_at = now() WHERE id = $1"
MINE = """
UPDATE taskd.job
SET state = 'running', worker_id = $1, fence = 1, attempt = 1, started_at = now()
"""


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


async def test_a_live_worker_that_was_declared_dead_registers_again(desk: Desk) -> None:
    runs: list[tuple[int, int]] = []
    ended = []

    @desk.task()
    async def waits(ctx: Any) -> int:
        runs.append((ctx.job_id, ctx.fence))
        if ctx.fence == 1:
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(ctx.job_id)
        return int(ctx.fence)

    @desk.task()
    async def quick() -> None: ...

    ids = await desk.enqueue(*(waits.job() for _ in range(3)))
    worker = await desk.start(lease_s=2.0)
    first = worker.worker._lease.worker_id
    await until(lambda: len(runs) == 3)
    async with desk.sql.transaction():
        await desk.sql.execute(BURY, first)
        await desk.sql.fetch(statement("rescue_jobs").text, 1000, 3, 10, *ANY_JOB)
    await desk.emitted.wait("worker.declared_dead", worker_id=str(first))
    await desk.emitted.wait("worker.started", 2)
    second = worker.worker._lease.worker_id
    assert second != first
    rows = await desk.settled(*ids)
    assert sorted(ended) == ids
    assert sorted(runs) == sorted([(job, fence) for job in ids for fence in (1, 2)])
    assert {(row["state"], row["worker_id"], row["crashes"], row["result"]) for row in rows} == {
        ("done", second, 0, "2")
    }
    assert json.loads(rows[0]["errors"])[0]["type"] == "WorkerLost"
    assert {had["job_id"] for had in desk.emitted.of("job.lost")} == set(ids)
    assert len(desk.emitted.of("worker.declared_dead")) == 1
    assert not desk.emitted.of("worker.fenced")
    (job,) = await desk.enqueue(quick.job())
    await desk.settled(job)
    assert await worker.stop() == 0
    assert not await desk.sql.fetchval("SELECT count(*) FROM taskd.worker WHERE died_at IS NULL")


async def test_a_lease_renewal_that_is_cancelled_begins_again(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start(lease_s=2.0)
    me = worker.worker._lease.worker_id
    # The worker does not wait for its lease thread to begin.
    loop = await until(lambda: worker.worker._lease_thread._own_loop)

    def cancel() -> None:
        [renewing] = [task for task in asyncio.all_tasks(loop) if task.get_name() == "lease"]
        renewing.cancel()
        cancelled.set()

    cancelled = threading.Event()
    loop.call_soon_threadsafe(cancel)
    await asyncio.to_thread(cancelled.wait, 10.0)
    now = await desk.sql.fetchval("SELECT clock_timestamp()")
    renewed = "SELECT renewed_at > $2 FROM taskd.worker WHERE id = $1 AND died_at IS NULL"
    await until(lambda: desk.sql.fetchval(renewed, me, now))
    assert desk.emitted.of("worker.fenced") == []


async def test_a_rebirth_that_fails_is_tried_again(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start(lease_s=1.0)
    register, tries = workers.register, []

    async def lossy(*args: Any) -> None:
        tries.append(args[1].id)
        await register(*args)
        if len(tries) == 1:
            raise Silence("no answer")

    monkeypatch.setattr(workers, "register", lossy)
    await desk.sql.execute(BURY, worker.worker._lease.worker_id)
    await until(lambda: worker.worker._lease.trusted and len(tries) == 2)
    assert len(set(tries)) == 2
    (job,) = await desk.enqueue(quick.job())
    (row,) = await desk.settled(job)
    assert row["worker_id"] == tries[1]


@pytest.mark.parametrize("silent", [True, False], ids=["silence", "outage"])
async def test_only_silence_fences(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    go = asyncio.Event()

    @desk.task()
    async def waits(ctx: Any) -> int:
        await go.wait()
        return int(ctx.attempt)

    (job,) = await desk.enqueue(waits.job())
    worker = await desk.start(lease_s=1.5)
    await until(lambda: worker.worker.parts.runners[0].running)
    beat, down = workers.renew_lease, asyncio.Event()
    down.set()

    async def unheard(*args: Any, **named: Any) -> bool:
        if not down.is_set():
            return await beat(*args, **named)
        raise Silence("no answer") if silent else Down("connection refused")

    monkeypatch.setattr(workers, "renew_lease", unheard)
    await until(lambda: not worker.worker._lease.trusted)
    if silent:
        await desk.emitted.wait("worker.fenced")
        # Released before another worker could declare this one dead, and the attempt does not
        # count.
        row = await desk.state(job, "queued")
        assert (row["attempt"], row["interrupts"], row["worker_id"]) == (0, 1, None)
    else:
        ticks = worker.worker._pulse.ticked
        await until(lambda: worker.worker._pulse.ticked > ticks + 0.3)
        assert worker.worker.parts.runners[0].running == 1
        assert not desk.emitted.of("worker.fenced")
    down.clear()
    go.set()
    (row,) = await desk.settled(job)
    assert (row["result"], row["crashes"], row["fence"]) == ("1", 0, 2 if silent else 1)


async def test_nothing_begins_after_a_standstill_that_outlived_the_lease(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat, silent = workers.renew_lease, threading.Event()
    leased: list[Any] = []
    began: list[tuple[int, bool]] = []

    async def unheard(*args: Any, **named: Any) -> bool:
        if not silent.is_set():
            return await beat(*args, **named)
        raise Silence("no answer")

    @desk.task()
    async def stands_still() -> None:
        silent.set()
        while leased[0].trusted:  # as for a process that SIGSTOP has met
            time.sleep(0.01)

    @desk.task()
    async def follows(ctx: Any) -> None:
        began.append((ctx.fence, leased[0].trusted))

    monkeypatch.setattr(workers, "renew_lease", unheard)
    worker = desk.worker(lease_s=1.5)
    leased.append(worker.worker._lease)
    # Claimed together, and handed to the runner in this order.
    still, next_one = await desk.enqueue(stands_still.job(), follows.job())
    await worker.ready()
    await desk.emitted.wait("job.done", job_id=still)
    await desk.emitted.wait("worker.fenced")
    # Others may have had it by now: it went back as it had come.
    assert began == []
    row = await desk.state(next_one, "queued")
    assert (row["attempt"], row["worker_id"], row["fence"]) == (0, None, 1)
    silent.clear()
    await desk.settled(still, next_one)
    assert began == [(2, True)]


async def test_a_neighbour_that_died_is_declared_dead_at_once_and_its_job_run(desk: Desk) -> None:
    @desk.task()
    async def quick(ctx: Any) -> None: ...

    await desk.other_worker(42, pid=dead_pid(), lease_s=3600)
    await desk.other_worker(43, pid=os.getpid(), lease_s=3600)
    await desk.other_worker(44, lease_s=0.0)
    (job,) = await desk.enqueue(quick.job())
    await desk.sql.execute(MINE, 42)
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["crashes"], row["attempt"], row["fence"]) == ("done", 1, 2, 2)
    (declared_dead,) = desk.emitted.of("workers.declared_dead")
    assert declared_dead["proof"] == "its process has ended"
    # A live neighbour, and a silent remote worker before our own lease was steady.
    alive = await desk.sql.fetch(
        "SELECT id FROM taskd.worker WHERE died_at IS NULL AND id < 100 ORDER BY id"
    )
    assert [row[0] for row in alive] == [43, 44]


async def test_the_end_of_a_process_on_the_host_starts_the_rescue_of_its_jobs(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rescuer, "SWEEP_EVERY_S_MAX", 3600.0)

    @desk.task()
    async def quick() -> None: ...

    with subprocess.Popen(["sleep", "600"]) as neighbour:
        await desk.other_worker(42, pid=neighbour.pid, lease_s=3600)
        # Only the next two workers after the own one are watched; this one comes behind 42.
        await desk.other_worker(44, pid=os.getpid(), lease_s=3600)
        (job,) = await desk.enqueue(quick.job())
        await desk.sql.execute(MINE, 42)
        started = await desk.start(lease_s=24 * 3600.0)
        watched = started.worker.parts.rescuer._neighbours._descriptors
        await until(lambda: 42 in watched)
        neighbour.kill()
        (row,) = await desk.settled(job)
        assert (row["state"], row["crashes"]) == ("done", 1)
        assert 42 not in watched


async def test_the_next_two_workers_of_the_host_are_watched() -> None:
    ended = asyncio.Event()
    neighbours = Neighbours(ended.set)
    started = process_started(os.getpid()) or 0
    with subprocess.Popen(["sleep", "600"]) as process:
        theirs = process_started(process.pid) or 0

        def other(worker_id: int, *, near: bool = True) -> workers.Other:
            mine = worker_id % 2
            pid, since = (os.getpid(), started) if mine else (process.pid, theirs)
            return workers.Other(worker_id, pid, since, neighbour=near, silent=False)

        neighbours.watch(5, [other(n) for n in (1, 2, 3, 4, 7)] + [other(6, near=False)])
        assert neighbours._descriptors.keys() == {7, 1}
        neighbours.watch(1, [other(n) for n in (2, 3, 5, 7)])
        assert neighbours._descriptors.keys() == {2, 3}
        process.kill()
        await ended.wait()
        assert neighbours._descriptors.keys() == {3}
        # Its pid belongs to nobody, or to another process: nothing is watched in its place.
        neighbours.watch(1, [other(2)._replace(pid=os.getpid(), pid_started=started + 1), other(3)])
        assert neighbours._descriptors.keys() == {3}
    descriptors = list(neighbours._descriptors.values())
    neighbours.close()
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


async def test_a_silent_remote_worker_is_declared_dead_by_a_steady_one(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    await desk.other_worker(44, lease_s=0.0)
    (job,) = await desk.enqueue(quick.job())
    await desk.sql.execute(MINE, 44)
    await desk.start(lease_s=1.0)
    (row,) = await desk.settled(job)
    # The death says nothing about the job, which is no suspect.
    assert (row["state"], row["crashes"], row["attempt"]) == ("done", 0, 1)
    [death] = desk.emitted.of("workers.declared_dead")
    assert death["proof"] == "its lease expired"


def test_who_counts_as_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(pid: int, started: int) -> workers.Other:
        return workers.Other(1, pid, started, neighbour=True, silent=False)

    me = process_started(os.getpid())
    assert me is not None
    assert me > 0
    assert not is_gone(other(os.getpid(), me))
    assert not is_gone(other(os.getpid(), 0))
    assert is_gone(other(os.getpid(), me + 1))
    assert is_gone(other(dead_pid(), me))
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert is_gone(other(zombie.pid, process_started(zombie.pid) or 1))
    zombie.wait()

    def hidden(*_: Any, **__: Any) -> str:
        raise FileNotFoundError

    # /proc mounted with hidepid shows nothing of other users: that proves nothing.
    monkeypatch.setattr(process_identity.Path, "read_text", hidden)
    assert not is_gone(other(os.getpid(), me))


@pytest.mark.parametrize("error", [SystemExit(0), MemoryError(), GeneratorExit()])
async def test_a_lease_thread_that_dies_stops_the_worker(desk: Desk, error: BaseException) -> None:
    begun, ends = asyncio.Event(), asyncio.Event()

    @desk.task()
    async def waits() -> None:
        begun.set()
        await ends.wait()

    [job] = await desk.enqueue(waits.job())
    worker = await desk.start(drain_s=60.0)
    await begun.wait()

    def dies(*_: Any, **__: Any) -> None:
        raise error

    worker.worker._lease_thread._check_now.clear = dies  # type: ignore[method-assign]
    [told] = await desk.emitted.wait("lease.thread_ended")
    assert told["error"].startswith(type(error).__name__)
    [draining] = await desk.emitted.wait("worker.draining")
    assert draining["why"] == "the lease thread ended"
    ends.set()  # attempts can end as in every drain
    assert await worker.end() == 1
    [row] = await desk.settled(job)
    assert (row["state"], row["attempt"]) == ("done", 1)
