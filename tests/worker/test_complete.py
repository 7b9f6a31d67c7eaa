"""`ctx.complete` on connections of frameworks, and `ctx.complete_sync` in plain functions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import psycopg2
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_asyncio

from taskd import Fixed
from taskd.errors import LeaseLost

from .conftest import Desk

EFFECT = "INSERT INTO effect VALUES ({})"


def over(dsn: str, driver: str) -> str:
    # SQLAlchemy hands a DSN's options to asyncpg, which has another name for this one.
    dsn = dsn.replace("sslmode=", "ssl=") if driver == "asyncpg" else dsn
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


@contextmanager
def over_psycopg(dsn: str) -> Iterator[tuple[Any, Any]]:
    with psycopg.connect(dsn) as conn:
        yield conn, conn.execute
    conn.close()


@contextmanager
def over_psycopg2(dsn: str) -> Iterator[tuple[Any, Any]]:
    conn = psycopg2.connect(dsn)
    try:
        with conn, conn.cursor() as cursor:
            yield conn, cursor.execute
    finally:
        conn.close()


@contextmanager
def over_sqlalchemy(dsn: str) -> Iterator[tuple[Any, Any]]:
    engine = sa.create_engine(over(dsn, "psycopg"))
    try:
        with orm.Session(engine) as session, session.begin():
            yield session, lambda text: session.execute(sa.text(text))
    finally:
        engine.dispose()


@pytest.mark.parametrize("opened", [over_psycopg, over_psycopg2, over_sqlalchemy])
async def test_a_plain_function_completes_its_job_with_its_effects(
    desk: Desk, dsn: str, opened: Any
) -> None:
    await desk.sql.execute("CREATE TABLE effect (job bigint)")

    @desk.task(backoff=Fixed(0.01))
    def booking(ctx: Any) -> None:
        with opened(dsn) as (conn, run):
            run(EFFECT.format(ctx.job_id))
            ctx.complete_sync(conn, {"attempt": ctx.attempt})
            if ctx.attempt == 1:
                raise ValueError("rolled back")

    (job,) = await desk.enqueue(booking.job())
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"]) == ("done", 2)
    assert json.loads(row["result"]) == {"attempt": 2}
    assert [each[0] for each in await desk.sql.fetch("TABLE effect")] == [job]


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_an_async_session_completes_the_job_with_its_effects(
    desk: Desk, dsn: str, driver: str
) -> None:
    await desk.sql.execute("CREATE TABLE effect (job bigint)")
    engine = sa_asyncio.create_async_engine(over(dsn, driver))

    @desk.task(backoff=Fixed(0.01))
    async def booking(ctx: Any) -> None:
        async with sa_asyncio.AsyncSession(engine) as session, session.begin():
            await ctx.complete(session)
            await session.execute(sa.text(EFFECT.format(ctx.job_id)))
            if ctx.attempt == 1:
                raise ValueError("rolled back")

    (job,) = await desk.enqueue(booking.job())
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"]) == ("done", 2)
    assert [each[0] for each in await desk.sql.fetch("TABLE effect")] == [job]
    await engine.dispose()


async def test_a_plain_function_that_lost_its_job_cannot_complete_it(desk: Desk, dsn: str) -> None:
    lost: list[BaseException] = []

    @desk.task()
    def booking(ctx: Any) -> None:
        with psycopg.connect(dsn, autocommit=True) as other:
            other.execute("UPDATE taskd.job SET fence = fence + 1, worker_id = 42")
        other.close()
        try:
            with over_psycopg(dsn) as (conn, run):
                run("CREATE TABLE effect ()")
                ctx.complete_sync(conn)
        except LeaseLost as error:
            lost.append(error)
            raise

    await desk.other_worker(42)
    (job,) = await desk.enqueue(booking.job())
    await desk.start()
    await desk.emitted.wait("job.lost", job_id=job)
    assert lost
    assert not await desk.sql.fetchval("SELECT to_regclass('effect')")
