"""Handlers of every kind that put a secret into the exception they raise, for test_secrets.py."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from taskd import task
from taskd.core.tasks.registry import Registry
from taskd.handlers import Item
from taskd.middleware import CallNext, middleware
from tests.fuzz.test_errors import tellings

REGISTRY = Registry()
OPTIONS: dict[str, Any] = {"registry": REGISTRY, "redact": ["secret"], "max_attempts": 1}
# Whether middleware repeats it in a text of its own.
RETELLS: list[bool] = []


@dataclass
class Secret:
    secret: str
    n: int


@middleware(registry=REGISTRY)
async def retells(ctx: Any, call_next: CallNext) -> Any:
    try:
        return await call_next()
    except Exception as error:
        if RETELLS:
            raise RuntimeError(f"told: {error}", error.args) from error
        raise


@task(**OPTIONS)
async def instant(secret: str, n: int) -> None:
    raise tellings(secret)[n]


@task(**OPTIONS)
async def waits(secret: str, n: int) -> None:
    await asyncio.sleep(0)
    raise tellings(secret)[n]


@task(**OPTIONS)
def thread(secret: str, n: int) -> None:
    raise tellings(secret)[n]


@task(process=True, **OPTIONS)
def process(secret: str, n: int) -> None:
    raise tellings(secret)[n]


@task(transaction=True, **OPTIONS)
async def transaction(ctx: Any, secret: str, n: int) -> None:
    if n % 2:
        # PostgreSQL quotes what it does not understand.
        await ctx.conn.execute("SELECT $1::text::integer", secret)
    raise tellings(secret)[n]


@task(batch=20, max_wait_s=0.01, **OPTIONS)
async def batch(items: list[Item[Secret]]) -> list[Any]:
    return [tellings(item.args.secret)[item.args.n] for item in items]


@task(batch=1, max_wait_s=0.0, **OPTIONS)
async def batch_of_one(items: list[Item[Secret]]) -> None:
    raise tellings(items[0].args.secret)[items[0].args.n]


PLAIN = [instant, waits, thread, process, transaction]
BATCHES = [batch, batch_of_one]
