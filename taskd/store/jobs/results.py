"""The progress of attempts, and the results of jobs that a client waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from taskd.core.jobs.job import JobState
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Listening
from taskd.store.connections.statements import Fetches
from taskd.store.schema_text import channel_prefix


class Progress(NamedTuple):
    """The last reported progress of an attempt."""

    job_id: int
    fence: int
    done: float
    total: float | None
    note: str


class JobKey(NamedTuple):
    """Identifies a job: its id, and `enqueued_us` as in Enqueued.

    If several jobs have the id and `enqueued_us` is None, the key stands for the live job, or else
    for the newest.
    """

    id: int
    enqueued_us: int | None


class Outcome(NamedTuple):
    """The state of a job.

    Attributes:
        awaited: whether the job is live, and PostgreSQL will send a notification when it ends.
        reason: why the job failed or was cancelled, or why its result was not stored.
        error: JSON of the error of the last failed attempt; None while the job is live.
        result: JSON of the value that its handler returned.
    """

    state: JobState
    awaited: bool
    reason: str | None
    error: str | None
    result: str | None


async def write_progress(on: Fetches, reports: Sequence[Progress]) -> None:
    """Write the progress of these attempts."""
    await on.fetch("write_progress", *map(list, zip(*reports, strict=True)))


async def delete_progress(on: Fetches, job_ids: Sequence[int], fences: Sequence[int]) -> None:
    """Delete the progress of ended attempts."""
    await on.fetch("delete_progress", list(job_ids), list(fences))


async def prune_progress(on: Fetches) -> int:
    """Delete the progress of attempts that no longer run; return how many rows were deleted."""
    pruned: int = (await on.fetch("prune_progress"))[0][0]
    return pruned


async def await_jobs(on: Fetches, keys: Sequence[JobKey]) -> dict[JobKey, Outcome]:
    """Return the outcomes of these jobs, and mark the live jobs as awaited.

    The end of a marked job sends a notification. The outcome of a live job is its current state. A
    live job whose row is locked is not marked: then `awaited` is False, and the caller must call
    again. Unknown jobs are missing.
    """
    rows = await on.fetch("await_jobs", *map(list, zip(*keys, strict=True)))
    return {
        JobKey(row[0], row[1]): Outcome(JobState(row[2]), bool(row[3]), *tuple(row)[4:])
        for row in rows
    }


def ended_channel(
    database: Database, heard: Callable[[str], Any], lost: Callable[[], None]
) -> Listening:
    """Return a channel that calls `heard` with the id of each awaited job that has ended."""
    return Listening(database, {f"{channel_prefix(database.schema)}:ended": heard}, lost)
