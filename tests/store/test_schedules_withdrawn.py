"""Schedules that no live worker declares any more: paused, resumed, taken over and deleted."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskd.core.schedule import Cron, Due, Every
from taskd.errors import AppError
from taskd.store import schedules, workers
from taskd.store.connections.lanes import Lane
from taskd.store.schedules import TicksIn
from tests.store.helpers import Connect, Transaction, incarnation
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, register, row

NOTHING: tuple[list[str], list[str]] = ([], [])


@pytest.fixture(autouse=True)
async def long_ago(sql: Any) -> None:
    """Let new schedules be an hour old, so that no worker that declares them can be starting."""
    await sql.execute(
        "ALTER TABLE taskd.schedule ALTER COLUMN created_at SET DEFAULT now() - interval '1 hour'"
    )


async def withdraw(lane: Lane, *names: str, app: str = "shop") -> None:
    """Declare schedules, and let a worker start whose code does not declare them."""
    await schedules.publish(lane, app, [nightly(name) for name in names])
    await register(lane, 1, app)
    assert await schedules.settle(lane, 1) == (sorted(names), [])


async def test_a_withdrawn_schedule_is_kept_and_has_no_ticks(sql: Any, lane: Lane) -> None:
    await withdraw(lane, "s")
    await late(sql, 5.0)
    assert await fire_due(lane) == 0
    assert await schedules.next_ticks(lane) == TicksIn(None, None)
    [listed] = await schedules.list_(lane)
    assert (listed["stopped"], listed["paused"]) == (True, False)
    assert listed["withdrawn_at"] is not None
    assert await schedules.settle(lane, 1) == NOTHING


async def test_a_tick_that_was_read_before_the_withdrawal_is_not_fired(
    sql: Any, lane: Lane
) -> None:
    await schedules.publish(lane, "shop", [nightly()])
    tick = await late(sql, 1.0)
    [read] = await schedules.due(lane, 10, with_query=False)
    await register(lane, 1, "shop")
    await schedules.settle(lane, 1)
    fired = await schedules.fire(lane, read, Due((tick,), datetime.now(UTC) + timedelta(hours=1)))
    assert fired.outcome is None
    assert await made(sql) == []


async def test_a_schedule_that_is_declared_again_goes_on_with_its_next_tick(
    sql: Any, lane: Lane
) -> None:
    await withdraw(lane, "s")
    await late(sql, 150.0)
    await schedules.publish(lane, "shop", [nightly()])
    assert (await row(sql))["withdrawn_at"] is not None
    await register(lane, 2, "shop", "s")
    assert await schedules.settle(lane, 2) == ([], ["s"])
    found = await row(sql)
    assert (found["withdrawn_at"], found["stopped"]) == (None, False)
    # The ticks of the 150 seconds are not caught up.
    assert timedelta(0) < found["next_at"] - datetime.now(UTC) <= timedelta(seconds=60)
    assert await fire_due(lane) == 0


async def test_the_next_tick_of_a_cron_schedule_is_computed_by_a_worker(
    sql: Any, lane: Lane
) -> None:
    await schedules.publish(lane, "shop", [nightly(when=Cron("0 3 * * *"))])
    await register(lane, 1, "shop")
    await schedules.settle(lane, 1)
    await sql.execute("UPDATE taskd.schedule SET next_at = now() - interval '3 days'")
    await register(lane, 2, "shop", "s")
    assert await schedules.settle(lane, 1) == ([], ["s"])
    assert (await row(sql))["next_at"] is None
    await fire_due(lane)
    assert (await row(sql))["next_at"] > datetime.now(UTC)
    assert await made(sql) == []


async def test_a_tick_in_the_future_stays_when_a_withdrawal_was_short(sql: Any, lane: Lane) -> None:
    await schedules.publish(lane, "shop", [nightly(when=Every(3600.0))])
    before = (await row(sql))["next_at"]
    await register(lane, 1, "shop")
    await schedules.settle(lane, 1)
    await register(lane, 2, "shop", "s")
    await schedules.settle(lane, 2)
    assert (await row(sql))["next_at"] == before


async def test_a_pause_by_an_operator_outlasts_a_withdrawal(sql: Any, lane: Lane) -> None:
    await withdraw(lane, "s")
    await schedules.pause(lane, ["s"], None, "not now")
    await register(lane, 2, "shop", "s")
    assert await schedules.settle(lane, 2) == ([], ["s"])
    found = await row(sql)
    assert (found["pause_reason"], found["stopped"]) == ("not now", True)


async def test_while_an_old_worker_lives_its_schedules_are_not_withdrawn(
    sql: Any, lane: Lane
) -> None:
    await schedules.publish(lane, "shop", [nightly("old"), nightly("both")])
    await register(lane, 1, "shop", "old", "both")
    await schedules.publish(lane, "shop", [nightly("both"), nightly("new")])
    await register(lane, 2, "shop", "both", "new")
    assert await schedules.settle(lane, 2) == await schedules.settle(lane, 1) == NOTHING
    # Not even after an outage of the database, when every lease has expired.
    await sql.execute("UPDATE taskd.worker SET lease_until = now() - interval '1 h' WHERE id = 1")
    assert await schedules.settle(lane, 2) == NOTHING
    # A worker that drains declares nothing, and withdraws nothing.
    await workers.renew_lease(lane, 1, 60.0, draining=True)
    assert await schedules.settle(lane, 1) == NOTHING
    assert await schedules.settle(lane, 2) == (["old"], [])
    # A rollback.
    await workers.retire(lane, 2)
    await register(lane, 3, "shop", "old", "both")
    assert await schedules.settle(lane, 3) == (["new"], ["old"])


async def test_a_crash_of_the_last_old_worker_does_not_withdraw_its_schedules_at_once(
    sql: Any, lane: Lane
) -> None:
    await schedules.publish(lane, "shop", [nightly()])
    await register(lane, 1, "shop", "s")
    await register(lane, 2, "shop")
    assert await workers.declare_dead(lane, [1], proved=True)
    assert await schedules.settle(lane, 2) == NOTHING
    await sql.execute("UPDATE taskd.worker SET died_at = now() - interval '100 s' WHERE id = 1")
    assert await schedules.settle(lane, 2) == (["s"], [])


async def test_a_new_schedule_is_not_withdrawn_before_its_worker_can_have_registered(
    sql: Any, lane: Lane
) -> None:
    await register(lane, 1, "shop")
    await schedules.publish(lane, "shop", [nightly()])
    made_s_ago = "UPDATE taskd.schedule SET created_at = now() - make_interval(secs => $1)"
    await sql.execute(made_s_ago, 80)
    assert await schedules.settle(lane, 1) == NOTHING
    me = incarnation(1)._replace(app="shop")
    assert not (await workers.check_upkeep(lane, me, 60.0)).astray
    await sql.execute(made_s_ago, 100)
    assert (await workers.check_upkeep(lane, me, 60.0)).astray
    assert await schedules.settle(lane, 1) == (["s"], [])


async def test_without_a_live_worker_of_its_app_a_schedule_stays(sql: Any, lane: Lane) -> None:
    await schedules.publish(lane, "shop", [nightly()])
    await make(lane, nightly("by-hand"))
    await register(lane, 1, "mail")
    assert await schedules.settle(lane, 1) == NOTHING
    await register(lane, 2, "shop")
    await workers.retire(lane, 2)
    assert await schedules.settle(lane, 2) == NOTHING


async def test_a_schedule_that_two_apps_declare_stays_while_one_of_them_does(
    sql: Any, lane: Lane
) -> None:
    await schedules.publish(lane, "mail", [nightly()])
    await register(lane, 1, "mail", "s")
    await schedules.publish(lane, "shop", [nightly()])
    await register(lane, 2, "shop", "s")
    await workers.retire(lane, 2)
    await register(lane, 3, "shop")
    assert await schedules.settle(lane, 3) == NOTHING


async def test_a_row_that_another_session_has_locked_is_withdrawn_later(
    lane: Lane, connect: Connect
) -> None:
    await schedules.publish(lane, "shop", [nightly("a"), nightly("b")])
    await register(lane, 1, "shop")
    other = await connect()
    async with Transaction(other):
        await other.execute("SELECT FROM taskd.schedule WHERE name = 'a' FOR UPDATE")
        assert await schedules.settle(lane, 1) == (["b"], [])
    assert await schedules.settle(lane, 1) == (["a"], [])


async def test_upkeep_reads_whether_a_schedule_must_be_withdrawn_or_resumed(
    sql: Any, lane: Lane
) -> None:
    async def astray(worker_id: int) -> bool:
        me = incarnation(worker_id)._replace(app="shop")
        return (await workers.check_upkeep(lane, me, 60.0)).astray

    await schedules.publish(lane, "shop", [nightly()])
    assert not await astray(1)
    await register(lane, 1, "shop", "s")
    await register(lane, 2, "shop")
    assert not await astray(2)
    await workers.retire(lane, 1)
    assert await astray(2)
    await schedules.settle(lane, 2)
    assert not await astray(2)
    await register(lane, 3, "shop", "s")
    assert await astray(2)
    assert await astray(3)


# Taken over, set by hand, deleted.


async def test_another_app_can_declare_a_withdrawn_schedule(sql: Any, lane: Lane) -> None:
    await schedules.publish(lane, "shop", [nightly()])
    with pytest.raises(AppError, match="'s'"):
        await schedules.publish(lane, "mail", [nightly(when=Every(5.0))])
    await register(lane, 1, "shop")
    await schedules.settle(lane, 1)
    await schedules.publish(lane, "mail", [nightly(when=Every(5.0))])
    await register(lane, 2, "mail", "s")
    assert await schedules.settle(lane, 2) == ([], ["s"])
    found = await row(sql)
    assert (found["app"], found["every_s"]) == ("mail", 5.0)
    assert await schedules.settle(lane, 1) == NOTHING


@pytest.mark.parametrize("period_s", [60.0, 5.0], ids=["as declared", "changed"])
async def test_a_withdrawn_schedule_that_an_operator_sets_is_kept_by_hand(
    sql: Any, lane: Lane, period_s: float
) -> None:
    await withdraw(lane, "s")
    await late(sql, 150.0)
    assert await make(lane, nightly(when=Every(period_s))) == {"s": "changed"}
    found = await row(sql)
    assert (found["app"], found["withdrawn_at"], found["stopped"]) == (None, None, False)
    assert found["next_at"] > datetime.now(UTC)
    assert await schedules.settle(lane, 1) == NOTHING
    # A rollback to the version that declares it starts, and does not change it.
    await schedules.publish(lane, "shop", [nightly()])
    assert (await row(sql))["every_s"] == period_s


async def test_a_withdrawn_schedule_can_be_deleted_and_stays_deleted(sql: Any, lane: Lane) -> None:
    await withdraw(lane, "s")
    assert await schedules.delete(lane, ["s"]) == {"s": None}
    assert await schedules.settle(lane, 1) == NOTHING
    assert await schedules.list_(lane) == []
