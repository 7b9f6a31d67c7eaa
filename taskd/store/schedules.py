"""Schedules in the database: declare, change at run time, fire, pause, run, list and delete."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from taskd.core.schedule import Cron, Due, Every, Schedule, When, first
from taskd.core.schedule import zones as all_zones
from taskd.errors import AppError, ScheduleNotFound
from taskd.store.acting import actor
from taskd.store.connections.statements import Fetches

Row = dict[str, Any]

ROWS_MAX = 10_000


class TicksIn(NamedTuple):
    """Seconds until the next ticks: 0 or less if a tick is due, None if no schedule has a tick.

    Attributes:
        plain_s: seconds until the next tick of schedules without a query.
        query_s: seconds until the next tick of schedules whose query runs as this worker's user.
    """

    plain_s: float | None
    query_s: float | None


class DueSchedule(NamedTuple):
    """A schedule whose next tick is due, or not computed yet (`next_at` is None).

    Ticks are computed from `now`: the database's time, or the end of the schedule's pause if that
    is later. `waits`: the next tick waits for the end of a live job.
    """

    name: str
    revision: int
    every_s: float | None
    cron: str | None
    timezone: str
    starts_at: datetime
    next_at: datetime | None
    catch_up: str
    catch_up_max: int
    now: datetime
    overlap: str
    waits: bool

    def when(self) -> When:
        """Return the rule for its ticks.

        Raises:
            InvalidSchedule: the cron expression is not valid. SQL clients can create schedules, and
                PostgreSQL does not check cron expressions.
        """
        return rhythm(self.every_s, self.cron, self.timezone, self.starts_at)


class Fired(NamedTuple):
    """The result of fire().

    Attributes:
        outcome: `fired` if the ticks were fired; `skipped` if an earlier job is live; `waits` if an
            earlier job is live and the tick stays due; `failed` if an error occurred, see `error`;
            `moved` if there were no ticks to fire, so that only the next tick was set. None if
            nothing was done, because another worker fires or has fired the ticks, or because the
            schedule was changed or paused.
        jobs: number of enqueued jobs.
        error: why the ticks failed. If the ticks were fired, why some rows of the query got no
            jobs.
    """

    outcome: str | None
    jobs: int
    error: str | None


def as_service(name: str) -> str:
    """Return the name by which a worker's list of failing services contains a failing schedule.

    The statements list_schedules and doctor_schedules search for this name.
    """
    return f"schedule {name}"


def rhythm(every_s: float | None, cron: str | None, timezone: str, starts_at: datetime) -> When:
    """Return the rule for ticks that the columns of a schedule describe.

    Raises:
        InvalidSchedule: the columns do not describe a valid rule.
    """
    return Every(every_s, starts_at) if every_s is not None else Cron(cron or "", timezone)


async def set_(
    on: Fetches, schedules: Sequence[Schedule], app: str | None = None
) -> dict[str, str]:
    """Make or change schedules.

    Args:
        app: the app that declares the schedules; None if they are set by hand.

    Returns:
        By name: `created`, `changed`, `unchanged`, or `taken` (a different schedule of the same
        name was declared by another app, or made by hand).

    Raises:
        ValueRefused: PostgreSQL refuses a value, or the arguments do not fit the published task. Or
            the task is not published, and the schedule names no queue.
    """
    if not schedules:
        return {}
    now = (await on.fetch("database_time"))[0][0]
    rows = [{**definition(each), "next_at": first(each.when, now)} for each in schedules]
    definitions = msgspec.json.encode(rows).decode()
    return {row[0]: row[1] for row in await on.fetch("set_schedules", app, definitions, actor())}


def definition(schedule: Schedule) -> Row:
    """Return the columns of a schedule, without its next tick."""
    job, when = schedule.job, schedule.when
    period = when if isinstance(when, Every) else None
    cron = when if isinstance(when, Cron) else None
    return {
        "name": schedule.name,
        "task": job.task,
        "args": msgspec.Raw(job.args.encode()),
        "every_s": period and period.period_s,
        "cron": cron and cron.expression,
        "timezone": cron.timezone if cron else "UTC",
        "query": schedule.query and schedule.query.strip().rstrip(";"),
        "queue": job.queue,
        "priority": job.priority,
        "max_attempts": job.max_attempts,
        "timeout_s": job.timeout_s,
        "catch_up": str(schedule.catch_up),
        "catch_up_max": schedule.catch_up_max,
        "overlap": str(schedule.overlap),
        "jitter_s": schedule.jitter_s,
        "deadline_s": schedule.deadline_s,
        "ends_by": schedule.ends_by,
        "ends_by_s": schedule.ends_by_s,
        # A checked job without a key gets no key, even if its task has a rule for unique keys.
        "no_key": job.no_key or (job.checked and job.unique is None),
        "unique_rule": msgspec.Raw(job.unique.rule({}).encode()) if job.unique else None,
        "starts_at": period and period.starts_at,
        "checked": job.checked and schedule.query is None,
    }


async def publish(on: Fetches, app: str, schedules: Iterable[Schedule]) -> None:
    """Publish the schedules that an app declares.

    settle() withdraws the schedules of the app that no live worker declares any more.

    Raises:
        AppError: a name belongs to another app, or to a schedule that was made at run time.
    """
    declared = list(schedules)
    outcomes = await set_(on, declared, app)
    taken = ", ".join(repr(name) for name, outcome in outcomes.items() if outcome == "taken")
    if taken:
        raise AppError(
            f"app {app!r} declares schedules that another app has declared, or that were made at "
            f"run time: {taken}. Rename them, or delete the others: taskd schedules delete. If the "
            "other app is an earlier version of this one, give this app the same name: --app-name"
        )


class Settled(NamedTuple):
    """The schedules that settle() has withdrawn, and those that it has resumed, by name."""

    withdrawn: list[str]
    resumed: list[str]


async def settle(on: Fetches, worker_id: int) -> Settled:
    """Withdraw the schedules of a worker's app that no live worker declares.

    A withdrawn schedule has no ticks. This also resumes withdrawn schedules that a live worker
    declares again.
    """
    rows = await on.fetch("settle_schedules", worker_id)
    return Settled(
        sorted(row[0] for row in rows if row[1]), sorted(row[0] for row in rows if not row[1])
    )


async def due(on: Fetches, batch: int, *, with_query: bool) -> list[DueSchedule]:
    """Return at most `batch` schedules whose next tick is due or not computed yet.

    Schedules without a computed tick come first, then the schedules that have been due for longest.

    Args:
        with_query: return schedules whose query runs as this user; otherwise, return schedules
            without a query.
    """
    return [DueSchedule(*row) for row in await on.fetch("due_schedules", with_query, batch)]


async def fire(
    on: Fetches,
    read: DueSchedule,
    found: Due,
    metadata: str | None = None,
) -> Fired:
    """Enqueue the jobs of the due ticks and set the next tick, unless another worker has done so.

    Raises:
        StoreUnavailable: PostgreSQL cannot be reached or is busy; the ticks stay due.
    """
    ticks, zones, locals_, known = list(found.ticks), None, None, None
    if found.zone_ticks:
        ticks = [each.tick for each in found.zone_ticks]
        zones = [each.timezone for each in found.zone_ticks]
        locals_ = [each.local for each in found.zone_ticks]
        # Once a day is often enough to look for rows whose time zone does not exist.
        known = list(all_zones()) if "UTC" in zones else None
    args = (read.name, read.revision, read.next_at, ticks, found.next_at, metadata)
    return Fired(*(await on.fetch("fire_schedule", *args, zones, locals_, known))[0])


async def pause_invalid(on: Fetches, read: DueSchedule, error: str) -> bool:
    """Pause a schedule whose next tick cannot be computed; return whether this call paused it."""
    return bool(await on.fetch("pause_invalid_schedule", read.name, read.revision, error[:400]))


async def next_ticks(on: Fetches) -> TicksIn:
    """Return when the next ticks are due."""
    return TicksIn(*(await on.fetch("next_ticks"))[0])


async def list_(on: Fetches) -> list[Row]:
    """Return at most ROWS_MAX schedules, sorted by name, without their arguments."""
    return [dict(record) for record in await on.fetch("list_schedules", ROWS_MAX)]


async def delete(on: Fetches, names: Sequence[str]) -> dict[str, str | None]:
    """Delete schedules; return by name the app that still declares each (None: no app)."""
    return {row[0]: row[1] for row in await on.fetch("delete_schedules", list(names), actor())}


async def pause(
    on: Fetches, names: Sequence[str], for_s: float | None, reason: str | None
) -> list[str]:
    """Pause schedules for `for_s` seconds (None: until resumed); return the names that exist."""
    rows = await on.fetch("pause_schedules", list(names), for_s, reason, actor())
    return sorted(row[0] for row in rows)


async def resume(on: Fetches, names: Sequence[str]) -> list[str]:
    """Resume schedules from their next tick on; return the names of those that were paused."""
    return sorted(row[0] for row in await on.fetch("resume_schedules", list(names), actor()))


class Ran(NamedTuple):
    """The result of run().

    Attributes:
        outcome: `fired`; `skipped`: the overlap of the schedule is `skip`, and one of its jobs is
            live; `waits`: the overlap is `wait` or `cancel`, a job is live, and the new jobs cannot
            wait for that job. The new jobs cannot wait if they are runs of a pipeline, have unique
            keys, or would wait for too many jobs.
        ids: the enqueued jobs; None if nothing was enqueued.
    """

    outcome: str
    ids: list[int] | None


async def run(on: Fetches, name: str) -> Ran:
    """Enqueue the jobs of a schedule now.

    Raises:
        ScheduleNotFound: no schedule has this name.
        PermissionDenied: this user has no right to run schedules, or the schedule has a query,
            which runs as another user.
    """
    outcome, ids = (await on.fetch("run_schedule", name, actor()))[0]
    if outcome is None:
        raise ScheduleNotFound(
            f"there is no schedule {name!r}. List schedules: taskd schedules list"
        )
    return Ran(outcome, list(ids) if ids is not None else None)
