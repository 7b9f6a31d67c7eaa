"""What the dashboard reads: pages of jobs by key, one job, what finished lately."""

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
# Rows that one statement reads on its way to a page, of the live and of the finished jobs each:
# some 20 ms, and 30 when their arguments are searched.
READ_MAX = 5000
# Failed and cancelled jobs stand among each other, and among nothing else.
ENDS_READ_MAX = 500
# Of each key of a limit.
COUNT_MAX = 1000
HOLDERS_MAX = 3
ID_MAX = 2**63 - 1
# Of each partition of the history: 16 MB, some 60,000 jobs, 120 ms.
CHART_BLOCKS_MAX = 2048


class Key(NamedTuple):
    """Where a page begins: behind this job, in the order of the ids, or of the ends if `at` is."""

    id: int
    at: datetime | None = None


class Found(NamedTuple):
    """A page of jobs.

    Attributes:
        next: where the next one begins; None: this is the last.
        more: whether that has jobs for sure; if not, reading has stopped on the way to them.
    """

    jobs: list[Row]
    next: Key | None
    more: bool


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which jobs a page shows: those of a filter, with a text in their arguments, with a key."""

    filter: Filter = field(default_factory=Filter)
    args_text: str | None = None
    unique_key: str | None = None

    @property
    def states(self) -> list[str] | None:
        """The states as statements take them."""
        return [state.value for state in self.filter.states] or None

    @property
    def searches_args(self) -> bool:
        """Whether it needs a login that may read arguments."""
        return self.args_text is not None or self.unique_key is not None

    @property
    def by_end(self) -> bool:
        """Whether the jobs are in the order of their ends: failed and cancelled ones have one."""
        states = self.filter.states
        return bool(states) and set(states) <= FINISHED_BADLY and not self.searches_args

    @property
    def reads(self) -> int:
        """How many rows are read on the way: without a filter, no more than are shown."""
        asked = self.filter
        if self.searches_args or asked.queue or asked.task or asked.error:
            return READ_MAX
        if self.by_end:
            return ENDS_READ_MAX
        # Of what is live or finished some state may be rare; all of both need no search.
        return READ_MAX if asked.states or asked.since_s else PAGE_ROWS + 1


async def reads_args(on: Fetches) -> bool:
    """Whether the login of this connection may read arguments and results."""
    return bool((await on.fetch("web_rights"))[0][0])


async def find_jobs(on: Fetches, wanted: Wanted, key: Key | None = None) -> Found:
    """A page of jobs, the newest first.

    Raises:
        PermissionDenied: the login may not read arguments, and they are searched.
    """
    key = key or Key(ID_MAX)
    asked = wanted.filter
    filters = (asked.queue, asked.task, wanted.states, asked.error_pattern)
    limits = (asked.since_s, asked.older_than_s, wanted.reads, PAGE_ROWS + 1)
    if wanted.by_end:
        rows = await on.fetch("web_failed_jobs", key.at, key.id, *filters, *limits)
    else:
        only = None
        if wanted.searches_args:
            pattern = Filter(error=wanted.args_text).error_pattern
            searched = (key.id, pattern, wanted.unique_key, wanted.states, READ_MAX)
            only = [row[0] for row in await on.fetch("web_search_jobs", *searched)]
        rows = await on.fetch("web_jobs", key.id, *filters, *limits, only)
    return _page([dict(row) for row in rows], wanted.by_end)


def _page(rows: list[Row], by_end: bool) -> Found:
    reach = Key(rows[0]["reach_id"] or 0, rows[0]["reach_at"])
    jobs = [row for row in rows if row["id"] is not None]
    if len(jobs) > PAGE_ROWS:
        last = jobs[PAGE_ROWS - 1]
        key = Key(last["id"], last["finished_at"] if by_end else None)
        return Found(jobs[:PAGE_ROWS], key, more=True)
    return Found(jobs, reach if reach.id else None, more=False)


async def find_job(on: Fetches, job_id: int, *, reads_args: bool) -> Row | None:
    """Everything about one job, its JSON decoded; None when nobody knows it.

    Args:
        reads_args: the login may see arguments and results; without, `args` is missing.
    """
    for record in await on.fetch("web_job", job_id):
        row = dict(record)
        for name in ("errors", "progress"):
            row[name] = None if row[name] is None else msgspec.json.decode(row[name])
        whole = await reports.show_job(on, job_id) if reads_args else None
        names = ("args", "result", "unique_key", "key_scope", "version", "next_version")
        return row | {name: whole[name] for name in names} if whole else row
    return None


async def finished_lately(
    on: Fetches, *, window_s: float, steps: int, queue: str | None = None
) -> list[Row]:
    """What finished lately, in steps; one without a number when nothing did.

    `since` and `until`, in each row, are the window, which may be shorter than asked for.
    """
    rows = await on.fetch("web_finished", queue, window_s, steps, CHART_BLOCKS_MAX)
    return [dict(row) for row in rows]


async def limit_keys(on: Fetches, name: str, first: str) -> list[Row]:
    """The keys of a limit from `first` on: one more than a page has, which begins the next one.

    Each with its counts, of which those above COUNT_MAX are COUNT_MAX + 1, and `holders`: the jobs
    that have its places, those that run first.
    """
    rows = await on.fetch("web_limit_keys", name, first, PAGE_ROWS + 1, COUNT_MAX + 1, HOLDERS_MAX)
    return [dict(row) | {"holders": msgspec.json.decode(row["holders"])} for row in rows]


async def watch_jobs(on: Fetches, ids: Sequence[int]) -> dict[int, tuple[Any, ...]]:
    """What tells whether a job has changed, by id; those that nobody knows are missing."""
    return {row[0]: tuple(row)[1:] for row in await on.fetch("web_watch", list(ids))}
