"""Handlers with process=True, in real processes that crash, hang and are killed."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from taskd import task
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.errors import ConfigError
from taskd.worker.running.job_processes import job_process
from taskd.worker.running.job_processes.pool import JobProcesses
from tests.processes import children, lives
from tests.worker import process_app as app
from tests.worker.conftest import Desk, until


async def text(note: Path) -> str:
    found: str = await until(lambda: note.exists() and note.read_text())
    return found


async def test_a_handler_runs_in_another_process_with_all_it_may_return_and_raise(
    desk: Desk,
) -> None:
    words = ["verdict", "returned", "exit", "rule", "wrong"]
    ids = await desk.enqueue(app.adds.job(1), *(app.raises.job(word) for word in words))
    worker = await desk.start(app.REGISTRY, process_slots=1)
    added, *others = await desk.settled(*ids)
    result = json.loads(added["result"])
    assert result["sum"] == 3
    assert result["pid"] != os.getpid()
    said = [(row["state"], row["attempt"], row["reason"]) for row in others]
    assert said == [
        ("cancelled", 1, "no longer wanted"),
        ("cancelled", 1, "returned"),
        ("failed", 2, "SystemExit: 3"),
        ("failed", 1, "KeyError: 'hopeless'"),
        ("failed", 2, "ValueError: it was wrong"),
    ]
    errors = json.loads(others[-1]["errors"])
    assert [each["attempt"] for each in errors] == [1, 2]
    assert "process_app.py" in errors[0]["traceback"]
    assert await worker.stop() == 0
    assert not lives(result["pid"])


async def test_the_context_of_a_process_says_what_it_knows_and_reports_progress(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskd.worker.observing.progress.WRITE_EVERY_S", 0.05)
    done = tmp_path / "done"
    (job,) = await desk.enqueue(app.tells.job("rows", done=str(done)))
    worker = await desk.start(app.REGISTRY, process_slots=1)
    read = "SELECT done, total, note FROM taskd.progress WHERE job_id = $1 AND done = 99999"
    row = await until(lambda: desk.sql.fetchrow(read, job))
    assert tuple(row) == (99999.0, 200_000.0, "rows")
    done.touch()
    (row,) = await desk.settled(job)
    told = json.loads(row["result"])
    assert 0 < told.pop("left_s") <= 60
    assert told.pop("idempotency_key").endswith(f"-{job}")
    assert told == {
        "job_id": job,
        "task": "tells",
        "queue": "default",
        "attempt": 1,
        "max_attempts": 7,
        "fence": 1,
    }
    # Reports that were still on their way are no answer to the next attempt.
    later = await desk.enqueue(*(app.tells.job("x") for _ in range(20)), app.adds.job(1))
    assert {row["state"] for row in await desk.settled(*later)} == {"done"}
    assert await worker.stop() == 0


async def test_a_process_says_what_its_context_lacks(desk: Desk) -> None:
    (job,) = await desk.enqueue(app.reads_resources.job())
    await desk.start(app.REGISTRY, process_slots=1)
    (row,) = await desk.settled(job)
    assert row["state"] == "failed"
    assert "ctx.resources does not exist in a handler with process=True" in row["reason"]


async def test_a_process_has_a_memory_limit(desk: Desk) -> None:
    small, large, again = await desk.enqueue(
        app.takes_memory.job(1), app.takes_memory.job(2000), app.takes_memory.job(1)
    )
    await desk.start(app.REGISTRY, process_slots=1, process_memory_mb=500)
    rows = await desk.settled(small, large, again)
    assert [row["state"] for row in rows] == ["done", "failed", "done"]
    assert "MemoryError" in rows[1]["reason"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("segfault", "SIGSEGV"),
        ("exit", "exit code 7"),
        ("oom", "SIGKILL, perhaps by the kernel because memory ran out"),
        ("fork", "exit code 8"),
        ("hangs up", "exit code 1"),
    ],
)
async def test_a_process_that_dies_is_one_failed_attempt_and_is_replaced(
    desk: Desk, how: str, said: str
) -> None:
    ids = await desk.enqueue(app.dies.job(how), app.dies_for_good.job(), app.adds.job(1))
    await desk.start(app.REGISTRY, process_slots=1)
    died, for_good, added = await desk.settled(*ids)
    assert (died["state"], died["attempt"], died["crashes"]) == ("failed", 1, 0)
    assert died["reason"].startswith("ProcessDied: process ")
    assert died["reason"].endswith(f"ended with {said} during the attempt")
    assert (for_good["state"], for_good["attempt"]) == ("failed", 1)
    assert added["state"] == "done"


async def test_a_process_that_hangs_up_and_stays_is_killed_and_that_is_reported(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_process, "CLOSED_S", 0.1)
    (job,) = await desk.enqueue(app.dies.job("stays"))
    await desk.start(app.REGISTRY, process_slots=1)
    (row,) = await desk.settled(job)
    assert row["reason"].startswith("ProcessDied: process ")
    assert row["reason"].endswith("closed its connection to the worker during the attempt")


async def test_a_handler_learns_that_its_time_is_over(desk: Desk, tmp_path: Path) -> None:
    note = tmp_path / "note"
    ids = await desk.enqueue(app.sleeps.options(timeout_s=0.2).job(60, str(note)))
    await desk.start(app.REGISTRY, process_slots=1, cancel_s=30.0)
    (row,) = await desk.settled(*ids)
    assert (row["state"], row["reason"]) == (
        "failed",
        "TimedOut: the attempt took longer than 0.2 s",
    )
    assert note.read_text() == "timeout"


async def test_what_a_handler_forks_ends_by_signals_as_any_process_does(
    desk: Desk, capfd: pytest.CaptureFixture[str]
) -> None:
    (job,) = await desk.enqueue(app.ends_what_it_forks.job())
    worker = await desk.start(app.REGISTRY, process_slots=1)
    (row,) = await desk.settled(job)
    assert (row["state"], row["result"]) == ("done", "-15")
    assert await worker.stop() == 0
    said = capfd.readouterr().err
    assert "MustEnd" not in said
    assert "Warning" not in said


async def test_who_ignores_that_is_killed_with_all_it_has_started(
    desk: Desk, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    hung, added = await desk.enqueue(
        app.blocks_signals.options(timeout_s=0.3).job(str(note)), app.adds.job(1)
    )
    worker = await desk.start(app.REGISTRY, process_slots=1, cancel_s=0.2)
    row, done = await desk.settled(hung, added)
    said = "TimedOut: the attempt took longer than 0.3 s, ignored that, and was killed"
    assert (row["state"], row["reason"], done["state"]) == ("failed", said, "done")
    pids = [int(word) for word in note.read_text().split()]
    await until(lambda: not any(map(lives, pids)))
    (event,) = desk.emitted.of("process.killed", job_id=hung)
    assert (event["why"], event["pid"]) == ("timeout", pids[0])
    assert await worker.stop() == 0
    assert worker.worker.report.abandoned == 0


async def test_a_cancelled_job_is_asked_to_stop(desk: Desk, tmp_path: Path) -> None:
    from taskd.store.jobs import jobs

    note = tmp_path / "note"
    (job,) = await desk.enqueue(app.sleeps.job(60, str(note)))
    worker = await desk.start(app.REGISTRY, process_slots=1, cancel_s=30.0)
    await text(note)
    await jobs.cancel(desk.lane, [job], "by hand")
    worker.worker.parts.runners[0].cancel_job(job, "by hand")
    (row,) = await desk.settled(job)
    assert row["state"] == "cancelled"
    assert note.read_text() == "stop"


async def test_a_stop_waits_for_a_process_and_kills_the_one_that_does_not_end(
    desk: Desk, tmp_path: Path
) -> None:
    quick, slow, hung = (tmp_path / name for name in ("quick", "slow", "hung"))
    ids = await desk.enqueue(
        app.sleeps.job(0.5, str(quick)),
        replace(app.sleeps.job(60, str(slow)), max_attempts=2),
        replace(app.blocks_signals.job(str(hung)), max_attempts=2),
        app.adds.job(1),
    )
    worker = await desk.start(app.REGISTRY, process_slots=3, drain_s=1.0, cancel_s=0.3)
    for note in (quick, slow, hung):
        await text(note)
    assert await worker.stop() == 0
    rows = [await desk.row(job) for job in ids]
    assert rows[0]["state"] == "done"
    # Asked to stop, killed, and not started: none of their attempts counts.
    for row in rows[1:3]:
        assert (row["state"], row["attempt"], row["interrupts"]) == ("queued", 0, 1)
    assert slow.read_text() == "stop"
    await until(lambda: not any(map(lives, map(int, hung.read_text().split()))))


async def test_a_process_is_replaced_after_so_many_attempts(desk: Desk) -> None:
    ids = await desk.enqueue(*(app.adds.job(n) for n in range(6)))
    await desk.start(app.REGISTRY, process_slots=1, process_jobs_max=2)
    pids = [json.loads(row["result"])["pid"] for row in await desk.settled(*ids)]
    assert sorted(map(pids.count, set(pids))) == [2, 2, 2]


async def test_a_process_that_died_at_rest_harms_no_job(desk: Desk) -> None:
    (job,) = await desk.enqueue(app.adds.job(1))
    await desk.start(app.REGISTRY, process_slots=1)
    (row,) = await desk.settled(job)
    pid = json.loads(row["result"])["pid"]
    os.kill(pid, 9)
    await until(lambda: not lives(pid))
    (job,) = await desk.enqueue(app.adds.job(1))
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"]) == ("done", 1)


async def test_a_job_that_a_silent_process_has_may_have_begun(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker whose loop was blocked once took such an attempt for one that had not started."""
    (job,) = await desk.enqueue(app.adds.job(1))
    await desk.start(app.REGISTRY, process_slots=1, cancel_s=0.3)
    (row,) = await desk.settled(job)
    pid = json.loads(row["result"])["pid"]
    os.kill(pid, signal.SIGSTOP)
    with monkeypatch.context() as impatient:
        impatient.setattr("taskd.worker.running.attempt_table.SLOT_WAIT_S", 0.2)
        (job,) = await desk.enqueue(app.adds.job(1))
        await desk.emitted.wait("job.interrupted", job_id=job)
    # The process that takes its place may be slow to start.
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], row["interrupts"]) == ("done", 1, 1)
    assert json.loads(row["result"])["pid"] != pid


