"""Log lines of attempts, which are stored in a table of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from taskd.core.jobs.log_lines import Line
from taskd.core.stored_json import decoded
from taskd.store.connections.statements import Fetches

PRUNE_BATCH = 5000


class AttemptLines(NamedTuple):
    """The log of an attempt: one row of the arguments of `write_logs`.

    Attributes:
        failed: whether the lines are kept as long as failed jobs of the queue; if not, as long as
            done jobs.
        ended: whether the attempt has ended, so that no further line follows.
        first: number of lines before the omitted ones.
        left_out: number of omitted lines.
        lines: JSON array of core.jobs.log_lines.Line.
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


async def write(on: Fetches, attempts: Sequence[AttemptLines]) -> None:
    """Store the lines of these attempts, in place of lines that were stored before.

    Lines that were stored with `ended` are not replaced.
    """
    await on.fetch("write_logs", *map(list, zip(*attempts, strict=True)))


async def delete(on: Fetches, job_ids: Sequence[int], fences: Sequence[int]) -> None:
    """Delete the lines of these attempts."""
    await on.fetch("delete_logs", list(job_ids), list(fences))


async def prune(on: Fetches) -> int:
    """Delete expired lines, in batches; return the number of attempts whose lines were deleted.

    Raises:
        StoreUnavailable: PostgreSQL cannot be reached or is busy; try again later.
    """
    total = 0
    while True:
        pruned: int = (await on.fetch("prune_logs", PRUNE_BATCH))[0][0]
        total += pruned
        if pruned < PRUNE_BATCH:
            return total


async def of_job(on: Fetches, job_id: int) -> list[dict[str, Any]]:
    """Return the stored logs of a job, in the order of attempts; `lines` is a list of Line."""
    rows = [dict(row) for row in await on.fetch("job_logs", job_id)]
    return [row | {"lines": _lines(row["lines"])} for row in rows]


def _lines(text: str) -> list[Line]:
    return decoded(text, list[Line], [Line("", "error", f"lines in an unknown form: {text}")])
