"""Statements of the dashboard: single jobs, recently finished jobs, limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from taskd.store.connections.statements import Fetches
from taskd.store.reading import reports

Row = dict[str, Any]

PAGE_ROWS = 50
# Maximum numbers of jobs that a page counts (COUNT_MAX) and names (HOLDERS_MAX) for one key of a
# limit.
COUNT_MAX = 1000
HOLDERS_MAX = 3
# Maximum number of blocks that a chart reads of one partition of the history. These are 16 MB with
# some 60,000 jobs, and the read takes 120 ms.
CHART_BLOCKS_MAX = 2048


async def reads_args(on: Fetches) -> bool:
    """Return whether the login of this connection can read arguments and results."""
    return bool((await on.fetch("web_rights"))[0][0])


async def find_job(on: Fetches, job_id: int, *, reads_args: bool) -> Row | None:
    """Return the columns of one job, as reports.show_job() does; None if the id is unknown.

    Args:
        reads_args: whether the login can read arguments, results and unique keys; if not, they are
            missing.
    """
    for record in await on.fetch("web_job", job_id):
        row = dict(record)
        row |= reports.read_parts(row)
        whole = await reports.show_job(on, job_id) if reads_args else None
        names = (
            "args", "result", "unique_key", "key_scope", "version", "next_version", "newer_follows"
        )  # fmt: skip
        return row | {name: whole[name] for name in names} if whole else row
    return None


async def jobs_of_sample(on: Fetches, ids: Sequence[int]) -> list[Row]:
    """Return id, queue, task, state and reason of these jobs, sorted by id."""
    return [dict(row) for row in await on.fetch("web_sample", list(ids))]


async def finished_recently(
    on: Fetches, *, window_s: float, steps: int, queue: str | None = None
) -> list[Row]:
    """Count recently finished jobs in `steps` equal parts of the last `window_s` seconds.

    `since` and `until` of each row are the period that was read, which can be shorter than
    `window_s`. If no job finished, the result is one row without a step.
    """
    rows = await on.fetch("web_finished", queue, window_s, steps, CHART_BLOCKS_MAX)
    return [dict(row) for row in rows]


async def limit_keys(on: Fetches, name: str, first: str) -> list[Row]:
    """Return the keys of a limit from `first` on: a page of keys, and the next page's first key.

    Each row has the numbers of jobs, counted up to COUNT_MAX + 1. The column `holders` has at most
    HOLDERS_MAX jobs that hold slots of the key, running jobs first.
    """
    rows = await on.fetch("web_limit_keys", name, first, PAGE_ROWS + 1, COUNT_MAX + 1, HOLDERS_MAX)
    return [dict(row) | {"holders": msgspec.json.decode(row["holders"])} for row in rows]


async def watch_jobs(on: Fetches, ids: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """Return for each job its state, attempt, fence, end and progress; unknown ids are missing.

    If one of these values has changed since an earlier call, an open page about the job is out of
    date.
    """
    return {row[0]: tuple(row)[1:] for row in await on.fetch("web_watch", list(ids))}
