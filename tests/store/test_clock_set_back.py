"""The database's clock is set back: what is corrected, and what stays.

The clock of a server cannot be set in a test, so everything that was written is moved into the
future: for the database that is the same.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from taskd.core.jobs.limit import Limit
from taskd.core.schedule import Cron
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import limits
from tests.store.helpers import bury, incarnation, new_worker
from tests.store.limit_helpers import lined_up, queued
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, row

HOUR_S = 3600.0
TIMES = {
    "worker": ("started_at", "renewed_at", "lease_until", "died_at"),
    "schedule": ("created_at", "starts_at", "next_at", "last_tick"),
    "opening": ("at",),
    "bucket": ("filled_at",),
    "queue": ("filled_at", "depth_at"),
}


async def set_back(sql: Any, by_s: float = HOUR_S) -> None:
    for table, columns in TIMES.items():
        moved = ", ".join(f"{each} = {each} + make_interval(secs => $1)" for each in columns)
        await sql.execute(f"UPDATE taskd.{table} SET {moved}", by_s)


async def next_in_s(sql: Any) -> float:
    return await sql.fetchval(
        "SELECT date_part('epoch', next_at - clock_timestamp()) FROM taskd.schedule"
    )


async def test_without_times_that_are_ahead_nothing_is_changed(lane: Lane, sql: Any) -> None:
    await new_worker(lane)
    await make(lane, nightly())
    await late(sql, 1.0)
    await fire_due(lane)
    before = await row(sql)
    assert await workers.follow_clock_back(lane, None) is None
    assert await row(sql) == before


async def test_a_period_goes_on_at_the_new_time(lane: Lane, sql: Any) -> None:
    await make(lane, nightly())
    first = await late(sql, 1.0)
    await fire_due(lane)
    await set_back(sql)
    assert await next_in_s(sql) > HOUR_S
    corrected = await workers.follow_clock_back(lane, None)
    assert corrected is not None
    assert corrected.schedules == ["s"]
    assert HOUR_S - 5 < corrected.ahead_s <= HOUR_S
    assert 0 < await next_in_s(sql) <= 60
    # The ticks are those of the same rhythm.
    off_s = ((await row(sql))["next_at"] - first).total_seconds() % 60
    assert min(off_s, 60 - off_s) < 0.001
    again = await workers.follow_clock_back(lane, None)
    assert again is not None
    assert again.schedules == []


@pytest.mark.parametrize("cron", ["*/5 * * * *", "* 3 * * *", "0 * * * *", "7,37 */1 * * *"])
async def test_cron_that_follows_elapsed_time_goes_on_at_the_new_time(
    lane: Lane, sql: Any, cron: str
) -> None:
    await make(lane, nightly(when=Cron(cron)))
    await late(sql, 1.0)
    await fire_due(lane)
    assert len(await made(sql)) == 1
    before = (await row(sql))["next_at"]
    await set_back(sql)
    corrected = await workers.follow_clock_back(lane, None)
    assert corrected is not None
    assert corrected.schedules == ["s"]
    await fire_due(lane)  # it computes the tick
    assert (await row(sql))["next_at"] - before < timedelta(hours=1)
    assert len(await made(sql)) == 1


@pytest.mark.parametrize(("by_s", "moved"), [(HOUR_S, []), (2.9 * HOUR_S, []), (4 * HOUR_S, ["s"])])
async def test_a_fixed_time_is_not_fired_again_unless_the_clock_was_hours_ahead(
    lane: Lane, sql: Any, by_s: float, moved: list[str]
) -> None:
    await make(lane, nightly(when=Cron("0 3 * * *")))
    await late(sql, 1.0)
    await fire_due(lane)
    await set_back(sql, by_s)
    before = (await row(sql))["next_at"]
    corrected = await workers.follow_clock_back(lane, None)
    assert corrected is not None
    assert corrected.schedules == moved
    assert (await row(sql))["next_at"] == (None if moved else before)


async def test_a_dead_worker_is_found_out_within_one_lease_and_a_live_one_keeps_its(
    lane: Lane, sql: Any, me: int
) -> None:
    dead, buried = await new_worker(lane, lease_s=30.0), await new_worker(lane)
    await bury(lane, buried)
    await set_back(sql)
    assert await workers.follow_clock_back(lane, None)
    left = await sql.fetchval(
        "SELECT date_part('epoch', lease_until - now()) FROM taskd.worker WHERE id = $1",
        dead,
    )
    assert 25 < left <= 30
    assert await workers.renew_lease(lane, me, 300.0, draining=False) is not None
    assert await sql.fetchval(
        "SELECT renewed_at > clock_timestamp() FROM taskd.worker WHERE id = $1", buried
    )


async def test_workers_are_found_silent_also_if_the_server_started_before_it(
    lane: Lane, sql: Any, me: int
) -> None:
    other = await new_worker(lane, lease_s=30.0)
    await sql.execute(
        "UPDATE taskd.worker SET lease_until = now() - interval '1 s' WHERE id = $1", other
    )
    seen = await workers.check_upkeep(lane, incarnation(me), 0.001)
    assert [each.silent for each in seen.others] == [True]


async def test_a_rate_goes_on_at_the_new_time(lane: Lane, sql: Any) -> None:
    _, born = await lined_up(lane, Limit(rate=2.0, burst=1), "x", "x")
    assert await queued(sql) == born[:1]
    await sql.execute("UPDATE taskd.job SET state = 'scheduled' WHERE id = $1", born[0])
    await set_back(sql)
    assert (await limits.admit(lane, 100)).checked == 0
    assert await workers.follow_clock_back(lane, None) is None  # nothing but the limit is ahead
    assert await workers.follow_clock_back(lane, HOUR_S)
    await limits.admit(lane, 100)
    assert not await sql.fetchval("SELECT filled_at > clock_timestamp() FROM taskd.bucket")
    waits_s = await sql.fetchval("SELECT date_part('epoch', at - now()) FROM taskd.opening")
    assert 0 < waits_s <= 0.6


async def test_depths_are_counted_again(lane: Lane, sql: Any) -> None:
    await sql.execute("INSERT INTO taskd.queue (name, max_depth) VALUES ('q', 5)")
    await limits.count_depths(lane)
    await set_back(sql)
    assert await workers.follow_clock_back(lane, HOUR_S)
    assert await sql.fetchval("SELECT depth_at IS NULL FROM taskd.queue WHERE name = 'q'")
