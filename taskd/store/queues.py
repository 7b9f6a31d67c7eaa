"""Queues in the database: pause and resume."""

from __future__ import annotations

from collections.abc import Sequence

from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches


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
