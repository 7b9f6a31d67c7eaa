"""Clients of two installations in one database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest

from taskd import Client, NewJob
from taskd.core.jobs.job import JobState
from taskd.errors import ConfigError, SchemaMissing
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.schema import migrations
from tests.store.helpers import new_worker, settle

BLUE = "jobs_blue"
COUNTS = "SELECT (SELECT count(*) FROM taskd.job), (SELECT count(*) FROM jobs_blue.job)"


@pytest.fixture
async def blue(dsn: str) -> AsyncIterator[Client]:
    await migrations.migrate(Database({"dsn": dsn}, schema=BLUE))
    async with Client(dsn, schema=BLUE) as made:
        yield made


def job() -> NewJob:
    return NewJob("t", queue="q")


async def test_a_client_enqueues_into_its_own_schema(blue: Client, dsn: str, sql: Any) -> None:
    await blue.enqueue(job())
    await blue.enqueue_many([job(), job()])
    async with Client(dsn) as green:
        await green.enqueue(job())
    assert tuple(await sql.fetchrow(COUNTS)) == (1, 3)


async def test_the_connections_of_callers_are_used_with_the_schema(
    blue: Client, dsn: str, sql: Any
) -> None:
    connection = await asyncpg.connect(dsn)
    await blue.enqueue(job(), conn=connection)
    await connection.close()
    async with await psycopg.AsyncConnection.connect(dsn) as conn:
        await blue.enqueue(job(), conn=conn)
    with psycopg.connect(dsn) as conn:
        blue.enqueue_sync(job(), conn=conn)
        blue.enqueue_many_sync([job()], conn=conn)
    with psycopg2.connect(dsn) as conn:
        blue.enqueue_sync(job(), conn=conn)
    assert tuple(await sql.fetchrow(COUNTS)) == (0, 5)


async def test_a_result_arrives_by_a_notification_of_the_own_schema(
    blue: Client, dsn: str, sql: Any
) -> None:
    lane = Lane(Database({"dsn": dsn}, schema=BLUE), "test")
    me = await new_worker(lane)
    job_id = await blue.enqueue(job())
    # Before the wait, which locks the job for a moment: claims skip locked jobs.
    [claimed] = await jobs.claim(lane, me, "q", 1)
    waits = asyncio.create_task(job_id.result(30.0))
    while not await sql.fetchval("SELECT awaited FROM jobs_blue.job"):
        await asyncio.sleep(0.01)
    await settle(lane, claimed, JobState.DONE)
    assert await waits is None
    await lane.close()


async def test_errors_name_the_schema(dsn: str) -> None:
    async with Client(dsn, schema="jobs_red") as red:
        with pytest.raises(SchemaMissing, match="no schema jobs_red"):
            await red.enqueue(job())
    with pytest.raises(ConfigError, match="not allowed as the name of taskd's schema"):
        Client(dsn, schema='my "jobs"')
