"""A tick is fired once, whichever workers poll at the same time and die."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest

from taskd.core.schedule import Cron, Every
from taskd.errors import StoreUnavailable
from taskd.store import schedules
from taskd.store.connections.lanes import Lane
from taskd.worker.upkeep.schedule_runner import fire
from tests.store.helpers import Transaction
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, row


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
    # Meanwhile it is locked; others do not wait.
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
