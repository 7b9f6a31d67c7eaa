"""What jobs have to say: how far attempts are, and what became of jobs that are waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from taskd.core.jobs.job import JobState
from taskd.store.connections.database import Database
from taskd.store.connections.listening import Listening
from taskd.store.connections.statements import Fetches

ENDED_CHANNEL = "taskd:ended"


class Progress(NamedTuple):
    """The last word of an attempt."""

    job_id: int
    fence: int
    done: float
    total: float | None
    note: str


class Outcome(NamedTuple):
    """Where a job is.

    Attributes:
        awaited: it is live and notifies when it ends.
        error: JSON of the last attempt that failed.
        result: JSON of what its handler returned.
    """

    id: int
    state: JobState
    awaited: bool
    reason: str | None
    error: str | None
    result: str | None


async def tell_progress(on: Fetches, told: Sequence[Progress]) -> None:
    """Write how far these attempts are."""
    await on.fetch("write_progress", *map(list, zip(*told, strict=True)))


async def forget_progress(on: Fetches, job_ids: Sequence[int], fences: Sequence[int]) -> None:
    """Forget attempts that have ended."""
    await on.fetch("delete_progress", list(job_ids), list(fences))


async def prune_progress(on: Fetches) -> int:
    """Forget what workers that died have left behind; how many rows."""
    pruned: int = (await on.fetch("prune_progress"))[0][0]
    return pruned


async def await_jobs(on: Fetches, job_ids: Sequence[int]) -> dict[int, Outcome]:
    """Where these jobs are, and have them notify when they end; unknown ones are missing."""
    rows = await on.fetch("await_jobs", list(job_ids))
    return {
        row[0]: Outcome(row[0], JobState(row[1]), bool(row[2]), *tuple(row)[3:]) for row in rows
    }


def ended_channel(
    database: Database, heard: Callable[[str], Any], lost: Callable[[], None]
) -> Listening:
    """A connection that hears of the ends of jobs that are waited for: `heard` gets their ids."""
    return Listening(database, {ENDED_CHANNEL: heard}, lost)
