"""lease.sql: leases, dead workers, and the rescue of their jobs."""

from __future__ import annotations

import asyncio
import json

import pytest

from taskd.core.jobs.job import JobState
from taskd.core.jobs.job_filter import JobFilter
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.reading import job_pages, reports
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    FAILED,
    MAX_CRASHES,
    SCHEDULED,
    Connect,
    Ears,
    Transaction,
    bury,
    enqueue,
    incarnation,
    new_worker,
    rescue,
    row,
    run_one,
    running,
    state_of,
    take_over,
    waits_for_lock,
)


async def lapse(sql, worker: int) -> None:
    await sql.execute(
        "UPDATE taskd.worker SET lease_until = now() - interval '1 s' WHERE id = $1", worker
    )


async def lease_left_s(sql, worker: int) -> float:
    return await sql.fetchval(
        "SELECT extract(epoch FROM lease_until - now())::float8 FROM taskd.worker WHERE id = $1",
        worker,
    )


async def test_a_renewal_extends_the_lease_and_stores_whether_the_worker_drains(sql, lane) -> None:
    worker = await new_worker(lane, lease_s=5.0)
    assert await lease_left_s(sql, worker) <= 5
    assert await workers.renew_lease(lane, worker, 300.0, draining=True)
    assert await lease_left_s(sql, worker) > 200
    assert await sql.fetchval("SELECT draining FROM taskd.worker WHERE id = $1", worker)


async def test_a_renewal_by_a_dead_worker_finds_nothing_and_revives_nobody(sql, lane, me) -> None:
    await bury(lane, me)
    died_at = await sql.fetchval("SELECT died_at FROM taskd.worker WHERE id = $1", me)
    assert not await workers.renew_lease(lane, me, 300.0, draining=False)
    assert await sql.fetchval("SELECT died_at FROM taskd.worker WHERE id = $1", me) == died_at


async def test_a_late_renewal_extends_a_lease_that_nobody_has_acted_upon(sql, lane, me) -> None:
    await lapse(sql, me)
    assert await workers.renew_lease(lane, me, 300.0, draining=False)
    assert await workers.declare_dead(lane, [me], proved=False) == []


async def test_a_worker_is_declared_dead_once_and_for_ever(lane: Lane, me) -> None:
    assert await workers.declare_dead(lane, [me], proved=True) == ["host/1"]
    assert await workers.declare_dead(lane, [me], proved=True) == []


async def test_without_proof_only_a_lapsed_lease_buries(sql, lane: Lane, me, other) -> None:
    await lapse(sql, other)
    assert len(await workers.declare_dead(lane, [me, other], proved=False)) == 1
    assert not await workers.renew_lease(lane, other, 30.0, draining=False)
    assert await workers.renew_lease(lane, me, 30.0, draining=False)


async def test_a_renewal_before_the_declaration_commits_saves_the_worker(
    sql, lane: Lane, connect: Connect, me
) -> None:
    await lapse(sql, me)
    burying = await connect()
    async with Transaction(await connect()) as beating:
        assert await workers.renew_lease(fetches(beating.connection), me, 300.0, draining=False)
        late = asyncio.create_task(workers.declare_dead(fetches(burying), [me], proved=False))
        await waits_for_lock(sql, burying)
        await beating.commit()
        assert await late == []
    assert await workers.renew_lease(lane, me, 300.0, draining=False)


async def test_a_renewal_that_waits_for_the_declaration_learns_of_it(
    sql, lane: Lane, connect: Connect, me
) -> None:
    beating = await connect()
    async with Transaction(await connect()) as burying:
        await workers.declare_dead(fetches(burying.connection), [me], proved=True)
        late = asyncio.create_task(workers.renew_lease(fetches(beating), me, 300.0, draining=False))
        await waits_for_lock(sql, beating)
        await burying.commit()
        assert not await late


async def test_a_retired_worker_is_dead_and_stays_so(sql, lane: Lane, me) -> None:
    await workers.retire(lane, me)
    died_at = await sql.fetchval("SELECT died_at FROM taskd.worker WHERE id = $1", me)
    assert died_at is not None
    await workers.retire(lane, me)
    assert await sql.fetchval("SELECT died_at FROM taskd.worker WHERE id = $1", me) == died_at


async def test_others_are_the_living_without_oneself(sql, lane: Lane, me) -> None:
    near, far, silent, dead = [
        await new_worker(lane, host=host) for host in ("host", "far", "host", "host")
    ]
    await lapse(sql, silent)
    await bury(lane, dead)
    others = (await workers.check_upkeep(lane, incarnation(me), 0.001)).others
    seen = {each.id: each for each in others}
    assert seen.keys() == {near, far, silent}
    assert {each for each in seen if seen[each].neighbour} == {near, silent}
    assert {each for each in seen if seen[each].silent} == {silent}
    assert (seen[near].pid, seen[near].pid_started) == (1, 100)


