"""The fifteen ways in which handlers and asyncio can harm a worker, and the tests of each."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from taskd.core.jobs.backoff import Fixed
from taskd.worker.observing import loop_monitor
from taskd.worker.observing.loop_monitor import CHECK_EVERY_S, LATE_S, TICK_S, LoopMonitor, Pulse
from taskd.worker.running import handler_tasks
from tests.worker.conftest import Desk, until

HERE = Path(__file__).parent
NOW = Fixed(0.01)

MIX = "test_hostile.test_the_hostile_mix_ends_once_and_harms_no_other_job"
TEXTS = "test_hostile.test_what_a_refused_text_would_be_is_described"

# Row of the reliability study, its hazard, and the test that covers it: module and test.
HAZARDS: dict[str, tuple[str, ...]] = {
    "10.1 a handler blocks the loop": (
        "test_hazards.test_who_blocks_the_loop_is_named_and_the_lease_is_kept",
        "test_hazards.test_a_child_task_that_blocks_the_loop_is_named_by_its_job",
        "test_hazards.test_a_loop_that_is_blocked_again_and_again_does_not_fill_the_log",
        "../system/test_stop_matrix.test_a_worker_stops_in_bounded_time_with_its_rows_in_order",
    ),
    "10.2 SystemExit and KeyboardInterrupt": (
        "test_hazards.test_a_hundred_exits_are_a_hundred_failed_attempts",
        "../system/test_stop.test_a_task_of_a_handler_that_exits_does_not_end_the_worker",
    ),
    "10.3 GeneratorExit and other odd exceptions": (MIX, TEXTS),
    "10.4 a swallowed cancellation": (
        "test_hostile.test_who_ignores_the_cancellation_is_abandoned_and_not_run_again_beside_it",
    ),
    "10.5 a CancelledError of the handler's own": (
        "test_hazards.test_a_cancellation_that_taskd_did_not_ask_for_is_a_failed_attempt",
    ),
    "10.6 several reasons to end in one turn of the loop": (
        "test_hazards.test_the_first_reason_to_cancel_decides",
        "test_hazards.test_a_handler_that_returns_in_the_turn_of_its_cancellation_is_judged_by_it",
    ),
    "10.7 threads cannot be cancelled": (
        "test_hostile.test_a_thread_that_takes_too_long_is_abandoned",
        "../system/test_stop.test_what_handlers_leave_behind_does_not_hold_the_process",
    ),
    "10.8 tasks that a handler leaves behind": (
        "test_hazards.test_tasks_that_handlers_leak_are_named_and_do_not_pile_up",
        "test_hazards.test_a_task_that_serves_all_handlers_outlives_the_one_that_made_it",
    ),
    "10.9 errors that cannot be stored": (TEXTS,),
    "10.10 context variables": (MIX,),
    "10.11 task groups": (
        MIX,
        "test_worker.test_a_service_that_crashes_is_started_again",
        "test_worker.test_consumer_acker_and_listener_survive_a_crash",
    ),
    "10.12 memory": ("test_hazards.test_memory_and_tasks_stay_flat_over_100_000_jobs",),
    "10.13 recursion": (
        MIX,
        "test_hazards.test_arguments_nested_too_deeply_harm_their_job_only",
        "test_hostile.test_results_at_the_limit_and_errors_of_errors",
    ),
    "10.14 processes and resolvers beside a running loop": (
        "test_hazards.test_what_a_handler_starts_inherits_nothing_and_its_end_is_not_ours",
        "test_hazards.test_a_resolver_that_never_answers_delays_nobody",
    ),
    "10.15 cancelled awaits in the worker": (
        "test_hazards.test_a_storm_of_cancellations_loses_nothing",
    ),
}


def test_each_of_the_fifteen_rows_has_its_tests() -> None:
    rows = [re.match(r"10\.(\d+) ", row) for row in HAZARDS]
    assert [int(row[1]) for row in rows if row] == list(range(1, 16))
    for name in {name for names in HAZARDS.values() for name in names}:
        module, _, test = name.rpartition(".")
        source = (HERE / f"{module}.py").read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {test}\(", source, re.MULTILINE), name


# 10.1


async def test_who_blocks_the_loop_is_named_and_the_lease_is_kept(desk: Desk) -> None:
    @desk.task()
    async def blocks() -> None:
        time.sleep(3.0)

    worker = await desk.start(lease_s=2.0)
    begun = worker.worker._lease.worker_id
    (job,) = await desk.enqueue(blocks.job())
    (row,) = await desk.settled(job)
    first, *again = desk.emitted.of("loop.blocked", job_id=job)
    assert (first["task"], first["queue"]) == ("blocks", "default")
    assert "time.sleep(3.0)" in first["stack"]
    # Half a second, give or take what a busy machine adds.
    assert TICK_S + LATE_S + CHECK_EVERY_S + 0.05 <= 0.5
    assert first["blocked_s"] < 1.0
    assert again
    (end,) = await desk.emitted.wait("loop.unblocked", job_id=job)
    assert end["blocked_s"] > 2.5
    assert row["worker_id"] == begun == worker.worker._lease.worker_id
    assert worker.worker._lease.trusted
    assert not desk.emitted.of("worker.fenced")
    assert not desk.emitted.of("job.lost")


async def test_a_child_task_that_blocks_the_loop_is_named_by_its_job(desk: Desk) -> None:
    @desk.task()
    async def parent() -> None:
        async def child() -> None:
            async with asyncio.TaskGroup() as group:
                group.create_task(grandchild())

        async def grandchild() -> None:
            await asyncio.sleep(0.01)
            time.sleep(0.8)

        await asyncio.create_task(child())

    await desk.start()
    (job,) = await desk.enqueue(parent.job())
    await desk.settled(job)
    assert desk.emitted.of("loop.blocked", task="parent", job_id=job)


async def test_a_loop_that_is_blocked_again_and_again_does_not_fill_the_log(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr(loop_monitor.time, "monotonic", lambda: clock)
    pulse = Pulse()
    looking = LoopMonitor(pulse)
    # A minute in which the loop is blocked for half of the time.
    for _ in range(60):
        pulse.ticked = clock
        for _ in range(10):
            clock += 0.05
            looking.check()
        for _ in range(10):
            clock += 0.05
            pulse.ticked = clock
            looking.check()
    said = desk.emitted.of("loop.blocked")
    assert 5 <= len(said) <= 8
    assert sum(had["suppressed"] for had in said) + len(said) <= 60
    assert len(desk.emitted.of("loop.unblocked")) == len(said)


# 10.2


async def test_a_hundred_exits_are_a_hundred_failed_attempts(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def exits(wait: bool) -> None:
        if wait:
            await asyncio.sleep(0)
        sys.exit(3)

    @desk.task()
    async def fine() -> None: ...

    ids = await desk.enqueue(*(exits.job(n % 2 == 0) for n in range(100)))
    worker = await desk.start()
    rows = await desk.settled(*ids)
    assert {(row["state"], row["reason"]) for row in rows} == {("failed", "SystemExit: 3")}
    (last,) = await desk.enqueue(fine.job())
    await desk.settled(last)
    assert await worker.stop() == 0


# 10.5 and 10.6


async def test_a_cancellation_that_taskd_did_not_ask_for_is_a_failed_attempt(desk: Desk) -> None:
    @desk.task(max_attempts=2, backoff=NOW)
    async def awaits_what_was_cancelled(wait: bool) -> None:
        inner = asyncio.create_task(asyncio.sleep(60))
        if wait:
            await asyncio.sleep(0.001)
        inner.cancel()
        await inner

    ids = await desk.enqueue(*(awaits_what_was_cancelled.job(n % 2 == 0) for n in range(40)))
    await desk.start()
    rows = await desk.settled(*ids)
    assert {(row["state"], row["attempt"], row["interrupts"]) for row in rows} == {("failed", 2, 0)}
    assert {json.loads(row["errors"])[0]["type"] for row in rows} == {"CancelledError"}


ENDS = {"timeout": "job.failed", "cancel": "job.cancelled", "stop": "job.interrupted"}


@pytest.mark.parametrize("first", ENDS)
async def test_the_first_reason_to_cancel_decides(desk: Desk, first: str) -> None:
    @desk.task(timeout_s=600, max_attempts=2 if first == "stop" else 1)
    async def waits() -> None:
        await asyncio.sleep(600)

    ids = await desk.enqueue(*(waits.job() for _ in range(50)))
    worker = await desk.start(concurrency=50)
    (runner,) = worker.worker.parts.runners
    await until(lambda: runner.running == 50)
    assert worker.worker._pulse.job is None  # all of them wait; none keeps the loop
    reasons = {
        "timeout": lambda: runner.attempts.cancel_all("timeout"),
        "cancel": lambda: [runner.cancel_job(job, "by hand") for job in ids],
        "stop": lambda: runner.attempts.cancel_all("stop"),
    }
    for name in sorted(reasons, key=lambda name: name != first):  # all in one turn of the loop
        reasons[name]()
    said = await desk.emitted.wait(ENDS[first], 50)
    assert {had["job_id"] for had in said} == set(ids)
    assert all(desk.emitted.ends(job)[:1] in ([], [ENDS[first]]) for job in ids)


@pytest.mark.parametrize("why", ["timeout", "cancel"])
async def test_a_handler_that_returns_in_the_turn_of_its_cancellation_is_judged_by_it(
    desk: Desk, why: str
) -> None:
    ready: list[asyncio.Future[str]] = []

    @desk.task(timeout_s=600, max_attempts=1)
    async def waits(swallows: bool) -> str:
        ready.append(asyncio.get_running_loop().create_future())
        try:
            return await ready[-1]
        except asyncio.CancelledError:
            if swallows:
                return "swallowed"
            raise

    one, two = await desk.enqueue(waits.job(False), waits.job(True))
    worker = await desk.start()
    (runner,) = worker.worker.parts.runners
    await until(lambda: len(ready) == 2)
    for each in ready:
        each.set_result("in time")
    if why == "timeout":
        runner.tick(time.monotonic() + 601)
    else:
        runner.cancel_job(one, "by hand")
        runner.cancel_job(two, "by hand")
    first, second = await desk.settled(one, two)
    # Work that was done although it should not be is not done again; but late is late.
    assert [first["state"], second["state"]] == {
        "timeout": ["failed", "failed"], "cancel": ["cancelled", "done"]
    }[why]  # fmt: skip


# 10.8


async def test_tasks_that_handlers_leak_are_named_and_do_not_pile_up(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handler_tasks, "LEFT_MAX", 50)

    @desk.task()
    async def leaks(wait: bool) -> None:
        async def leaks_too() -> None:
            asyncio.create_task(asyncio.sleep(3600))  # noqa: RUF006 - it leaks
            await asyncio.sleep(3600)

        for _ in range(5):
            asyncio.create_task(leaks_too())  # noqa: RUF006 - it leaks
        if wait:
            await asyncio.sleep(0)

    worker = await desk.start()
    before = len(asyncio.all_tasks())
    owners = worker.worker._pulse.owners
    ids = await desk.enqueue(*(leaks.job(n % 2 == 0) for n in range(1000)))
    await desk.settled(*ids)
    (said, *_) = await desk.emitted.wait("task.leaks", task="leaks")
    assert said["count"] >= said["cancelled"] > 0
    await until(lambda: len(owners) <= 50)
    await until(lambda: len(asyncio.all_tasks()) <= before + 60)
    assert len(desk.emitted.of("task.leaks")) == 1
    for task in list(owners):
        task.cancel()


async def test_a_task_that_serves_all_handlers_outlives_the_one_that_made_it(desk: Desk) -> None:
    asked: asyncio.Queue[asyncio.Future[int]] = asyncio.Queue()
    server: list[asyncio.Task[None]] = []

    async def serve() -> None:
        while True:
            (await asked.get()).set_result(1)

    @desk.task()
    async def uses_the_server() -> int:
        if not server:
            server.append(asyncio.create_task(serve()))
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        asked.put_nowait(answer)
        return await answer

    await desk.start()
    (one,) = await desk.enqueue(uses_the_server.job())
    await desk.settled(one)
    (said,) = await desk.emitted.wait("task.leaks", task="uses_the_server")
    assert (said["job_id"], said["count"], said["cancelled"]) == (one, 1, 0)
    assert "serve" in said["stack"]
    ids = await desk.enqueue(*(uses_the_server.job() for _ in range(20)))
    rows = await desk.settled(*ids)
    assert {row["state"] for row in rows} == {"done"}
    server[0].cancel()


# 10.12


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


ROUND = "SELECT taskd.enqueue(CASE WHEN n % 50 = 0 THEN 'waits' WHEN n % 51 = 0 THEN 'fails' "
ROUND += "ELSE 'quick' END) FROM generate_series(1, 20000) AS n"


@pytest.mark.timeout(240)
async def test_memory_and_tasks_stay_flat_over_100_000_jobs(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    @desk.task()
    async def waits() -> None:
        await asyncio.create_task(asyncio.sleep(0))

    @desk.task(max_attempts=1)
    async def fails() -> None:
        raise ValueError("on purpose")

    worker = await desk.start()
    (runner,) = worker.worker.parts.runners
    sizes: list[int] = []
    counts: list[tuple[int, int]] = []
    for number in range(1, 6):
        await desk.sql.execute(ROUND, timeout=60)
        desk.emitted.all.clear()
        left = "SELECT NOT EXISTS (SELECT 1 FROM taskd.job)"
        await until(lambda: desk.sql.fetchval(left), within_s=60)  # noqa: B023
        await until(lambda: runner.idle)
        assert runner.ended >= number * 20_000
        desk.emitted.all.clear()
        gc.collect()
        sizes.append(resident_bytes())
        standing = [t for t in asyncio.all_tasks() if "statement" not in t.get_name()]
        counts.append((len(standing), len(gc.get_objects())))
    # The first rounds fill caches and the allocator's arenas; 60,000 jobs then add next to
    # nothing: 8 MiB would be 140 bytes for each.
    assert sizes[-1] - sizes[1] < 8 * 2**20, sizes
    assert {tasks for tasks, _ in counts} == {counts[0][0]}
    assert counts[-1][1] - counts[1][1] < 1000, counts


# 10.13


async def test_arguments_nested_too_deeply_harm_their_job_only(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def takes(value: Any) -> None: ...

    deep = "[" * 3000 + "]" * 3000
    (odd,) = await desk.enqueue(takes.job(1))
    await desk.sql.execute(
        "UPDATE taskd.job SET args = jsonb_build_object('value', $1::jsonb)", deep
    )
    others = await desk.enqueue(*(takes.job(n) for n in range(20)))
    await desk.start()
    rows = await desk.settled(*others)
    assert Counter(row["state"] for row in rows)["done"] == 20
    assert "ArgsDoNotFit" in (await desk.state(odd, "scheduled"))["errors"]
    assert not desk.emitted.of("service.crashed")


# 10.14

INHERITED = """
import json, os
status = open("/proc/self/status").read()
masks = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line[:3] == "Sig"}
own, others = set(), set()
for fd in os.listdir("/proc/self/fd"):
    if os.path.lexists(f"/proc/self/fd/{fd}"):
        (own if int(fd) < 3 else others).add(os.readlink(f"/proc/self/fd/{fd}"))
