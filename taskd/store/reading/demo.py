"""Statements of `taskd demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class LeftJob(NamedTuple):
    """A live job in the queue of the demo.

    Attributes:
        folder: the folder in which the demo stores its mail; None if another app enqueued the job.
    """

    id: int
    task: str
    folder: str | None


class Outcome(NamedTuple):
    """How the jobs of a demo ended.

    Attributes:
        live: number of jobs that have not ended.
        retries: number of attempts after the first attempts.
        span_s: seconds from the first start to the last end of a job. The start of a job is the
            start of its last attempt.
        wait_s: median and 95th percentile of the seconds from the due time of a job's last attempt
            to its start.
        message_ids: the Message-IDs of the sent mails, from the results of the jobs.
    """

    done: int
    failed: int
    cancelled: int
    live: int
    retries: int
    span_s: float
    wait_s: Sequence[float] | None
    message_ids: Sequence[str] | None


async def left(on: Fetches, queue: str) -> list[LeftJob]:
    """Return the live jobs of a queue, oldest first."""
    return [LeftJob(*row) for row in await on.fetch("demo_left", queue)]


async def live(on: Fetches, ids: Sequence[int]) -> int:
    """Return how many of these jobs are live."""
    count: int = (await on.fetch("demo_live", list(ids)))[0][0]
    return count


async def outcome(on: Fetches, ids: Sequence[int]) -> Outcome:
    """Return how these jobs ended."""
    return Outcome(*(await on.fetch("demo_outcome", list(ids)))[0])