async def test_nobody_is_silent_while_the_server_is_younger_than_a_lease(sql, lane, me) -> None:
    silent = await new_worker(lane)
    await lapse(sql, silent)
    up_s = await sql.fetchval(
        "SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8"
    )
    [young] = (await workers.check_upkeep(lane, incarnation(me), up_s + 3600.0)).others
    [grown] = (await workers.check_upkeep(lane, incarnation(me), up_s / 2)).others
    assert (young.silent, grown.silent) == (False, True)


async def test_without_a_boot_id_nobody_is_a_neighbour(sql, lane: Lane, me) -> None:
    await new_worker(lane)
    await sql.execute("UPDATE taskd.worker SET boot_id = ''")
    me_unknown = incarnation(me)._replace(boot_id="")
    [other] = (await workers.check_upkeep(lane, me_unknown, 30.0)).others
    assert not other.neighbour


async def test_a_worker_that_is_alone_sees_no_others_and_still_learns_what_is_due(
    sql, lane: Lane, me
) -> None:
    seen = await workers.check_upkeep(lane, incarnation(me), 30.0)
    nothing_due = (None, None, None, [])
    idle = ([], False, False, nothing_due, (None, None), False, frozenset(), [], {}, {})
    assert seen == (*idle, False, True, False, seen.now)  # its task is not published
    await enqueue(lane, delay_s=60.0)
    seen = await workers.check_upkeep(lane, incarnation(me), 30.0)
    assert seen.others == []
    assert 50 < seen.due.job_s <= 60
    assert seen.due.suspect_s is None
    await sql.execute("UPDATE taskd.job SET crashes = 1")
    seen = await workers.check_upkeep(lane, incarnation(me), 30.0)
    assert seen.due.job_s is None
    assert 50 < seen.due.suspect_s <= 60


async def test_orphans_are_running_jobs_without_a_living_owner(sql, lane: Lane, me, other) -> None:
    async def orphans() -> bool:
        return (await workers.check_upkeep(lane, incarnation(me), 30.0)).orphans

    for worker in (me, other):
        await running(lane, worker, 2)
    assert not await orphans()
    await lapse(sql, other)  # silent is not dead
    assert not await orphans()
    await bury(lane, other)
    assert await orphans()
    assert len(await rescue(lane)) == 2
    assert not await orphans()
    # Neither the lowest nor the highest owner may be overlooked, nor one without a row.
    for stranger in (1, 2**62):
        await sql.execute(
            "UPDATE taskd.job SET worker_id = $1 "
            "WHERE id = (SELECT min(id) FROM taskd.job WHERE worker_id = $2)",
            stranger,
            me,
        )
        assert await orphans()
        await rescue(lane)
        assert not await orphans()


async def test_running_jobs_are_those_that_the_database_says_this_worker_runs(
    sql, lane: Lane, me, other
) -> None:
    mine = await running(lane, me, 2)
    await running(lane, other, 1)
    await jobs.cancel(lane, [mine[0].id], "by hand")
    await sql.execute("UPDATE taskd.job SET started_at = now() - interval '1 h'")
    rows = sorted(await workers.running_jobs(lane, me))
    assert [(each.id, each.fence, each.cancel_reason) for each in rows] == [
        (mine[0].id, 1, "by hand"),
        (mine[1].id, 1, None),
    ]
    assert all(3600 <= each.age_s < 3700 for each in rows)


# Rescue.


async def test_jobs_of_the_living_are_left_alone_even_when_their_lease_has_lapsed(
    sql, lane: Lane, me
) -> None:
    await run_one(lane, me)
    await lapse(sql, me)
    assert await rescue(lane) == {}


async def test_a_job_of_a_dead_worker_comes_back_as_a_suspect_and_notifies(sql, lane, me) -> None:
    job = await run_one(lane, me)
    await bury(lane, me)
    ears = Ears(sql)
    await ears.listen("taskd_q")
    assert await rescue(lane) == {job.id: SCHEDULED}
    assert await ears.so_far() == ["taskd_q"]
    back = await row(sql, job.id)
    assert (back["state"], back["crashes"], back["attempt"]) == ("scheduled", 1, 1)
    assert (back["fence"], back["worker_id"]) == (1, None)
    [error] = json.loads(back["errors"])
    assert (error["type"], error["worker"], error["attempt"]) == ("WorkerLost", str(me), 1)
    assert await sql.fetchval("SELECT run_at <= now() FROM taskd.job")


