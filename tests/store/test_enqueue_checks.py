"""The sequence `needs`: enqueues need checks while a worker lives or a depth is limited."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import NewJob
from taskd.errors import QueueFull
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from tests.logins import Logins
from tests.schema import fetches
from tests.store.helpers import Connect, Transaction, bury, incarnation, waits_for_lock

FIRST, SECOND = 7_001, 7_002
NEEDED = "SELECT pg_sequence_last_value('taskd.needs') <> 0"
# Above READ COMMITTED producers always notify, unless the checks are off.
OLD = "repeatable_read"
USUAL = """
INSERT INTO taskd.job AS j (task, queue) VALUES ('t', 'q')
RETURNING CASE WHEN taskd.enqueue_checks_are_off() OR taskd.is_polled_unbounded(queue) THEN false
               ELSE taskd.run_enqueue_checks(queue, now()) END
"""


async def register(on: Any, worker_id: int) -> None:
    await workers.register(on, incarnation(worker_id), 3600.0, ["q"], {})


async def test_a_new_database_needs_nothing_until_a_worker_is_registered(
    lane: Lane, sql: Any
) -> None:
    assert not await sql.fetchval(NEEDED)
    await register(lane, FIRST)
    assert await sql.fetchval(NEEDED)


async def test_nothing_is_needed_when_the_last_worker_has_left_and_not_before(
    lane: Lane, sql: Any
) -> None:
    for each in (FIRST, SECOND):
        await register(lane, each)
    await workers.retire(lane, FIRST)
    assert await sql.fetchval(NEEDED)
    await workers.retire(lane, SECOND)
    assert not await sql.fetchval(NEEDED)
    await register(lane, FIRST + SECOND)
    assert await sql.fetchval(NEEDED)


async def test_the_last_worker_turns_the_checks_off_even_if_dead_workers_are_left(
    lane: Lane, sql: Any
) -> None:
    for each in (FIRST, SECOND):
        await register(lane, each)
    await bury(lane, FIRST)
    assert await sql.fetchval(NEEDED)
    await workers.retire(lane, SECOND)
    assert not await sql.fetchval(NEEDED)


async def test_a_depth_with_a_limit_is_needed_without_any_worker(
    lane: Lane, sql: Any, connect: Connect
) -> None:
    producer = fetches(await connect())
    await limits.limit_queue(lane, "q", max_depth=1)
    assert await sql.fetchval(NEEDED)
    await jobs.enqueue(producer, [NewJob("t", queue="q")])
    with pytest.raises(QueueFull):
        await jobs.enqueue(producer, [NewJob("t", queue="q")])
    await register(lane, FIRST)
    await workers.retire(lane, FIRST)
    assert await sql.fetchval(NEEDED)
    await limits.limit_queue(lane, "q", without=("max_depth",))
    await register(lane, SECOND)
    await workers.retire(lane, SECOND)
    assert not await sql.fetchval(NEEDED)


async def _registers(conn: Any) -> None:
    await register(fetches(conn), SECOND)


async def _limits(conn: Any) -> None:
    await limits.limit_queue(fetches(conn), "q", max_depth=1)


@pytest.mark.parametrize("act", [_registers, _limits])
async def test_a_leaving_worker_is_not_the_last_beside_one_that_has_not_committed_yet(
    lane: Lane, sql: Any, connect: Connect, act: Any
) -> None:
    other = await connect()
    await register(lane, FIRST)
    async with Transaction(other) as held:
        await act(other)
        await workers.retire(lane, FIRST)
        assert await sql.fetchval(NEEDED)
        await held.commit()
    assert await sql.fetchval(NEEDED)


@pytest.mark.parametrize("act", [_registers, _limits])
async def test_the_checks_are_on_before_the_commit_that_needs_them(
    sql: Any, connect: Connect, act: Any
) -> None:
    """A producer that has read that checks are off has a lower xid than any drawn afterwards."""
    other = await connect()
    async with Transaction(other) as held:
        await act(other)
        assert await sql.fetchval(NEEDED)
        await held.rollback()
    assert await sql.fetchval(NEEDED)


async def test_a_worker_that_registers_while_the_last_one_leaves_turns_the_checks_on(
    sql: Any, connect: Connect
) -> None:
    leaving, coming = await connect(), await connect()
    async with Transaction(leaving) as held:
        assert await leaving.fetchval("SELECT taskd.turn_enqueue_checks_off()")
        registering = asyncio.create_task(register(fetches(coming), FIRST))
        await waits_for_lock(sql, coming)
        assert not await sql.fetchval(NEEDED)
        await held.commit()
    await registering
    assert await sql.fetchval(NEEDED)


async def test_a_producer_has_its_xid_before_it_reads_whether_checks_are_on(
    sql: Any, connect: Connect
) -> None:
    """Stop the producer at its read, which waits for a transaction that alters the sequence."""
    producer, other = await connect(), await connect()
    async with Transaction(other) as held:
        await other.execute("ALTER SEQUENCE taskd.needs NO CYCLE")
        enqueueing = asyncio.create_task(jobs.enqueue(fetches(producer), [NewJob("t", queue="q")]))
        await waits_for_lock(sql, producer)
        mine = "SELECT backend_xid IS NOT NULL FROM pg_stat_activity WHERE pid = $1"
        assert await sql.fetchval(mine, producer.get_server_pid())
        await held.commit()
    await enqueueing


async def test_no_workers_are_looked_up_while_the_checks_are_off(
    lane: Lane, sql: Any, connect: Connect
) -> None:
    producer = await connect()
    async with producer.transaction(isolation=OLD):
        assert not await producer.fetchval(USUAL)
    # Without a value, as in a sequence that was just created, the checks are on.
    await sql.execute("SELECT setval('taskd.needs', 0, false)")
    async with producer.transaction(isolation=OLD):
        assert await producer.fetchval(USUAL)
    await register(lane, FIRST)
    await workers.retire(lane, FIRST)
    async with producer.transaction(isolation=OLD):
        assert not await producer.fetchval(USUAL)


async def test_what_is_needed_counts_in_a_transaction_that_began_before(
    lane: Lane, connect: Connect
) -> None:
    producer = await connect()
    async with producer.transaction(isolation=OLD):
        assert not await producer.fetchval(USUAL)
        await register(lane, FIRST)
        assert await producer.fetchval(USUAL)


async def test_members_of_the_roles_read_what_is_needed_and_workers_alone_say_so(
    logins: Logins, sql: Any
) -> None:
    on = {
        kind: await asyncpg.connect(logins.dsn(kind))
        for kind in ("producer", "worker", "admin", "observer")
    }
    await register(fetches(on["worker"]), FIRST)
    for each in on.values():
        assert await each.fetchval(NEEDED)
    for kind in ("producer", "admin", "observer"):
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await on[kind].fetchval("SELECT taskd.turn_enqueue_checks_off()")
    await workers.retire(fetches(on["worker"]), FIRST)
    assert not await on["producer"].fetchval(NEEDED)
    await limits.limit_queue(fetches(on["admin"]), "q", max_depth=1)
    assert await on["producer"].fetchval(NEEDED)
    owner = "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'taskd.needs'::regclass"
    assert await sql.fetchval(owner) == logins.role("owner")
    for each in on.values():
        await each.close()
