"""Schedules whose jobs have the unique key of their task."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskd.core.jobs.job import JobState, NewJob
from taskd.core.jobs.unique import Unique
from taskd.core.outcomes.ack import Ack
from taskd.core.tasks.task import Task
from taskd.store import schedules
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, row

RULE = Unique(by=("a",))


async def publish(sql: Any, rule: Unique = RULE) -> None:
    await sql.execute(
        "INSERT INTO taskd.task "
        "(name, app, signature, queue, max_attempts, args_schema, unique_rule) "
        "VALUES ('t', 'app', 'x', 'q', 5, '{\"properties\": {\"a\": {}, \"v\": {}}}', $1)",
        rule.rule({}),
    )


async def refire(sql: Any, lane: Lane) -> None:
    await late(sql, 1.0)
    assert await fire_due(lane) == 1
    assert (await row(sql))["last_error"] is None


async def test_each_row_has_its_own_key_and_a_live_job_keeps_only_its_own_row_back(
    sql: Any, lane: Lane, me: int
) -> None:
    await publish(sql)
    query = "SELECT n AS a FROM generate_series(1, 3) AS n"
    await make(lane, nightly(query=query, job=NewJob("t", queue="q"), ends_by_s=60.0))
    await refire(sql, lane)
    first = await made(sql)
    assert [each["unique_key"] for each in first] == ["[1]", "[2]", "[3]"]
    assert {each["ends_by"] - each["tick"] for each in first} == {timedelta(minutes=1)}
    [job] = await jobs.claim(lane, me, "q", 1)
    await jobs.ack_done(lane, me, [job.id], [job.fence])
    await refire(sql, lane)
    found = await made(sql)
    assert len(found) == 4
    assert found[3]["unique_key"] == first[0]["unique_key"]
    assert found[1]["tick"] == first[1]["tick"], "the job that held the key stays as it was"


async def test_a_holder_that_another_enqueued_does_not_become_a_job_of_the_schedule(
    sql: Any, lane: Lane
) -> None:
    await publish(sql)
    await sql.execute("SELECT taskd.enqueue('t', '{\"a\": 1}')")
    await make(lane, nightly(job=NewJob("t", '{"a": 1}', queue="q")))
    await refire(sql, lane)
    assert await made(sql) == []
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 1
    assert (await schedules.run(lane, "s")).ids == []


async def test_a_newer_version_wins_in_schedules_too(sql: Any, lane: Lane) -> None:
    await publish(sql, Unique(by=("a",), version_by="v"))
    query = "SELECT 1 AS a, extract(epoch FROM $1)::bigint AS v"
    await make(lane, nightly(query=query, job=NewJob("t", queue="q")))
    await refire(sql, lane)
    await sql.execute("UPDATE taskd.job SET version = version - 1000")
    await sql.execute("UPDATE taskd.job_key SET version = version - 1000")
    await refire(sql, lane)
    [job] = await made(sql)
    assert job["args"] != "{}"
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 1


async def test_a_newer_version_of_a_schedule_keeps_the_delay_of_the_retry_if_the_rule_says_so(
    sql: Any, lane: Lane, me: int
) -> None:
    await publish(sql, Unique(by=("a",), version_by="v", newer_starts="after_delay"))
    query = "SELECT 1 AS a, extract(epoch FROM $1)::bigint AS v"
    await make(lane, nightly(query=query, job=NewJob("t", queue="q")))
    await late(sql, 100.0)
    assert await fire_due(lane) == 1
    [job] = await jobs.claim(lane, me, "q", 1)
    retry = Ack(job.id, me, job.fence, JobState.SCHEDULED, delay_s=3000.0, error='{"type": "E"}')
    await jobs.ack_outcomes(lane, me, [retry])
    await refire(sql, lane)
    [newer] = [each for each in await made(sql) if each["state"] != "cancelled"]
    assert newer["id"] > job.id
    assert newer["run_at"] > datetime.now(UTC) + timedelta(seconds=2900)


async def test_a_schedule_keeps_the_key_of_the_job_that_it_was_given(sql: Any, lane: Lane) -> None:
    async def t(a: int) -> None: ...

    task = Task(t, name="t", queue="q", unique=RULE)
    await make(lane, nightly(job=task.job(a=1)))
    await refire(sql, lane)
    await refire(sql, lane)
    [job] = await made(sql)
    assert job["unique_key"] == "[1]"


async def test_without_the_key_each_tick_makes_a_job(sql: Any, lane: Lane) -> None:
    await publish(sql)
    job = NewJob("t", '{"a": 1}', queue="q", no_key=True)
    await make(lane, nightly(job=job))
    for _ in range(2):
        await refire(sql, lane)
    assert [each["unique_key"] for each in await made(sql)] == [None, None]


@pytest.mark.parametrize("no_key", [False, True])
async def test_sql_clients_choose_whether_the_key_applies(
    sql: Any, lane: Lane, no_key: bool
) -> None:
    await publish(sql)
    await sql.execute(
        "SELECT taskd.set_schedule('s', 't', '{\"a\": 1}', every => '1 min', no_key => $1)", no_key
    )
    for _ in range(2):
        await refire(sql, lane)
    assert len(await made(sql)) == (2 if no_key else 1)


@pytest.mark.parametrize("overlap", ["wait", "cancel"])
@pytest.mark.parametrize("published", [True, False])
async def test_run_enqueues_no_second_job_with_a_unique_key(
    sql: Any, lane: Lane, me: int, overlap: str, published: bool
) -> None:
    if published:
        await publish(sql)
    job = NewJob("t", '{"a": 1}', queue="q", unique=None if published else Unique("[1]"))
    await make(lane, nightly(overlap=overlap, job=job))
    assert (await schedules.run(lane, "s")).outcome == "fired"
    [running] = await jobs.claim(lane, me, "q", 1)
    assert await schedules.run(lane, "s") == ("waits", None)
    [live] = await made(sql)
    assert live["cancel_requested"] is (overlap == "cancel")
    await jobs.ack_done(lane, me, [running.id], [running.fence])
    assert (await schedules.run(lane, "s")).outcome == "fired"
    assert [each["unique_key"] for each in await made(sql)] == ["[1]", "[1]"]
    done = await sql.fetch("SELECT action FROM taskd.action")
    assert [each["action"] for each in done] == ["set", "run", "run", "run"]
