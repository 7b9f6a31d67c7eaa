"""Reports for the command line; the columns of a row are the keys of the `--json` output."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from taskd.core import worker_status
from taskd.core.explain.error_groups import Failures
from taskd.core.explain.reasons import AHEAD_MAX, Facts
from taskd.core.jobs.job import JobState
from taskd.core.jobs.unique import version_of_number
from taskd.core.stored_json import decoded, errors_of
from taskd.store import workflows
from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches
from taskd.store.workers import Incarnation

Row = dict[str, Any]
ROWS_MAX = 1000
# Maximum number of workers, and of parents, that the report about one job names.
SERVERS_MAX = 20
PARENTS_MAX = 20


class Progress(msgspec.Struct):
    """The last progress report of a running attempt, and its age in seconds."""

    done: float
    total: float | None
    note: str
    reported_ago_s: float


class Action(msgspec.Struct):
    """An action by hand on a job, a queue, a schedule, ...

    Attributes:
        by: the database user, and in parentheses the actor whom the client has named.
        detail: further values, such as what was changed.
    """

    at: datetime
    action: str
    by: str
    reason: str | None = None
    detail: dict[str, Any] | None = None

    def text(self) -> str:
        """Return the action in a line: `cancel by taskd_web (dashboard ada): withdrawn`."""
        values = ", ".join(f"{name} {value}" for name, value in (self.detail or {}).items())
        action = f"{self.action} ({values})" if values else self.action
        return f"{action} by {self.by}" + (f": {self.reason}" if self.reason else "")


class Errors(NamedTuple):
    """Errors of jobs, and whether the errors of all jobs were read.

    Attributes:
        failures: the errors, by task and text.
        failed_back_s: age in seconds of the oldest failed job that was read, if the read ended at
            its limit of rows; None if all were read.
        all_scheduled: whether every scheduled job was read.
    """

    failures: list[Failures]
    failed_back_s: float | None
    all_scheduled: bool


async def show_job(on: Fetches, job_id: int, *, unredacted: bool = False) -> Row | None:
    """Return all columns of one job; None if the id is unknown.

    `args`, `result` and `metadata` are JSON as text, `errors` are PastErrors, `actions` are
    Actions, and `progress` is a Progress or None. `past_workers` maps the id of each worker of an
    error, as a text, to its `name`, `host` and `pid`.

    Args:
        unredacted: show the arguments that the job's task redacts.
    """
    for row in _rows(await on.fetch("show_job", job_id, unredacted)):
        moment = row.pop("version_at")
        more: Row = {
            "past_workers": decoded(row["past_workers"], dict[str, Row], {}),
            "version": row["version"] if moment is None else moment,
            "next_version": version_of_number(row["next_version"]),
        }
        return row | read_parts(row) | more
    return None


def read_parts(row: Row) -> Row:
    """Return the columns of a job that are JSON of a known form, decoded."""
    progress = decoded(row["progress"], Progress, None)
    actions = decoded(row["actions"], list[Action], [])
    for each in actions:
        each.at = each.at.astimezone(UTC)
    return {"errors": errors_of(row["errors"]), "progress": progress, "actions": actions}


async def why_job(on: Fetches, job_id: int) -> Facts | None:
    """Return the facts that decide whether a job runs; None if the id is unknown."""
    for row in _rows(await on.fetch("why_job", job_id, AHEAD_MAX + 1, SERVERS_MAX)):
        more: Row = {
            name: decoded(row[name], list[Row], []) for name in ("servers", "slot_holders")
        }
        for server in more["servers"]:
            server["status"] = worker_status.decode(server["status"])
        if row["state"] == JobState.BLOCKED:
            parents = await workflows.pending_parents(on, job_id, PARENTS_MAX)
            more["parents"] = parents
            more["parents_left"] = parents[0]["parents"] if parents else 0
        return msgspec.convert(row | more, Facts)
    return None


async def job_states(on: Fetches, ids: Sequence[int]) -> dict[int, JobState]:
    """Return the states of jobs; unknown ids are missing."""
    return {row[0]: JobState(row[1]) for row in await on.fetch("job_states", list(ids))}


async def list_queues(on: Fetches) -> list[Row]:
    """Return queues, each with the numbers of its jobs and workers, and its pause."""
    return _rows(await on.fetch("list_queues", ROWS_MAX))


async def kept_by_queue(on: Fetches, name: str) -> Row:
    """Return how long a queue keeps finished jobs, in seconds."""
    return _rows(await on.fetch("kept_by_queue", name))[0]


async def keep_queue(on: Fetches, name: str, done_s: int | None, failed_s: int | None) -> Row:
    """Set how long a queue keeps finished jobs (None: unchanged); return the queue's new row."""
    return _rows(await on.fetch("keep_queue", name, done_s, failed_s, actor()))[0]


class DueQueues(NamedTuple):
    """Queues that have due jobs and are not paused.

    Attributes:
        workers: the number of live workers that are not draining, by queue. At most ROWS_MAX queues
            are listed; queues without such a worker come first.
        queues: number of all queues that have due jobs and are not paused.
        unserved: number of these queues that have no such worker.
    """

    workers: dict[str, int]
    queues: int
    unserved: int


