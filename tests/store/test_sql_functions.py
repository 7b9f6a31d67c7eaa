"""The SQL functions that any client can call in its own transaction, as a member of each role."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import asyncpg
import psycopg
import pytest

from taskd.core.jobs.limit import Limit
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import limits
from tests.logins import Logins
from tests.store.helpers import (
    DONE,
    FAILED,
    Connect,
    Ears,
    done,
    enqueue,
    row,
    run_one,
    settle,
    state_of,
    waits_for_lock,
)
from tests.store.limit_helpers import lined_up, queued

# A call as a member of a role; returns the rows.
Call = Callable[[str, str], Awaitable[list[tuple[Any, ...]]]]

DENIED = "42501"
PARAMETER = "22023"
TOO_LARGE = "54000"
WRONG_TRANSACTION = "25000"
NOT_ENDED = "55000"

# A call of each function; {0} is the id of a job, which fits the call.
FUNCTIONS = {
    "cancel": "SELECT * FROM taskd.cancel(ARRAY[{0}])",
    "retry": "SELECT * FROM taskd.retry(ARRAY[{0}])",
    "change": "SELECT * FROM taskd.change(ARRAY[{0}], priority => 1)",
    "results": "SELECT * FROM taskd.results(ARRAY[{0}])",
    "wait": "SELECT * FROM taskd.wait(ARRAY[{0}], timeout_s => 0)",
    "pause_queues": "SELECT * FROM taskd.pause_queues(ARRAY['q'])",
    "resume_queues": "SELECT * FROM taskd.resume_queues(ARRAY['q'])",
    "pause_tasks": "SELECT * FROM taskd.pause_tasks(ARRAY['t'])",
    "resume_tasks": "SELECT * FROM taskd.resume_tasks(ARRAY['t'])",
}
FINISHED_FIRST = ("retry", "results", "wait")
PUBLISH = (
    "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema, alias_of) "
    "VALUES ('t', 'app', 'x', 'q', 5, '{}', NULL), ('old', 'app', 'x', 'q', 5, '{}', 't'), "
    "('u', 'app', 'x', 'q', 5, '{}', NULL)"
)


@pytest.fixture(params=["asyncpg", "psycopg"])
async def call(request: pytest.FixtureRequest, logins: Logins) -> AsyncIterator[Call]:
    """Call a function as a member of a role, over a driver, in a transaction of its own."""
    closes: list[Callable[[], Awaitable[Any]]] = []

    async def over_asyncpg(kind: str, statement: str) -> list[tuple[Any, ...]]:
        connection = await asyncpg.connect(logins.dsn(kind))
        closes.append(connection.close)
        return [tuple(each) for each in await connection.fetch(statement)]

    async def over_psycopg(kind: str, statement: str) -> list[tuple[Any, ...]]:
        connection = await psycopg.AsyncConnection.connect(logins.dsn(kind))
        closes.append(connection.close)
        rows = await (await connection.execute(statement)).fetchall()
        await connection.commit()
        return rows

    yield over_asyncpg if request.param == "asyncpg" else over_psycopg
    for close in closes:
        await close()


def sqlstate(error: BaseException) -> str | None:
    return getattr(error, "sqlstate", None)


async def refused(sql: Any, statement: str, code: str) -> str:
    """Return the message of the error that the statement raises."""
    with pytest.raises(asyncpg.PostgresError) as caught:
        await sql.fetch(statement)
    assert caught.value.sqlstate == code, caught.value
    return str(caught.value)


async def one_job(lane: Lane, me: int, finished: bool) -> int:
    if not finished:
        return (await enqueue(lane))[0]
    job = await run_one(lane, me)
    await settle(lane, job, FAILED)
    return job.id


# The roles that have the right to call the functions.


async def test_an_admin_cancels_retries_and_changes_jobs(
    call: Call, lane: Lane, sql: Any, me: int
) -> None:
    running = await run_one(lane, me)
    [waiting] = await enqueue(lane)
    ids = f"ARRAY[{running.id}, {waiting}, 4711]"
    assert await call("admin", f"SELECT * FROM taskd.change({ids}, priority => 7)") == [
        (running.id, "running"), (waiting, "changed"), (4711, "unknown"),
    ]  # fmt: skip
    cancelled = await call("admin", f"SELECT * FROM taskd.cancel({ids}, 'withdrawn')")
    assert sorted(cancelled) == [(running.id, "running"), (waiting, "cancelled")]
    assert [(await row(sql, waiting))[key] for key in ("state", "reason", "priority")] == [
        "cancelled", "withdrawn", 7,
    ]  # fmt: skip
    assert (await row(sql, running.id))["cancel_requested"]
    assert await call("admin", f"SELECT * FROM taskd.retry({ids}, delay_s => 60)") == [
        (waiting, "scheduled")
    ]
    only = "states => ARRAY['running']"
    assert await call("admin", f"SELECT * FROM taskd.cancel(ARRAY[{waiting}], {only})") == []
    assert await state_of(sql, waiting) == "scheduled"


async def test_producers_and_admins_enqueue(call: Call, sql: Any) -> None:
    await sql.execute(PUBLISH)
    for kind in ("producer", "admin"):
        for enqueue_one in (
            "enqueue('t')",
            "enqueue('t', delay_s => 60)",
            "enqueue('unpublished', queue => 'q')",
            "enqueue_unique('t', '{}', 'k')",
            "enqueue_after('t', after => ARRAY[1])",
        ):
            assert len(await call(kind, f"SELECT taskd.{enqueue_one}")) == 1


async def test_an_admin_pauses_and_resumes_queues_and_tasks(call: Call, sql: Any) -> None:
    await sql.execute(PUBLISH)
    pause = "SELECT taskd.pause_{}(ARRAY[{}], for_s => 60, reason => 'why')"
    assert await call("admin", pause.format("queues", "'b', 'a', 'b'")) == [("a",), ("b",)]
    assert sorted(await call("admin", pause.format("tasks", "'t', 'unpublished'"))) == [
        ("old",), ("t",),
    ]  # fmt: skip
    for table in ("queue", "task"):
        assert [
            tuple(each)
            for each in await sql.fetch(
                "SELECT pause_reason, extract(epoch FROM paused_until - paused_at)::integer "
                f"FROM taskd.{table} WHERE paused_at IS NOT NULL"
            )
        ] == [("why", 60)] * 2
    assert await call("admin", "SELECT taskd.resume_queues(ARRAY['a', 'c'])") == [("a",)]
    assert len(await call("admin", "SELECT taskd.resume_tasks(ARRAY['t', 'u'])")) == 2


async def test_an_admin_reads_and_awaits_results(call: Call, lane: Lane, sql: Any, me: int) -> None:
    good, bad = await run_one(lane, me), await run_one(lane, me)
    [waiting] = await enqueue(lane)
    await settle(lane, good, DONE, result='{"sum": 3}')
    await settle(lane, bad, FAILED, reason="too old", error='{"type": "ValueError"}')
    ids = f"ARRAY[{good.id}, {bad.id}, {waiting}, 4711]"
    wanted = "SELECT job_id, state, result ->> 'sum', reason, error ->> 'type' FROM taskd."
    assert await call("admin", f"{wanted}results({ids}) ORDER BY 1") == [
        (good.id, "done", "3", None, None),
        (bad.id, "failed", None, "too old", "ValueError"),
        (waiting, "queued", None, None, None),
    ]
    ids = f"ARRAY[{good.id}, {bad.id}]"
    assert len(await call("admin", f"{wanted}wait({ids})")) == 2


@pytest.mark.parametrize("kind", ["producer", "worker", "observer"])
async def test_no_other_role_may_call_them(
    call: Call, lane: Lane, sql: Any, me: int, kind: str
) -> None:
    [job_id] = await enqueue(lane)
    for name, statement in FUNCTIONS.items():
        with pytest.raises((asyncpg.PostgresError, psycopg.Error)) as caught:
            await call(kind, statement.format(job_id))
        assert sqlstate(caught.value) == DENIED, name
    assert await state_of(sql, job_id) == "queued"


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_a_producer_needs_the_grant_of_one_function_and_no_more(
    call: Call, lane: Lane, sql: Any, me: int, logins: Logins, name: str
) -> None:
    job_id = await one_job(lane, me, name in FINISHED_FIRST)
    await sql.execute(PUBLISH)
    await sql.execute("UPDATE taskd.task SET paused_at = now()")
    await sql.execute("INSERT INTO taskd.queue (name, paused_at) VALUES ('q', now())")
    signature = await sql.fetchval("SELECT $1::regproc::oid::regprocedure::text", f"taskd.{name}")
    await sql.execute(f"GRANT EXECUTE ON FUNCTION {signature} TO {logins.role('producer')}_login")
    assert await call("producer", FUNCTIONS[name].format(job_id)) != []


# Cancelling and pausing in the caller's transaction.


async def test_a_cancellation_that_is_not_committed_blocks_no_admission(
    lane: Lane, sql: Any, connect: Connect
) -> None:
    _, [first, second] = await lined_up(lane, Limit(concurrency=1), "x", "x")
    caller = await connect()
    async with caller.transaction():
        await caller.fetch("SELECT taskd.cancel(ARRAY[$1::bigint])", first)
        await sql.execute("SELECT FROM taskd.job_limit FOR UPDATE NOWAIT")
    assert await queued(sql) == []
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]


async def test_a_cancellation_that_is_rolled_back_cancels_nothing(
    lane: Lane, sql: Any, me: int, connect: Connect
) -> None:
    running = await run_one(lane, me)
    [waiting] = await enqueue(lane)
    ears = Ears(await connect())
    await ears.listen("taskd", serve_by=sql)
    caller = await connect()
    transaction = caller.transaction()
    await transaction.start()
    await caller.fetch("SELECT taskd.cancel($1::bigint[])", [running.id, waiting])
    await transaction.rollback()
    assert await state_of(sql, waiting) == "queued"
    assert not (await row(sql, running.id))["cancel_requested"]
    assert await ears.so_far() == []


async def test_a_job_that_starts_before_it_is_locked_is_cancelled_as_running(
    lane: Lane, sql: Any, connect: Connect
) -> None:
    [job_id] = await enqueue(lane)
    claim, caller = await connect(), await connect()
    async with claim.transaction():
        await claim.execute(
            "UPDATE taskd.job SET state = 'running', worker_id = 1, fence = 1 WHERE id = $1", job_id
        )
        cancelling = asyncio.create_task(
            caller.fetch("SELECT * FROM taskd.cancel(ARRAY[$1::bigint])", job_id)
        )
        await waits_for_lock(sql, caller)
    assert [tuple(each) for each in await cancelling] == [(job_id, "running")]


@pytest.mark.parametrize(
    ("statement", "code", "why"),
    [
        ("cancel(ARRAY[1], repeat('x', 501))", TOO_LARGE, "the reason takes 501 bytes"),
        ("pause_queues(ARRAY['q'], reason => repeat('x', 501))", TOO_LARGE, "takes 501 bytes"),
        ("pause_tasks(ARRAY['t'], reason => repeat('x', 501))", TOO_LARGE, "takes 501 bytes"),
        ("pause_queues(ARRAY['q'], for_s => 0)", PARAMETER, "for_s is the length of a pause"),
        ("pause_tasks(ARRAY['t'], for_s => 'NaN')", PARAMETER, "it is NaN"),
        ("pause_queues(ARRAY['Q'])", PARAMETER, "queue must consist of 1 to 48"),
        ("wait(ARRAY[1], timeout_s => 61)", PARAMETER, "timeout_s from 0 to 60"),
        ("wait(ARRAY[1], timeout_s => NULL)", PARAMETER, "timeout_s from 0 to 60"),
        ("wait(NULL)", PARAMETER, "up to 1000 ids"),
        ("wait(array_fill(1, ARRAY[1001]))", PARAMETER, "up to 1000 ids"),
        ("wait(ARRAY[4711])", PARAMETER, "no job has the id 4711"),
    ],
)
async def test_what_is_out_of_bounds_is_refused(
    sql: Any, statement: str, code: str, why: str
) -> None:
    await sql.execute(PUBLISH)
    assert why in await refused(sql, f"SELECT * FROM taskd.{statement}", code)


@pytest.mark.parametrize("ids", ["NULL", "'{}'", "ARRAY[NULL::bigint]"])
async def test_no_jobs_are_no_error(sql: Any, ids: str) -> None:
    for name in ("cancel", "retry", "results"):
        assert await sql.fetch(f"SELECT * FROM taskd.{name}({ids})") == [], name
    await sql.fetch(f"SELECT * FROM taskd.change({ids}, priority => 1)")


# Waiting.


async def waits(sql: Any, connection: Any) -> None:
    """Wait until the connection sleeps between two looks."""
    async with asyncio.timeout(30):
        while not await sql.fetchval(
            "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1",
            connection.get_server_pid(),
        ):
            await asyncio.sleep(0.01)


async def test_a_wait_ends_when_the_last_job_has_ended(
    lane: Lane, sql: Any, me: int, connect: Connect
) -> None:
    first, second = await run_one(lane, me), await run_one(lane, me)
    caller = await connect()
    waiting = asyncio.create_task(
        caller.fetch("SELECT * FROM taskd.wait($1, 60)", [first.id, second.id])
    )
    await waits(sql, caller)
    await done(lane, first)
    await waits(sql, caller)
    assert not waiting.done()
    await done(lane, second)
    async with asyncio.timeout(30):
        assert {each["state"] for each in await waiting} == {"done"}


async def test_a_job_that_is_not_kept_has_no_row(
    lane: Lane, sql: Any, me: int, connect: Connect
) -> None:
    await sql.execute("INSERT INTO taskd.queue (name, keep_done_s) VALUES ('q', 0)")
    job = await run_one(lane, me)
    caller = await connect()
    waiting = asyncio.create_task(caller.fetch("SELECT * FROM taskd.wait($1, 60)", [job.id]))
    await waits(sql, caller)
    await done(lane, job)
    async with asyncio.timeout(30):
        assert await waiting == []


async def test_a_wait_that_takes_too_long_names_a_job_that_has_not_ended(
    lane: Lane, sql: Any
) -> None:
    [job_id] = await enqueue(lane)
    message = await refused(sql, f"SELECT taskd.wait(ARRAY[{job_id}], 0.05)", NOT_ENDED)
    assert message.startswith(f"job {job_id} is still queued after 0.05 s\n")


OWN: dict[str, Sequence[str]] = {
    "enqueued": ("INSERT INTO taskd.job (task, queue) VALUES ('t', 'q')",),
    "enqueued in a savepoint": (
        "CREATE TEMP TABLE other ()",
        "SAVEPOINT a",
        "INSERT INTO taskd.job (task, queue) VALUES ('t', 'q')",
        "RELEASE a",
    ),
    "changed": ("SELECT taskd.change(ARRAY[1], priority => 1)",),
    "asked to stop": ("SELECT taskd.cancel(ARRAY[2])",),
    "locked": ("SELECT id FROM taskd.job WHERE id = 1 FOR UPDATE",),
    "found by its key": (
        "SELECT taskd.enqueue_unique('t', '{}', 'k', queue => 'q', key_scope => 'live')",
    ),
}


@pytest.mark.parametrize("how", OWN)
async def test_a_transaction_does_not_wait_for_what_it_holds_itself(
    lane: Lane, sql: Any, me: int, how: str
) -> None:
    await sql.execute("SELECT taskd.enqueue_unique('t', '{}', 'k', queue => 'q')")
    assert (await run_one(lane, me, queue="r")).id == 2
    async with sql.transaction():
        for statement in OWN[how]:
            await sql.execute(statement)
        newest = await sql.fetchval("SELECT max(id) FROM taskd.job")
        job_id = 2 if how == "asked to stop" else newest if "enqueued" in how else 1
        call = sql.transaction()
        await call.start()
        message = await refused(sql, f"SELECT taskd.wait(ARRAY[{job_id}])", WRONG_TRANSACTION)
        await call.rollback()
        assert f"job {job_id} cannot end before this transaction commits" in message
    # After the commit it waits, also in a transaction that has written something else.
    async with sql.transaction():
        await sql.execute("CREATE TEMP TABLE written ()")
        call = sql.transaction()
        await call.start()
        await refused(sql, f"SELECT taskd.wait(ARRAY[{job_id}], 0)", NOT_ENDED)
        await call.rollback()


@pytest.mark.parametrize("level", ["repeatable_read", "serializable"])
async def test_a_transaction_with_one_snapshot_does_not_wait(
    lane: Lane, sql: Any, level: Any
) -> None:
    [job_id] = await enqueue(lane)
    transaction = sql.transaction(isolation=level)
    await transaction.start()
    message = await refused(sql, f"SELECT taskd.wait(ARRAY[{job_id}])", WRONG_TRANSACTION)
    await transaction.rollback()
    assert "never sees that a job ends" in message
