"""The lines of attempts, kept in a table of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from taskd.store.connections.statements import Fetches

PRUNE_BATCH = 5000


class AttemptLines(NamedTuple):
    """What is kept of an attempt, as `write_logs` takes it.

    Attributes:
        failed: kept as long as the jobs of its queue that failed, else as those that are done.
        ended: nothing more will come.
        first: so many lines stand before those that were left out.
        lines: JSON array of core.lines.Line.
    """

    worker_id: int
    job_id: int
    fence: int
    attempt: int
    queue: str
    failed: bool
    ended: bool
    first: int
    left_out: int
    lines: str


async def write(on: Fetches, told: Sequence[AttemptLines]) -> None:
    """Write the lines of these attempts, in place of what was written of them before."""
    await on.fetch("write_logs", *map(list, zip(*told, strict=True)))


async def forget(on: Fetches, job_ids: Sequence[int], fences: Sequence[int]) -> None:
    """Forget what was written of these attempts."""
    await on.fetch("delete_logs", list(job_ids), list(fences))


async def prune(on: Fetches) -> int:
    """Forget lines whose time is over, in batches; of how many attempts.

    Raises:
        StoreUnavailable: not now; try again later.
    """
    total = 0
    while True:
        pruned: int = (await on.fetch("prune_logs", PRUNE_BATCH))[0][0]
        total += pruned
        if pruned < PRUNE_BATCH:
            return total


async def of_job(on: Fetches, job_id: int) -> list[dict[str, Any]]:
    """What is kept of a job's attempts, in their order, each with its lines decoded."""
    rows = [dict(row) for row in await on.fetch("job_logs", job_id)]
    return [row | {"lines": msgspec.json.decode(row["lines"])} for row in rows]
