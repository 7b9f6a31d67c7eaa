"""Changing waiting jobs, finding jobs in bulk, and what races with them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskd.client.operations import job_changes
from taskd.core.jobs.job import Job, JobState, NewJob
from taskd.core.jobs.job_changes import Change
from taskd.core.jobs.job_filter import JobFilter
from taskd.core.jobs.unique import Unique
from taskd.core.outcomes.ack import Ack
from taskd.errors import InvalidArgs, InvalidJob
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, jobs
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    FAILED,
    Connect,
    Ears,
    Transaction,
    done,
    enqueue,
    row,
    run_one,
    running,
    settle,
    state_of,
    waits_for_lock,
)

PUBLISH = """
INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema, args_version)
VALUES ('t', 'app', 'x', 'q', 5, $1::text::jsonb, $2)
"""
SCHEMA = (
    '{"type": "object", "properties": {"to": {"type": "string"}, "n": {"type": "integer"}}, '
    '"required": ["to"]}'
)

BAD = [JobState.FAILED, JobState.CANCELLED]
KEYED = NewJob("t", queue="q", unique=Unique(key="k"))


async def change(lane: Lane, ids: list[int], **changes: Any) -> dict[int, str]:
    return dict(await job_changes.change(lane, ids, Change(**changes)))


# Changing.


async def test_each_job_is_answered_for(sql: Any, lane: Lane, me: int) -> None:
    job = await run_one(lane, me)
    ended = await run_one(lane, me)
    await done(lane, ended)
    queued, later = await enqueue(lane), await enqueue(lane, delay_s=60.0)
    ids = [*queued, *later]
    outcomes = await change(lane, [job.id, ended.id, *ids, 4711], priority=3)
    assert outcomes == {
        job.id: "running", ended.id: "finished", ids[0]: "changed", ids[1]: "changed",
        4711: "unknown",
    }  # fmt: skip
    assert [(await row(sql, each))["priority"] for each in (job.id, *ids)] == [100, 3, 3]
    assert [(await row(sql, each))["state"] for each in ids] == ["queued", "scheduled"]


async def test_a_new_time_moves_a_job_between_queued_and_scheduled(sql: Any, lane: Lane) -> None:
    [job_id] = await enqueue(lane)
    await change(lane, [job_id], delay_s=3600.0)
    assert await state_of(sql, job_id) == "scheduled"
    await change(lane, [job_id], run_at=datetime.now(UTC) - timedelta(days=1))
    assert await state_of(sql, job_id) == "queued"
    await sql.execute("UPDATE taskd.job SET state = 'scheduled', crashes = 1")
    await change(lane, [job_id], delay_s=0.0)  # a suspect stays in quarantine
    assert await state_of(sql, job_id) == "scheduled"


async def test_everything_can_be_changed_and_a_deadline_be_taken_away(sql: Any, lane: Lane) -> None:
    [job_id] = await enqueue(lane)
    await change(
        lane, [job_id], queue="other", args={"n": 1}, max_attempts=7, timeout_s=2.5, deadline_s=60.0
    )
    job = await row(sql, job_id)
    changed = ("other", '{"n": 1}', 7, 2.5)
    assert tuple(job[k] for k in ("queue", "args", "max_attempts", "timeout_s")) == changed
    assert job["deadline"] > datetime.now(UTC)
    await change(lane, [job_id], no_deadline=True, update_args={"m": 2})
    job = await row(sql, job_id)
    assert (job["deadline"], job["args"]) == (None, '{"m": 2, "n": 1}')


async def test_a_change_notifies_the_queue_that_the_job_is_in_now(
    sql: Any, lane: Lane, connect: Connect
) -> None:
    ears = Ears(await connect())
    await ears.listen("taskd_q", "taskd_other", serve_by=sql)
    [job_id] = await enqueue(lane, delay_s=3600.0)
    await change(lane, [job_id], priority=1)
    assert await ears.so_far() == []
    await change(lane, [job_id], queue="other", delay_s=0.0)
    assert await ears.so_far() == ["taskd_other"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"args": {}}, "'to' is a required property"),
        ({"args": {"to": 5}}, "the value is not of type 'string' - at `$.to`"),
        ({"update_args": {"n": "x"}}, "not of type 'integer'"),
        ({"update_args": {"odd": 1}}, "odd"),
    ],
)
async def test_new_arguments_are_checked_against_the_published_task(
    sql: Any, lane: Lane, changes: dict[str, Any], why: str
) -> None:
    await sql.execute(
        PUBLISH, SCHEMA.replace('"required"', '"additionalProperties": false, "required"'), 1
    )
    [job_id] = await enqueue(lane, args='{"to": "ada"}')
    with pytest.raises(InvalidArgs, match=why.replace("$", r"\$")):
        await change(lane, [job_id], **changes)
    assert (await row(sql, job_id))["args"] == '{"to": "ada"}'
    # And by the database, for SQL clients.
    with pytest.raises(asyncpg.PostgresError, match="argument"):
        await sql.fetch(
            "SELECT * FROM taskd.change(ARRAY[$1::bigint], args => '{\"odd\": 1}')", job_id
        )


async def test_some_arguments_are_changed_only_in_the_form_that_they_have(
    sql: Any, lane: Lane
) -> None:
    await sql.execute(PUBLISH, SCHEMA, 2)
    [job_id] = await enqueue(lane, args='{"old": 1}')
    with pytest.raises(InvalidJob, match=r"has version 2\. Pass all of the arguments"):
        await change(lane, [job_id], update_args={"n": 1})
    await change(lane, [job_id], args={"to": "ada"})
    assert (await row(sql, job_id))["args_version"] == 2


async def test_nothing_to_change_is_reported(lane: Lane) -> None:
    with pytest.raises(InvalidJob, match="no new value is given"):
        await change(lane, [1])


async def test_a_change_that_waits_for_a_claim_finds_the_job_running(
    sql: Any, lane: Lane, connect: Connect, me: int
) -> None:
    [job_id] = await enqueue(lane)
    changing_one = await connect()
    async with Transaction(await connect()) as claiming:
        await jobs.claim(fetches(claiming.connection), me, "q", 1)
        late = asyncio.create_task(
            job_changes.change(fetches(changing_one), [job_id], Change(priority=1, delay_s=60.0))
        )
        await waits_for_lock(sql, changing_one)
        await claiming.commit()
    assert await late == {job_id: "running"}
    job = await row(sql, job_id)
    assert (job["state"], job["priority"]) == ("running", 100)


async def test_a_claim_steps_over_a_job_that_is_being_changed(
    sql: Any, lane: Lane, connect: Connect, me: int
) -> None:
    [job_id] = await enqueue(lane)
    async with Transaction(await connect()) as held:
        await job_changes.change(fetches(held.connection), [job_id], Change(delay_s=60.0))
        assert await jobs.claim(lane, me, "q", 1) == []
        await held.commit()
    assert await jobs.claim(lane, me, "q", 1) == []
    assert await state_of(sql, job_id) == "scheduled"


# Finding.


async def found(lane: Lane, **filters: Any) -> list[int]:
    return [job_id async for ids in changes.find(lane, JobFilter(**filters)) for job_id in ids]


async def test_a_filter_finds_live_and_finished_jobs(lane: Lane, me: int) -> None:
    failed = await run_one(lane, me, task="fetch", args='{"host": "a", "n": 1}')
    error = '{"type": "Timeout", "message": "100% of 3 s, twice_over"}'
    await settle(lane, failed, FAILED, reason="Timeout: 100% of 3 s", error=error)
    cancelled = await run_one(lane, me, task="fetch")
    await settle(lane, cancelled, CANCELLED, reason="by hand")
    good = await run_one(lane, me, task="fetch")
    await done(lane, good)
    held = await run_one(lane, me)
    [queued] = await enqueue(lane, task="fetch", args='{"host": "a"}')
    [other] = await enqueue(lane, queue="other", delay_s=60.0)
    assert await found(lane) == [held.id, queued, other, failed.id, cancelled.id, good.id]
    assert await found(lane, task="fetch") == [queued, failed.id, cancelled.id, good.id]
    assert await found(lane, queue="other") == [other]
    assert await found(lane, states=(JobState.FAILED, JobState.RUNNING)) == [held.id, failed.id]
    assert await found(lane, args={"host": "a"}) == [queued, failed.id]
    assert await found(lane, error="TIMEOUT: #") == [failed.id]
    assert await found(lane, error="timeout*of … s") == [failed.id]
    assert await found(lane, error="100%") == [failed.id]
    assert await found(lane, error="1%0") == []  # a percent sign is one
    assert await found(lane, error="twiceXover") == []
    assert await found(lane, older_than_s=60.0) == []
    recent = {"since_s": 60.0, "task": "fetch", "states": BAD}
    assert await found(lane, **recent) == [failed.id, cancelled.id]
    assert await found(lane, since=datetime.now(UTC) - timedelta(minutes=1), states=BAD) == [
        failed.id,
        cancelled.id,
    ]
    assert await found(lane, since=datetime.now(UTC) + timedelta(minutes=1)) == []


async def test_a_walk_meets_every_job_once_however_few_it_reads_at_a_time(
    lane: Lane, me: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changes, "READ_MAX", 3)
    ended = await running(lane, me, 8)
    # All in one statement, so that some end in the same moment.
    await jobs.ack_outcomes(
        lane, me, [Ack(job.id, me, job.fence, FAILED, reason="x") for job in ended]
    )
    waiting = await enqueue(lane, 7)
    met = []
    async for ids in changes.find(lane, JobFilter()):
        met += ids
        if ids == waiting[:3]:
            await enqueue(lane, 5)  # jobs that are enqueued meanwhile are not found
    assert met == [*waiting, *(job.id for job in ended)]


async def test_a_cancel_in_bulk_touches_only_jobs_that_are_still_as_the_filter_says(
    sql: Any, lane: Lane, me: int
) -> None:
    job = await run_one(lane, me)
    assert await jobs.cancel(lane, [job.id], "old", ["queued", "scheduled"]) == {}
    assert await state_of(sql, job.id) == "running"


# Retries.


async def test_a_retry_may_be_for_later(sql: Any, lane: Lane, me: int) -> None:
    job = await run_one(lane, me)
    await settle(lane, job, FAILED, reason="x")
    assert await jobs.retry(lane, [job.id], delay_s=60.0) == [job.id]
    assert await state_of(sql, job.id) == "scheduled"


@pytest.fixture
async def keyed_job(lane: Lane, me: int) -> Job:
    """One that has failed, and had a unique key."""
    await jobs.enqueue(lane, [KEYED])
    [job] = await jobs.claim(lane, me, "q", 1)
    await settle(lane, job, FAILED, reason="x")
    return job


async def test_a_retry_waits_for_a_transaction_that_takes_its_key_and_leaves_the_job_where_it_is(
    sql: Any, connect: Connect, keyed_job: Job
) -> None:
    retrying = await connect()
    async with Transaction(await connect()) as enqueueing:
        await jobs.enqueue(fetches(enqueueing.connection), [KEYED])
        late = asyncio.create_task(jobs.retry(fetches(retrying), [keyed_job.id]))
        await waits_for_lock(sql, retrying)
        await enqueueing.commit()
    assert await late == []
    assert await state_of(sql, keyed_job.id) == "failed"


async def test_a_retry_that_looked_before_its_key_was_taken_leaves_the_job_where_it_is(
    sql: Any, lane: Lane, connect: Connect, keyed_job: Job
) -> None:
    retrying = await connect()
    async with Transaction(await connect()) as holding:
        await holding.connection.execute(
            "SELECT FROM taskd.job_history WHERE id = $1 FOR UPDATE", keyed_job.id
        )
        late = asyncio.create_task(jobs.retry(fetches(retrying), [keyed_job.id]))
        await waits_for_lock(sql, retrying)
        await jobs.enqueue(lane, [KEYED])
    assert await late == []
    assert await state_of(sql, keyed_job.id) == "failed"
