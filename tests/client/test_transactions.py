"""A job enqueued on the caller's connection is part of the caller's transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.rows import dict_row

from taskd import Client, NewJob
from taskd.client import configure
from taskd.core.tasks.registry import Registry
from taskd.errors import InvalidArgs, SchemaMissing

COUNT = "SELECT count(*) FROM taskd.job"


@pytest.fixture
async def pool(dsn: str) -> AsyncIterator[Any]:
    async with asyncpg.create_pool(dsn, min_size=1, max_size=1) as made:
        yield made


@pytest.fixture(params=["asyncpg", "asyncpg pool", "psycopg"])
async def caller(
    request: pytest.FixtureRequest, dsn: str, pool: Any, psycopg_async: Any
) -> AsyncIterator[tuple[Any, Any, Any]]:
    """A connection in a transaction, and what commits it and rolls it back."""
    if request.param == "psycopg":
        yield psycopg_async, psycopg_async.commit, psycopg_async.rollback
        return
    if request.param == "asyncpg":
        connection = await asyncpg.connect(dsn)
    else:
        connection = await pool.acquire()
    transaction = connection.transaction()
    await transaction.start()
    yield connection, transaction.commit, transaction.rollback
    if request.param == "asyncpg":
        await connection.close()
    else:
        await pool.release(connection)


async def test_a_rolled_back_enqueue_leaves_nothing(
    client: Client, caller: Any, sql: Any, listener: Any, send: Any
) -> None:
    connection, _, rollback = caller
    assert await client.enqueue(send.job(to="x"), conn=connection) > 0
    assert len(await client.enqueue_many([send.job(to="y")] * 3, conn=connection)) == 3
    await rollback()
    assert await sql.fetchval(COUNT) == 0
    assert await listener.notified() == []


async def test_a_committed_enqueue_is_there_and_notifies_after_the_commit(
    client: Client, caller: Any, sql: Any, listener: Any, send: Any
) -> None:
    connection, commit, _ = caller
    ids = await client.enqueue_many((send.job(to=str(n)) for n in range(1200)), conn=connection)
    assert await sql.fetchval(COUNT) == 0
    assert await listener.notified() == []
    await commit()
    assert [r["id"] for r in await sql.fetch("SELECT id FROM taskd.job ORDER BY id")] == ids
    assert await listener.notified() == ["email"]


async def test_a_task_enqueues_in_the_callers_transaction_without_a_client_of_its_own(
    caller: Any, sql: Any, send: Any
) -> None:
    # Nothing listens on port 1: with conn, the default client is never connected.
    configure("postgresql://nobody@127.0.0.1:1/nowhere")
    connection, commit, _ = caller
    job_id = await send.on(connection).enqueue(to="x")
    await commit()
    assert await sql.fetchval("SELECT id FROM taskd.job") == job_id


async def test_options_and_a_connection_go_together(caller: Any, sql: Any, send: Any) -> None:
    connection, commit, _ = caller
    job_id = await send.options(priority=7).on(connection).enqueue(to="x")
    await commit()
    assert await sql.fetchval("SELECT id FROM taskd.job WHERE priority = 7") == job_id


async def test_a_connection_among_the_arguments_is_refused_with_the_right_call(send: Any) -> None:
    with pytest.raises(InvalidArgs, match=r"send\.on\(conn\)\.enqueue"):
        await send.enqueue(to="x", conn=object())


async def test_none_is_no_connection(send: Any) -> None:
    # A caller whose connection is missing must not enqueue outside of its transaction.
    with pytest.raises(TypeError, match="pass a connection"):
        send.on(None)


async def test_a_named_task_is_looked_up_in_the_callers_transaction(
    client: Client, published: Registry, caller: Any, sql: Any
) -> None:
    connection, commit, _ = caller
    job_id = await client.enqueue_named("send", {"to": "x"}, conn=connection)
    with pytest.raises(InvalidArgs):
        await client.enqueue_named("send", {"to": 5}, conn=connection)
    await commit()
    assert await sql.fetchval("SELECT id FROM taskd.job WHERE queue = 'email'") == job_id


def test_psycopg_sync_rolled_back_leaves_nothing(psycopg_sync: Any, send: Any) -> None:
    client = Client("postgresql://nobody@127.0.0.1:1/nowhere")
    client.enqueue_sync(send.job(to="x"), conn=psycopg_sync)
    psycopg_sync.rollback()
    assert psycopg_sync.execute(COUNT).fetchone()[0] == 0


def test_psycopg_sync_committed_is_there(dsn: str, psycopg_sync: Any, send: Any) -> None:
    configure("postgresql://nobody@127.0.0.1:1/nowhere")
    client = Client("postgresql://nobody@127.0.0.1:1/nowhere")
    ids = client.enqueue_many_sync((send.job(to=str(n)) for n in range(1200)), conn=psycopg_sync)
    ids.append(send.on(psycopg_sync).enqueue_sync(to="x"))
    ids.append(client.enqueue_named_sync("other", {"a": 1}, queue="q", conn=psycopg_sync))
    assert psycopg_sync.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    psycopg_sync.commit()
    with psycopg.connect(dsn) as other:
        rows = other.execute("SELECT id FROM taskd.job ORDER BY id").fetchall()
        assert [row[0] for row in rows] == ids
    other.close()


async def test_psycopg_with_autocommit_and_rows_as_dicts_works(
    dsn: str, client: Client, sql: Any, send: Any
) -> None:
    async with await psycopg.AsyncConnection.connect(
        dsn, autocommit=True, row_factory=dict_row, cursor_factory=psycopg.AsyncClientCursor
    ) as connection:
        job = send.options(delay_s=5).job(to="100 %s %(x)s")
        job_id = await client.enqueue(job, conn=connection)
    assert await sql.fetchval("SELECT args ->> 'to' FROM taskd.job WHERE id = $1", job_id) == (
        "100 %s %(x)s"
    )


async def test_psycopg_takes_batches_of_differing_options(
    client: Client, psycopg_async: Any, send: Any
) -> None:
    jobs = [
        send.options(delay_s=5, timeout_s=1, priority=-9).job(to="a"),
        send.options(delay_s=2.5, timeout_s=2.5, max_attempts=300).job(to="b"),
        send.job(to="c"),
    ]
    assert len(await client.enqueue_many(jobs, conn=psycopg_async)) == 3


async def test_an_asyncpg_connection_with_a_record_class_and_codecs_of_its_own_works(
    dsn: str, client: Client, send: Any
) -> None:
    class Odd(asyncpg.Record):
        def __getitem__(self, key: Any) -> Any:
            assert not isinstance(key, int), "the caller's record class was used"
            return super().__getitem__(key)

    connection = await asyncpg.connect(dsn, record_class=Odd)
    await connection.set_type_codec("jsonb", encoder=repr, decoder=repr, schema="pg_catalog")
    assert await client.enqueue(send.job(to="x"), conn=connection) > 0
    await connection.close()


async def test_a_refused_job_aborts_the_callers_transaction_and_nothing_else(
    client: Client, sql: Any
) -> None:
    from taskd.errors import InvalidJob

    async with sql.transaction():
        await client.enqueue(NewJob("a", queue="q"), conn=sql)
        with pytest.raises(InvalidJob):
            async with sql.transaction():  # a savepoint
                await client.enqueue(NewJob("b", "[]", queue="q"), conn=sql)
    assert await sql.fetchval(COUNT) == 1


async def test_errors_of_psycopg_stay_its_own(client: Client, psycopg_async: Any) -> None:
    with pytest.raises(psycopg.errors.CheckViolation):
        await client.enqueue(NewJob("b", "[]", queue="q"), conn=psycopg_async)


async def test_errors_of_asyncpg_are_taskds(client: Client, empty_dsn: str, send: Any) -> None:
    connection = await asyncpg.connect(empty_dsn)
    with pytest.raises(SchemaMissing, match="taskd db migrate"):
        await client.enqueue(send.job(to="x"), conn=connection)
    await connection.close()


@pytest.mark.parametrize("conn", [5, "postgresql://", object()])
async def test_anything_else_is_refused_by_name(client: Client, send: Any, conn: Any) -> None:
    with pytest.raises(TypeError, match=r"asyncpg connection .* a psycopg\.AsyncConnection"):
        await client.enqueue(send.job(to="x"), conn=conn)
    with pytest.raises(TypeError, match=r"takes a connection of psycopg"):
        client.enqueue_sync(send.job(to="x"), conn=conn)


async def test_a_pool_is_not_a_connection(client: Client, pool: Any, send: Any) -> None:
    with pytest.raises(TypeError, match=r"asyncpg\.pool\.Pool"):
        await client.enqueue(send.job(to="x"), conn=pool)


async def test_sync_and_async_connections_are_not_mixed_up(
    client: Client, psycopg_async: Any, psycopg_sync: Any, sql: Any, send: Any
) -> None:
    with pytest.raises(TypeError, match="block the event loop"):
        await client.enqueue(send.job(to="x"), conn=psycopg_sync)
    with pytest.raises(TypeError):
        client.enqueue_sync(send.job(to="x"), conn=psycopg_async)
    with pytest.raises(TypeError):
        client.enqueue_sync(send.job(to="x"), conn=sql)


async def test_a_connection_of_another_database_is_refused(client: Client, send: Any) -> None:
    connection = sqlite3.connect(":memory:")
    with pytest.raises(TypeError, match=r"sqlite3\.Connection"):
        await client.enqueue(send.job(to="x"), conn=connection)
    connection.close()


async def test_a_cancelled_caller_leaves_a_usable_pool(client: Client, sql: Any, send: Any) -> None:
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.job IN ACCESS EXCLUSIVE MODE")
        waiting = asyncio.create_task(client.enqueue(send.job(to="x")))
        waits = (
            "SELECT 1 FROM pg_locks JOIN pg_database AS d ON d.oid = pg_locks.database"
            " WHERE NOT granted AND d.datname = current_database()"
        )
        while not await sql.fetchval(waits):
            await asyncio.sleep(0.005)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await client.enqueue(send.job(to="y")) > 0
    assert await sql.fetchval(COUNT) == 1