async def test_a_rescued_job_is_not_rescued_twice(lane: Lane, me) -> None:
    await take_over(lane, await run_one(lane, me))
    assert await rescue(lane) == {}


async def test_two_rescuers_share_the_jobs(lane: Lane, connect: Connect, me) -> None:
    batch = {job.id for job in await running(lane, me, 4)}
    await bury(lane, me)
    async with Transaction(await connect()) as first:
        ours = await jobs.rescue(fetches(first.connection), 3, 3, 3)
        theirs = await rescue(lane)
        await first.commit()
    assert len(ours) == 3
    assert ours.keys() | theirs.keys() == batch
    assert not ours.keys() & theirs.keys()


@pytest.mark.parametrize(
    ("crashes", "max_attempts", "cancel", "ends_as", "reason"),
    [
        (0, 5, False, SCHEDULED, None),
        (1, 5, False, SCHEDULED, None),
        (2, 5, False, FAILED, "crashed"),  # the third death
        (0, 1, False, FAILED, "began once, and its worker died"),
        (0, 5, True, CANCELLED, "by hand"),
        (2, 1, True, CANCELLED, "by hand"),
    ],
)
async def test_what_becomes_of_a_dead_workers_job(
    sql, lane: Lane, me, crashes, max_attempts, cancel, ends_as: JobState, reason
) -> None:
    job = await run_one(lane, me, max_attempts=max_attempts)
    await sql.execute("UPDATE taskd.job SET crashes = $1", crashes)
    if cancel:
        await jobs.cancel(lane, [job.id], "by hand")
    await bury(lane, me)
    assert await rescue(lane) == {job.id: ends_as}
    ended = await row(sql, job.id)
    assert (ended["state"], ended["reason"]) == (ends_as.value, reason)
    assert ended["crashes"] == crashes + 1
    assert json.loads(ended["errors"])[-1]["type"] == "WorkerLost"


PUBLISHED = """
INSERT INTO taskd.task (name, app, signature, queue, max_attempts, max_crashes, args_schema)
VALUES ('t', 'app', '', 'q', $1, $2, '{}')
"""


@pytest.mark.parametrize(
    ("of_job", "of_task", "attempt", "ends_as"),
    [
        (1, 20, 1, FAILED),
        (None, 1, 1, FAILED),
        (2, 1, 2, FAILED),  # retried by hand
        (2, 1, 1, SCHEDULED),
        (2, 20, 2, SCHEDULED),
        (None, 20, 1, SCHEDULED),
    ],
)
@pytest.mark.parametrize("proved", [True, False])
async def test_a_job_with_one_attempt_does_not_begin_again_after_any_death(
    sql, lane: Lane, me, of_job, of_task, attempt, ends_as: JobState, proved: bool
) -> None:
    await sql.execute(PUBLISHED, of_task, None)
    job = await run_one(lane, me, max_attempts=of_job)
    await sql.execute("UPDATE taskd.job SET attempt = $1", attempt)
    await dies(sql, lane, me, proved=proved)
    assert await rescue(lane) == {job.id: ends_as}
    ended = await row(sql, job.id)
    failed = ends_as is FAILED
    assert ended["reason"] == ("began once, and its worker died" if failed else None)
    assert ended["crashes"] == (proved or failed)


@pytest.mark.parametrize("proved", [True, False])
@pytest.mark.parametrize(
    ("max_crashes", "before", "ends_as"),
    [(0, 0, FAILED), (1, 0, SCHEDULED), (1, 1, FAILED), (5, 4, SCHEDULED), (5, 5, FAILED)],
)
async def test_max_crashes_counts_every_death_of_the_worker(
    sql, lane: Lane, me, max_crashes, before, ends_as: JobState, proved: bool
) -> None:
    await sql.execute(PUBLISHED, 20, max_crashes)
    job = await run_one(lane, me)
    # The death of a worker whose last group is another suspect is not charged to other suspects.
    await sql.execute("UPDATE taskd.job SET crashes = $1", before)
    await sql.execute("UPDATE taskd.worker SET suspects = ARRAY[$1::bigint]", job.id + 1)
    await dies(sql, lane, me, proved=proved)
    assert await rescue(lane) == {job.id: ends_as}
    ended = await row(sql, job.id)
    assert ended["reason"] == ("crashed" if ends_as is FAILED else None)
    assert (ended["crashes"], ended["attempt"]) == (before + 1, 1)


async def dies(sql, lane: Lane, worker: int, *, proved: bool) -> None:
    """Let a worker crash, or lose its lease."""
    await lapse(sql, worker)
    assert await workers.declare_dead(lane, [worker], proved=proved)


