"""The load of the storm of keys: handlers that record when they ran, and what they saw."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator

import asyncpg

from taskd import Context, Fixed, Limit, Unique, resource, task
from taskd.store.connections.shielded import to_its_end

SCHEMA = """
CREATE SCHEMA storm;
CREATE TABLE storm.run (
    id bigint PRIMARY KEY, task text, key text, version bigint, pid integer,
    started_at timestamptz NOT NULL DEFAULT clock_timestamp(), ended_at timestamptz
);
CREATE TABLE storm.kill (pid integer, at timestamptz NOT NULL DEFAULT clock_timestamp());
CREATE TABLE storm.source (key text PRIMARY KEY, written bigint DEFAULT 0, seen bigint DEFAULT 0);
"""
BEGAN = "INSERT INTO storm.run (id, task, key, version, pid) VALUES ($1, $2, $3, $4, $5)"
ENDED = "UPDATE storm.run SET ended_at = clock_timestamp() WHERE id = $1"
SOON = Fixed(0.05, jitter=0.5)
WORK_S = 0.02
FAILS_EVERY = 7


@resource
async def pool() -> AsyncIterator[asyncpg.Pool]:
    options = {"application_name": "storm"}
    async with asyncpg.create_pool(
        os.environ["TASKD_DSN"], min_size=1, max_size=8, server_settings=options
    ) as made:
        yield made


@task(queue="keys", unique=Unique(by=("key",), version_by="version"), backoff=SOON)
async def newest(ctx: Context, key: str, version: int) -> None:
    """Brings something up to a version of its source; fails now and then, once."""
    await _run(ctx, "newest", key, version)


@task(queue="keys", unique=Unique(by=("key",), on_conflict="latest"), backoff=SOON)
async def state(ctx: Context, key: str, version: int) -> None:
    """As `newest`, but the order of the enqueues decides, not a version."""
    await _run(ctx, "state", key, version)


@task(queue="keys", unique=Unique(by=("key",)), limit=Limit(concurrency=2), backoff=SOON)
async def single(ctx: Context, key: str) -> None:
    """Bears no second one beside it; two keys at a time."""
    await _run(ctx, "single", key, 0)


@task(queue="keys", unique=Unique(by=("key",), scope="waiting"), backoff=SOON)
async def latest(ctx: Context, key: str) -> None:
    """Check that data of every transaction that found this job waiting is visible."""
    said = "UPDATE storm.source SET seen = greatest(seen, $2) WHERE key = $1"
    conn: asyncpg.Pool = ctx.resources["pool"]
    there = await conn.fetchval("SELECT written FROM storm.source WHERE key = $1", key)
    await asyncio.sleep(WORK_S)
    await conn.execute(said, key, there)


async def _run(ctx: Context, task: str, key: str, version: int) -> None:
    run = random.getrandbits(62)
    # One connection, so that the last statement comes after the first also when that is cancelled.
    async with ctx.resources["pool"].acquire() as conn:
        try:
            await conn.execute(BEGAN, run, task, key, version, os.getpid())
            await asyncio.sleep(WORK_S)
        finally:
            # The first time on a connection it takes two round trips. Cancelled between them it is
            # not written, and the judge would hold this run to have gone on until its worker was
            # killed, beside all that came after it.
            await to_its_end(conn.execute(ENDED, run))
    if ctx.attempt == 1 and run % FAILS_EVERY == 0:
        raise RuntimeError("now and then")
