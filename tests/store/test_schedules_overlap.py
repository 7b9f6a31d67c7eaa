"""A tick while a job of its schedule is live: it waits, and no tick is lost."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskd import events
from taskd.core.jobs.job import NewJob
from taskd.core.schedule import Cron, Every
from taskd.errors import InvalidSchedule
from taskd.store import schedules
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.worker.upkeep.schedule_runner import fire
from tests.store.helpers import Transaction
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, row


async def end(lane: Lane, me: int) -> None:
    """Claim and complete the next job."""
    [job] = await jobs.claim(lane, me, "q", 1)
    await jobs.ack_done(lane, me, [job.id], [job.fence])


async def check_again(sql: Any) -> None:
    """Bring forward the time at which a worker checks a waiting tick."""
    await sql.execute("UPDATE taskd.schedule SET check_at = clock_timestamp()")


async def ticks(sql: Any) -> list[datetime]:
    return [each["tick"] for each in await made(sql)]


@pytest.mark.parametrize("catch_up", ["none", "last", "all"])
async def test_with_wait_every_tick_is_fired_one_after_the_other(
    sql: Any, lane: Lane, me: int, catch_up: str
) -> None:
    await make(lane, nightly(overlap="wait", catch_up=catch_up))
    first = await late(sql, 239.0)
    assert await fire_due(lane) == 1
    for n in range(3):
        assert await ticks(sql) == [first + timedelta(minutes=k) for k in range(n + 1)]
        await check_again(sql)
        assert await fire_due(lane) == 0, "the job of the tick before is live"
        await end(lane, me)
        await check_again(sql)
        assert await fire_due(lane) == 1
    await end(lane, me)
    after = await row(sql)
    assert (after["next_at"], after["waits_since"]) == (first + timedelta(minutes=4), None)
    assert after["last_tick"] == first + timedelta(minutes=3)
    assert {each["state"] for each in await made(sql)} == {"done"}


async def test_with_wait_the_newest_ticks_are_kept_up_to_a_number(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(overlap="wait", catch_up_max=2))
    first = await late(sql, 239.0)
    missed: list[Any] = []
    unsubscribe = events.subscribe(
        lambda name, fields: missed.append(fields) if name == "schedule.missed" else None
    )
    await fire_due(lane)
    await end(lane, me)
    await check_again(sql)
    await fire_due(lane)
    unsubscribe()
    assert await ticks(sql) == [first + timedelta(minutes=2), first + timedelta(minutes=3)]
    assert [each["caught_up"] for each in missed] == [2]


async def test_with_cancel_the_new_job_is_made_when_the_old_one_has_ended(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(overlap="cancel", catch_up="none"))
    await late(sql, 1.0)
    await fire_due(lane)
    [running] = await jobs.claim(lane, me, "q", 1)
    tick = await late(sql, 61.5)
    waits: list[str] = []
    unsubscribe = events.subscribe(lambda name, fields: waits.append(name))
    for _ in range(3):
        assert await fire_due(lane) == 0
        await check_again(sql)
        assert [(each["state"], each["cancel_requested"]) for each in await made(sql)] == [
            ("running", True)
        ]
    unsubscribe()
    assert waits.count("schedule.waits") == 1
    await jobs.ack_done(lane, me, [running.id], [running.fence])
    # The tick is late by more than a minute, but it has waited: it was not missed.
    assert await fire_due(lane) == 1
    found = await made(sql)
    assert [each["state"] for each in found] == ["done", "queued"]
    assert found[1]["tick"] in (tick, tick + timedelta(minutes=1))


async def test_with_cancel_waiting_jobs_make_room_at_once(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(overlap="cancel"), nightly("other"))
    for name in ("s", "other", "s"):
        await late(sql, 1.0, name)
        assert await fire_due(lane) == 1
    found = await made(sql)
    assert [each["state"] for each in found] == ["cancelled", "queued"]
    assert found[0]["reason"] == "its schedule made another one"
    assert [each["state"] for each in await made(sql, "other")] == ["queued"]


async def test_a_tick_of_a_query_waits_for_all_jobs_of_the_tick_before(
    sql: Any, lane: Lane, me: int
) -> None:
    query = "SELECT n AS a FROM generate_series(1, 2) AS n"
    await make(lane, nightly(overlap="wait", query=query, job=NewJob("t", queue="q")))
    await late(sql, 1.0)
    await fire_due(lane)
    await late(sql, 1.0)
    for _ in range(2):
        await check_again(sql)
        assert await fire_due(lane) == 0
        await end(lane, me)
    await check_again(sql)
    assert await fire_due(lane) == 1
    assert len(await made(sql)) == 4


async def test_a_tick_that_fails_costs_only_itself(sql: Any, lane: Lane, me: int) -> None:
    query = (
        "SELECT 1 / (n - 2)::int AS a FROM (SELECT extract(minute FROM $1)::int - "
        "(SELECT extract(minute FROM min(next_at))::int FROM taskd.schedule) + 2 AS n) AS x "
        "WHERE false OR n = 2"
    )
    await make(lane, nightly(overlap="wait", query=query, job=NewJob("t", queue="q")))
    first = await late(sql, 61.0)
    assert await fire_due(lane) == 1
    after = await row(sql)
    assert "22012" in after["last_error"]
    assert (after["last_tick"], after["next_at"]) == (first, first + timedelta(minutes=1))


async def test_a_hundred_waiting_schedules_delay_no_other(sql: Any, lane: Lane) -> None:
    await make(
        lane,
        *(nightly(f"w{n:03}", overlap="wait") for n in range(100)),
        nightly("z"),
    )
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, schedule) "
        "SELECT 'q', 't', name FROM taskd.schedule WHERE name <> 'z'"
    )
    await sql.execute(
        "UPDATE taskd.schedule SET next_at = now() - interval '1 h' WHERE name <> 'z'"
    )
    assert await fire_due(lane) == 0
    await sql.execute(
        "UPDATE taskd.schedule SET check_at = check_at + interval '1 min' "
        "WHERE check_at IS NOT NULL"
    )
    await late(sql, 0.1, "z")
    due = await schedules.due(lane, 100, with_query=False)
    assert [each.name for each in due] == ["z"]
    assert ((await schedules.next_ticks(lane)).plain_s or 0.0) < 0


async def test_a_waiting_tick_is_checked_less_often_the_longer_it_waits(
    sql: Any, lane: Lane
) -> None:
    await make(lane, nightly(overlap="wait"))
    await sql.execute("INSERT INTO taskd.job (queue, task, schedule) VALUES ('q', 't', 's')")
    await late(sql, 1.0)
    for waited_s, wait_s in ((0, 1), (50, 5), (5000, 10)):
        await sql.execute(
            "UPDATE taskd.schedule SET waits_since = now() - make_interval(secs => $1), "
            "check_at = NULL",
            waited_s,
        )
        assert await fire_due(lane) == 0
        found = await sql.fetchval(
            "SELECT date_part('epoch', check_at - now()) FROM taskd.schedule"
        )
        assert wait_s - 0.5 < found < wait_s + 0.2


async def test_a_pause_ends_the_wait_of_a_tick(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(overlap="wait"))
    await sql.execute("INSERT INTO taskd.job (queue, task, schedule) VALUES ('q', 't', 's')")
    await late(sql, 1.0)
    assert await fire_due(lane) == 0
    assert (await row(sql))["waits_since"] is not None
    await schedules.pause(lane, ["s"], 60.0, None)
    await sql.execute("DELETE FROM taskd.job")
    assert await fire_due(lane) == 0
    after = await row(sql)
    assert (after["waits_since"], after["check_at"]) == (None, None)
    assert await made(sql) == [], "ticks of a pause are not fired"


async def test_run_is_behind_the_live_job_and_fires_behind_run(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(overlap="wait"))
    await late(sql, 1.0)
    await fire_due(lane)
    [new] = (await schedules.run(lane, "s")).ids or []
    assert [each["state"] for each in await made(sql)] == ["queued", "blocked"]
    await late(sql, 1.0)
    assert await fire_due(lane) == 0
    await end(lane, me)
    assert [each["state"] for each in await made(sql)] == ["done", "queued"]
    await end(lane, me)
    await check_again(sql)
    assert await fire_due(lane) == 1
    found = await made(sql)
    assert [each["state"] for each in found] == ["done", "done", "queued"]
    assert found[1]["id"] == new
    assert (await row(sql))["last_run"] > found[1]["tick"]


async def test_run_with_cancel_waits_for_the_end_of_the_running_job(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(overlap="cancel"))
    await late(sql, 1.0)
    await fire_due(lane)
    [running] = await jobs.claim(lane, me, "q", 1)
    await schedules.run(lane, "s")
    found = await made(sql)
    assert [(each["state"], each["cancel_requested"]) for each in found] == [
        ("running", True),
        ("blocked", False),
    ]
    await jobs.ack_done(lane, me, [running.id], [running.fence])
    assert [each["state"] for each in await made(sql)] == ["done", "queued"]


async def test_run_refuses_to_make_many_jobs_wait_for_many(sql: Any, lane: Lane) -> None:
    query = "SELECT n AS a FROM generate_series(1, 101) AS n"
    await make(lane, nightly(overlap="wait", query=query, job=NewJob("t", queue="q")))
    assert len((await schedules.run(lane, "s")).ids or []) == 101
    assert await schedules.run(lane, "s") == ("waits", None)
    assert len(await made(sql)) == 101


async def test_a_tick_and_a_run_at_the_same_time_do_not_pass_each_other(
    sql: Any, lane: Lane, database: Database, connect: Any
) -> None:
    await make(lane, nightly(overlap="wait"))
    await late(sql, 1.0)
    [read] = await schedules.due(lane, 10, with_query=False)
    async with Transaction(await connect()) as other:
        await other.connection.execute("SELECT taskd.run_schedule('s')")
        assert not await fire(lane, read), "the run holds the schedule"
        await other.commit()
    assert not await fire(lane, read), "the job of the run is live"
    assert [each["state"] for each in await made(sql)] == ["queued"]
    assert (await row(sql))["waits_since"] is not None


async def test_skipped_runs_count_as_skipped(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(overlap="skip"))
    assert (await schedules.run(lane, "s")).outcome == "fired"
    assert await schedules.run(lane, "s") == ("skipped", None)
    assert (await row(sql))["skipped"] == 1


# A start in the past.


async def test_a_start_in_the_past_is_caught_up_if_all_ticks_count(sql: Any, lane: Lane) -> None:
    now = datetime.now(UTC).replace(microsecond=0)
    start = now - timedelta(minutes=5, seconds=30)
    period = Every(60.0, start)
    await make(lane, nightly(when=period), nightly("all", when=period, catch_up="all"))
    assert await fire_due(lane) == 1
    assert await made(sql) == []
    found = [each["tick"] for each in await made(sql, "all")]
    assert found == [start + timedelta(minutes=n) for n in range(6)]
    # What was fired is not fired again, whatever the start becomes.
    earlier = Every(60.0, start - timedelta(minutes=3))
    await make(lane, nightly("all", when=earlier, catch_up="all"))
    await fire_due(lane)
    assert [each["tick"] for each in await made(sql, "all")] == found


async def test_a_start_long_ago_is_caught_up_to_the_bound(sql: Any, lane: Lane) -> None:
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    await make(lane, nightly(when=Every(1.0, long_ago), catch_up="all", catch_up_max=3))
    missed: list[Any] = []
    unsubscribe = events.subscribe(lambda name, fields: missed.append((name, fields)))
    await fire_due(lane)
    unsubscribe()
    assert len(await made(sql)) == 3
    assert [fields["caught_up"] for name, fields in missed if name == "schedule.missed"] == [3]


def test_all_and_cancel_contradict_each_other() -> None:
    for overlap in ("skip", "cancel"):
        with pytest.raises(InvalidSchedule, match="overlap='wait'"):
            nightly(overlap=overlap, catch_up="all")
    assert nightly(when=Cron("0 3 * * *"), overlap="wait", catch_up="all")


async def test_workers_that_check_a_waiting_tick_at_the_same_time_fire_it_once(
    sql: Any, database: Database, lane: Lane, me: int
) -> None:
    lanes = [Lane(database, "test") for _ in range(4)]
    await make(lane, nightly(overlap="wait"))
    await late(sql, 1.0)
    await fire_due(lane)
    await late(sql, 1.0)
    assert await fire_due(lane) == 0
    await check_again(sql)
    read = [(await schedules.due(each, 9, with_query=False))[0] for each in lanes]
    await end(lane, me)
    assert sum(await asyncio.gather(*map(fire, lanes, read))) == 1
    assert [each["state"] for each in await made(sql)] == ["done", "queued"]
    await asyncio.gather(*(each.close() for each in lanes))
