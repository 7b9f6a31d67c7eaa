"""Which deaths are crashes, and which suspects a crash is charged to."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.core.jobs.job import JobState
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.helpers import (
    FAILED,
    SCHEDULED,
    bury,
    enqueue,
    incarnation,
    new_worker,
    rescue,
    row,
    run_one,
    running,
)

LAPSE = "UPDATE taskd.worker SET lease_until = now() - interval '1 s' WHERE id = $1"
CRASHED = "SELECT crashed FROM taskd.worker WHERE id = $1"


async def lapse_and_bury(sql: Any, lane: Lane, worker: int) -> None:
    await sql.execute(LAPSE, worker)
    assert await workers.declare_dead(lane, [worker], proved=False)


@pytest.mark.parametrize("draining", [False, True])
async def test_a_process_that_is_gone_has_crashed_unless_it_was_stopping(
    sql: Any, lane: Lane, draining: bool
) -> None:
    worker = await new_worker(lane)
    await workers.renew_lease(lane, worker, 30.0, draining=draining)
    await bury(lane, worker)
    assert await sql.fetchval(CRASHED, worker) is not draining


@pytest.mark.parametrize(
    ("later", "crashed"),
    [
        (None, False),  # a network that is cut, a process that stands still
        ({"pid_namespace": "pid:[2]"}, True),  # its container was started again
        ({"pid_namespace": "pid:[1]"}, False),  # a neighbour, which can see that it still runs
        ({"pid_namespace": "pid:[2]", "host": "another"}, False),
        ({"pid_namespace": "pid:[2]", "boot_id": "another"}, False),  # the host was booted again
    ],
)
async def test_a_lease_that_ran_out_is_a_crash_if_the_container_was_started_again(
    sql: Any, lane: Lane, later: dict[str, str] | None, crashed: bool
) -> None:
    here = {"host": "host", "boot_id": "boot", "pid_namespace": "pid:[1]"}
    await workers.register(lane, incarnation(1)._replace(**here), 30.0, ["q"], {"t": 1})
    if later is not None:
        await workers.register(lane, incarnation(2)._replace(**here | later), 30.0, ["q"], {"t": 1})
    await lapse_and_bury(sql, lane, 1)
    assert await sql.fetchval(CRASHED, 1) is crashed


async def test_a_death_that_says_nothing_about_its_jobs_makes_no_suspects(
    sql: Any, lane: Lane
) -> None:
    worker = await new_worker(lane)
    job = await run_one(lane, worker)
    await lapse_and_bury(sql, lane, worker)
    assert await rescue(lane) == {job.id: SCHEDULED}
    back = await row(sql, job.id)
    assert (back["crashes"], back["interrupts"], back["attempt"]) == (0, 1, 0)
    # It keeps its place in the line.
    assert back["run_at"] < back["started_at"]


async def test_the_third_such_death_of_a_job_is_treated_as_a_crash(sql: Any, lane: Lane) -> None:
    [job_id] = await enqueue(lane)
    found = []
    for _ in range(3):
        worker = await new_worker(lane)
        await sql.execute(
            "UPDATE taskd.job SET state = 'running', worker_id = $1, attempt = attempt + 1", worker
        )
        await lapse_and_bury(sql, lane, worker)
        await rescue(lane)
        found.append(await sql.fetchval("SELECT crashes FROM taskd.job WHERE id = $1", job_id))
    assert found == [0, 0, 1]


@pytest.mark.parametrize(
    ("group", "crashes", "isolated", "goes", "charges", "becomes_isolated"),
    [
        # An ordinary job becomes a suspect, even if a group is charged as well.
        ([], 0, False, SCHEDULED, 1, False),
        (["another"], 0, False, SCHEDULED, 1, False),
        # The group is charged, and nobody else.
        (["it", "another"], 1, False, SCHEDULED, 2, True),
        (["it"], 1, False, SCHEDULED, 2, True),
        (["another"], 1, False, SCHEDULED, 1, False),
        (["another"], 2, True, SCHEDULED, 2, True),
        # Without a group, any suspect that ran may have been it.
        ([], 1, False, SCHEDULED, 2, False),
        ([], 2, False, SCHEDULED, 3, True),
        ([], 2, True, SCHEDULED, 3, True),
        # Guilty: it was isolated, and the whole group.
        (["it"], 2, True, FAILED, 3, None),
        (["it"], 1, True, SCHEDULED, 2, True),
        (["it", "another"], 2, True, SCHEDULED, 3, True),
        # A bound for what is never proved.
        ([], 9, True, FAILED, 10, None),
        (["another"], 9, True, SCHEDULED, 9, True),
    ],
)
async def test_a_crash_is_charged_to_the_last_group(
    sql: Any,
    lane: Lane,
    group: list[str],
    crashes: int,
    isolated: bool,
    goes: JobState,
    charges: int,
    becomes_isolated: bool | None,
) -> None:
    worker = await new_worker(lane)
    it, another = await running(lane, worker, 2)
    ids = {"it": it.id, "another": another.id}
    await sql.execute(
        "UPDATE taskd.job SET crashes = $2, isolated = $3 WHERE id = $1", it.id, crashes, isolated
    )
    await sql.execute("UPDATE taskd.worker SET suspects = $1", [ids[each] for each in group])
    await bury(lane, worker)
    went = await jobs.rescue(lane, 1000, 3, 10)
    assert went[it.id].state is goes
    after = await row(sql, it.id)
    assert after["crashes"] == charges
    live = await sql.fetchval("SELECT isolated FROM taskd.job WHERE id = $1", it.id)
    assert live is becomes_isolated


async def test_a_claim_records_the_group_and_an_empty_one_keeps_it_unless_it_is_over(
    sql: Any, lane: Lane
) -> None:
    worker = await new_worker(lane)
    suspects = await running(lane, worker, 3)
    await bury(lane, worker)
    await rescue(lane)
    me = await new_worker(lane)

    async def claim(slots: int, batch: int, *, clear: bool = False) -> list[int]:
        claimed = await jobs.claim_suspects(
            lane, me, {"q": slots, "r": 5}, ["t"], batch, isolated=False, clear=clear
        )
        return [job.id for job in claimed]

    group = "SELECT suspects FROM taskd.worker WHERE id = $1"
    first = await claim(2, 5)
    assert len(first) == 2
    assert await sql.fetchval(group, me) == sorted(first)
    last = await claim(5, 1)
    assert sorted(first + last) == sorted(job.id for job in suspects)
    assert await sql.fetchval(group, me) == last
    assert await claim(5, 5) == []
    assert await sql.fetchval(group, me) == last
    assert await claim(5, 5, clear=True) == []
    assert await sql.fetchval(group, me) == []


async def test_isolated_suspects_are_claimed_apart(sql: Any, lane: Lane) -> None:
    worker = await new_worker(lane)
    plain, isolated = await running(lane, worker, 2)
    await bury(lane, worker)
    await rescue(lane)
    await sql.execute("UPDATE taskd.job SET isolated = true WHERE id = $1", isolated.id)
    me = await new_worker(lane)
    for wanted, only in ((False, plain), (True, isolated)):
        claimed = await jobs.claim_suspects(lane, me, {"q": 9}, ["t"], 9, isolated=wanted)
        assert [job.id for job in claimed] == [only.id]
