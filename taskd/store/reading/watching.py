"""Statements of `taskd top` and `taskd tail`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from taskd.core.stored_json import errors_of
from taskd.core.watching.tail import JobRow, Poll, ids_of
from taskd.core.watching.top import BORN_MAX, Ended, State
from taskd.store.connections.statements import Fetches

# Maximum number of jobs that one statement reads, so that the statement takes little time.
ROWS_MAX = 1000
# Maximum number of rows that state() returns of each kind: workers, queues, running jobs and full
# limits.
PARTS_MAX = 200
ENDED_MAX = 500


async def poll(on: Fetches, after_id: int | None, missing: Sequence[int]) -> Poll:
    """Return the ids of the live jobs, of the running jobs, and of some finished jobs.

    Args:
        after_id: return the finished jobs with higher ids. With None, return the finished jobs
            among the newest 4096 ids.
        missing: further ids to look up among the finished jobs.
    """
    [row] = await on.fetch("watch_ids", after_id, list(missing))
    live, running, finished = (
        ids_of(row[f"{which}_blocks"], row[f"{which}_masks"])
        for which in ("live", "running", "finished")
    )
    xids = (row["oldest_xid"], row["next_xid"])
    return Poll(row["now"], row["after_id"], *xids, live, running, finished)


async def jobs(on: Fetches, ids: Sequence[int]) -> list[JobRow]:
    """Return the rows of these jobs, live or finished; unknown ids are missing."""
    found: list[JobRow] = []
    for chunk in _chunks(ids):
        for record in await on.fetch("watch_jobs", chunk):
            row: dict[str, Any] = dict(record)
            row["errors"] = errors_of(row["errors"])
            found.append(msgspec.convert(row, JobRow))
    return found


async def since(
    on: Fetches, since_s: float, queue: str | None, task: str | None, batch: int
) -> list[int]:
    """Return the ids of at most `batch` jobs with events in the last `since_s` s, latest first."""
    return [row[0] for row in await on.fetch("watch_since", since_s, queue, task, batch)]


async def state(on: Fetches, after_id: int | None) -> State:
    """Return the state of queues, workers, running jobs and full limits.

    Args:
        after_id: State.born counts the jobs with higher ids, by queue. Only the newest BORN_MAX of
            these jobs are counted. With None, no job is counted.
    """
    [row] = await on.fetch("watch_state", after_id, BORN_MAX, PARTS_MAX)
    made: dict[str, Any] = dict(row)
    for part in ("queues", "workers", "running", "limits"):
        made[part] = msgspec.json.decode(made[part] or "[]")
    made["born"] = msgspec.json.decode(made["born"] or "{}")
    return msgspec.convert(made, State)


async def ended(on: Fetches, since_s: float, running: Sequence[int]) -> list[Ended]:
    """Return jobs whose last attempt ended in the last `since_s` seconds.

    If many attempts ended, some of the jobs are left out.

    Args:
        running: ids of jobs that were running at the last poll; these jobs are always looked up.
    """
    rows = await on.fetch("watch_ended", since_s, list(running), ENDED_MAX)
    return [msgspec.convert(dict(row), Ended) for row in rows]


def _chunks(ids: Sequence[int]) -> Iterator[list[int]]:
    for start in range(0, len(ids), ROWS_MAX):
        yield list(ids[start : start + ROWS_MAX])
