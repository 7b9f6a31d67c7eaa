"""Queues in the database: find them, pause and resume them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches


async def matching(on: Fetches, patterns: Sequence[str]) -> list[str]:
    """Return the queues that match one of these regular expressions.

    These are queues with a row, and queues with queued jobs.
    """
    return [row[0] for row in await on.fetch("match_queues", list(patterns))]


async def serve(on: Fetches, worker_id: int, queues: Collection[str]) -> None:
    """Store that a worker serves these queues, and no others; queues without a row get one."""
    await on.fetch("declare_queues", list(queues))
    await on.fetch("serve_queues", worker_id, list(queues))


async def pause(
    on: Fetches, names: Sequence[str] | None, for_s: float | None, reason: str | None
) -> list[str]:
    """Pause queues for `for_s` seconds (None: until resumed); return their names, sorted.

    Args:
        names: the queues; None for all queues that have a row or a live job.
    """
    wanted = None if names is None else list(names)
    rows = await on.fetch("pause_queues", wanted, for_s, reason, actor())
    return sorted(row[0] for row in rows)


async def resume(on: Fetches, names: Sequence[str] | None) -> list[str]:
    """Resume queues (None: all of them); return the names of those that were paused."""
    rows = await on.fetch("resume_queues", None if names is None else list(names), actor())
    return sorted(row[0] for row in rows)
