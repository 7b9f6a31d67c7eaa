"""Pages of jobs that match a filter, newest first: for the dashboard and `taskd jobs list`."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

from taskd.core.jobs.job_filter import JobFilter
from taskd.errors import PermissionDenied
from taskd.store.connections.statements import Fetches

Row = dict[str, Any]

# Maximum number of live jobs, and of finished jobs, that one statement reads for a page of a
# filter. This read takes some 20 ms, or 30 ms if arguments are searched.
READ_MAX = 5000
# The same limit for a page that shows failed and cancelled jobs by their end, without a filter: an
# index serves these pages.
ENDS_READ_MAX = 500
# The same limit for further reads of list_jobs(), which reads until its list is full or all jobs
# were read.
LIST_READ_MAX = 100_000


class Key(NamedTuple):
    """Where a page begins: after the job with this id.

    Attributes:
        at: when the job with this id ended; None if the page is sorted by id, and not by the ends
            of jobs.
    """

    id: int
    at: datetime | None = None


class Found(NamedTuple):
    """A page of jobs.

    Attributes:
        next: where the next page begins; None on the last page.
        more: whether the next page certainly has jobs. If not, and there is a next page, the read
            ended at its limit of rows. Then it is unknown whether more jobs match.
    """

    jobs: list[Row]
    next: Key | None
    more: bool


async def find_page(
    on: Fetches, chosen: JobFilter, key: Key | None, page_rows: int, read_max: int | None = None
) -> Found:
    """Return a page of jobs, newest first: by id, or if the filter is `by_end`, by their ends.

    Args:
        page_rows: maximum number of jobs on the page.
        read_max: maximum number of live jobs, and of finished jobs, to read. With None, the filter
            decides.

    Raises:
        PermissionDenied: the login is not allowed to read a column of the filter, for example the
            arguments.
    """
    at, job_id = (key.at, key.id) if key else (None, None)
    reads = read_max or _reads(chosen, page_rows)
    place = (at, job_id, chosen.by_end)
    try:
        read = await on.fetch("list_jobs", chosen.document(), *place, reads, page_rows + 1)
    except PermissionDenied as error:
        if not chosen.private:
            raise
        raise PermissionDenied(
            "only members of taskd_admin can find jobs by arguments, unique keys or metadata; "
            f"{error}"
        ) from error
    rows = [dict(row) for row in read]
    reach = (rows[0]["reach_id"], rows[0]["reach_at"])
    jobs = [row for row in rows if row["id"] is not None]
    for row in jobs:
        del row["reach_id"], row["reach_at"]
    if len(jobs) > page_rows:
        last = jobs[page_rows - 1]
        key = Key(last["id"], last["finished_at"] if chosen.by_end else None)
        return Found(jobs[:page_rows], key, more=True)
    return Found(jobs, Key(*reach) if reach[0] else None, more=False)


async def list_jobs(on: Fetches, chosen: JobFilter, limit: int) -> list[Row]:
    """Return at most `limit` jobs in the order of find_page(), however many rows must be read.

    Raises:
        PermissionDenied: like find_page().
    """
    found = await find_page(on, chosen, None, limit)
    jobs = found.jobs
    while found.next is not None and len(jobs) < limit:
        found = await find_page(on, chosen, found.next, limit - len(jobs), LIST_READ_MAX)
        jobs += found.jobs
    return jobs


def _reads(chosen: JobFilter, page_rows: int) -> int:
    """Return the maximum number of rows to read; without a filter, one more than a page shows."""
    if chosen.empty:
        return page_rows + 1
    if chosen == JobFilter(states=chosen.states) and chosen.by_end:
        return ENDS_READ_MAX
    # Matching jobs can be rare, so that many rows must be read for a page.
    return READ_MAX
