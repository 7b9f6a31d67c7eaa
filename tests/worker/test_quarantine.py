"""The quarantine: which suspects start together, and which wait for which."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from taskd.store.jobs import jobs
from taskd.worker.claiming import quarantine
from tests.worker.conftest import Desk, until

SUSPECTS = """
UPDATE taskd.job SET state = 'scheduled', crashes = 1, run_at = now() - interval '1 s',
       started_at = now() - make_interval(secs => id)
"""
GROUP = "SELECT suspects FROM taskd.worker WHERE died_at IS NULL"


def waiting(desk: Desk) -> tuple[Any, asyncio.Event]:
    """A task whose handlers wait for an event, and the event."""
    release = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        await release.wait()

    return waits, release


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of each group that was claimed."""
    claimed: list[list[int]] = []
    claim = jobs.claim_suspects

    async def recorded(*args: Any, **options: Any) -> Any:
        group = await claim(*args, **options)
        if group:
            claimed.append([job.id for job in group])
        return group

    monkeypatch.setattr(jobs, "claim_suspects", recorded)
    return claimed


async def test_groups_of_suspects_grow_and_the_youngest_come_first(
    desk: Desk, groups: list[list[int]]
) -> None:
    @desk.task()
    async def quick() -> None: ...

    ids = await desk.enqueue(*(quick.job() for _ in range(10)))
    await desk.sql.execute(SUSPECTS)
    await desk.start()
    rows = await desk.settled(*ids)
    assert {(row["state"], row["crashes"], row["attempt"]) for row in rows} == {("done", 1, 1)}
    assert [len(group) for group in groups] == [1, 2, 4, 3]
    assert groups[0] == [1]
    # Nothing is charged with a crash that comes now.
    await until(lambda: desk.sql.fetchval(f"SELECT cardinality(({GROUP})) = 0"))


async def test_suspects_run_one_at_a_time_in_a_queue_that_is_full(
    desk: Desk, groups: list[list[int]]
) -> None:
    fills, release = waiting(desk)

    @desk.task()
    async def quick() -> None: ...

    fillers = await desk.enqueue(*(fills.job() for _ in range(30)))
    [runner] = (await desk.start(concurrency=5)).worker.parts.runners
    await until(lambda: runner.running == 5)
    ids = await desk.enqueue(*(quick.job().after(3600) for _ in range(5)))
    await desk.sql.execute(f"{SUSPECTS} WHERE id = ANY ($1)", ids)
    await desk.sql.execute("SELECT pg_notify('taskd_default', '')")
    await desk.settled(*ids)
    assert [len(group) for group in groups] == [1] * 5
    assert runner.running == 5
    release.set()
    await desk.settled(*fillers)


async def test_a_suspect_that_hangs_keeps_no_other_waiting(desk: Desk) -> None:
    hangs, release = waiting(desk)

    @desk.task()
    async def quick() -> None: ...

    @desk.task(queue="other")
    async def elsewhere() -> None: ...

    (hanging,) = await desk.enqueue(hangs.job())
    ids = await desk.enqueue(*(quick.job() for _ in range(20)), *(elsewhere.job() for _ in "ab"))
    await desk.sql.execute(SUSPECTS)  # the one that hangs comes first
    await desk.start()
    await desk.settled(*ids)
    assert (await desk.row(hanging))["state"] == "running"
    release.set()
    await desk.settled(hanging)


async def test_the_row_of_the_worker_names_the_group_that_a_crash_is_charged_to(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "OUTLIVED_S", 3600.0)
    waits, release = waiting(desk)

    ids = await desk.enqueue(waits.job(), waits.job())
    await desk.sql.execute(SUSPECTS)
    await desk.start()
    await until(lambda: desk.sql.fetchval(f"SELECT ({GROUP}) = ARRAY[1]::bigint[]"))
    assert (await desk.row(2))["state"] == "scheduled"
    release.set()
    await desk.settled(*ids)


async def test_an_isolated_suspect_starts_when_no_other_could_be_the_cause_of_a_crash(
    desk: Desk, groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "SETTLED_S", 3600.0)
    waits, release = waiting(desk)

    @desk.task()
    async def quick() -> None: ...

    first, *alone = await desk.enqueue(waits.job(), *(quick.job() for _ in range(3)))
    await desk.sql.execute(SUSPECTS)
    await desk.sql.execute(
        "UPDATE taskd.job SET crashes = 2, isolated = true WHERE id = ANY ($1)", alone
    )
    parts = (await desk.start()).worker.parts
    await until(lambda: parts.runners[0].has_job(first))
    await asyncio.sleep(2 * quarantine.OUTLIVED_S)
    await parts.quarantine.tick()
    assert groups == [[first]]
    release.set()
    await desk.settled(first, *alone)
    assert groups == [[first], *([each] for each in alone)]


async def test_a_suspect_that_was_near_three_crashes_starts_after_others_like_it(
    desk: Desk, groups: list[list[int]]
) -> None:
    waits, release = waiting(desk)

    ids = await desk.enqueue(waits.job(), waits.job())
    await desk.sql.execute(SUSPECTS)
    await desk.sql.execute("UPDATE taskd.job SET crashes = 3, isolated = true")
    parts = (await desk.start()).worker.parts
    await until(lambda: bool(parts.runners[0].running))
    await asyncio.sleep(2 * quarantine.OUTLIVED_S)
    await parts.quarantine.tick()
    assert groups == [[1]]
    release.set()
    await desk.settled(*ids)
    assert groups == [[1], [2]]


async def test_a_killer_runs_three_times_and_what_ran_beside_it_is_done(
    desk: Desk, dsn: str, tmp_path: Any
) -> None:
    (tmp_path / "killing_app.py").write_text(APP)

    @desk.task()
    async def innocent() -> None: ...

    @desk.task()
    async def kills() -> None: ...

    [killer] = await desk.enqueue(kills.job())
    ids = await desk.enqueue(*(innocent.job() for _ in range(12)))

    def run() -> int:
        return subprocess.run(
            [sys.executable, "-m", "taskd", "run", "--app", "killing_app", "--until-empty"],
            env=os.environ | {"TASKD_DSN": dsn, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            check=False,
            timeout=60,
        ).returncode

    codes = [await asyncio.to_thread(run) for _ in range(4)]
    assert codes == [-9, -9, -9, 1]
    ended = await desk.row(killer)
    assert (ended["state"], ended["reason"], ended["attempt"]) == ("failed", "crashed", 3)
    rows = await desk.settled(*ids)
    assert {row["state"] for row in rows} == {"done"}


APP = """
import asyncio, os, signal
from taskd import Context, task

@task()
async def innocent() -> None:
    await asyncio.sleep(0.5)

@task()
async def kills(ctx: Context) -> None:
    if ctx.attempt == 1:
        await asyncio.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
"""