sockets = [what for what in others - own if what.startswith("socket:")]
print(json.dumps([int(masks["SigBlk"], 16), len(sockets)]))
"""


def waits_for_its_end() -> None:
    time.sleep(60)


async def test_what_a_handler_starts_inherits_nothing_and_its_end_is_not_ours(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def starts_a_program() -> Any:
        started = await asyncio.create_subprocess_exec(
            sys.executable, "-c", INHERITED, stdout=asyncio.subprocess.PIPE
        )
        return json.loads((await started.communicate())[0])

    @desk.task(max_attempts=1)
    def starts_one_in_a_thread() -> Any:
        return json.loads(subprocess.check_output([sys.executable, "-c", INHERITED]))

    @desk.task(max_attempts=1)
    def forks_and_ends_it() -> Any:
        process = multiprocessing.get_context("fork").Process(target=waits_for_its_end)
        process.start()
        time.sleep(0.1)
        process.terminate()
        process.join(10)
        return process.exitcode

    worker = await desk.start()
    ids = await desk.enqueue(
        starts_a_program.job(), starts_one_in_a_thread.job(), forks_and_ends_it.job()
    )
    rows = await desk.settled(*ids)
    assert [json.loads(row["result"]) for row in rows] == [[0, 0], [0, 0], -signal.SIGTERM]
    assert not worker.worker.report.why
    assert not desk.emitted.of("worker.draining")


async def test_a_resolver_that_never_answers_delays_nobody(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "uvloop" in type(asyncio.get_running_loop()).__module__:
        pytest.skip("uvloop resolves in threads of libuv, which a test cannot replace")
    real, answer = socket.getaddrinfo, threading.Event()

    def slow(host: Any, *args: Any, **named: Any) -> Any:
        if host == "nowhere.example":
            answer.wait(30)
        return real("127.0.0.1", *args, **named)

    @desk.task(timeout_s=1.0, max_attempts=1)
    async def resolves() -> None:
        await asyncio.get_running_loop().getaddrinfo("nowhere.example", 80)

    @desk.task()
    async def quick() -> None: ...

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    try:
        await desk.start(concurrency=60)
        slow_ones = await desk.enqueue(*(resolves.job() for _ in range(50)))
        others = await desk.enqueue(*(quick.job() for _ in range(100)))
        rows = await desk.settled(*others)
        assert {row["state"] for row in rows} == {"done"}
        rows = await desk.settled(*slow_ones)
        assert {row["reason"] for row in rows} == {"TimedOut: the attempt took longer than 1 s"}
    finally:
        answer.set()


# 10.15


async def test_a_storm_of_cancellations_loses_nothing(desk: Desk, silent_loop: list[Any]) -> None:
    dice = random.Random(15)

    @desk.task(max_attempts=50, backoff=NOW)
    async def waits(ms: int) -> int:
        await asyncio.sleep(ms / 1000)
        return ms

    mine = set(asyncio.all_tasks())
    worker = await desk.start(statement_timeout_s=0.5, poll_s=0.5)
    ids = await desk.enqueue(*(waits.job(n % 20) for n in range(400)))
    for _ in range(60):
        await asyncio.sleep(0.02)
        there = sorted(asyncio.all_tasks() - mine, key=lambda task: task.get_name())
        there = [task for task in there if task.get_name() != "worker" and task.get_coro()]
        for task in dice.sample(there, min(3, len(there))):
            task.cancel()
    rows = await desk.settled(*ids)
    assert [row["state"] for row in rows] == ["done"] * 400
    ended = Counter(had["job_id"] for had in desk.emitted.of("job.done"))
    assert set(ended.values()) == {1}
    assert await worker.stop() == 0
    # The driver complains about connections that were cancelled while they were made.
    gc.collect()
    await asyncio.sleep(0)
    silent_loop[:] = [had for had in silent_loop if type(had["exception"]) is not ConnectionError]
