"""Change waiting jobs, find jobs by a filter, queue parked jobs again, and expire jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from taskd.core.jobs.job_changes import Change, ChangeOutcome
from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches
from taskd.store.jobs.jobs import ANY_JOB, Among

if TYPE_CHECKING:
    from taskd.core.jobs.job_filter import JobFilter

# Maximum number of rows that one statement reads. This read takes some 20 ms.
READ_MAX = 5000


async def change(
    on: Fetches, ids: Sequence[int], new: Change, args: str | None = None
) -> dict[int, ChangeOutcome]:
    """Change the jobs that wait; return the outcome for each of the given jobs, by id.

    Args:
        args: the JSON text of `new.args` or `new.update_args`, whichever is given.
    """
    rows = await on.fetch(
        "change_jobs",
        list(ids),
        new.priority,
        new.run_at,
        new.delay_s,
        None if new.args is None else args,
        None if new.update_args is None else args,
        new.queue,
        new.max_attempts,
        new.timeout_s,
        new.deadline,
        new.deadline_s,
        new.no_deadline,
        actor(),
    )
    return {row[0]: ChangeOutcome(row[1]) for row in rows}


async def tasks_of(on: Fetches, ids: Sequence[int]) -> list[str]:
    """Return the names of the tasks of these jobs, leaving out running and finished jobs."""
    return [row[0] for row in await on.fetch("tasks_of_jobs", list(ids))]


async def find(on: Fetches, chosen: JobFilter) -> AsyncIterator[list[int]]:
    """Yield the ids of the jobs that match a filter, in sorted batches; a batch can be empty.

    Jobs that are enqueued or end after the call are left out. No row is locked, so a caller that
    acts on a batch must check the jobs of the batch again.
    """
    at, up_to_id = (await on.fetch("find_bounds"))[0]
    document = chosen.document(at=at, up_to_id=up_to_id)
    for live in (True, False):
        seen, last_at, last_id = READ_MAX, None, None
        by_end = chosen.by_end and not live
        while seen == READ_MAX:
            rows = await on.fetch("find_jobs", document, live, by_end, last_at, last_id, READ_MAX)
            seen, last_at, last_id, ids = rows[0]
            yield sorted(ids)


async def unpark(
    on: Fetches, worker_id: int, tasks: Sequence[str], batch: int, among: Among = ANY_JOB
) -> dict[str, int]:
    """Queue again at most `batch` parked jobs of these tasks that this worker can run.

    Returns:
        The number of these jobs, by queue.
    """
    rows = await on.fetch("unpark_jobs", worker_id, list(tasks), batch, *among)
    return {row[0]: row[1] for row in rows}


async def expire(on: Fetches, batch: int, among: Among = ANY_JOB) -> dict[str, int]:
    """Fail at most `batch` waiting jobs whose deadline has passed; return their number by task."""
    return {row[0]: row[1] for row in await on.fetch("expire_jobs", batch, *among)}