async def queues_with_due_jobs(on: Fetches) -> DueQueues:
    """Return the queues that have due jobs and are not paused."""
    rows = await on.fetch("queues_with_due_jobs", ROWS_MAX)
    workers = {row["queue"]: row["workers"] for row in rows}
    return DueQueues(workers, *((rows[0]["queues"], rows[0]["unserved"]) if rows else (0, 0)))


async def count_serving(on: Fetches, queue: str) -> int:
    """Return how many live workers that are not draining serve a queue."""
    count: int = (await on.fetch("count_serving", queue))[0][0]
    return count


async def list_workers(on: Fetches, dead_s: float) -> list[Row]:
    """Return the workers that have not ended, and those that ended in the last `dead_s` seconds."""
    return _rows(await on.fetch("list_workers", dead_s, ROWS_MAX))


async def failing_services(on: Fetches) -> list[Row]:
    """Return services of live workers that fail repeatedly, the longest failing first."""
    return _rows(await on.fetch("doctor_services", ROWS_MAX))


async def list_workers_here(on: Fetches, me: Incarnation) -> list[Row]:
    """Return the workers with the host, boot and pid namespace of this process, newest first.

    Workers that were declared dead are missing.
    """
    return _rows(
        await on.fetch("list_workers_here", me.host, me.boot_id, me.pid_namespace, ROWS_MAX)
    )


class Names(NamedTuple):
    """Existing names, and whether a job with the requested name was found.

    Attributes:
        queue_met: whether one of the newest jobs is in the requested queue.
        task_met: whether one of the newest jobs is of the requested task.
    """

    queues: list[str]
    tasks: list[str]
    queue_met: bool
    task_met: bool


async def known_names(on: Fetches, queue: str | None, task: str | None) -> Names:
    """Return the names of queues and tasks, and whether a recent job has a requested name."""
    return Names(*(await on.fetch("known_names", queue, task, ROWS_MAX))[0])


async def list_actions(
    on: Fetches, *, since_s: float, target: str | None, by: str | None, limit: int
) -> list[Row]:
    """Return at most `limit` actions by hand of the last `since_s` seconds, newest first.

    Args:
        target: what was acted on: `job 17`, `queue email`, `task send`, `schedule nightly`,
            `limit api`, `worker 42`, `workflow 7`.
        by: a part of the database user or of the actor, in upper or lower case.
    """
    return _rows(await on.fetch("list_actions", since_s, target, by, limit))


async def list_tasks(on: Fetches) -> list[Row]:
    """Return published tasks, each with the JSON Schema of its arguments as text."""
    return _rows(await on.fetch("list_tasks", ROWS_MAX))


@dataclass(frozen=True, slots=True)
class Recently:
    """Which jobs statistics are about.

    Attributes:
        since: jobs that ended within this number of seconds, or since this time.
    """

    since: float | datetime
    queue: str | None = None
    task: str | None = None

    @property
    def parameters(self) -> tuple[Any, ...]:
        """Return the first parameters of the statements."""
        times = (None, self.since) if isinstance(self.since, datetime) else (self.since, None)
        return (*times, self.queue, self.task)


async def stats(on: Fetches, recently: Recently, by: str | None = None) -> list[Row]:
    """Count the jobs that ended recently, by queue and task, with their wait and run times.

    Without `by`, jobs that wait for another attempt are counted, too.

    Args:
        by: `hour` or `day`, in UTC, to count each of them separately.
    """
    rows = _rows(await on.fetch("stats", *recently.parameters, by, ROWS_MAX))
    return [_flat(row, by) for row in rows]


async def stats_attempts(on: Fetches, recently: Recently) -> list[Row]:
    """Return how many jobs ended after which number of attempts, by queue and task.

    The column `attempts` is a mapping from a number of attempts, as text, to a number of jobs.
    """
    rows = _rows(await on.fetch("stats_attempts", *recently.parameters, ROWS_MAX))
    return [row | {"attempts": msgspec.json.decode(row["attempts"])} for row in rows]


async def stats_errors(on: Fetches, recently: Recently, read_max: int) -> Errors:
    """Return recent errors by task and text.

    These are the errors of failed jobs, and of jobs that wait for another attempt.

    Args:
        read_max: maximum number of failed jobs, and of scheduled jobs, to read.
    """
    rows = _rows(await on.fetch("stats_errors", *recently.parameters, read_max))
    return Errors(
        [msgspec.convert(row, Failures) for row in rows if row["task"] is not None],
        rows[0]["failed_back_s"] if rows[0]["failed_read"] >= read_max else None,
        rows[0]["scheduled_read"] < read_max,
    )


def _flat(row: Row, by: str | None) -> Row:
    """Return a row with the name of the period, and with a column for each percentile."""
    period = row.pop("period")
    flat = {} if by is None else {by: period}
    for name, value in row.items():
        if name in ("wait_s", "run_s"):
            p50, p95 = value or (None, None)
            flat |= {f"{name[:-2]}_p50_s": p50, f"{name[:-2]}_p95_s": p95}
        elif name != "retrying" or by is None:
            flat[name] = value
    return flat


def _rows(records: Iterable[Any]) -> list[Row]:
    return [dict(record) for record in records]
