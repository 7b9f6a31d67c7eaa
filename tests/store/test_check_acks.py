"""Status of acks, and completion inside of the handler's own transaction."""

from __future__ import annotations

import pytest

from taskd.core.jobs.job import JobState
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.schema import fetches
from tests.store.ack_helpers import ALL_STATES, jobs_completed, snapshot
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    MAX_CRASHES,
    QUEUED,
    SCHEDULED,
    Connect,
    Transaction,
    bury,
    claim_suspect,
    done,
    fate,
    new_worker,
    rescue,
    row,
    run_one,
    running,
    settle,
    state_of,
    take_over,
)


async def test_the_check_of_an_ack_that_was_written_is_its_outcome(sql, lane: Lane, me) -> None:
    batch = await running(lane, me, 6)
    plain, *others = batch
    await done(lane, plain)
    for job, state in zip(others, ALL_STATES, strict=True):
        await settle(lane, job, state, delay_s=60.0 if state is SCHEDULED else 0.0)
    fates = await jobs.check_acks(lane, me, [job.id for job in batch], [job.fence for job in batch])
    completed = {plain.id, *(j.id for j, s in zip(others, ALL_STATES, strict=True) if s is DONE)}
    assert fates == {job.id: "done" if job.id in completed else "acked" for job in batch}


async def test_an_earlier_claim_that_was_rescued_does_not_make_the_ack_of_the_next_one_lost(
    sql, lane: Lane, me
) -> None:
    job = await run_one(lane, me)
    await bury(lane, me)
    await jobs.rescue(lane, 1, 3, 3)
    # Its snapshot was taken before the worker was declared dead, and it commits only now.
    await sql.execute("UPDATE taskd.worker SET died_at = NULL WHERE id = $1", me)
    late = await claim_suspect(lane, me, ["q"], ["t"])
    assert late is not None
    await bury(lane, me)
    assert await fate(lane, late) == "running"
    assert await done(lane, late)
    assert (await fate(lane, job), await fate(lane, late)) == ("lost", "done")


async def test_the_check_of_an_ack_that_was_not_written_is_running(lane: Lane, me) -> None:
    assert await fate(lane, await run_one(lane, me)) == "running"


@pytest.mark.parametrize("state", [None, DONE, FAILED, CANCELLED])
async def test_without_a_history_a_written_ack_is_absent(sql, lane: Lane, me, state) -> None:
    await sql.execute(
        "INSERT INTO taskd.queue (name, keep_done_s, keep_failed_s) VALUES ('q', 0, 0)"
    )
    job = await run_one(lane, me)
    written = await done(lane, job) if state is None else await settle(lane, job, state)
    assert written in (1, state)
    assert await row(sql, job.id) is None
    assert await fate(lane, job) == "absent"


@pytest.mark.parametrize(
    ("keep_done_s", "keep_failed_s", "expected"),
    [(86400, 86400, "deleted"), (86399, 86400, "absent"), (604800, 0, "absent")],
)
async def test_a_missing_job_was_deleted_if_the_history_would_have_it(
    sql, lane: Lane, me, keep_done_s: int, keep_failed_s: int, expected: str
) -> None:
    job = await run_one(lane, me)
    await sql.execute("DELETE FROM taskd.job")
    assert await fate(lane, job) == "deleted"  # no row of its queue: the default applies
    keep = "INSERT INTO taskd.queue (name, keep_done_s, keep_failed_s) VALUES ($1, $2, $3)"
    await sql.execute(keep, "others", 0, 0)
    assert await fate(lane, job) == "deleted"
    await sql.execute(keep, "q", keep_done_s, keep_failed_s)
    assert await fate(lane, job) == expected


async def test_the_check_of_a_job_that_was_taken_over_is_lost(sql, lane: Lane, me, other) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    assert await fate(lane, job) == "lost"  # waits in quarantine
    again = await claim_suspect(lane, other, ["q"], ["t"])
    assert again is not None
    assert await fate(lane, job) == "lost"  # runs elsewhere
    await done(lane, again)
    assert await fate(lane, job) == "lost"  # finished elsewhere
    assert await fate(lane, again) == "done"


