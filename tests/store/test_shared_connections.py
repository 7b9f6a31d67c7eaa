"""Lanes that share connections: how many they open, when they close them, and a full server."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.errors import StoreUnavailable
from taskd.store import workers
from taskd.store.connections import lanes as shared_connections
from taskd.store.connections.callers_connection import finished
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import NoRoom
from taskd.store.connections.lanes import Lane, SharedConnections
from taskd.store.jobs import jobs
from tests.logins import Logins

SESSIONS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND application_name = 'taskd work'
"""
# pg_stat_activity stays the same during a transaction.
BLOCKED = "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'taskd.job'::regclass"
TERMINATE = f"SELECT pg_terminate_backend(pid) FROM ({SESSIONS}) AS sessions"


class Group:
    """Three lanes, and the sessions of the group."""

    def __init__(self, dsn: str, sql: Any) -> None:
        self.shared = SharedConnections(Database({"dsn": dsn}, statement_timeout_s=60.0), "work")
        self.a, self.b, self.c = self.lanes = [self.shared.lane(name) for name in "abc"]
        self._sql = sql

    async def sessions(self) -> set[int]:
        return {row[0] for row in await self._sql.fetch(SESSIONS)}

    async def until(self, sessions: int) -> None:
        async with asyncio.timeout(30):
            while len(await self.sessions()) != sessions:
                await asyncio.sleep(0.01)

    async def blocked(self, count: int) -> None:
        async with asyncio.timeout(30):
            while await self._sql.fetchval(BLOCKED) != count:
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        self.shared.close()
        for lane in self.lanes:
            await lane.close()


@pytest.fixture
async def group(dsn: str, sql: Any) -> AsyncIterator[Group]:
    made = Group(dsn, sql)
    yield made
    await made.close()


@pytest.fixture
async def limited(logins: Logins, sql: Any) -> AsyncIterator[Group]:
    """A group whose login is allowed one connection."""
    login = f"{logins.role('worker')}_login"
    await sql.execute(f"ALTER ROLE {login} CONNECTION LIMIT 1")
    made = Group(logins.dsn("worker"), sql)
    yield made
    await made.close()
    await sql.execute(f"ALTER ROLE {login} CONNECTION LIMIT -1")


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(30):
        while not true():
            await asyncio.sleep(0.01)


async def poll(lane: Lane) -> set[str]:
    """Run a statement that waits while `taskd.job` is locked."""
    return await jobs.poll(lane, ["q"])


async def test_lanes_that_take_turns_use_one_connection(group: Group) -> None:
    for lane in group.lanes * 3:
        await poll(lane)
    assert len(await group.sessions()) == len(group.shared) == 1


async def test_lanes_that_run_statements_at_the_same_time_have_one_each_and_idle_ones_are_closed(
    group: Group, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_connections, "IDLE_S", 0.2)
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        polls = [asyncio.create_task(poll(lane)) for lane in group.lanes * 2]
        await group.blocked(3)
    await asyncio.gather(*polls)
    await group.until(1)
    assert len(group.shared) == 1
    for lane in group.lanes:
        await poll(lane)
    assert len(await group.sessions()) == 1


async def test_a_connection_that_is_used_stays_open(
    group: Group, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_connections, "IDLE_S", 0.4)
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        polls = [asyncio.create_task(poll(lane)) for lane in group.lanes]
        await group.blocked(3)
    await asyncio.gather(*polls)
    before = await group.sessions()
    kept = group.a._connection.get_server_pid()
    while len(await group.sessions()) > 1:
        await poll(group.a)
        await asyncio.sleep(0.05)
    assert await group.sessions() == {kept} < before


async def test_while_the_server_is_full_lanes_use_the_open_connection_in_turn(
    limited: Group, sql: Any
) -> None:
    await poll(limited.a)
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        polls = [asyncio.create_task(poll(lane)) for lane in limited.lanes * 3]
        await limited.blocked(1)
        # Each of the two other lanes tries to connect, or finds that another lane has tried.
        await until(lambda: len(limited.shared._waiting) >= 2)
    assert await asyncio.gather(*polls) == [set()] * 9
    assert len(limited.shared) == 1


async def test_a_lane_that_waits_for_a_connection_can_be_closed(limited: Group, sql: Any) -> None:
    await poll(limited.a)
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        first, second = [asyncio.create_task(poll(lane)) for lane in (limited.a, limited.b)]
        await until(lambda: limited.shared._waiting)
        await limited.b.close()
        with pytest.raises(asyncio.CancelledError):
            await second
    await first
    assert await poll(limited.c) == set()


