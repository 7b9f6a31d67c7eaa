"""The jobs of the shop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import asyncpg

from shop import mail
from taskd import Cancel, Context, Fixed, Unique, resource, task


@resource
async def pool() -> AsyncIterator[asyncpg.Pool]:
    async with asyncpg.create_pool(os.environ["TASKD_DSN"], min_size=1, max_size=2) as made:
        yield made


@task(queue="mail", backoff=Fixed(60))
async def confirm(order: int, to: str, language: str = "en") -> None:
    await mail.send(to, f"order {order}, in {language}")


@task(queue="billing")
async def charge(ctx: Context, order: int, cents: int) -> None:
    """The charge, the next job and the completion commit together, exactly once."""
    async with ctx.resources["pool"].acquire() as conn, conn.transaction():
        await conn.execute("INSERT INTO charge (order_id, cents) VALUES ($1, $2)", order, cents)
        await confirm.on(conn).enqueue(order=order, to="ada@example.org")
        await ctx.complete(conn)


@task(queue="billing")
async def charge_carelessly(ctx: Context, order: int, cents: int) -> None:
    """The same without ctx.complete:

    if a worker dies after the commit, the order is charged twice.
    """
    async with ctx.resources["pool"].acquire() as conn, conn.transaction():
        await conn.execute("INSERT INTO charge (order_id, cents) VALUES ($1, $2)", order, cents)


@task(queue="reports", unique=Unique(by=("month",), for_s=3600))
def report(month: str) -> dict[str, int]:
    if month == "never":
        raise Cancel("there is no such month")
    return {"pages": 3}
