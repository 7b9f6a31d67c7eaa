"""The load of the chaos test and a few more tasks, in a worker that strikes itself at one point.

`POINTS_PLAN` in the environment is the Plan, as JSON; without it nothing strikes.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os

import msgspec

from taskd import Context, task
from taskd.core.tasks import registry as registries
from taskd.handlers import TransactionContext
from taskd.schedules import every, schedule
from taskd.workflows import pipeline, stage
from tests.system import chaos_app as app
from tests.system import points_strike as points


@task(queue="fast", backoff=app.SOON, transaction=True)
async def pays(ctx: TransactionContext) -> None:
    """An effect in the transaction of the completion."""
    await app.recorder.write(ctx.job_id, ctx.attempt, ctx.fence, "start")
    await ctx.conn.execute("INSERT INTO judge.ledger VALUES ($1)", ctx.job_id)
    await app.recorder.write(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="mixed", backoff=app.SOON)
async def goes_on(ctx: Context) -> None:
    """Report its progress."""
    await app.recorder.write(ctx.job_id, ctx.attempt, ctx.fence, "start")
    ctx.progress(1, 2)
    await asyncio.sleep(0.1)
    await app.recorder.write(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="mixed", backoff=app.SOON, keep_logs="all")
async def tells(ctx: Context) -> None:
    """Logs something, and goes on for a while."""
    await app.recorder.write(ctx.job_id, ctx.attempt, ctx.fence, "start")
    log.warning("begun")
    await asyncio.sleep(0.2)
    log.warning("ended")
    await app.recorder.write(ctx.job_id, ctx.attempt, ctx.fence, "done")


@task(queue="mixed", backoff=app.SOON, keep_logs="failed")
async def tells_of_failures(ctx: Context) -> None:
    """The same, of which nothing is kept when it has ended well."""
    await tells.handler(ctx)


log = logging.getLogger("points")
line = pipeline("line", stage("one", app.member), stage("two", app.member))


def _be_struck(plan: points.Plan) -> None:
    if plan.ticks == 1:
        schedule("ticking", app.instant, every(1), catch_up="all")
    elif plan.ticks:
        asked = f"SELECT n AS ms FROM generate_series(1, {plan.ticks}) AS n"
        schedule("ticking", app.waits, every(1), query=asked, catch_up="all")
    # The statement that was hit must be repeated while a caller waits for it.
    for each in registries.DEFAULT:
        each.backoff = app.SOON
    for place, value in plan.tuned.items():
        module, _, constant = place.rpartition(".")
        setattr(importlib.import_module(module), constant, value)
    points.install(plan)


if plan := os.environ.get("POINTS_PLAN"):
    _be_struck(msgspec.json.decode(plan, type=points.Plan))
