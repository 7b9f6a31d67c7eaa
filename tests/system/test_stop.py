"""Stopping `taskd run`, besides the table of test_stop_matrix.py:

what must not delay or end a stop.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import send
from tests.system.shell import WITHIN_S, Shell


@pytest.fixture
async def shell(home: Path, dsn: str, sql: Any) -> AsyncIterator[Shell]:
    made = Shell(home, dsn, sql)
    yield made
    await made.close()


@pytest.mark.parametrize("task", ["leaks_a_swallower", "leaves_a_thread", "in_a_thread_of_its_own"])
async def test_what_handlers_leave_behind_does_not_hold_the_process(
    shell: Shell, task: str
) -> None:
    process = await shell.run()
    leaves = task != "in_a_thread_of_its_own"
    await shell.enqueue(task, **({} if leaves else {"s": 600}))
    await shell.wait_for("job.done" if leaves else "job.started")
    code, took = await shell.stop(process, signal.SIGTERM)
    assert code == 0
    assert took < 12
    assert await shell.states() == ({"done": 1} if leaves else {"queued": 1})


async def test_a_blocked_loop_stops_when_it_turns_again(shell: Shell) -> None:
    process = await shell.run()
    await shell.enqueue("blocks", s=1.5)
    await shell.enqueue("blocks", s=1.5)
    await shell.wait_for("loop.blocked")
    code, took = await shell.stop(process, signal.SIGTERM)
    assert code == 0
    assert took < 14
    states = await shell.states()
    assert "running" not in states
    assert sum(states.values()) == 2


async def test_a_task_of_a_handler_that_exits_does_not_end_the_worker(shell: Shell) -> None:
    process = await shell.run()
    await shell.enqueue("sleeps", 20, s=1)
    await shell.enqueue("exits_in_a_task", 3)
    await shell.wait_for("job.failed", 3)
    await shell.wait_for("job.done", 20)
    code, _ = await shell.stop(process, signal.SIGTERM)
    assert code == 0
    assert await shell.states() == {"done": 20, "failed": 3}
    assert await shell.sql.fetchval("SELECT max(crashes) FROM taskd.job_history") == 0


async def test_a_log_that_nobody_reads_any_more_stops_nothing(shell: Shell) -> None:
    reader, writer = os.pipe()
    process = await shell.run(stderr=writer)
    os.close(writer)
    os.close(reader)
    await shell.enqueue("sleeps", 5, s=0)
    await shell.settled(5)
    await shell.enqueue("sleeps", 2, s=600)
    await shell.running(2)
    code, took = await shell.stop(process, signal.SIGTERM)
    assert code == 0
    assert took < 12
    assert await shell.states() == {"done": 5, "queued": 2}


async def test_quiet_and_reload(shell: Shell) -> None:
    settings = shell.home / "taskd.toml"
    settings.write_text("poll_s = 1\n")
    process = await shell.run(concurrency="")
    settings.write_text("poll_s = 1\nconcurrency = 3\n")
    process.send_signal(signal.SIGHUP)
    (said,) = await shell.wait_for("worker.reloaded")
    assert said["queues"] == {"default": 3}
    process.send_signal(signal.SIGTSTP)
    await shell.wait_for("worker.quiet")
    await shell.enqueue("sleeps", 10, s=600)
    process.send_signal(signal.SIGCONT)
    await shell.running(3)
    code, _ = await shell.stop(process, signal.SIGINT)
    assert code == 0
    assert await shell.states() == {"queued": 10}


async def test_a_killed_worker_is_succeeded_at_once(shell: Shell) -> None:
    process = await shell.run()
    await shell.enqueue("sleeps", 2, s=0.5)
    await shell.running(2)
    process.kill()
    await shell.end(process)
    began = time.monotonic()
    await shell.run()
    (declared_dead,) = await shell.wait_for("workers.declared_dead")
    assert declared_dead["proof"] == "its process has ended"
    await shell.wait_for("job.done", 2)
    assert time.monotonic() - began < 15
    rows = await shell.sql.fetch("SELECT state, crashes, attempt FROM taskd.job_history")
    assert {tuple(row) for row in rows} == {("done", 1, 2)}


async def test_what_was_there_at_the_start_is_not_searched_for_garbage(shell: Shell) -> None:
    await shell.run()
    await shell.enqueue("counts_what_is_searched_for_garbage")
    await shell.settled(1)
    result = await shell.sql.fetchval("SELECT result FROM taskd.job_history")
    searched, spared = json.loads(result)
    assert searched < spared / 2


async def test_a_handler_that_cancels_all_tasks_or_stops_the_loop_fails_alone(shell: Shell) -> None:
    process = await shell.run()
    await shell.enqueue("sleeps", 20, s=2)
    await shell.wait_for("job.started", 20)
    await shell.enqueue("cancels_all", 3)
    await shell.enqueue("stops_the_loop", 3)
    await shell.wait_for("job.failed", 6)
    await shell.wait_for("job.done", 20)
    rows = await shell.sql.fetch("SELECT task, attempt, interrupts, crashes FROM taskd.jobs")
    assert {tuple(row)[1:] for row in rows} == {(1, 0, 0)}
    assert not shell.of("job.interrupted")
    assert (await shell.stop(process, signal.SIGTERM))[0] == 0


async def test_what_cancels_all_and_stops_the_loop_outside_of_handlers_ends_no_worker(
    shell: Shell,
) -> None:
    process = await shell.run()
    await shell.enqueue("tells_its_loop")
    await shell.wait_for("job.done")
    await shell.enqueue("sleeps", 20, s=2)
    await shell.wait_for("job.started", 20, task="sleeps")
    await shell.enqueue("lets_the_loop_cancel_all_and_stop")
    await shell.wait_for("loop.stopped")
    interrupted = await shell.wait_for("job.interrupted", 20)
    assert {each["why"] for each in interrupted} == {"foreign"}
    await shell.wait_for("service.crashed", service="main")
    await shell.settled(22)
    rows = await shell.sql.fetch("SELECT state, attempt, crashes FROM taskd.job_history")
    assert {tuple(row) for row in rows} == {("done", 1, 0)}
    assert (await shell.stop(process, signal.SIGTERM))[0] == 0


# A stop while a resource is made or closed.

RESOURCE = """
import asyncio, time
from pathlib import Path
from taskd import resource, task

