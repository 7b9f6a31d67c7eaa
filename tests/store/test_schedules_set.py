"""Create, change, pause and run schedules: by an app, by hand and by SQL."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.schedule import Cron, Every
from taskd.errors import AppError, ScheduleNotFound
from taskd.store import schedules
from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.lanes import Lane
from taskd.worker.upkeep.schedule_runner import fire
from tests.store.helpers import Transaction
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, register, row

# Create, change, declare.


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
    await sql.execute("UPDATE taskd.schedule SET created_at = now() - interval '1 hour'")
    await register(lane, 1, "shop", "b")
    assert await schedules.settle(lane, 1) == (["a"], [])
    names = await sql.fetch("SELECT name FROM taskd.schedule WHERE NOT stopped ORDER BY name")
    assert [each["name"] for each in names] == ["b", "by-hand", "c"]
    for taken in ("c", "by-hand"):
        with pytest.raises(AppError, match=f"'{taken}'"):
            await schedules.publish(lane, "shop", [nightly("b"), nightly(taken, Every(5.0))])
    assert await sql.fetchval("SELECT count(*) FROM taskd.schedule") == 4
    # Two apps can import one module: equal declarations belong to the app that has started last.
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
    # After its deletion the declaration of its code applies again.
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


# Pause, resume, run.


async def test_a_pause_fires_nothing_and_is_not_made_up_for(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(catch_up="all"), nightly("c", Cron("* * * * *"), catch_up="all"))
    assert await schedules.pause(lane, ["s", "c", "x"], None, "why") == ["c", "s"]
    await late(sql, 3600.0)
    await late(sql, 3600.0, "c")
    assert await fire_due(lane) == 0
    assert await schedules.next_ticks(lane) == (None, None)
    assert await schedules.resume(lane, ["s", "c"]) == ["c", "s"]
    assert await schedules.resume(lane, ["s", "c"]) == []
    assert await fire_due(lane) == 1  # the next tick of cron is computed
    assert await made(sql) == await made(sql, "c") == []
    for name in ("s", "c"):
        after = await row(sql, name)
        assert timedelta(0) < after["next_at"] - datetime.now(UTC) <= timedelta(seconds=60)


async def test_a_pause_with_an_end_ends_by_itself_with_the_first_tick_after_it(
    sql: Any, lane: Lane
) -> None:
    await make(lane, nightly(), nightly("c", Cron("* * * * *"), catch_up="all"))
    await schedules.pause(lane, ["s", "c"], 7200.0, "why")
    assert await fire_due(lane) == 1  # the next tick of cron is computed
    for name in ("s", "c"):
        after = await row(sql, name)
        assert timedelta(0) < after["next_at"] - after["paused_until"] <= timedelta(seconds=60)
    assert 7190 < (await schedules.next_ticks(lane)).plain_s <= 7260
    # The times can change meanwhile, and the pause stays.
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
    [job_id] = (await schedules.run(lane, "s")).ids or []
    [found] = await made(sql)
    assert (found["id"], found["state"], found["run_at"]) == (job_id, "queued", found["tick"])
    assert (await row(sql))["next_at"] == before["next_at"]
    assert await schedules.run(lane, "s") == ("skipped", None)
    assert len((await schedules.run(lane, "f")).ids or []) == 2
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
        ("every => '5 min', cron => '0 3 * * *'", "pass either every"),
        ("priority => 1", "pass either every"),
        ("every => '1 month'", "a month has no fixed length"),
        ("every => '0.5 s'", "every must be from 1 second"),
        ("cron => '0 3 * *'", "five fields"),
        ("cron => '0 3 * * *', timezone => 'Mars/Olympus'", "no time zone"),
        ("every => '5 min', catch_up => 'some'", "catch_up must be none, last or all"),
        ("every => '5 min', overlap => 'maybe'", "overlap must be allow, skip, wait"),
        (
            "every => '5 min', catch_up => 'all', overlap => 'skip'",
            "catch_up all needs overlap allow",
        ),
        ("every => '5 min', jitter_s => 90000", "jitter"),
        ("every => '5 min', deadline_s => 0", "deadline"),
        ("every => '5 min', args => '[]'", "must be a JSON object"),
        ("every => '5 min', starts_at => 'infinity'", "starts_at must be in the years"),
        ("every => '5 min', starts_at => '0001-01-01 BC'", "starts_at must be in the years"),
    ],
)
async def test_errors_of_sql_clients_say_what_is_wrong(
    sql: Any, arguments: str, error: str
) -> None:
    with pytest.raises(asyncpg.PostgresError, match=error):
        await sql.execute(f"SELECT taskd.set_schedule('s', 't', queue => 'q', {arguments})")
    for name in ("''", "repeat('x', 201)", r"E'a\nb'"):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="name must be printable"):
            await sql.execute(
                f"SELECT taskd.set_schedule({name}, 't', queue => 'q', every => '5 min')"
            )


async def test_a_task_that_nobody_knows_needs_a_queue(lane: Lane) -> None:
    with pytest.raises(ValueRefused, match="no queue was named"):
        await make(lane, nightly(job=NewJob("t")))
