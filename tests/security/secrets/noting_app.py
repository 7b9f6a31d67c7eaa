"""Handlers of every kind that report a secret as the note of their progress."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from taskd import task
from taskd.core.tasks.registry import Registry
from taskd.handlers import Item

REGISTRY = Registry()
OPTIONS: dict[str, Any] = {"registry": REGISTRY, "redact": ["token"]}
DSN = "postgresql://ada:hunter2-canary@db/shop"
# Long enough for the writer of progress, which tests set to 0.05 s.
SHOWN_S = 1.0


@dataclass
class Secret:
    token: str


def note_of(token: str) -> str:
    """The secret, another one at the end, where a note is cut, and a password."""
    return f"{token} {DSN} ".ljust(490) + token


@task(**OPTIONS)
async def loop(ctx: Any, token: str) -> None:
    ctx.progress(1, 2, note_of(token))
    await asyncio.sleep(SHOWN_S)


@task(**OPTIONS)
def thread(ctx: Any, token: str) -> None:
    ctx.progress(1, 2, note_of(token))
    time.sleep(SHOWN_S)


@task(process=True, **OPTIONS)
def process(ctx: Any, token: str) -> None:
    ctx.progress(1, 2, note_of(token))
    time.sleep(SHOWN_S)


@task(batch=2, max_wait_s=0.5, **OPTIONS)
async def batch(items: list[Item[Secret]]) -> None:
    for item in items:
        item.ctx.progress(1, 2, " ".join(each.args.token for each in items))
    await asyncio.sleep(SHOWN_S)


@task(batch=2, max_wait_s=0.5, max_attempts=1, **OPTIONS)
async def fails(items: list[Item[Secret]]) -> None:
    raise ValueError(" ".join(item.args.token for item in items))
