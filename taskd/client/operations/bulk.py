"""Act on all jobs of a filter or a workflow, in transactions of up to a thousand jobs each."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence

from taskd.core.jobs.job import JobState
from taskd.core.jobs.job_filter import JobFilter
from taskd.errors import InvalidJob
from taskd.store import workflows
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import changes, jobs

BATCH_JOBS = 1000
SAMPLE_JOBS = 10
# Low, because the transaction locks the last job and the workflow of each run until it commits.
BATCH_RUNS = 200

# Acts on the jobs with these ids, in this order. Returns the ids of the jobs on which it acted. It
# does not act on jobs that have changed since they were found.
Act = Callable[[Fetches, Sequence[int]], Awaitable[Collection[int]]]
# The jobs of an action: one id, several ids, or the jobs that match a filter.
Chosen = int | Iterable[int] | JobFilter


async def batches(
    on: Fetches, chosen: JobFilter, limit: int | None
) -> AsyncIterator[Sequence[int]]:
    """Yield the ids of the matching jobs in batches: at most `limit` ids, or all ids if None."""
    left = limit if limit is not None else sys.maxsize
    async for ids in changes.find(on, chosen):
        for at in range(0, len(ids), BATCH_JOBS):
            batch = ids[at : at + BATCH_JOBS][:left]
            if batch:
                yield batch
            left -= len(batch)
            if left <= 0:
                return


def narrowed(chosen: Chosen, able: Collection[JobState]) -> Sequence[int] | JobFilter:
    """Return the ids, or the filter for jobs in the states in which an action is possible.

    Raises:
        InvalidJob: the filter is empty, or selects none of these states.
    """
    if isinstance(chosen, JobFilter):
        if chosen.empty:
            raise InvalidJob(
                "an empty JobFilter selects all jobs; to do that, pass states, for example "
                f"JobFilter(states=[{str(min(able))!r}])"
            )
        return chosen.within(able)
    return ids_of(chosen)


def ids_of(chosen: int | Iterable[int]) -> list[int]:
    """Return the ids as a list."""
    return [chosen] if isinstance(chosen, int) else list(chosen)


async def batches_of(
    on: Fetches, chosen: Sequence[int] | JobFilter
) -> AsyncIterator[Sequence[int]]:
    """Yield all given ids at once, or the ids of the matching jobs in batches."""
    if isinstance(chosen, JobFilter):
        async for ids in batches(on, chosen, None):
            yield ids
    else:
        yield chosen


def states_of(chosen: Sequence[int] | JobFilter) -> Sequence[JobState]:
    """Return the states in which a job of a batch must still be; empty for any state."""
    return (
        [state for state in JobState if state in chosen.states]
        if isinstance(chosen, JobFilter)
        else ()
    )


async def preview(on: Fetches, chosen: JobFilter, limit: int | None) -> tuple[int, list[int]]:
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
    if not await workflows.stop(on, workflow_id, reason):
        return None
    moved: dict[int, JobState] = {}
    while len(moved) < limit and (left := await workflows.jobs_to_cancel(on, workflow_id)):
        left = left[: limit - len(moved)]
        for at in range(0, len(left), BATCH_JOBS):
            moved |= await jobs.cancel(on, left[at : at + BATCH_JOBS], reason)
    return moved


async def restart_runs(
    on: Fetches,
    ids: Sequence[int],
    stage: str | None = None,
    args: str | None = None,
    reason: str = "",
) -> dict[int, workflows.Restarted]:
    """Start stopped and finished runs of pipelines again, in batches; return what happened.

    Args:
        stage, args, reason: as for workflows.restart() of the store.
    """
    done: dict[int, workflows.Restarted] = {}
    for at in range(0, len(ids), BATCH_RUNS):
        done |= await workflows.restart(on, ids[at : at + BATCH_RUNS], stage, args, reason)
    return done


async def find_runs(on: Fetches, chosen: workflows.RunFilter, limit: int | None) -> list[int]:
    """Return the ids of the matching runs of pipelines: at most `limit` ids, or all ids if None."""
    found: list[int] = []
    most = sys.maxsize if limit is None else limit
    while len(found) < most:
        page = min(BATCH_JOBS, most - len(found))
        ids = await workflows.find_runs(on, chosen, found[-1] if found else 0, page)
        found += ids
        if len(ids) < page:
            break
    return found


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
