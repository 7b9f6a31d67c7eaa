"""ack.sql: the guard is (id, worker_id, fence, running); what it does not match changes nothing."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from taskd.core.job import JobState
from taskd.store import jobs
from taskd.store.connections import fetches
from taskd.store.database import Lane
from taskd.store.translate import ValueRefused
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    MAX_CRASHES,
    QUEUED,
    RUNNING,
    SCHEDULED,
    Connect,
    Ears,
    Transaction,
    ack,
    bury,
    done,
    due_now,
    enqueue,
    fate,
    new_worker,
    rescue,
    row,
    run_one,
    running,
    settle,
    state_of,
    take_over,
    waits_for_lock,
)

ALL_STATES = [DONE, FAILED, CANCELLED, SCHEDULED, QUEUED]


async def snapshot(sql) -> list:
    """Everything about all jobs."""
    rows = await sql.fetch("SELECT * FROM taskd.jobs ORDER BY id")
    return [tuple(each.values()) for each in rows]


# Successes.


async def test_a_success_moves_the_job_to_the_history_as_it_was(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me, args='{"a": 1}', max_attempts=4, timeout_s=9.0, priority=5)
    before = dict(await row(sql, job.id))
    assert await done(lane, job) == 1
    after = dict(await row(sql, job.id))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"state", "finished_at"}
    assert after["state"] == "done"
    assert after["finished_at"] >= after["started_at"]


async def test_a_batch_of_successes_with_differing_fences_is_matched_pair_by_pair(
    sql, lane: Lane, me
) -> None:
    # width_bucket finds the place of an id in the sorted ids, and so its fence.
    batch = await running(lane, me, 300)
    rng = random.Random(7)
    fences = {job.id: rng.randrange(1, 5) for job in batch}
    await sql.executemany("UPDATE taskd.job SET fence = $2 WHERE id = $1", list(fences.items()))
    chosen = sorted(rng.sample(sorted(fences), 200))
    assert await jobs.ack_done(lane, me, chosen, [fences[each] for each in chosen]) == 200
    assert sorted(r["id"] for r in await sql.fetch("SELECT id FROM taskd.job_history")) == chosen


@pytest.mark.parametrize("wrong", [-1, 1])
async def test_one_wrong_fence_in_a_batch_keeps_its_own_job_only(
    sql, lane: Lane, me, wrong: int
) -> None:
    batch = await running(lane, me, 21)
    for place in (0, 10, 20):
        await sql.execute("DELETE FROM taskd.job_history")
        again = await running(lane, me, 21)
        fences = [job.fence for job in again]
        fences[place] += wrong
        assert await jobs.ack_done(lane, me, [job.id for job in again], fences) == 20
        assert await state_of(sql, again[place].id) == "running"
        finished = {each["id"] for each in await sql.fetch("SELECT id FROM taskd.job_history")}
        assert finished == {job.id for job in again} - {again[place].id}
    # Neighbours in the table that were in no batch are untouched.
    assert {await state_of(sql, job.id) for job in batch} == {"running"}


async def test_ids_between_and_beyond_those_of_the_batch_are_not_matched(sql, lane, me) -> None:
    # width_bucket also gives a place to ids that are not in the list: the list itself decides.
    batch = await running(lane, me, 9)
    picked = batch[1:8:2]
    assert await done(lane, *picked) == 4
    left = {r["id"] for r in await sql.fetch("SELECT id FROM taskd.job")}
    assert left == {job.id for job in batch} - {job.id for job in picked}


async def test_a_job_that_stands_twice_in_a_batch_is_written_once(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me)
    assert await done(lane, job, job) == 1
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_history") == 1


async def test_an_empty_batch_and_unknown_ids_write_nothing(lane: Lane, me) -> None:
    assert await jobs.ack_done(lane, me, [], []) == 0
    assert await jobs.ack_done(lane, me, [1, 2], [1, 1]) == 0
    assert await jobs.ack_settled(lane, me, []) == {}


# Other outcomes.


@pytest.mark.parametrize("state", [FAILED, CANCELLED])
async def test_a_final_outcome_keeps_its_reason_error_and_attempt(
    sql, lane: Lane, me, state: JobState
) -> None:
    job = await run_one(lane, me)
    error = json.dumps({"type": "ValueError", "message": "no"})
    assert await settle(lane, job, state, reason="gave up", error=error) == state
    ended = await row(sql, job.id)
    assert (ended["state"], ended["reason"], ended["attempt"]) == (state.value, "gave up", 1)
    assert (ended["worker_id"], ended["fence"]) == (me, 1)
    [kept] = json.loads(ended["errors"])
    assert (kept["type"], kept["message"]) == ("ValueError", "no")
    assert (kept["attempt"], kept["worker"]) == (1, str(me))
    assert kept["started"] < kept["ended"]


async def test_a_result_is_kept_with_the_success(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me)
    assert await settle(lane, job, DONE, result='{"sent": 3}') == DONE
    ended = await row(sql, job.id)
    assert (ended["state"], ended["result"]) == ("done", '{"sent": 3}')


async def test_a_retry_waits_for_its_delay_and_counts(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me)
    now = await sql.fetchval("SELECT clock_timestamp()")
    assert await settle(lane, job, SCHEDULED, delay_s=60.0, error='{"type": "E"}') == SCHEDULED
    waiting = await row(sql, job.id)
    assert (waiting["state"], waiting["attempt"], waiting["worker_id"]) == ("scheduled", 1, None)
    assert 60 <= (waiting["run_at"] - now).total_seconds() < 70


async def test_a_snooze_does_not_count(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me)
    await settle(lane, job, SCHEDULED, delay_s=60.0, refund=True)
    waiting = await row(sql, job.id)
    assert (waiting["state"], waiting["attempt"], waiting["fence"]) == ("scheduled", 0, 1)
    assert waiting["errors"] == "[]"


async def test_a_release_queues_again_in_its_old_place_and_rings(sql, lane: Lane, me) -> None:
    ears = Ears(sql)
    await ears.listen("taskd_q")
    first, second = await running(lane, me, 2)
    await ears.so_far()
    ears.heard.clear()
    before = await row(sql, first.id)
    assert await settle(lane, first, QUEUED, refund=True) == QUEUED
    assert await ears.so_far() == ["taskd_q"]
    after = await row(sql, first.id)
    assert (after["state"], after["attempt"], after["interrupts"]) == ("queued", 0, 0)
    assert after["run_at"] == before["run_at"]
    assert await state_of(sql, second.id) == "running"


async def test_a_batch_may_send_each_job_another_way(sql, lane: Lane, me) -> None:
    batch = await running(lane, me, 5)
    acks = [
        ack(job, state, delay_s=60.0 if state is SCHEDULED else 0.0)
        for job, state in zip(batch, ALL_STATES, strict=True)
    ]
    moved = await jobs.ack_settled(lane, me, acks)
    assert moved == {job.id: state for job, state in zip(batch, ALL_STATES, strict=True)}
    for job, state in zip(batch, ALL_STATES, strict=True):
        assert await state_of(sql, job.id) == state.value


async def test_ten_interrupts_are_refunded_and_no_more(sql, lane: Lane, me) -> None:
    await enqueue(lane)
    attempts = []
    for _ in range(13):
        [job] = await jobs.claim(lane, me, "q", 1)
        await settle(lane, job, QUEUED, refund=True, interrupted=True)
        attempts.append((await row(sql, job.id))["attempt"])
    assert attempts == [0] * 10 + [1, 2, 3]
    assert (await row(sql, job.id))["interrupts"] == 13


async def test_a_release_is_refunded_however_often_it_was_interrupted_before(sql, lane, me) -> None:
    job = await run_one(lane, me)
    await sql.execute("UPDATE taskd.job SET interrupts = 10")
    await settle(lane, job, QUEUED, refund=True)
    assert (await row(sql, job.id))["attempt"] == 0


async def test_the_first_and_the_last_nineteen_errors_are_kept(sql, lane: Lane, me) -> None:
    await enqueue(lane)
    for number in range(1, 31):
        [job] = await jobs.claim(lane, me, "q", 1)
        error = json.dumps({"type": "E", "message": f"number {number}"})
        await settle(lane, job, SCHEDULED, delay_s=60.0, error=error)
        await due_now(sql, job.id)
        await jobs.promote(lane, 1)
    kept = json.loads((await row(sql, job.id))["errors"])
    assert [each["attempt"] for each in kept] == [1, *range(12, 31)]
    assert kept[0]["message"] == "number 1"
    assert kept[-1]["message"] == "number 30"


@pytest.mark.parametrize("state", [QUEUED, SCHEDULED])
async def test_a_released_suspect_goes_to_the_slow_lane_and_not_to_the_hot_index(
    sql, lane: Lane, me, other, state: JobState
) -> None:
    await take_over(lane, await run_one(lane, me))
    suspect = await jobs.claim_suspect(lane, other, ["q"], ["t"])
    assert suspect is not None
    assert await settle(lane, suspect, state, refund=True) == SCHEDULED
    waiting = await row(sql, suspect.id)
    assert (waiting["state"], waiting["crashes"], waiting["attempt"]) == ("scheduled", 1, 1)
    assert await jobs.claim_suspect(lane, other, ["q"], ["t"]) is not None  # due at once


@pytest.mark.parametrize("bad", [{"result": '"\\u0000"'}, {"error": "{"}, {"result": "NaN"}])
async def test_an_outcome_that_cannot_be_stored_writes_nothing_of_its_batch(
    sql, lane: Lane, me, bad
) -> None:
    first, second = await running(lane, me, 2)
    with pytest.raises(ValueRefused):
        await jobs.ack_settled(lane, me, [ack(first, DONE), ack(second, FAILED, **bad)])
    assert {await state_of(sql, job.id) for job in (first, second)} == {"running"}


# Cancelling a running job: the flag decides what may no longer run.


@pytest.mark.parametrize(
    ("state", "ends_as", "reason"),
    [
        (SCHEDULED, CANCELLED, "by hand"),
        (QUEUED, CANCELLED, "by hand"),
        (FAILED, FAILED, "gave up"),
        (CANCELLED, CANCELLED, "gave up"),
        (DONE, DONE, "gave up"),
    ],
)
async def test_a_cancel_flagged_between_claim_and_ack_decides_what_would_run_again(
    sql, lane: Lane, me, state: JobState, ends_as: JobState, reason: str
) -> None:
    job = await run_one(lane, me)
    assert await jobs.cancel(lane, [job.id], "by hand") == {job.id: RUNNING}
    assert await settle(lane, job, state, delay_s=60.0, reason="gave up") == ends_as
    ended = await row(sql, job.id)
    assert (ended["state"], ended["reason"]) == (ends_as.value, reason)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


async def test_a_success_beats_a_cancel_that_came_too_late(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me)
    await jobs.cancel(lane, [job.id], "by hand")
    assert await done(lane, job) == 1
    assert await state_of(sql, job.id) == "done"


async def test_an_ack_that_waits_for_a_cancel_decides_by_the_flag_it_then_finds(
    sql, lane: Lane, connect: Connect, me
) -> None:
    plain, again = await running(lane, me, 2)
    acking = await connect()
    async with Transaction(await connect()) as cancelling:
        await jobs.cancel(fetches(cancelling.connection), [plain.id, again.id], "by hand")
        first = asyncio.create_task(settle(fetches(acking), again, SCHEDULED, delay_s=60.0))
        await waits_for_lock(sql, acking)
        await cancelling.commit()
        assert await first is CANCELLED
    assert await done(lane, plain) == 1
    assert await state_of(sql, again.id) == "cancelled"


async def test_a_cancel_that_waits_for_an_ack_finds_the_job_gone(
    sql, lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    cancelling = await connect()
    async with Transaction(await connect()) as acking:
        assert await done(fetches(acking.connection), job) == 1
        late = asyncio.create_task(jobs.cancel(fetches(cancelling), [job.id], "by hand"))
        await waits_for_lock(sql, cancelling)
        await acking.commit()
        assert await late == {}
    assert await state_of(sql, job.id) == "done"


async def test_a_cancel_that_waits_for_a_retry_cancels_the_waiting_job(
    sql, lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    cancelling = await connect()
    async with Transaction(await connect()) as acking:
        await settle(fetches(acking.connection), job, SCHEDULED, delay_s=60.0)
        late = asyncio.create_task(jobs.cancel(fetches(cancelling), [job.id], "by hand"))
        await waits_for_lock(sql, cancelling)
        await acking.commit()
        assert await late == {job.id: CANCELLED}
    assert await state_of(sql, job.id) == "cancelled"


# Late acks.


@pytest.mark.parametrize("state", ALL_STATES)
async def test_a_late_ack_changes_nothing(sql, lane: Lane, me, state: JobState) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    before = await snapshot(sql)
    assert await settle(lane, job, state, refund=True, error='{"type": "E"}') is None
    assert await done(lane, job) == 0
    assert await jobs_completed(lane, job) == []
    assert await snapshot(sql) == before


@pytest.mark.parametrize("state", ALL_STATES)
async def test_a_late_ack_does_not_end_the_run_of_another_worker(
    sql, lane: Lane, me, other, state: JobState
) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    again = await jobs.claim_suspect(lane, other, ["q"], ["t"])
    assert again is not None
    before = await snapshot(sql)
    assert await settle(lane, job, state) is None
    assert await done(lane, job) == 0
    assert await jobs_completed(lane, job) == []
    assert await snapshot(sql) == before
    assert await done(lane, again) == 1


async def test_an_earlier_fence_of_the_same_worker_does_not_end_its_later_run(
    sql, lane: Lane, me
) -> None:
    job = await run_one(lane, me)
    await settle(lane, job, QUEUED, refund=True)
    [again] = await jobs.claim(lane, me, "q", 1)
    assert again.fence == job.fence + 1
    assert await done(lane, job) == 0
    assert await settle(lane, job, FAILED) is None
    assert await jobs_completed(lane, job) == []
    assert await state_of(sql, job.id) == "running"
    assert await done(lane, again) == 1


async def test_the_same_fence_under_another_workers_id_matches_nothing(
    sql, lane: Lane, me, other
) -> None:
    # After a failover that lost a claim two workers may hold the same id and fence.
    job = await run_one(lane, me)
    job.worker_id = other
    assert await done(lane, job) == 0
    assert await settle(lane, job, DONE) is None
    assert await jobs_completed(lane, job) == []
    assert await state_of(sql, job.id) == "running"


async def test_a_worker_that_nobody_is_matches_no_waiting_job(sql, lane: Lane) -> None:
    # `IS NOT DISTINCT FROM` is true for two NULLs; a waiting job has no worker.
    [job_id] = await enqueue(lane)
    for name, args in (
        ("ack_done", (None, [job_id], [0])),
        ("complete_job", (job_id, None, 0, None, None)),
    ):
        assert [r for r in await lane.fetch(name, *args) if r[0]] == []
    assert await state_of(sql, job_id) == "queued"


async def test_rescue_steps_over_a_job_whose_ack_is_being_written(
    sql, lane: Lane, connect: Connect, me
) -> None:
    first, second = await running(lane, me, 2)
    await bury(lane, me)
    async with Transaction(await connect()) as acking:
        assert await done(fetches(acking.connection), first) == 1
        assert await rescue(lane) == {second.id: SCHEDULED}
        await acking.commit()
    assert await rescue(lane) == {}
    assert await state_of(sql, first.id) == "done"


async def test_rescue_takes_the_job_after_all_when_its_ack_rolls_back(
    lane: Lane, connect: Connect, me
) -> None:
    job = await run_one(lane, me)
    await bury(lane, me)
    async with Transaction(await connect()) as acking:
        await done(fetches(acking.connection), job)
        assert await rescue(lane) == {}
        await acking.rollback()
    assert await rescue(lane) == {job.id: SCHEDULED}


async def test_an_ack_that_waits_for_a_rescue_changes_nothing(
    sql, lane: Lane, connect: Connect, me
) -> None:
    one, two = await running(lane, me, 2)
    await bury(lane, me)
    for job, write in ((one, done), (two, lambda on, job: settle(on, job, FAILED))):
        acking = await connect()
        async with Transaction(await connect()) as rescuing:
            await jobs.rescue(fetches(rescuing.connection), 1, 3)
            late = asyncio.create_task(write(fetches(acking), job))
            await waits_for_lock(sql, acking)
            await rescuing.commit()
            assert not await late
        assert await state_of(sql, job.id) == "scheduled"


# What became of acks that matched nothing, or whose reply was lost.


async def test_the_fate_of_an_ack_that_was_written_is_acked(sql, lane: Lane, me) -> None:
    batch = await running(lane, me, 6)
    plain, *others = batch
    await done(lane, plain)
    for job, state in zip(others, ALL_STATES, strict=True):
        await settle(lane, job, state, delay_s=60.0 if state is SCHEDULED else 0.0)
    fates = await jobs.check_acks(lane, me, [job.id for job in batch], [job.fence for job in batch])
    assert fates == dict.fromkeys([job.id for job in batch], "acked")


async def test_an_earlier_claim_that_was_rescued_does_not_make_the_ack_of_the_next_one_lost(
    sql, lane: Lane, me
) -> None:
    job = await run_one(lane, me)
    await bury(lane, me)
    await jobs.rescue(lane, 1, 3)
    # Its snapshot was taken before the burial, and it commits only now.
    await sql.execute("UPDATE taskd.worker SET died_at = NULL WHERE id = $1", me)
    late = await jobs.claim_suspect(lane, me, ["q"], ["t"])
    assert late is not None
    await bury(lane, me)
    assert await fate(lane, late) == "running"
    assert await done(lane, late)
    assert (await fate(lane, job), await fate(lane, late)) == ("lost", "acked")


async def test_the_fate_of_an_ack_that_was_not_written_is_running(lane: Lane, me) -> None:
    assert await fate(lane, await run_one(lane, me)) == "running"


@pytest.mark.parametrize("state", [None, DONE, FAILED, CANCELLED])
async def test_without_a_history_a_written_ack_is_absent(sql, lane: Lane, me, state) -> None:
    await sql.execute("INSERT INTO taskd.queue VALUES ('q', NULL, NULL, NULL, 0, 0)")
    job = await run_one(lane, me)
    written = await done(lane, job) if state is None else await settle(lane, job, state)
    assert written in (1, state)
    assert await row(sql, job.id) is None
    assert await fate(lane, job) == "absent"


async def test_the_fate_of_a_job_that_was_taken_over_is_lost(sql, lane: Lane, me, other) -> None:
    job = await run_one(lane, me)
    await take_over(lane, job)
    assert await fate(lane, job) == "lost"  # waits in the slow lane
    again = await jobs.claim_suspect(lane, other, ["q"], ["t"])
    assert again is not None
    assert await fate(lane, job) == "lost"  # runs elsewhere
    await done(lane, again)
    assert await fate(lane, job) == "lost"  # finished elsewhere
    assert await fate(lane, again) == "acked"


@pytest.mark.parametrize("how", ["crashed too often", "cancel asked"])
async def test_the_fate_of_a_job_that_rescue_ended_is_lost(sql, lane: Lane, me, how: str) -> None:
    job = await run_one(lane, me)
    if how == "cancel asked":
        await jobs.cancel(lane, [job.id], "by hand")
    else:
        await sql.execute("UPDATE taskd.job SET crashes = $1", MAX_CRASHES - 1)
    await take_over(lane, job)
    assert await state_of(sql, job.id) == ("cancelled" if how == "cancel asked" else "failed")
    assert await fate(lane, job) == "lost"


@pytest.mark.parametrize("state", [SCHEDULED, QUEUED, FAILED])
async def test_the_fate_of_a_suspects_own_ack_is_acked(
    sql, lane: Lane, me, other, state: JobState
) -> None:
    # An earlier worker's crash does not make this worker's ack look lost.
    await take_over(lane, await run_one(lane, me))
    suspect = await jobs.claim_suspect(lane, other, ["q"], ["t"])
    assert suspect is not None
    await settle(lane, suspect, state, refund=state is QUEUED)
    assert await fate(lane, suspect) == "acked"


async def test_the_fate_of_a_written_ack_stays_acked_when_people_move_the_job_on(
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


async def jobs_completed(on, job, result: str | None = None) -> list:
    return await on.fetch("complete_job", job.id, job.worker_id, job.fence, result, None)


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
    assert await fate(lane, kept) == "acked"


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
