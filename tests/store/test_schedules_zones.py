"""Schedules with a time zone per row: each row gets its job once per local day."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import asyncpg
import pytest

from taskd import events
from taskd.core.jobs.job import NewJob
from taskd.core.schedule import PER_ROW, Cron
from taskd.store import schedules
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.worker.upkeep.schedule_runner import fire
from tests.logins import Logins
from tests.store.schedule_helpers import fire_due, made, make, nightly, row

ZONES = ["Europe/Berlin", "America/New_York", "Asia/Kolkata", "Pacific/Apia", "UTC"]
ACCOUNTS = 'SELECT id AS account, zone AS "job.timezone" FROM public.account'
JOB = NewJob("t", queue="q")
MIDNIGHT = Cron("1 0 * * *", PER_ROW)


@pytest.fixture
async def accounts(sql: Any) -> None:
    await sql.execute("CREATE TABLE public.account (id integer PRIMARY KEY, zone text)")
    await sql.executemany("INSERT INTO public.account VALUES ($1, $2)", list(enumerate(ZONES)))


def zoned(query: str = ACCOUNTS, **options: Any) -> Any:
    return nightly(when=options.pop("when", MIDNIGHT), job=JOB, query=query, **options)


async def due_since(sql: Any, ago: timedelta) -> None:
    await sql.execute("UPDATE taskd.schedule SET next_at = clock_timestamp() - $1::interval", ago)


async def local_days(sql: Any) -> list[tuple[int, str]]:
    """The account and the local time of each job, in the zone of its account."""
    rows = await sql.fetch(
        "SELECT a.id, (j.tick AT TIME ZONE a.zone)::text AS local FROM taskd.jobs AS j "
        "JOIN public.account AS a ON a.id = (j.args ->> 'account')::integer ORDER BY 1, 2"
    )
    return [tuple(each) for each in rows]


async def test_each_row_gets_its_job_once_at_the_local_time(
    sql: Any, lane: Lane, accounts: None
) -> None:
    await make(lane, zoned())
    assert await fire_due(lane) == 0
    await due_since(sql, timedelta(days=1))
    assert await fire_due(lane) == 1
    fired = await local_days(sql)
    assert [account for account, _ in fired] == list(range(len(ZONES)))
    assert {local[11:] for _, local in fired} == {"00:01:00"}
    assert {each["args"] for each in await made(sql)} == {
        f'{{"account": {n}}}' for n in range(len(ZONES))
    }
    after = await row(sql)
    assert after["last_error"] is None
    assert datetime.now(UTC) < after["next_at"] <= datetime.now(UTC) + timedelta(hours=1.1)


async def test_a_local_day_is_not_fired_again_if_ticks_are_computed_again(
    sql: Any, lane: Lane, accounts: None
) -> None:
    await make(lane, zoned(catch_up="all"))
    await due_since(sql, timedelta(days=2))
    await fire_due(lane)
    fired = await local_days(sql)
    assert len(set(fired)) == len(fired) == 2 * len(ZONES)
    # As by a worker with other rules of time zones, or after the clock was set back.
    await due_since(sql, timedelta(days=2))
    assert await fire_due(lane) == 1
    assert await local_days(sql) == fired
    await sql.execute("UPDATE taskd.schedule_zone SET last_local = last_local - interval '1 s'")
    await due_since(sql, timedelta(days=2))
    await fire_due(lane)
    assert await local_days(sql) == fired, "the ticks are not later than the last ones"


async def test_of_workers_that_fire_at_the_same_time_one_does(
    sql: Any, database: Any, accounts: None
) -> None:
    lanes = [Lane(database, "test") for _ in range(4)]
    await make(lanes[0], zoned())
    await due_since(sql, timedelta(days=1))
    read = [(await schedules.due(lane, 9, with_query=True))[0] for lane in lanes]
    assert sum(await asyncio.gather(*map(fire, lanes, read))) == 1
    assert len(await local_days(sql)) == len(ZONES)
    await asyncio.gather(*(lane.close() for lane in lanes))


async def test_rows_without_a_zone_are_told_and_cost_the_others_nothing(
    sql: Any, lane: Lane, accounts: None
) -> None:
    await sql.execute("INSERT INTO public.account VALUES (50, 'Mars/Olympus'), (51, NULL)")
    await make(lane, zoned())
    await due_since(sql, timedelta(days=1))
    seen: list[dict[str, Any]] = []
    unsubscribe = events.subscribe(lambda name, fields: seen.append({"event": name, **fields}))
    assert await fire_due(lane) == 1
    unsubscribe()
    assert [each["event"] for each in seen] == ["schedule.fired", "schedule.rows_left_out"]
    error = (await row(sql))["last_error"]
    assert error.startswith('2 rows of the query have a "job.timezone" that is NULL or does not')
    assert "Mars" not in error
    assert len(await local_days(sql)) == len(ZONES)
    # The ticks of other zones keep the error; the next tick in UTC finds none.
    await sql.execute("DELETE FROM public.account WHERE id >= 50")
    await sql.execute("DELETE FROM taskd.schedule_zone")
    await due_since(sql, timedelta(days=1))
    await fire_due(lane)
    assert (await row(sql))["last_error"] is None


async def test_a_row_names_the_time_and_the_deadline_of_its_job(
    sql: Any, lane: Lane, accounts: None
) -> None:
    query = (
        'SELECT id AS account, zone AS "job.timezone", time \'02:30\' AS "job.run_at", '
        "'08:00' AS \"job.deadline\" FROM public.account"
    )
    await make(lane, zoned(query))
    await due_since(sql, timedelta(days=1))
    await fire_due(lane)
    for each in await made(sql):
        zone = ZoneInfo(ZONES[int(each["args"].split(":")[1].strip(" }"))])
        day = each["tick"].astimezone(zone).date()
        for column, hour in (("run_at", 2.5), ("deadline", 8.0)):
            local = each[column].astimezone(zone)
            assert (local.date(), local.hour + local.minute / 60) == (day, hour)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ("'x' AS \"job.run_at\"", 'has a "job.run_at" that is neither a time of day'),
        ("'25:00' AS \"job.deadline\"", 'has a "job.deadline" that is neither a time of day'),
        ("'2026-02-30' AS \"job.deadline\"", 'has a "job.deadline" that is neither'),
        ('1 AS "job.queue"', 'the query has a column "job.queue"'),
    ],
)
async def test_bad_options_of_a_row_are_told(
    sql: Any, lane: Lane, columns: str, said: str, accounts: None
) -> None:
    await make(lane, zoned(f'SELECT id, zone AS "job.timezone", {columns} FROM public.account'))
    await due_since(sql, timedelta(days=1))
    await fire_due(lane)
    assert said in (await row(sql))["last_error"]
    assert await made(sql) == []


async def test_a_query_without_the_column_of_the_zone_is_told(sql: Any, lane: Lane) -> None:
    await make(lane, zoned("SELECT 1 AS account"))
    await due_since(sql, timedelta(days=1))
    await fire_due(lane)
    assert "column found.job.timezone does not exist" in (await row(sql))["last_error"]


async def test_options_of_rows_apply_without_zones_too(sql: Any, lane: Lane) -> None:
    query = (
        "SELECT 1 AS a, '2099-01-01T00:00' AS \"job.run_at\", 'Asia/Tokyo' AS \"job.timezone\" "
        "UNION ALL SELECT 2, '2099-01-01T00:00+03', 'Asia/Tokyo'"
    )
    await make(lane, nightly(job=JOB, query=query))
    await due_since(sql, timedelta(seconds=1))
    await fire_due(lane)
    assert [each["run_at"].astimezone(UTC).hour for each in await made(sql)] == [15, 21]


async def test_run_enqueues_the_jobs_of_all_zones_now(sql: Any, lane: Lane, accounts: None) -> None:
    await sql.execute("INSERT INTO public.account VALUES (50, 'Mars/Olympus')")
    query = ACCOUNTS.replace(" FROM", ", '02:30' AS \"job.run_at\" FROM")
    await make(lane, zoned(query))
    assert len((await schedules.run(lane, "s")).ids or []) == len(ZONES)
    assert {each["state"] for each in await made(sql)} == {"queued"}


async def test_a_worker_login_fires_the_zones_of_its_own_query(
    sql: Any, logins: Logins, accounts: None
) -> None:
    await sql.execute(f"GRANT SELECT ON public.account TO {logins.role('worker')}")
    worker = Lane(Database({"dsn": logins.dsn("worker")}), "test")
    await sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema, login) "
        "VALUES ('t', 'app', 'x', 'q', 5, '{\"properties\": {\"account\": {}}}', $1)",
        logins.role("worker"),
    )
    await make(worker, zoned())
    await due_since(sql, timedelta(days=1))
    assert await fire_due(worker) == 1
    assert len(await local_days(sql)) == len(ZONES)
    await worker.close()


async def test_sql_refuses_a_zone_per_row_without_cron_or_query(sql: Any) -> None:
    for options in ("every => '1 h', query => 'SELECT 1'", "cron => '1 0 * * *'"):
        with pytest.raises(asyncpg.PostgresError, match="a time zone per row needs cron, a query"):
            await sql.execute(
                "SELECT taskd.set_schedule('s', 't', queue => 'q', timezone => 'per row', "
                f"{options})"
            )


async def test_a_clock_that_was_wrong_by_a_year_leaves_no_zone_without_ticks(
    sql: Any, lane: Lane, accounts: None
) -> None:
    await make(lane, zoned())
    await due_since(sql, timedelta(days=1))
    await fire_due(lane)
    await sql.execute(
        "UPDATE taskd.schedule_zone SET last_tick = last_tick + interval '1 year', "
        "last_local = last_local + interval '1 year'"
    )
    await sql.execute(
        "UPDATE taskd.schedule SET last_tick = now() + interval '1 year', "
        "next_at = now() + interval '1 year 1 hour'"
    )
    await sql.execute("SELECT taskd.follow_clock_back(31536000)")
    assert await sql.fetchval("SELECT count(*) FROM taskd.schedule_zone") == 0
    await due_since(sql, timedelta(days=1))
    await fire_due(lane)
    assert len(await made(sql)) == 2 * len(ZONES)


# Local times.


@pytest.mark.parametrize(
    ("local", "zone", "moment"),
    [
        ("2026-06-01 08:00", "Europe/Berlin", "2026-06-01 06:00"),
        ("2026-10-25 02:30", "Europe/Berlin", "2026-10-25 00:30"),  # twice: the first one
        ("2026-10-25 03:00", "Europe/Berlin", "2026-10-25 02:00"),
        ("2026-03-29 02:30", "Europe/Berlin", "2026-03-29 01:00"),  # never: at the change
        ("2026-03-29 03:00", "Europe/Berlin", "2026-03-29 01:00"),
        ("2026-03-29 03:30", "Europe/Berlin", "2026-03-29 01:30"),
        ("2026-11-01 01:30", "America/New_York", "2026-11-01 05:30"),
        ("2026-04-05 01:45", "Australia/Lord_Howe", "2026-04-04 14:45"),  # half an hour
        ("2026-10-04 02:15", "Australia/Lord_Howe", "2026-10-03 15:30"),
        ("2011-12-30 12:00", "Pacific/Apia", "2011-12-30 10:00"),  # a whole day is left out
    ],
)
async def test_a_local_time_means_its_first_or_the_next_valid_moment(
    sql: Any, local: str, zone: str, moment: str
) -> None:
    found = await sql.fetchval("SELECT taskd.local_moment($1::text::timestamp, $2)", local, zone)
    assert found.astimezone(UTC).strftime("%Y-%m-%d %H:%M") == moment


async def test_sql_and_python_find_the_same_moment_for_each_local_time(sql: Any) -> None:
    for zone in ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Africa/Cairo"):
        rows = await sql.fetch(
            "SELECT local, taskd.local_moment(local, $1) AS moment FROM generate_series("
            "timestamp '2026-01-01', timestamp '2027-01-01', '97 min') AS local",
            zone,
        )
        for local, moment in rows:
            first = local.replace(tzinfo=ZoneInfo(zone)).astimezone(UTC)
            if first.astimezone(ZoneInfo(zone)).replace(tzinfo=None) == local:
                assert moment == first, (zone, local)
            else:
                assert moment <= first
                at = moment.astimezone(ZoneInfo(zone)).replace(tzinfo=None)
                before = (moment - timedelta(minutes=1)).astimezone(ZoneInfo(zone))
                assert before.replace(tzinfo=None) < local < at, "the moment of the change"
