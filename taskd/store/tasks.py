"""Published tasks: find, list, pause, resume and forget them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.job import PRIORITY_DEFAULT
from taskd.core.jobs.limit import LimitOf, limit_of
from taskd.core.jobs.unique import Unique, of_rule
from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches

NAMES_MAX = 10_000


class PublishedTask(NamedTuple):
    """A row of `taskd.task`, with the columns of `find_tasks`.

    Attributes:
        args_schema: the JSON Schema of the arguments, as text.
        unique_rule: the rule for unique keys, as JSON text.
        metadata_text: the default metadata of the task's jobs, as JSON text.
        priority: the priority of jobs that are enqueued without one.
    """

    name: str
    app: str
    signature: str
    queue: str
    max_attempts: int
    timeout_s: float | None
    args_schema: str
    args_version: int
    redact: list[str]
    published_at: datetime
    limit_name: str | None = None
    limit_by: Sequence[str] | None = None
    limit_defaults: str | None = None
    unique_rule: str | None = None
    metadata_text: str | None = None
    priority: int = PRIORITY_DEFAULT

    @property
    def metadata(self) -> Mapping[str, Any] | None:
        """The default metadata of the task's jobs, or None."""
        return None if self.metadata_text is None else msgspec.json.decode(self.metadata_text)

    def limit_of(self, args: str) -> LimitOf | None:
        """Return the limit of a job with these arguments (JSON text), or None if it has none."""
        if self.limit_name is None:
            return None
        defaults = msgspec.json.decode(self.limit_defaults or "{}")
        return limit_of(self.limit_name, self.limit_by or (), args, defaults, self.redact)

    def unique_of(self, args: str) -> Unique | None:
        """Return the unique key of a job with these arguments (JSON text); None if it has none."""
        return None if self.unique_rule is None else of_rule(self.unique_rule, args)


async def find(on: Fetches, names: Collection[str]) -> dict[str, PublishedTask]:
    """Return the published tasks with these names, by name; unpublished tasks are missing."""
    rows = await on.fetch("find_tasks", list(names))
    return {row[0]: PublishedTask(*row) for row in rows}


async def pause(
    on: Fetches, names: Sequence[str], for_s: float | None, reason: str | None
) -> list[str]:
    """Pause tasks for `for_s` seconds (None: until they are resumed).

    Returns:
        The names of the tasks that are paused now, former names included. Tasks that no worker has
        published are missing.
    """
    rows = await on.fetch("pause_tasks", list(names), for_s, reason, actor())
    return sorted(row[0] for row in rows)


async def resume(on: Fetches, names: Sequence[str]) -> list[str]:
    """Resume tasks; return the names of those that were paused."""
    return sorted(row[0] for row in await on.fetch("resume_tasks", list(names), actor()))


class Forgotten(NamedTuple):
    """The result of forget() for one task.

    Attributes:
        app: the app that has published the task.
        workers: number of workers that have the task and were not declared dead.
        jobs: number of live jobs of the task, at most 1,000.
        schedules: names of at most 10 schedules of the task that are not stopped.
        forgotten: whether the record of the task was deleted.
    """

    name: str
    app: str
    workers: int
    jobs: int
    schedules: list[str]
    forgotten: bool


async def forget(on: Fetches, names: Sequence[str], *, despite_jobs: bool) -> list[Forgotten]:
    """Delete the records of tasks that no worker has, and that no live job or schedule names.

    Args:
        despite_jobs: delete a record even if live jobs or schedules name the task.

    Returns:
        The tasks that were published, sorted by name.
    """
    rows = await on.fetch("forget_tasks", list(names), despite_jobs, actor())
    return [Forgotten(*row) for row in rows]


async def names(on: Fetches) -> list[str]:
    """Return the names of at most NAMES_MAX published tasks, sorted."""
    return [row[0] for row in await on.fetch("task_names", NAMES_MAX)]
