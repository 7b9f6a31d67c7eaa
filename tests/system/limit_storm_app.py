"""The load of the storm of limits: handlers that say when they begin and end."""

from __future__ import annotations

import asyncio
import os
import random
import time
from functools import cache
from pathlib import Path

from taskd import Context, Fail, Fixed, Limit, Retry, Snooze, task

SOON = Fixed(0.05)
# The most that each limit allows, whatever an operator sets meanwhile.
KEYED = Limit(concurrency=2, by="key", concurrency_in_all=5)
ALONE = Limit(concurrency=1)
RATED = Limit(rate=20, burst=4, by="key")
BOTH = Limit(concurrency=2, rate=40, burst=3, by="key", name="both")
LIMITS = {"keyed": KEYED, "alone": ALONE, "rated": RATED, "both": BOTH}


@cache
def _log() -> int:
    """One line for each begin and each end: so few bytes are written whole or not at all."""
    path = Path(os.environ["STORM_DIR"], f"{os.getpid()}.log")
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _say(what: str, name: str) -> None:
    os.write(_log(), f"{time.monotonic()} {what} {name}\n".encode())


async def _work(ctx: Context, limit: str, key: str, ms: int, how: str) -> None:
    name = f"{limit} {key if LIMITS[limit].by else '-'} {ctx.queue} {ctx.job_id} {ctx.fence}"
    _say("begin", name)
    try:
        await asyncio.sleep(ms / 1000)
        # A snooze gives its attempt back: not every time, or it would never end.
        if ctx.attempt == 1 and how != "done" and (how != "snooze" or random.random() < 0.5):
            raise {
                "fail": Fail("no"),
                "raise": ValueError("no"),
                "retry": Retry(0.0),
                "later": Retry(0.1),
                "snooze": Snooze(0.05),
            }[how]
    finally:
        _say("end", name)


@task(queue="free", limit=KEYED, backoff=SOON)
async def keyed(ctx: Context, key: str, ms: int, how: str) -> None:
    """Two of a key, five in all."""
    await _work(ctx, "keyed", key, ms, how)


@task(queue="free", limit=ALONE, backoff=SOON)
async def alone(ctx: Context, key: str, ms: int, how: str) -> None:
    """One at a time."""
    await _work(ctx, "alone", key, ms, how)


@task(queue="bound", limit=RATED, backoff=SOON)
async def rated(ctx: Context, key: str, ms: int, how: str) -> None:
    """Twenty of a key per second."""
    await _work(ctx, "rated", key, ms, how)


@task(queue="bound", limit=BOTH, backoff=SOON)
async def both(ctx: Context, key: str, ms: int, how: str) -> None:
    """Two of a key, and forty of them per second."""
    await _work(ctx, "both", key, ms, how)


@task(queue="free", limit=BOTH, backoff=SOON)
async def both_free(ctx: Context, key: str, ms: int, how: str) -> None:
    """As `both`, from another queue."""
    await _work(ctx, "both", key, ms, how)


TASKS = (keyed, alone, rated, both, both_free)
