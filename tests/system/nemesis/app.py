"""The load of the nemesis: that of chaos, and handlers that harm their own worker."""

from __future__ import annotations

import asyncio
import os
import time

from taskd import Context, task
from taskd.schedules import PER_ROW, cron, every, schedule
from tests.system.chaos_app import LEDGER, SOON, block, books, has_done, recorder

__all__ = [
    "CANCELLING_SCHEDULE",
    "LEDGER",
    "NEWER_SCHEDULE",
    "SCHEDULE",
    "TRANSFERS",
    "WAITING_SCHEDULE",
    "ZONED_SCHEDULE",
    "blocks_loop",
    "books",
    "once",
    "stubborn",
    "survives_once",
    "tick",
    "transfers",
]

SCHEDULE = "nemesis"
NEWER_SCHEDULE = "nemesis newer"
ZONED_SCHEDULE = "nemesis zoned"
WAITING_SCHEDULE = "nemesis waiting"
CANCELLING_SCHEDULE = "nemesis cancelling"
ZONES = """
SELECT zone, zone AS "job.timezone"
FROM unnest(ARRAY['Europe/Berlin', 'Asia/Kolkata', 'America/New_York']) AS zone
"""
TRANSFERS = """
CREATE TABLE judge.transfer (job bigint NOT NULL, account smallint NOT NULL, amount bigint NOT NULL)
"""


@task(queue="fast", backoff=SOON)
async def blocks_loop(ctx: Context, ms: int) -> None:
    """Block the event loop for a while."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    block(ms / 1000)
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="mixed", backoff=SOON, timeout_s=0.3, max_attempts=2)
async def stubborn(ctx: Context) -> None:
    """Takes longer than it may, and swallows its cancellation."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    ends_at = time.monotonic() + 1.0
    while (left_s := ends_at - time.monotonic()) > 0:
        try:
            await asyncio.sleep(left_s)
        except asyncio.CancelledError:
            continue
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "raised")
    raise RuntimeError("too late")


@task(queue="fast", backoff=SOON, transaction=True)
async def transfers(ctx: Context, amount: int) -> None:
    """Moves money between two accounts, in the transaction that completes the job."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    await ctx.conn.executemany(
        "INSERT INTO judge.transfer VALUES ($1, $2, $3)",
        [(ctx.job_id, 1, -amount), (ctx.job_id, 2, amount)],
    )
    await has_done(ctx, ctx.conn)


@task(queue="mixed", max_attempts=1)
async def once(ctx: Context, ms: int) -> None:
    """Begins at most once, whatever happens to its worker."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    await asyncio.sleep(ms / 1000)
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="mixed", max_crashes=1, backoff=SOON)
async def survives_once(ctx: Context, ms: int) -> None:
    """Begins at most twice because of a death of its worker."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    await asyncio.sleep(ms / 1000)
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


async def newer(ctx: Context) -> None:
    """A task that the code of one host does not have yet, as in the middle of a deploy."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="fast", backoff=SOON)
async def tick(ctx: Context) -> None:
    """One for each second."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="fast", backoff=SOON)
async def zoned(ctx: Context, zone: str) -> None:
    """One for each local minute of a zone."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="fast", backoff=SOON)
async def long_tick(ctx: Context) -> None:
    """Takes longer than the time between two ticks."""
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "start")
    await asyncio.sleep(1.2)
    recorder.now(ctx.job_id, ctx.attempt, ctx.fence, "done")


schedule(WAITING_SCHEDULE, long_tick, every(1), overlap="wait", catch_up_max=1000)
schedule(CANCELLING_SCHEDULE, long_tick, every(1), overlap="cancel")
schedule(SCHEDULE, tick, every(1), catch_up="all", catch_up_max=1000)
schedule(ZONED_SCHEDULE, zoned, cron("* * * * *", PER_ROW), query=ZONES, catch_up="all")
if not os.environ.get("NEMESIS_OLD_CODE"):
    task(queue="fast", backoff=SOON)(newer)
    schedule(NEWER_SCHEDULE, tick, every(1))
