"""Statements of the dashboard: pages of jobs, single jobs, recently finished jobs, limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.job_changes import FINISHED_BADLY, Filter
from taskd.store.connections.statements import Fetches
from taskd.store.reading import reports

Row = dict[str, Any]

PAGE_ROWS = 50
# How many live and how many finished jobs one statement reads at most for a page. This read takes
# some 20 ms, or 30 ms if arguments are searched.
READ_MAX = 5000
# The same limit for a page that shows failed and cancelled jobs by their end, without a filter: an
# index serves these pages.
ENDS_READ_MAX = 500
# Of the jobs of one key of a limit, a page counts and names at most these numbers.
COUNT_MAX = 1000
HOLDERS_MAX = 3
ID_MAX = 2**63 - 1
# How many blocks of a partition of the history a chart reads at most: 16 MB with some 60,000 jobs,
# in 120 ms.
CHART_BLOCKS_MAX = 2048


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
            ended at its limit of rows, and it is unknown whether more jobs match.
    """

    jobs: list[Row]
    next: Key | None
    more: bool


@dataclass(frozen=True, slots=True)
class JobSearch:
    """The search for the jobs of a page.

    Attributes:
        args_text: a text that the arguments contain.
        unique_key: the unique key of the job.
    """

    filter: Filter = field(default_factory=Filter)
    args_text: str | None = None
    unique_key: str | None = None

    @property
    def states(self) -> list[str] | None:
        """Return the states as an argument of statements; None stands for all states."""
        return [state.value for state in self.filter.states] or None

    @property
    def searches_args(self) -> bool:
        """Return whether the search needs a login that can read arguments."""
        return self.args_text is not None or self.unique_key is not None

    @property
    def by_end(self) -> bool:
        """Return whether the page is sorted by the ends of jobs.

        That is so if the page shows only failed or cancelled jobs, and no arguments or unique keys
        are searched.
        """
        states = self.filter.states
        return bool(states) and set(states) <= FINISHED_BADLY and not self.searches_args

    @property
    def reads(self) -> int:
        """Return how many rows to read at most: without a filter, one more than a page shows."""
        chosen = self.filter
        if self.searches_args or chosen.queue or chosen.task or chosen.error:
            return READ_MAX
        if self.by_end:
            return ENDS_READ_MAX
        # Jobs in these states or of this time can be rare: then many rows must be read for a page.
        return READ_MAX if chosen.states or chosen.since_s else PAGE_ROWS + 1


async def reads_args(on: Fetches) -> bool:
    """Return whether the login of this connection can read arguments and results."""
    return bool((await on.fetch("web_rights"))[0][0])


async def find_jobs(on: Fetches, search: JobSearch, key: Key | None = None) -> Found:
    """Return a page of jobs, newest first.

    Raises:
        PermissionDenied: the search needs arguments, which the login is not allowed to read.
    """
    key = key or Key(ID_MAX)
    chosen = search.filter
    filters = (chosen.queue, chosen.task, search.states, chosen.error_pattern)
    limits = (chosen.since_s, chosen.older_than_s, search.reads, PAGE_ROWS + 1)
    if search.by_end:
        rows = await on.fetch("web_failed_jobs", key.at, key.id, *filters, *limits)
    else:
        only = None
        if search.searches_args:
            pattern = Filter(error=search.args_text).error_pattern
            searched = (key.id, pattern, search.unique_key, search.states, READ_MAX)
            only = [row[0] for row in await on.fetch("web_search_jobs", *searched)]
        rows = await on.fetch("web_jobs", key.id, *filters, *limits, only)
    return _page([dict(row) for row in rows], search.by_end)


def _page(rows: list[Row], by_end: bool) -> Found:
    reach = Key(rows[0]["reach_id"] or 0, rows[0]["reach_at"])
    jobs = [row for row in rows if row["id"] is not None]
    if len(jobs) > PAGE_ROWS:
        last = jobs[PAGE_ROWS - 1]
        key = Key(last["id"], last["finished_at"] if by_end else None)
        return Found(jobs[:PAGE_ROWS], key, more=True)
    return Found(jobs, reach if reach.id else None, more=False)


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
        names = ("args", "result", "unique_key", "key_scope", "version", "next_version")
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
