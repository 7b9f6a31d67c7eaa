"""Helpers of the tests of acks."""

from __future__ import annotations

from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    QUEUED,
    SCHEDULED,
)

ALL_STATES = [DONE, FAILED, CANCELLED, SCHEDULED, QUEUED]


async def snapshot(sql) -> list:
    """Return all columns of all jobs."""
    rows = await sql.fetch("SELECT * FROM taskd.jobs ORDER BY id")
    return [tuple(each.values()) for each in rows]


async def jobs_completed(on, job, result: str | None = None) -> list:
    return await on.fetch("complete_job", job.id, job.worker_id, job.fence, result, None, None)
