"""Busy marks: which worker sets and clears them, and depth limits of polled queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import QueueFull
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import busy_marks, jobs, limits
from tests.logins import Logins
from tests.schema import fetches
from tests.store.helpers import (
    MARK,
    MARKED,
    Connect,
    Ears,
    Transaction,
    bury,
    incarnation,
)

# Two workers with different last digits.
FIRST, SECOND = 7_001, 7_002
VALUE = "SELECT taskd.busy_mark('q', 0)"
# The name of a queue by the numbers of its sequences.
PLACES = """
SELECT format('%s %s', hash & 63, (hash >> 6) & 63), min(name)
FROM generate_series(1, 60000) AS n, concat('q', n) AS name, hashtextextended(name, 0) AS hash
GROUP BY 1
"""
LONG_S = 50.0
FULL = (QueueFull, asyncpg.PostgresError)


@pytest.fixture
async def both(lane: Lane) -> None:
    """Register workers that serve the queue."""
    for each in (FIRST, SECOND):
        await workers.register(lane, incarnation(each), 3600.0, ["q"], {})


@pytest.fixture(autouse=True)
async def _published(lane: Lane) -> None:
    async def published() -> None: ...

    registry = Registry()
    registry.add(Task(published, queue="q"))
    await workers.publish(lane, "app", registry, ["q"])


async def limit_depth(lane: Lane, max_depth: int | None) -> None:
    without = () if max_depth else ("max_depth",)
    await limits.limit_queue(lane, "q", max_depth=max_depth, without=without)


# Which worker sets a mark, and which one clears it.


@pytest.mark.usefixtures("both")
async def test_a_mark_that_another_worker_renewed_later_is_not_withdrawn_by_the_first(
    lane: Lane, sql: Any
) -> None:
    await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S)
    await busy_marks.set_busy_mark(lane, "q", SECOND, LONG_S)
    await busy_marks.clear_busy_mark(lane, "q", FIRST)
    assert await sql.fetchval(MARKED, "q")
    await busy_marks.clear_busy_mark(lane, "q", SECOND)
    assert not await sql.fetchval(MARKED, "q")
    assert await sql.fetchval(VALUE) == 0


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("max_depth", [None, 9])
async def test_a_worker_that_gives_way_leaves_the_mark_of_another(
    lane: Lane, sql: Any, max_depth: int | None
) -> None:
    await limit_depth(lane, max_depth)
    attends = partial(busy_marks.set_busy_mark, lane, "q", for_s=LONG_S)
    # No mark; its own mark; another worker's mark.
    assert await attends(worker_id=FIRST, yields=True) == (True, 1)
    assert await attends(worker_id=FIRST, yields=True) == (True, 1)
    before = await sql.fetchval(VALUE)
    assert await attends(worker_id=SECOND, yields=True) is None
    assert await sql.fetchval(VALUE) == before
    # A worker that is needed sets a mark as well, and then the first one gives way.
    assert await attends(worker_id=SECOND) == (False, 1)
    assert await attends(worker_id=FIRST, yields=True) is None
    assert await attends(worker_id=SECOND, yields=True) == (True, 1)
    # No worker gives way to a mark that was cleared, has expired, or was written before a clock was
    # set back.
    await busy_marks.clear_busy_mark(lane, "q", SECOND)
    assert await attends(worker_id=FIRST, yields=True) == (True, 1)
    for ahead_s in (-1.0, 3600.0):
        await sql.execute(MARK, "q", ahead_s, SECOND)
        assert await attends(worker_id=FIRST, yields=True) == (True, 1)


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("max_depth", [None, 9])
async def test_a_clear_without_a_worker_clears_any_mark(
    lane: Lane, sql: Any, max_depth: int | None
) -> None:
    await limit_depth(lane, max_depth)
    for each in (FIRST, SECOND):
        await busy_marks.set_busy_mark(lane, "q", each, LONG_S)
        assert await sql.fetchval(MARKED, "q")
        await busy_marks.clear_busy_mark(lane, "q", None)
        assert not await sql.fetchval(MARKED, "q")


async def test_a_mark_from_before_a_clock_was_set_back_is_taken_back_by_anybody(
    lane: Lane, sql: Any
) -> None:
    for ahead_s, remains in ((60.0, True), (70.0, False)):
        await sql.execute(MARK, "q", ahead_s, SECOND)
        assert await sql.fetchval(MARKED, "q") == remains
        await busy_marks.clear_busy_mark(lane, "q", FIRST)
        assert (await sql.fetchval(VALUE) > 0) == remains


async def test_a_mark_is_never_made_for_longer_than_a_minute(lane: Lane, sql: Any, both) -> None:
    await busy_marks.set_busy_mark(lane, "q", FIRST, 3600.0)
    later = "SELECT taskd.busy_mark_until('q', clock_timestamp() + interval '61 s')"
    assert await sql.fetchval(VALUE) < await sql.fetchval(later)
    assert await sql.fetchval(MARKED, "q")


async def _serves_another(lane: Lane, _sql: Any) -> None:
    await workers.register(lane, incarnation(FIRST), 3600.0, ["other", "qq"], {})


async def _is_declared_dead(lane: Lane, _sql: Any) -> None:
    await workers.register(lane, incarnation(FIRST), 3600.0, ["q"], {})
    await bury(lane, FIRST)


async def _has_retired(lane: Lane, _sql: Any) -> None:
    await workers.register(lane, incarnation(FIRST), 3600.0, ["q"], {})
    await workers.retire(lane, FIRST)


async def _is_silent(lane: Lane, sql: Any) -> None:
    await workers.register(lane, incarnation(FIRST), 3600.0, ["q"], {})
    await sql.execute("UPDATE taskd.worker SET lease_until = now() - interval '1 s'")


async def _is_unknown(_lane: Lane, _sql: Any) -> None: ...


@pytest.mark.parametrize(
    "prepare", [_serves_another, _is_declared_dead, _has_retired, _is_silent, _is_unknown]
)
async def test_a_worker_that_is_dead_or_does_not_serve_the_queue_sets_no_mark(
    lane: Lane, sql: Any, prepare: Callable[[Lane, Any], Awaitable[None]]
) -> None:
    await prepare(lane, sql)
    await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S)
    assert await sql.fetchval(VALUE) is None
    assert not await sql.fetchval(MARKED, "q")
    await sql.execute(MARK, "q", -1.0, SECOND)
    before = await sql.fetchval(VALUE)
    await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S)
    assert await sql.fetchval(VALUE) == before


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("end", [bury, workers.retire])
async def test_with_a_worker_goes_its_mark_and_no_other(
    lane: Lane, sql: Any, end: Callable[[Lane, int], Awaitable[Any]]
) -> None:
    await busy_marks.set_busy_mark(lane, "q", SECOND, LONG_S)
    await end(lane, FIRST)
    assert await sql.fetchval(MARKED, "q")
    await end(lane, SECOND)
    assert not await sql.fetchval(MARKED, "q")


@pytest.mark.usefixtures("both")
async def test_two_workers_that_write_the_same_mark_do_not_wait_for_each_other(
    lane: Lane, sql: Any, connect: Connect
) -> None:
    first = await connect()
    async with Transaction(first) as marking:
        assert await busy_marks.set_busy_mark(fetches(first), "q", FIRST, LONG_S) == (True, 1)
        assert await busy_marks.set_busy_mark(lane, "q", SECOND, LONG_S) == (False, 1)
        await marking.rollback()
    await busy_marks.clear_busy_mark(lane, "q", FIRST)
    assert await sql.fetchval(MARKED, "q")
    await busy_marks.clear_busy_mark(lane, "q", SECOND)
    assert not await sql.fetchval(MARKED, "q")


# Queues share the sequences.


async def _queue_at(sql: Any, first: int, second: int) -> str:
    names = dict(await sql.fetch(PLACES))
    return str(names[f"{first} {second}"])


async def test_queues_that_share_a_sequence_have_a_mark_each_or_none(lane: Lane, sql: Any) -> None:
    one, two, three = [await _queue_at(sql, *at) for at in ((1, 2), (1, 3), (3, 1))]
    await workers.register(lane, incarnation(FIRST), 3600.0, [one, two, three], {})

    async def polled() -> list[bool]:
        return [await sql.fetchval(MARKED, each) for each in (one, two, three)]

    for _ in range(2):
        assert await busy_marks.set_busy_mark(lane, one, FIRST, LONG_S) == (True, 0)
        # The second one's other sequence is free; the third one finds none, and is notified.
        assert await busy_marks.set_busy_mark(lane, two, FIRST, LONG_S) == (True, 0)
        assert await busy_marks.set_busy_mark(lane, three, FIRST, LONG_S) is None
        assert await polled() == [True, True, False]
    # With the first one's mark out of the way, the second one moves to its first sequence.
    await busy_marks.clear_busy_mark(lane, one, FIRST)
    assert await polled() == [False, True, False]
    assert await busy_marks.set_busy_mark(lane, two, FIRST, LONG_S) == (True, 0)
    await busy_marks.clear_busy_mark(lane, two, FIRST)
    assert await polled() == [False, False, False]
    # An expired mark is in nobody's way.
    await sql.execute(MARK, one, -1.0, FIRST)
    await sql.execute(MARK, two, -1.0, FIRST)
    assert await busy_marks.set_busy_mark(lane, three, FIRST, LONG_S) == (True, 0)
    assert await polled() == [False, False, True]


async def test_a_worker_without_the_sequences_sets_no_mark(lane: Lane, sql: Any, both) -> None:
    await sql.execute("DROP SEQUENCE " + ", ".join(f"taskd.mark_{n}" for n in range(64)))
    assert await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S) is None
    await busy_marks.clear_busy_mark(lane, "q", FIRST)
    assert not await sql.fetchval(MARKED, "q")
    assert await sql.fetchval("SELECT taskd.enqueue('published', queue => 'q')")


async def test_workers_write_marks_operators_take_them_back_and_others_read_them(
    logins: Logins, sql: Any
) -> None:
    """Connections as members of their roles, which own nothing."""
    on = {kind: await asyncpg.connect(logins.dsn(kind)) for kind in ("worker", "admin", "observer")}
    producer = await asyncpg.connect(logins.dsn("producer"))
    worker = fetches(on["worker"])
    await workers.register(worker, incarnation(FIRST), 3600.0, ["q"], {})
    await busy_marks.set_busy_mark(worker, "q", FIRST, LONG_S)
    for each in on.values():
        assert await each.fetchval(MARKED, "q")
    assert await producer.fetchval("SELECT taskd.enqueue('published')")
    await busy_marks.clear_busy_mark(worker, "q", FIRST)
    assert not await on["observer"].fetchval(MARKED, "q")
    await busy_marks.set_busy_mark(worker, "q", FIRST, LONG_S)
    await limits.limit_queue(fetches(on["admin"]), "q", max_depth=1)
    assert not await on["observer"].fetchval(MARKED, "q")
    owner = "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'taskd.mark_0'::regclass"
    assert await sql.fetchval(owner) == logins.role("owner")
    for each in (*on.values(), producer):
        await each.close()


async def test_a_mark_is_logged(sql: Any) -> None:
    """tests/system/faults/test_failover.py shows why."""
    kind = "SELECT relpersistence = 'p' FROM pg_class WHERE oid = 'taskd.mark_0'::regclass"
    assert await sql.fetchval(kind)


async def test_the_longest_name_of_a_queue_has_a_mark_of_its_own(sql: Any) -> None:
    one, another = "q" * 48, "q" * 47 + "-"
    await sql.execute(MARK, one, LONG_S, FIRST)
    assert await sql.fetchval(MARKED, one)
    assert not await sql.fetchval(MARKED, another)
    await sql.execute(MARK, another, LONG_S, FIRST)
    assert await sql.fetchval(MARKED, another)


# The depth of a polled queue.

Enqueue = Callable[[Any], Awaitable[Any]]


async def _by_sql(task: str, conn: Any) -> int:
    job: int = await conn.fetchval("SELECT taskd.enqueue($1, queue => 'q')", task)
    return job


async def _by_client(count: int, conn: Any) -> list[Any]:
    return await jobs.enqueue(fetches(conn), [NewJob("t", queue="q")] * count)


async def _by_client_unlike(conn: Any) -> list[Any]:
    return await jobs.enqueue(fetches(conn), [NewJob("t", queue="q", priority=n) for n in (1, 2)])


DOORS = [
    pytest.param(partial(_by_sql, "published"), id="SQL, published"),
    pytest.param(partial(_by_sql, "unpublished"), id="SQL, unpublished"),
    pytest.param(partial(_by_client, 1), id="client"),
    pytest.param(partial(_by_client, 2), id="client, several"),
    pytest.param(_by_client_unlike, id="client, several unlike"),
]


@pytest.fixture
async def producer(connect: Connect) -> Any:
    return await connect()


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("enqueue", DOORS)
async def test_a_polled_queue_that_is_full_refuses_jobs_and_is_not_notified(
    lane: Lane, sql: Any, producer: Any, enqueue: Enqueue
) -> None:
    # This alone notifies the queue, because its poller must know.
    await limit_depth(lane, 4)
    ears = Ears(sql)
    await ears.listen("taskd_q")
    await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S)
    assert await sql.fetchval(VALUE) < 0
    assert await sql.fetchval(MARKED, "q")
    count = "SELECT count(*) FROM taskd.job"
    while await sql.fetchval(count) < 4:
        await enqueue(producer)
    with pytest.raises(FULL, match="is full"):
        await enqueue(producer)
    assert await sql.fetchval(count) == 4
    assert await ears.so_far() == []


@pytest.mark.usefixtures("both")
@pytest.mark.parametrize("enqueue", DOORS)
async def test_a_depth_limit_of_a_polled_queue_holds_for_the_next_enqueue(
    lane: Lane, sql: Any, producer: Any, enqueue: Enqueue
) -> None:
    await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S)
    assert await sql.fetchval(VALUE) > 0
    await enqueue(producer)
    await limit_depth(lane, 1)
    with pytest.raises(FULL, match="is full"):
        await enqueue(producer)
    # Its worker renews the mark without knowing of the limit.
    await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S)
    with pytest.raises(FULL, match="is full"):
        await enqueue(producer)
    await limit_depth(lane, None)
    await enqueue(producer)
    await busy_marks.set_busy_mark(lane, "q", FIRST, LONG_S)
    assert await sql.fetchval(VALUE) > 0
