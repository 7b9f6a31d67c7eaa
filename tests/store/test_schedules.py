"""Schedules in the database: what a tick makes, once, whoever looks and whoever dies."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskd.core.job import NewJob
from taskd.core.schedule import Cron, Every, Schedule
from taskd.errors import AppError, QueueFull, ScheduleNotFound, StoreUnavailable
from taskd.store import jobs, schedules
from taskd.store.database import Lane
from taskd.store.translate import ValueRefused
from taskd.worker.firer import fire
from tests.store.helpers import Ears, Transaction

JOB = NewJob("t", '{"a": 1}', queue="q")


def nightly(name: str = "s", when: Any = None, job: NewJob = JOB, **options: Any) -> Schedule:
    return Schedule(name, job, when or Every(60.0), **options)


async def make(on: Any, *made: Schedule, app: str | None = None) -> dict[str, str]:
    return await schedules.set_(on, made, app)


async def late(sql: Any, by_s: float, name: str = "s") -> datetime:
    """Let the next tick have come so long ago; when that was."""
    return await sql.fetchval(
        "UPDATE taskd.schedule SET next_at = clock_timestamp() - make_interval(secs => $1), "
        "starts_at = clock_timestamp() - make_interval(secs => $1) "
        "WHERE name = $2 RETURNING next_at",
        by_s,
        name,
    )


async def fire_due(lane: Lane) -> int:
    """Fire what is due, as a worker does; how many schedules were fired here."""
    due = [await schedules.due(lane, 100, with_query=each) for each in (False, True)]
    return sum([await fire(lane, each) for each in (*due[0], *due[1])])


async def made(sql: Any, name: str = "s") -> list[Any]:
    return await sql.fetch("SELECT * FROM taskd.jobs WHERE schedule = $1 ORDER BY id", name)


async def row(sql: Any, name: str = "s") -> Any:
    return await sql.fetchrow("SELECT * FROM taskd.schedule WHERE name = $1", name)


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
        # Every tick is looked at late, each time by something else.
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
        "SELECT taskd.next_of_every($1::timestamptz, 21600.1, "
        "$1 + make_interval(secs => 123 * 21600.1 + 1))",
        begin,
    )
    assert reckoned == begin + timedelta(seconds=124 * 21600.1)


async def test_a_tick_rings_for_its_queue(sql: Any, lane: Lane, connect: Any) -> None:
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
        ("none", 100, 179.0, [2]),  # the last one came a moment ago: it is no missed one
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


async def test_with_cancel_the_live_ones_end_before_the_new_one_is_made(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(), nightly("other"))
    for _ in range(2):
        await late(sql, 1.0)
        await late(sql, 1.0, "other")
        await fire_due(lane)
    [running] = await jobs.claim(lane, me, "q", 1)
    running_of = await sql.fetchval("SELECT schedule FROM taskd.job WHERE id = $1", running.id)
    await make(lane, nightly(running_of, overlap="cancel"))
    await late(sql, 1.0, running_of)
    assert await fire_due(lane) == 1
    found = await made(sql, running_of)
    assert [(each["state"], each["cancel_asked"]) for each in found] == [
        ("running", True),
        ("cancelled", False),
        ("queued", False),
    ]
    assert found[1]["reason"] == "its schedule made another one"
    assert (found[1]["args"], found[1]["tick"]) == ('{"a": 1}', found[1]["run_at"])
    other = "other" if running_of == "s" else "s"
    assert [each["state"] for each in await made(sql, other)] == ["queued", "queued"]


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


async def test_a_full_queue_refuses_the_jobs_of_a_tick_and_tells_it(sql: Any, lane: Lane) -> None:
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
        ("SELECT 1/0 AS a", "division by zero"),
        ("SELEC 1", "syntax error"),
        ("DELETE FROM taskd.job RETURNING 1 AS a", "syntax error"),
        ("SELECT 1 AS a) AS x; DELETE FROM taskd.schedule; --", "syntax error"),
        ("SELECT n AS a FROM generate_series(1, 100001) AS n", "more than 100000 rows"),
        ("SELECT 1 AS b", 'needs the argument "a"'),
        ("SELECT 1 AS a, 2 AS c", 'has no argument "c"'),
        ("SELECT repeat('x', 300000) AS a", "payload_fits_256_kib"),
        ("SELECT 1 AS a, pg_sleep(10)", "statement timeout"),
    ],
)
async def test_a_bad_query_is_told_and_the_next_tick_goes_on(
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


# Once, whoever looks and whoever dies.


async def test_of_workers_that_fire_at_the_same_time_one_does(
    sql: Any, database: Any, connect: Any
) -> None:
    lanes = [Lane(database, "test") for _ in range(5)]
    await make(lanes[0], *(nightly(f"s{n}", Every(1.0)) for n in range(10)))
    for _ in range(10):
        for n in range(10):
            await late(sql, 0.5, f"s{n}")
        read = [await schedules.due(lane, 100, with_query=False) for lane in lanes]
        fired = await asyncio.gather(
            *(fire(lane, each) for lane, due in zip(lanes, read, strict=True) for each in due)
        )
        assert sum(fired) == 10
    twice = "SELECT schedule, tick FROM taskd.jobs GROUP BY 1, 2 HAVING count(*) > 1"
    assert await sql.fetch(twice) == []
    assert await sql.fetchval("SELECT count(*) FROM taskd.jobs") == 100
    for lane in lanes:
        await lane.close()


async def test_what_was_read_before_others_fired_fires_nothing(sql: Any, lane: Lane) -> None:
    await make(lane, nightly())
    await late(sql, 1.0)
    [stale] = await schedules.due(lane, 100, with_query=False)
    assert await fire(lane, stale)
    assert not await fire(lane, stale)
    assert len(await made(sql)) == 1


async def test_what_was_read_before_the_rhythm_or_a_pause_changed_fires_nothing(
    sql: Any, lane: Lane
) -> None:
    await make(lane, nightly(when=Cron("0 3 * * *")))
    await sql.execute("UPDATE taskd.schedule SET next_at = NULL")
    [stale] = await schedules.due(lane, 100, with_query=False)
    await make(lane, nightly(when=Cron("0 4 * * *")))
    await sql.execute("UPDATE taskd.schedule SET next_at = NULL")
    assert not await fire(lane, stale)
    await late(sql, 1.0)
    [stale] = await schedules.due(lane, 100, with_query=False)
    await schedules.pause(lane, ["s"], None, None)
    assert not await fire(lane, stale)
    assert await made(sql) == []


async def test_a_worker_that_dies_between_the_jobs_and_the_commit_has_fired_nothing(
    sql: Any, lane: Lane, connect: Any
) -> None:
    await make(lane, nightly())
    tick = await late(sql, 1.0)
    [read] = await schedules.due(lane, 100, with_query=False)
    dying = await connect()
    await dying.execute("BEGIN")
    fired = await dying.fetchrow(
        "SELECT * FROM taskd.fire_schedule('s', $1, $2::timestamptz, ARRAY[$2], $3)",
        read.revision,
        tick,
        tick + timedelta(seconds=60),
    )
    assert (fired["outcome"], fired["jobs"]) == ("fired", 1)
    # Meanwhile it is in its hands; others do not wait.
    assert not await fire(lane, read)
    pid = dying.get_server_pid()
    dying.terminate()
    while await sql.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid):
        await asyncio.sleep(0.01)
    assert await made(sql) == []
    assert await fire_due(lane) == 1
    assert [each["tick"] for each in await made(sql)] == [tick]


async def test_a_tick_that_cannot_be_written_now_stays_due(
    sql: Any, database: Any, connect: Any
) -> None:
    database.statement_timeout_s = 1.0
    lane = Lane(database, "test")
    await make(lane, nightly())
    await late(sql, 1.0)
    async with Transaction(await connect()) as held:
        await held.connection.execute("LOCK TABLE taskd.job IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreUnavailable):
            await fire_due(lane)
    assert (await row(sql))["last_error"] is None
    assert await fire_due(lane) == 1
    assert len(await made(sql)) == 1
    await lane.close()


# Made, changed, declared.


async def test_a_change_that_leaves_the_rhythm_leaves_the_next_tick(sql: Any, lane: Lane) -> None:
    await make(lane, nightly())
    before = await row(sql)
    assert await make(lane, nightly()) == {"s": "unchanged"}
    assert await make(lane, nightly(jitter_s=5.0)) == {"s": "changed"}
    assert (await row(sql))["next_at"] == before["next_at"]
    assert await make(lane, nightly(when=Every(3600.0))) == {"s": "changed"}
    assert await row(sql) != before["next_at"]


async def test_a_worker_that_starts_does_not_wait_for_one_that_fires(
    sql: Any, lane: Lane, connect: Any
) -> None:
    declared = [nightly(query="SELECT 1 AS b"), nightly("c", Cron("0 3 * * *"))]
    await make(lane, *declared, app="a")
    other = await connect()
    async with Transaction(other):
        await other.execute("SELECT FROM taskd.schedule FOR UPDATE")
        async with asyncio.timeout(10.0):
            assert set((await make(lane, *declared, app="a")).values()) == {"unchanged"}


async def test_what_an_app_declares_is_its_own(sql: Any, lane: Lane) -> None:
    await schedules.publish(lane, "shop", [nightly("a"), nightly("b")])
    await schedules.publish(lane, "mail", [nightly("c")])
    await make(lane, nightly("by-hand"))
    await schedules.publish(lane, "shop", [nightly("b")])
    names = await sql.fetch("SELECT name FROM taskd.schedule ORDER BY name")
    assert [each["name"] for each in names] == ["b", "by-hand", "c"]
    for taken in ("c", "by-hand"):
        with pytest.raises(AppError, match=f"'{taken}'"):
            await schedules.publish(lane, "shop", [nightly("b"), nightly(taken, Every(5.0))])
    assert await sql.fetchval("SELECT count(*) FROM taskd.schedule") == 3
    # Two apps may import one module: what they say alike belongs to who has started last.
    await schedules.publish(lane, "shop", [nightly("b"), nightly("c")])
    await schedules.publish(lane, "mail", [])
    assert (await row(sql, "c"))["app"] == "shop"


async def test_what_an_operator_does_survives_the_start_of_the_app(sql: Any, lane: Lane) -> None:
    await schedules.publish(lane, "shop", [nightly("a"), nightly("b")])
    await schedules.pause(lane, ["a"], None, "not now")
    await make(lane, nightly("b", Every(3600.0)))
    await schedules.publish(lane, "shop", [nightly("a", deadline_s=5.0), nightly("b")])
    a, b = await row(sql, "a"), await row(sql, "b")
    assert (a["pause_reason"], a["deadline_s"], a["changed_at"]) == ("not now", 5.0, None)
    assert (b["every_s"], b["app"], b["changed_at"] is None) == (3600.0, "shop", False)
    # Deleted, it is what its code says again.
    assert await schedules.delete(lane, ["b", "x"]) == {"b": "shop"}
    await schedules.publish(lane, "shop", [nightly("a"), nightly("b")])
    assert (await row(sql, "b"))["every_s"] == 60.0


async def test_two_workers_that_start_together_declare_each_schedule_once(
    sql: Any, database: Any
) -> None:
    lanes = [Lane(database, "test") for _ in range(4)]
    many = [nightly(f"s{n}") for n in range(20)]
    await asyncio.gather(*(schedules.publish(lane, "shop", many) for lane in lanes))
    assert await sql.fetchval("SELECT count(*) FROM taskd.schedule") == 20
    for lane in lanes:
        await lane.close()


# Paused, resumed, run.


async def test_a_pause_fires_nothing_and_is_not_made_up_for(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(catch_up="all"), nightly("c", Cron("* * * * *"), catch_up="all"))
    assert await schedules.pause(lane, ["s", "c", "x"], None, "why") == ["c", "s"]
    await late(sql, 3600.0)
    await late(sql, 3600.0, "c")
    assert await fire_due(lane) == 0
    assert await schedules.next_ticks(lane) == (None, None)
    assert await schedules.resume(lane, ["s", "c"]) == ["c", "s"]
    assert await schedules.resume(lane, ["s", "c"]) == []
    assert await fire_due(lane) == 1  # cron's next tick is reckoned
    assert await made(sql) == await made(sql, "c") == []
    for name in ("s", "c"):
        after = await row(sql, name)
        assert timedelta(0) < after["next_at"] - datetime.now(UTC) <= timedelta(seconds=60)


async def test_a_pause_with_an_end_ends_by_itself_with_the_first_tick_after_it(
    sql: Any, lane: Lane
) -> None:
    await make(lane, nightly(), nightly("c", Cron("* * * * *"), catch_up="all"))
    await schedules.pause(lane, ["s", "c"], 7200.0, "why")
    assert await fire_due(lane) == 1  # cron's next tick is reckoned
    for name in ("s", "c"):
        after = await row(sql, name)
        assert timedelta(0) < after["next_at"] - after["paused_until"] <= timedelta(seconds=60)
    assert 7190 < (await schedules.next_ticks(lane)).plain_s <= 7260
    # The rhythm may change meanwhile, and the pause stays.
    await make(lane, nightly(when=Every(10.0)), nightly("c", Cron("*/2 * * * *")))
    assert await fire_due(lane) == 1
    for name in ("s", "c"):
        after = await row(sql, name)
        assert after["next_at"] > after["paused_until"]
    back = "UPDATE taskd.schedule SET {0} = {0} - interval '7400 s'"
    for column in ("starts_at", "next_at", "paused_until"):
        await sql.execute(back.format(column))
    assert await schedules.resume(lane, ["s", "c"]) == []
    assert await fire_due(lane) == 2
    assert len(await made(sql)) == 1
    assert not any(each["paused"] for each in await schedules.list_(lane))


async def test_what_was_reckoned_before_a_pause_with_an_end_is_not_written_after(
    sql: Any, lane: Lane
) -> None:
    await sql.execute("SELECT taskd.set_schedule('c', 't', queue => 'q', cron => '* * * * *')")
    [read] = await schedules.due(lane, 1, with_query=False)
    await schedules.pause(lane, ["c"], 7200.0, None)
    assert not await fire(lane, read)
    assert (await row(sql, "c"))["next_at"] is None


async def test_run_makes_the_jobs_now_and_leaves_the_ticks(sql: Any, lane: Lane) -> None:
    await make(
        lane,
        nightly(overlap="skip", jitter_s=600.0),
        nightly("f", query="SELECT 1 AS b UNION SELECT 2"),
    )
    before = await row(sql)
    await schedules.pause(lane, ["s"], None, None)
    [job_id] = await schedules.run(lane, "s") or []
    [found] = await made(sql)
    assert (found["id"], found["state"], found["run_at"]) == (job_id, "queued", found["tick"])
    assert (await row(sql))["next_at"] == before["next_at"]
    assert await schedules.run(lane, "s") is None
    assert len(await schedules.run(lane, "f") or []) == 2
    with pytest.raises(ScheduleNotFound, match="'x'"):
        await schedules.run(lane, "x")


# From SQL.


async def test_a_schedule_that_sql_has_made_is_fired(sql: Any, lane: Lane) -> None:
    await sql.execute("SELECT taskd.set_schedule('s', 't', queue => 'q', every => '5 min')")
    cron = "SELECT taskd.set_schedule('c', 't', queue => 'q', cron => $1, timezone => $2)"
    await sql.execute(cron, "0 3 * * *", "Europe/Berlin")
    assert await schedules.next_ticks(lane) == (0.0, None)
    assert await fire_due(lane) == 1
    assert (await row(sql, "c"))["next_at"] is not None
    assert (await schedules.next_ticks(lane)).plain_s <= 300


async def test_a_cron_that_nobody_can_read_pauses_the_schedule(sql: Any, lane: Lane) -> None:
    await sql.execute("SELECT taskd.set_schedule('c', 't', queue => 'q', cron => '0 3 * * 9')")
    assert await fire_due(lane) == 1
    assert await fire_due(lane) == 0
    after = await row(sql, "c")
    assert "bad day-of-week" in after["pause_reason"]
    assert after["last_error"] == after["pause_reason"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ("every => '5 min', cron => '0 3 * * *'", "say every"),
        ("priority => 1", "say every"),
        ("every => '1 month'", "a month has no fixed length"),
        ("every => '0.5 s'", "every_is_1_s"),
        ("cron => '0 3 * *'", "five fields"),
        ("cron => '0 3 * * *', timezone => 'Mars/Olympus'", "no time zone"),
        ("every => '5 min', catch_up => 'some'", "catch_up_is_known"),
        ("every => '5 min', overlap => 'maybe'", "overlap_is_known"),
        ("every => '5 min', catch_up => 'all', overlap => 'skip'", "catches_up_one_by_one"),
        ("every => '5 min', jitter_s => 90000", "jitter"),
        ("every => '5 min', deadline_s => 0", "deadline"),
        ("every => '5 min', args => '[]'", "must be a JSON object"),
        ("every => '5 min', starts_at => 'infinity'", "moment_is_finite"),
        ("every => '5 min', starts_at => '0001-01-01 BC'", "moment_is_finite"),
    ],
)
async def test_sql_is_told_what_is_wrong(sql: Any, arguments: str, error: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match=error):
        await sql.execute(f"SELECT taskd.set_schedule('s', 't', queue => 'q', {arguments})")
    for name in ("''", "repeat('x', 201)", r"E'a\nb'"):
        with pytest.raises(asyncpg.CheckViolationError):
            await sql.execute(
                f"SELECT taskd.set_schedule({name}, 't', queue => 'q', every => '5 min')"
            )


async def test_a_task_that_nobody_knows_needs_a_queue(lane: Lane) -> None:
    with pytest.raises(ValueRefused, match="no queue was named"):
        await make(lane, nightly(job=NewJob("t")))