async def test_a_lane_that_waits_connects_when_the_last_connection_has_broken(
    limited: Group, sql: Any
) -> None:
    await poll(limited.a)
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        first, second, third = [asyncio.create_task(poll(lane)) for lane in limited.lanes]
        await until(lambda: len(limited.shared._waiting) >= 2)
        await sql.execute(TERMINATE)
        ended = await asyncio.wait({first}, timeout=30)
        assert first in ended[0]
    await asyncio.wait({first, second, third}, timeout=30)
    # The server may not have noticed the end of the first session when the next lane connects.
    errors = [each.exception() for each in (first, second, third)]
    assert errors[0] is not None
    assert all(error is None or isinstance(error, NoRoom) for error in errors[1:])
    async with asyncio.timeout(30):
        while True:
            try:
                await poll(limited.b)
            except NoRoom:
                await asyncio.sleep(0.01)
            else:
                break


async def test_a_full_server_without_an_open_connection_is_an_error(
    limited: Group, logins: Logins
) -> None:
    holds = Lane(Database({"dsn": logins.dsn("worker")}), "holds")
    await poll(holds)
    with pytest.raises(NoRoom):
        await poll(limited.a)
    await holds.close()
    async with asyncio.timeout(30):
        while True:
            try:
                await poll(limited.a)
            except NoRoom:
                await asyncio.sleep(0.01)
            else:
                break


async def test_a_broken_connection_is_not_given_to_another_lane(group: Group, sql: Any) -> None:
    await poll(group.a)
    await sql.execute(TERMINATE)
    await until(group.a._connection.is_closed)
    assert await poll(group.b) == set()


async def test_fences_jump_with_the_first_claim_over_a_new_connection(
    group: Group, lane: Lane, me: int, sql: Any
) -> None:
    """The new connection can lead to a standby that has not received the last claims."""
    [job] = await jobs.enqueue(lane, [NewJob("t", queue="q")])
    back = "UPDATE taskd.job SET state = 'queued', worker_id = NULL"
    for claims in (1, 2):
        [claimed] = await jobs.claim(group.a, me, "q", 1)
        assert (claimed.id, claimed.fence) == (job, claims)
        await sql.execute(back)
    await sql.execute(TERMINATE)
    await until(group.a._connection.is_closed)
    for each in (group.a, group.b):
        before = await sql.fetchval("SELECT fence FROM taskd.job")
        [claimed] = await jobs.claim(each, me, "q", 1)
        assert claimed.fence > before + 1
        await sql.execute(back)


async def test_a_further_connection_to_the_same_server_leaves_fences_alone(
    group: Group, lane: Lane, me: int, sql: Any
) -> None:
    await jobs.enqueue(lane, [NewJob("t", queue="q")])
    await workers.connections(group.a)
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        first = asyncio.create_task(poll(group.a))
        await group.blocked(1)
        claim = asyncio.create_task(jobs.claim(group.b, me, "q", 1))
        await group.blocked(2)
    await first
    [claimed] = await claim
    assert claimed.fence == 1


async def test_a_connection_to_another_server_makes_the_fences_of_all_lanes_jump(
    group: Group, lane: Lane, me: int, sql: Any
) -> None:
    await jobs.enqueue(lane, [NewJob("t", queue="q")])
    await workers.connections(group.a)
    # As if the connection led to a server before the one that has taken over.
    group.shared._server = "another"
    await group.a.close()
    await workers.connections(group.b)
    late = group.shared.lane("late")
    lanes = [*group.lanes, late]
    assert len({each.stride for each in lanes} - {1}) == len(lanes)
    # A lane that has not run a statement yet, over the open connection.
    [claimed] = await jobs.claim(group.c, me, "q", 1)
    assert claimed.fence > 1
    assert len(group.shared) == 1


async def test_an_error_through_a_pooler_makes_the_fences_of_all_lanes_jump(
    group: Group, sql: Any
) -> None:
    """The pooler can have connected to another server meanwhile."""
    await poll(group.a)
    group.shared._database.pooled = True
    group.shared._database.statement_timeout_s = 0.5
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        with pytest.raises(StoreUnavailable):
            await poll(group.a)
    assert len({each.stride for each in group.lanes} - {1}) == len(group.lanes)


async def test_a_connection_that_a_closed_lane_was_given_goes_to_the_next_one(
    limited: Group, sql: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = limited.shared.released

    def released_and_closed(lane: Lane) -> None:
        released(lane)
        if lane is limited.a:
            finished(limited.b.close())  # before it uses the connection

    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job")
        first = asyncio.create_task(poll(limited.a))
        await limited.blocked(1)
        second, third = [asyncio.create_task(poll(lane)) for lane in limited.lanes[1:]]
        await until(lambda: len(limited.shared._waiting) == 2)
        monkeypatch.setattr(limited.shared, "released", released_and_closed)
    assert await first == set()
    assert await asyncio.wait_for(third, 30) == set()
    with pytest.raises(asyncio.CancelledError):
        await second
    assert len(limited.shared) == 1


async def test_a_lane_that_was_only_opened_lets_waiting_ones_have_its_connection(
    group: Group,
) -> None:
    opening = asyncio.create_task(group.a.open())
    while not group.a.connecting:  # until() could look too late
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # the task that connects has begun
    group.shared._full_until = math.inf  # as if the server had refused a further connection
    assert await asyncio.wait_for(poll(group.b), 30) == set()
    await opening
    assert len(group.shared) == 1
