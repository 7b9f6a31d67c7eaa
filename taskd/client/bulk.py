"""Act on all jobs of a filter or a workflow, in transactions of up to a thousand jobs each."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

from taskd.core.jobs.job import JobState
from taskd.core.jobs.job_changes import Filter
from taskd.store import workflows
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import changes, jobs

BATCH_JOBS = 1000
SAMPLE_JOBS = 10

# Acts on the jobs with these ids, in this order. Returns the ids of the jobs on which it acted. It
# does not act on jobs that have changed since they were found.
Act = Callable[[Fetches, Sequence[int]], Awaitable[Collection[int]]]


async def batches(on: Fetches, chosen: Filter, limit: int | None) -> AsyncIterator[Sequence[int]]:
    """Yield the ids of the matching jobs in batches: `limit` ids at most, or with None, all ids."""
    left = limit if limit is not None else sys.maxsize
    async for ids in changes.find(on, chosen):
        for at in range(0, len(ids), BATCH_JOBS):
            batch = ids[at : at + BATCH_JOBS][:left]
            if batch:
                yield batch
            left -= len(batch)
            if left <= 0:
                return


async def preview(on: Fetches, chosen: Filter, limit: int | None) -> tuple[int, list[int]]:
    """Return the number of matching jobs, counted up to `limit`, and the ids of the first ten."""
    found, sample = 0, list[int]()
    async for ids in batches(on, chosen, limit):
        found += len(ids)
        sample += ids[: SAMPLE_JOBS - len(sample)]
    return found, sample


async def cancel_workflow(
    on: Fetches, workflow_id: int, reason: str, limit: int = sys.maxsize
) -> dict[int, JobState] | None:
    """Stop a workflow: let no further stage start, and cancel at most `limit` of its jobs.

    Returns:
        The state of each of these jobs, by id: `cancelled`, or `running` if the cancellation of the
        job was requested. None if there is no such workflow.
    """
    if not await workflows.stop(on, workflow_id):
        return None
    moved: dict[int, JobState] = {}
    while len(moved) < limit and (left := await workflows.jobs_to_cancel(on, workflow_id)):
        left = left[: limit - len(moved)]
        for at in range(0, len(left), BATCH_JOBS):
            moved |= await jobs.cancel(on, left[at : at + BATCH_JOBS], reason)
    return moved


async def retry_workflow(
    on: Fetches, workflow_id: int, limit: int = sys.maxsize
) -> tuple[list[int], list[int]]:
    """Retry the first `limit` failed and cancelled jobs of a workflow.

    Returns:
        The ids of the jobs that were retried, and the ids of the jobs that could not be retried.
    """
    # Parents have smaller ids, so each batch retries parents before the jobs that wait for them.
    chosen = (await workflows.jobs_to_retry(on, workflow_id))[:limit]
    back: set[int] = set()
    for at in range(0, len(chosen), BATCH_JOBS):
        back |= {*await jobs.retry(on, chosen[at : at + BATCH_JOBS])}
    return sorted(back), [each for each in chosen if each not in back]