@resource
{kind} slow():
{make}
    yield 1
{close}

@task()
async def works() -> None: ...
"""
WAITS = "    Path('there').touch()\n    await asyncio.sleep(600)"
SWALLOWS = (
    "    Path('there').touch()\n    while True:\n        try:\n"
    "            await asyncio.sleep(600)\n"
    "        except asyncio.CancelledError:\n            pass"
)
BLOCKS = "    Path('there').touch()\n    time.sleep(600)"
NOTHING = "    pass"


@pytest.mark.parametrize("how", [WAITS, SWALLOWS, BLOCKS], ids=["waits", "swallows", "blocks"])
@pytest.mark.parametrize("where", ["make", "close"])
async def test_a_stop_does_not_wait_for_a_resource(shell: Shell, how: str, where: str) -> None:
    kind = "def" if how is BLOCKS else "async def"
    parts = {"make": NOTHING, "close": NOTHING} | {where: how}
    (shell.home / "stop_app.py").write_text(RESOURCE.format(kind=kind, **parts))
    process = await shell.run(ready=False)
    there = shell.home / "there"
    if where == "close":
        await shell.wait_for("worker.ready")
        send(process, signal.SIGTERM)
    async with asyncio.timeout(WITHIN_S):
        while not there.exists():
            await asyncio.sleep(0.01)
    [told, *_] = await shell.wait_for("resource.slow")
    assert (told["resource"], told["doing"]) == ("slow", "open" if where == "make" else "close")
    began = time.monotonic()
    if where == "make":
        send(process, signal.SIGTERM)
    assert await shell.end(process) == 0
    # The bounds of closing, its cancellation, and what asyncio tasks get that are left.
    assert time.monotonic() - began < 10
    assert not shell.of("service.crashed")
    rows = await shell.sql.fetch("SELECT died_at FROM taskd.worker")
    assert all(row["died_at"] is not None for row in rows)
    assert len(rows) == (where == "close")
