"""ack.sql: an ack that its guard (id, worker_id, fence, running) does not match changes nothing."""

from __future__ import annotations

import json
import random

import pytest

from taskd.core.jobs.job import JobState
from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.ack_helpers import ALL_STATES
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    QUEUED,
    SCHEDULED,
    Ears,
    ack,
    claim_suspect,
    done,
    due_now,
    enqueue,
    row,
    run_one,
    running,
    settle,
    state_of,
    take_over,
)

# Successes.


async def test_a_success_moves_the_job_to_the_history_as_it_was(sql, lane: Lane, me) -> None:
    job = await run_one(lane, me, args='{"a": 1}', max_attempts=4, timeout_s=9.0, priority=5)
    before = dict(await row(sql, job.id))
    assert await done(lane, job) == 1
    after = dict(await row(sql, job.id))
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"state", "finished_at", "updated_at"}
    assert after["state"] == "done"
    assert after["finished_at"] >= after["started_at"]


async def test_a_batch_of_successes_with_differing_fences_is_matched_pair_by_pair(
    sql, lane: Lane, me
) -> None:
    # width_bucket finds the position of an id in the sorted ids, and so its fence.
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
    for position in (0, 10, 20):
        await sql.execute("DELETE FROM taskd.job_history")
        again = await running(lane, me, 21)
        fences = [job.fence for job in again]
        fences[position] += wrong
        assert await jobs.ack_done(lane, me, [job.id for job in again], fences) == 20
        assert await state_of(sql, again[position].id) == "running"
        finished = {each["id"] for each in await sql.fetch("SELECT id FROM taskd.job_history")}
        assert finished == {job.id for job in again} - {again[position].id}
    # Neighbours in the table that were in no batch are untouched.
    assert {await state_of(sql, job.id) for job in batch} == {"running"}


async def test_ids_between_and_beyond_those_of_the_batch_are_not_matched(sql, lane, me) -> None:
    # width_bucket also returns a position for ids that are not in the list: the list itself
    # decides.
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
    assert await jobs.ack_outcomes(lane, me, []) == {}


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


async def test_a_release_queues_again_in_its_old_place_and_notifies(sql, lane: Lane, me) -> None:
    ears = Ears(sql)
    await ears.listen("taskd_q")
    first, second = await running(lane, me, 2)
    await ears.so_far()
    ears.notifications.clear()
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
    moved = await jobs.ack_outcomes(lane, me, acks)
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
async def test_a_released_suspect_goes_to_quarantine_and_not_to_the_index_of_claims(
    sql, lane: Lane, me, other, state: JobState
) -> None:
    await take_over(lane, await run_one(lane, me))
    suspect = await claim_suspect(lane, other, ["q"], ["t"])
    assert suspect is not None
    assert await settle(lane, suspect, state, refund=True) == SCHEDULED
    waiting = await row(sql, suspect.id)
    assert (waiting["state"], waiting["crashes"], waiting["attempt"]) == ("scheduled", 1, 1)
    assert await claim_suspect(lane, other, ["q"], ["t"]) is not None  # due at once


@pytest.mark.parametrize("bad", [{"result": '"\\u0000"'}, {"error": "{"}, {"result": "NaN"}])
async def test_an_outcome_that_cannot_be_stored_writes_nothing_of_its_batch(
    sql, lane: Lane, me, bad
) -> None:
    first, second = await running(lane, me, 2)
    with pytest.raises(ValueRefused):
        await jobs.ack_outcomes(lane, me, [ack(first, DONE), ack(second, FAILED, **bad)])
    assert {await state_of(sql, job.id) for job in (first, second)} == {"running"}
