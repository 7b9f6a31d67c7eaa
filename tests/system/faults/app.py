"""The load of the scenarios. Handlers record into a file, which no database fault can reach."""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path

from taskd import Context, Fixed, task

SOON = Fixed(0.1, jitter=0.5)
RECORDS = Path(os.environ.get("FAULTS_RECORDS", "."))


class _File:
    """One per process; a line is one write, so a killed process leaves whole lines."""

    descriptor: int | None = None


fences: dict[int, int] = {}


def record(ctx: Context, phase: str) -> None:
    """Write one phase down, with the clock that this machine's PostgreSQL reads too."""
    if _File.descriptor is None:
        path = RECORDS / f"{os.getpid()}.records"
        _File.descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    # A run that is adopted under a new claim ends as what it began.
    fence = fences[ctx.job_id] = (
        ctx.fence if phase == "start" else fences.get(ctx.job_id, ctx.fence)
    )
    row = [time.time(), ctx.job_id, ctx.attempt, fence, os.getpid(), phase]
    os.write(_File.descriptor, json.dumps(row).encode() + b"\n")


# Other system tests have tasks of the same kinds, and a process has one default registry.
@task(name="faults.instant", queue="fast")
async def instant(ctx: Context) -> None:
    """Nothing to do."""
    record(ctx, "start")
    record(ctx, "done")


@task(name="faults.waits", queue="mixed")
async def waits(ctx: Context, ms: int) -> None:
    """Waits for something else."""
    record(ctx, "start")
    await asyncio.sleep(ms / 1000)
    record(ctx, "done")


@task(name="faults.works_in_thread", queue="mixed")
def works_in_thread(ctx: Context, ms: int) -> None:
    """Blocks a thread."""
    record(ctx, "start")
    time.sleep(ms / 1000)
    record(ctx, "done")


@task(name="faults.answers", queue="mixed")
async def answers(ctx: Context, number: int) -> int:
    """Has a result, which takes the slower way of acks."""
    record(ctx, "start")
    record(ctx, "done")
    return number + 1


@task(name="faults.flaky", queue="fast", backoff=SOON)
async def flaky(ctx: Context, fails: int) -> None:
    """Fails some times, then succeeds."""
    record(ctx, "start")
    if ctx.attempt <= fails:
        record(ctx, "raised")
        raise RuntimeError(f"attempt {ctx.attempt}")
    record(ctx, "done")


@task(name="faults.hopeless", queue="fast", backoff=SOON, max_attempts=2)
async def hopeless(ctx: Context) -> None:
    """Fails for good."""
    record(ctx, "start")
    record(ctx, "raised")
    raise RuntimeError("never")


@task(name="faults.holds", queue="mixed")
async def holds(ctx: Context, gate: str) -> None:
    """Runs until a file is there: as long as the scenario wants."""
    record(ctx, "start")
    while not Path(gate).exists():
        await asyncio.sleep(0.02)
    record(ctx, "done")
