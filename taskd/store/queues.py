"""Queues in the database: pause and resume."""

from __future__ import annotations

from collections.abc import Sequence

from taskd.store.connections.statements import Fetches


async def pause(
    on: Fetches, names: Sequence[str], for_s: float | None, reason: str | None
) -> list[str]:
    """Pause queues for `for_s` seconds (None: until resumed); return their names, sorted."""
    rows = await on.fetch("pause_queues", list(names), for_s, reason)
    return sorted(row[0] for row in rows)


async def resume(on: Fetches, names: Sequence[str]) -> list[str]:
    """Resume queues; return the names of those that were paused."""
    return sorted(row[0] for row in await on.fetch("resume_queues", list(names)))