async def test_an_app_that_cannot_be_imported_there_is_reported_by_the_job(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_app.py").write_text("raise RuntimeError('only for workers')")
    monkeypatch.syspath_prepend(str(tmp_path))
    (job,) = await desk.enqueue(app.adds.options(max_attempts=1).job(1))
    desk.settings["app"] = "broken_app"
    await desk.start(app.REGISTRY, process_slots=1)
    (row,) = await desk.settled(job)
    assert row["reason"] == (
        "ProcessNotStarted: the process for this attempt did not start: RuntimeError: "
        "only for workers"
    )


async def test_a_handler_that_is_not_found_in_its_module_is_refused_at_the_start(
    desk: Desk,
) -> None:
    registry = Registry()
    task(process=True, registry=registry, name="other")(app.REGISTRY.get("adds").handler)  # type: ignore[union-attr]
    with pytest.raises(ConfigError, match="find the task as adds in the module"):
        desk.worker(registry)


async def test_a_pool_that_is_closed_while_a_process_starts_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A socket that is left would fail the test as a warning."""
    there, before = asyncio.Event(), set(children(os.getpid()))

    async def never(**_options: object) -> None:
        there.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio, "open_unix_connection", never)
    pool = JobProcesses(Settings(process_slots=1))
    taking = asyncio.create_task(pool._acquire())
    await until(there.is_set)
    assert len(set(children(os.getpid())) - before) == 1
    await pool.close()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert set(children(os.getpid())) <= before
    gc.collect()
