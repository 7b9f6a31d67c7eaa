"""What `taskd demo` reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class LeftJob(NamedTuple):
    """A live job. `folder` is the demo's folder for its mail; None: it is no job of a demo."""

    id: int
    task: str
    folder: str | None


class Outcome(NamedTuple):
    """How jobs ended: counts, seconds, and the Message-IDs of sent mails."""

    done: int
    failed: int
    cancelled: int
    live: int
    retries: int
    span_s: float
    wait_s: Sequence[float] | None
    message_ids: Sequence[str] | None


async def left(on: Fetches, queue: str) -> list[LeftJob]:
    """Return the live jobs of a queue, oldest first."""
    return [LeftJob(*row) for row in await on.fetch("demo_left", queue)]


async def live(on: Fetches, ids: Sequence[int]) -> int:
    """Return how many of these jobs are live."""
    count: int = (await on.fetch("demo_live", list(ids)))[0][0]
    return count


async def outcome(on: Fetches, ids: Sequence[int]) -> Outcome:
    """Return how these jobs ended, as far as they have."""
    return Outcome(*(await on.fetch("demo_outcome", list(ids)))[0])