@pytest.mark.parametrize("how", ["crashed too often", "cancel requested"])
async def test_the_check_of_a_job_that_rescue_ended_is_lost(sql, lane: Lane, me, how: str) -> None:
    job = await run_one(lane, me)
    if how == "cancel requested":
        await jobs.cancel(lane, [job.id], "by hand")
    else:
        await sql.execute("UPDATE taskd.job SET crashes = $1", MAX_CRASHES - 1)
    await take_over(lane, job)
    assert await state_of(sql, job.id) == ("cancelled" if how == "cancel requested" else "failed")
    assert await fate(lane, job) == "lost"


@pytest.mark.parametrize("state", [SCHEDULED, QUEUED, FAILED])
async def test_the_check_of_a_suspects_own_ack_is_acked(
    sql, lane: Lane, me, other, state: JobState
) -> None:
    # An earlier worker's crash does not make this worker's ack look lost.
    await take_over(lane, await run_one(lane, me))
    suspect = await claim_suspect(lane, other, ["q"], ["t"])
    assert suspect is not None
    await settle(lane, suspect, state, refund=state is QUEUED)
    assert await fate(lane, suspect) == "acked"


async def test_the_check_of_a_written_ack_stays_acked_when_people_move_the_job_on(
    lane: Lane, me
) -> None:
    retried, cancelled = await running(lane, me, 2)
    await settle(lane, retried, FAILED)
    await jobs.retry(lane, [retried.id])
    await settle(lane, cancelled, SCHEDULED, delay_s=60.0)
    await jobs.cancel(lane, [cancelled.id], "by hand")
    assert await fate(lane, retried) == "acked"
    assert await fate(lane, cancelled) == "acked"


# Completing inside the handler's own transaction.


async def test_the_effects_and_the_completion_commit_together(
    sql, lane: Lane, connect: Connect, me
) -> None:
    await sql.execute("CREATE TABLE effect (job_id bigint)")
    kept, dropped = await running(lane, me, 2)
    for job in (kept, dropped):
        async with Transaction(await connect()) as mine:
            await mine.connection.execute("INSERT INTO effect VALUES ($1)", job.id)
            assert await jobs_completed(fetches(mine.connection), job, '{"n": 1}') == [(job.id,)]
            assert await state_of(sql, job.id) == "running"  # until it commits
            await (mine.commit() if job is kept else mine.rollback())
    assert [each["job_id"] for each in await sql.fetch("SELECT job_id FROM effect")] == [kept.id]
    ended = await row(sql, kept.id)
    assert (ended["state"], ended["result"], ended["reason"]) == ("done", '{"n": 1}', None)
    assert await state_of(sql, dropped.id) == "running"
    assert await fate(lane, kept) == "done"


async def test_a_completion_that_lost_its_job_returns_nothing(
    sql, lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    async with Transaction(await connect()) as mine:
        assert await jobs_completed(fetches(mine.connection), job) == []
    assert await state_of(sql, job.id) == "scheduled"


async def test_rescue_steps_over_a_completion_that_is_not_yet_committed(
    sql, lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    async with Transaction(await connect()) as mine:
        await jobs_completed(fetches(mine.connection), job)
        await bury(lane, me)
        assert await rescue(lane) == {}
        await mine.commit()
    assert await rescue(lane) == {}
    assert await state_of(sql, job.id) == "done"


async def test_an_ack_sent_after_a_committed_completion_changes_nothing(sql, lane, me) -> None:
    job = await run_one(lane, me)
    await jobs_completed(lane, job, "1")
    before = await snapshot(sql)
    assert await settle(lane, job, FAILED, reason="not committed") is None
    assert await snapshot(sql) == before
    worker = await new_worker(lane)
    assert await jobs.claim(lane, worker, "q", 1) == []