async def test_rescues_after_the_second_one_delay_the_job(sql, lane: Lane, me) -> None:
    """Two come at once, as a job that kills is caught by its third run."""
    delays_s = []
    for crashes in range(5):
        worker = await new_worker(lane)
        [job_id] = await enqueue(lane)
        await sql.execute(
            "UPDATE taskd.job SET state = 'running', worker_id = $2, crashes = $3 WHERE id = $1",
            job_id,
            worker,
            crashes,
        )
        await bury(lane, worker)
        await jobs.rescue(lane, 1000, MAX_CRASHES, 10)
        delays_s.append(
            await sql.fetchval(
                "SELECT round(extract(epoch FROM run_at - clock_timestamp()))::integer "
                "FROM taskd.job WHERE id = $1",
                job_id,
            )
        )
    assert delays_s == [0, 0, 20, 40, 80]


async def test_a_cancel_in_flight_is_stepped_over_and_then_decides(
    sql, lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    await bury(lane, me)
    async with Transaction(await connect()) as cancelling:
        await jobs.cancel(fetches(cancelling.connection), [job.id], "by hand")
        assert await rescue(lane) == {}
        await cancelling.commit()
    assert await rescue(lane) == {job.id: CANCELLED}


async def test_without_a_history_a_crashed_job_is_gone(sql, lane: Lane, me) -> None:
    await sql.execute(
        "INSERT INTO taskd.queue (name, keep_done_s, keep_failed_s) VALUES ('q', 0, 0)"
    )
    job = await run_one(lane, me)
    await sql.execute("UPDATE taskd.job SET crashes = $1", MAX_CRASHES - 1)
    await bury(lane, me)
    assert await rescue(lane) == {job.id: FAILED}
    assert await row(sql, job.id) is None


async def test_workers_are_forgotten_when_long_dead_and_without_jobs(sql, lane: Lane, me) -> None:
    busy, recent, old = [await new_worker(lane) for _ in range(3)]
    job = await run_one(lane, busy)
    for worker in (busy, recent, old):
        await bury(lane, worker)
    await sql.execute(
        "UPDATE taskd.worker SET died_at = now() - interval '1 h' WHERE id <> $1 AND id <> $2",
        recent,
        me,
    )
    await workers.prune(lane, 600.0)
    left = {each["id"] for each in await sql.fetch("SELECT id FROM taskd.worker")}
    assert left == {me, busy, recent}
    assert await state_of(sql, job.id) == "running"


async def test_a_finished_job_keeps_the_name_of_a_worker_that_was_forgotten(
    sql, lane: Lane
) -> None:
    named = await new_worker(lane, name="mailer")
    job = await run_one(lane, named)
    assert await jobs.ack_done(lane, named, [job.id], [job.fence]) == 1
    await bury(lane, named)
    await workers.prune(lane, -1.0)
    assert await sql.fetchval("SELECT count(*) FROM taskd.worker") == 0
    shown = await reports.show_job(lane, job.id)
    assert shown is not None
    assert (shown["worker_name"], shown["host"], shown["pid"]) == ("mailer", "host", 1)
    found = await job_pages.list_jobs(lane, JobFilter(worker="mailer"), 10)
    assert [each["id"] for each in found] == [job.id]
    assert await job_pages.list_jobs(lane, JobFilter(worker="other"), 10) == []


async def test_workers_are_deleted_when_no_job_of_theirs_can_be_kept(sql, lane: Lane, me) -> None:
    recent, old = [await new_worker(lane) for _ in range(2)]
    await bury(lane, recent)
    await bury(lane, old)
    await sql.execute(
        "INSERT INTO taskd.queue (name, keep_done_s) VALUES ('long', 40 * 86400);"
        f"UPDATE taskd.worker SET died_at = now() - interval '39 d' WHERE id = {recent};"
        f"UPDATE taskd.worker SET died_at = now() - interval '41 d' WHERE id = {old}"
    )
    await workers.prune(lane, 600.0)
    assert await _known(sql) == {me, recent, old}
    await workers.prune(lane, 600.0)
    assert await _known(sql) == {me, recent}


async def _known(sql) -> set[int]:
    return {each["id"] for each in await sql.fetch("SELECT id FROM taskd.workers")}


async def test_the_connections_of_the_server_are_counted(sql, lane: Lane) -> None:
    counted = await workers.connections(lane)
    assert counted.allowed == int(await sql.fetchval("SHOW max_connections"))
    assert 2 <= counted.used <= counted.allowed
    assert counted.reserved >= 0
