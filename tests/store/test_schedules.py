"""Schedules in the database: the jobs of a tick are made once, whichever workers poll and die."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.schedule import Every
from taskd.errors import QueueFull
from taskd.store import schedules
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.helpers import Ears
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, row

# One tick.


async def test_a_tick_makes_a_job_with_all_that_the_schedule_says(sql: Any, lane: Lane) -> None:
    job = NewJob("t", '{"a": 1}', queue="q", priority=7, max_attempts=3, timeout_s=9)
    assert await make(lane, nightly(job=job, deadline_s=30)) == {"s": "created"}
    assert await fire_due(lane) == 0
    tick = await late(sql, 1.0)
    assert await fire_due(lane) == 1
    [found] = await made(sql)
    assert (found["task"], found["queue"], found["state"], found["args"]) == (
        ("t", "q", "queued", '{"a": 1}')
    )
    assert (found["priority"], found["max_attempts"], found["timeout_s"]) == (7, 3, 9.0)
    assert (found["tick"], found["run_at"]) == (tick, tick)
    assert found["deadline"] == tick + timedelta(seconds=30)
    after = await row(sql)
    assert (after["last_tick"], after["next_at"]) == (tick, tick + timedelta(seconds=60))
    assert await fire_due(lane) == 0


async def test_a_month_of_ticks_does_not_drift(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(when=Every(21600.1)))
    begin = await late(sql, 1.0)
    for n in range(124):
        # Each tick is fired late, by a different delay.
        await sql.execute(
            "UPDATE taskd.schedule SET starts_at = starts_at - (next_at - clock_timestamp()) "
            "- make_interval(secs => $1), next_at = clock_timestamp() - make_interval(secs => $1)",
            (n * 37 % 59) + 0.123,
        )
        before = await sql.fetchrow("SELECT next_at, starts_at FROM taskd.schedule")
        assert await fire_due(lane) == 1
        after = await sql.fetchval("SELECT next_at FROM taskd.schedule")
        assert after - before["next_at"] == timedelta(seconds=21600.1)
    assert len(await made(sql)) == 124
    # And without moving anything: the 124th tick after the first, to the microsecond.
    reckoned = await sql.fetchval(
        "SELECT taskd.next_interval_tick($1::timestamptz, 21600.1, "
        "$1 + make_interval(secs => 123 * 21600.1 + 1))",
        begin,
    )
    assert reckoned == begin + timedelta(seconds=124 * 21600.1)


async def test_a_tick_notifies_its_queue(sql: Any, lane: Lane, connect: Any) -> None:
    ears = Ears(await connect())
    await ears.listen("taskd_q")
    await make(lane, nightly())
    await late(sql, 1.0)
    await fire_due(lane)
    assert await ears.so_far() == ["taskd_q"]


# Ticks that were missed.


@pytest.mark.parametrize(
    ("catch_up", "most", "late_s", "ticks"),
    [
        ("none", 100, 30.0, [0]),
        ("none", 100, 179.0, [2]),  # the last tick was a moment ago, so it was not missed
        ("none", 100, 3600.0 * 24 - 1 + 0.5, [1439]),
        ("last", 100, 3600.0, [60]),
        ("all", 100, 3600.0, list(range(61))),
        ("all", 3, 3600.0, [58, 59, 60]),
        ("all", 100, 30.0, [0]),
    ],
)
async def test_missed_ticks_are_made_up_for_as_the_schedule_says(
    sql: Any, lane: Lane, catch_up: str, most: int, late_s: float, ticks: list[int]
) -> None:
    await make(lane, nightly(catch_up=catch_up, catch_up_max=most))
    first = await late(sql, late_s)
    assert await fire_due(lane) == 1
    assert [(each["tick"] - first).total_seconds() / 60 for each in await made(sql)] == ticks
    after = await row(sql)
    assert (after["next_at"] - first).total_seconds() % 60 == 0
    assert after["next_at"] > datetime.now(UTC)


async def test_what_came_long_ago_is_left_out_without_a_catch_up(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(when=Every(86400.0), catch_up="none"))
    first = await late(sql, 7200.0)
    assert await fire_due(lane) == 1
    assert await made(sql) == []
    assert (await row(sql))["next_at"] == first + timedelta(days=1)


# A live job when the tick comes.


async def test_with_skip_a_live_job_keeps_the_tick_from_making_another(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(overlap="skip"))
    await late(sql, 1.0)
    await fire_due(lane)
    tick = await late(sql, 1.0)
    assert await fire_due(lane) == 1
    assert len(await made(sql)) == 1
    after = await row(sql)
    assert (after["skipped"], after["skipped_tick"], after["last_tick"]) == (1, tick, tick)
    [job] = await jobs.claim(lane, me, "q", 1)
    await jobs.ack_done(lane, me, [job.id], [job.fence])
    await late(sql, 1.0)
    await fire_due(lane)
    assert [each["state"] for each in await made(sql)] == ["done", "queued"]


# Jitter.


async def test_jitter_stays_within_its_bound_and_is_the_same_again(sql: Any, lane: Lane) -> None:
    query = "SELECT n AS a FROM generate_series(1, 500) AS n"
    await make(lane, nightly(query=query, job=NewJob("t", queue="q"), jitter_s=600.0))
    tick = await late(sql, 1.0)
    await fire_due(lane)
    first = [(each["run_at"] - tick).total_seconds() for each in await made(sql)]
    assert 0 <= min(first) < 60
    assert 540 < max(first) < 600
    assert {each["state"] for each in await made(sql)} <= {"scheduled", "queued"}
    await sql.execute("DELETE FROM taskd.job")
    await sql.execute("UPDATE taskd.schedule SET next_at = $1", tick)
    await fire_due(lane)
    assert [(each["run_at"] - tick).total_seconds() for each in await made(sql)] == first


# One job for each row of a query.


async def test_a_query_makes_a_job_for_each_of_its_rows(sql: Any, lane: Lane) -> None:
    await sql.execute(
        "CREATE TABLE public.account AS SELECT n AS id FROM generate_series(1, 1000) n"
    )
    query = "SELECT id AS account, $1::timestamptz AS until FROM public.account ORDER BY id -- all;"
    job = NewJob("t", '{"kind": "x"}', queue="q")
    await make(lane, nightly(query=query, job=job, deadline_s=3600))
    tick = await late(sql, 1.0)
    assert await fire_due(lane) == 1
    found = await sql.fetch(
        "SELECT (args ->> 'account')::int AS account, args ->> 'kind' AS kind, "
        "(args ->> 'until')::timestamptz AS until, deadline FROM taskd.job ORDER BY id"
    )
    assert [each["account"] for each in found] == list(range(1, 1001))
    assert {(each["kind"], each["until"], each["deadline"]) for each in found} == {
        ("x", tick, tick + timedelta(hours=1))
    }


async def test_a_full_queue_refuses_the_jobs_of_a_tick_and_shows_it(sql: Any, lane: Lane) -> None:
    await sql.execute("INSERT INTO taskd.queue (name, max_depth) VALUES ('q', 3)")
    await make(
        lane, nightly("many", query="SELECT n AS b FROM generate_series(1, 4) AS n"),
        nightly("none", query="SELECT 1 AS b WHERE false"), nightly("one"),
        nightly("three", query="SELECT n AS b FROM generate_series(1, 3) AS n"),
    )  # fmt: skip
    for name in ("many", "none", "one", "three"):
        await late(sql, 1.0, name)
    assert await fire_due(lane) == 4
    found = {name: (await row(sql, name))["last_error"] for name in ("many", "none", "one")}
    assert (found["none"], found["one"]) == (None, None)
    for name in ("many", "three"):
        assert 'the queue "q" is full' in (await row(sql, name))["last_error"]
        assert await made(sql, name) == []
    with pytest.raises(QueueFull):
        await schedules.run(lane, "many")


async def test_a_query_without_rows_makes_no_job_and_is_no_error(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(query="SELECT 1 AS a WHERE false"))
    await late(sql, 1.0)
    assert await fire_due(lane) == 1
    assert await made(sql) == []
    assert (await row(sql))["last_error"] is None


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("SELECT * FROM public.nothing", 'relation "public.nothing" does not exist'),
        ("SELECT 1/0 AS a", "SQLSTATE 22012"),
        ("SELEC 1", "syntax error"),
        ("DELETE FROM taskd.job RETURNING 1 AS a", "syntax error"),
        ("SELECT 1 AS a) AS x; DELETE FROM taskd.schedule; --", "syntax error"),
        ("SELECT n AS a FROM generate_series(1, 100001) AS n", "more than 100000 rows"),
        ("SELECT 1 AS b", 'needs the argument "a"'),
        ("SELECT 1 AS a, 2 AS c", 'has no argument "c"'),
        ("SELECT repeat('x', 300000) AS a", "take 300009 bytes"),
        ("SELECT 1 AS a, pg_sleep(10)", "statement timeout"),
    ],
)
async def test_a_bad_query_is_reported_and_the_next_tick_goes_on(
    sql: Any, database: Any, query: str, error: str
) -> None:
    database.statement_timeout_s = 1.0 if "sleep" in query else 5.0
    lane = Lane(database, "test")
    schema = '{"type": "object", "properties": {"a": {}}, "required": ["a"]}'
    await sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
        "VALUES ('t', 'app', 'x', 'q', 5, $1)",
        schema,
    )
    await make(lane, nightly(query=query, job=NewJob("t", queue="q")), nightly("fine"))
    await late(sql, 1.0)
    await late(sql, 1.0, "fine")
    assert await fire_due(lane) == 2
    after = await row(sql)
    assert error in after["last_error"]
    assert after["next_at"] > datetime.now(UTC)
    assert await made(sql) == []
    assert len(await made(sql, "fine")) == 1
    await make(lane, nightly(query="SELECT 1 AS a", job=NewJob("t", queue="q")))
    await late(sql, 1.0)
    await fire_due(lane)
    assert (await row(sql))["last_error"] is None
    assert len(await made(sql)) == 1
    await lane.close()
