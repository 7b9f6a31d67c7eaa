"""Schedules in the database: declared, made at run time, fired, paused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from taskd.core.schedule import Cron, Every, Schedule, When, first
from taskd.errors import AppError, ScheduleNotFound
from taskd.store.connections.statements import Fetches

Row = dict[str, Any]

ROWS_MAX = 10_000


class TicksIn(NamedTuple):
    """Seconds until the next tick, of schedules without a query and with one; None: there is none.

    Those with a query are told of to workers that may run it.
    """

    plain_s: float | None
    query_s: float | None


class DueSchedule(NamedTuple):
    """A schedule whose next tick has come, or that has none yet; `now` is the database's."""

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

    def when(self) -> When:
        """Its rhythm.

        Raises:
            InvalidSchedule: it was made by SQL, with a cron that is none.
        """
        return rhythm(self.every_s, self.cron, self.timezone, self.starts_at)


class Fired(NamedTuple):
    """What came of a tick: `fired`, `skipped`, `failed`, `moved`; None: others have fired it."""

    outcome: str | None
    jobs: int
    error: str | None


def rhythm(every_s: float | None, cron: str | None, timezone: str, starts_at: datetime) -> When:
    """The rhythm that columns of a schedule tell.

    Raises:
        InvalidSchedule: they tell none.
    """
    return Every(every_s, starts_at) if every_s is not None else Cron(cron or "", timezone)


async def set_(
    on: Fetches, schedules: Sequence[Schedule], app: str | None = None
) -> dict[str, str]:
    """Make or change schedules, by hand or as the code of an app declares them; what happened.

    `created`, `changed`, `unchanged`, or `taken`: it is not this app's.

    Raises:
        ValueRefused: PostgreSQL refuses a value, or knows neither queue nor task.
    """
    if not schedules:
        return {}
    now = (await on.fetch("database_time"))[0][0]
    definitions = msgspec.json.encode([_definition(each, now) for each in schedules]).decode()
    return {row[0]: row[1] for row in await on.fetch("set_schedules", app, definitions)}


def _definition(schedule: Schedule, now: datetime) -> Row:
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
        "starts_at": period and period.starts_at,
        "next_at": first(when, now),
        "checked": job.checked and schedule.query is None,
    }


async def publish(on: Fetches, app: str, schedules: Iterable[Schedule]) -> None:
    """Publish what an app declares; what it has declared before and does no more is deleted.

    Raises:
        AppError: a name belongs to another app, or was taken at run time.
    """
    declared = list(schedules)
    told = await set_(on, declared, app)
    taken = ", ".join(repr(name) for name, outcome in told.items() if outcome == "taken")
    if taken:
        raise AppError(
            f"app {app!r} declares schedules that another app has declared, or somebody has made "
            f"at run time: {taken}. Rename them, or delete those: taskd schedules delete"
        )
    await on.fetch("drop_undeclared_schedules", app, [each.name for each in declared])


async def due(on: Fetches, batch: int, *, with_query: bool) -> list[DueSchedule]:
    """Schedules whose next tick has come, the longest due first."""
    return [DueSchedule(*row) for row in await on.fetch("due_schedules", with_query, batch)]


async def fire(
    on: Fetches,
    read: DueSchedule,
    ticks: Sequence[datetime],
    next_at: datetime,
    metadata: str | None = None,
) -> Fired:
    """Make the jobs of these ticks and move the next one, if nobody has done so since it was read.

    Raises:
        StoreUnavailable: not now; the ticks stay due.
    """
    args = (read.name, read.revision, read.next_at, list(ticks), next_at, metadata)
    return Fired(*(await on.fetch("fire_schedule", *args))[0])


async def stall(on: Fetches, read: DueSchedule, error: str) -> bool:
    """Pause a schedule whose next tick nobody can tell; whether it was done here."""
    return bool(await on.fetch("pause_invalid_schedule", read.name, read.revision, error[:400]))


async def next_ticks(on: Fetches) -> TicksIn:
    """When the next ticks come."""
    return TicksIn(*(await on.fetch("next_ticks"))[0])


async def list_(on: Fetches) -> list[Row]:
    """All schedules in the order of their names, without their arguments."""
    return [dict(record) for record in await on.fetch("list_schedules", ROWS_MAX)]


async def delete(on: Fetches, names: Sequence[str]) -> dict[str, str | None]:
    """Delete schedules; of those that there were the app, None for those made at run time."""
    return {row[0]: row[1] for row in await on.fetch("delete_schedules", list(names))}


async def pause(
    on: Fetches, names: Sequence[str], for_s: float | None, reason: str | None
) -> list[str]:
    """Let no tick fire for so many seconds, or (None) until resumed; the names that there are."""
    return sorted(row[0] for row in await on.fetch("pause_schedules", list(names), for_s, reason))


async def resume(on: Fetches, names: Sequence[str]) -> list[str]:
    """Fire again, from the next tick on; the names of those that were paused."""
    return sorted(row[0] for row in await on.fetch("resume_schedules", list(names)))


async def run(on: Fetches, name: str) -> list[int] | None:
    """Make the jobs of a schedule now; their ids, None: it skips, as one of its jobs is live.

    Raises:
        ScheduleNotFound: there is none of that name.
        PermissionDenied: it has a query, which runs as another user.
    """
    outcome, ids = (await on.fetch("run_schedule", name))[0]
    if outcome is None:
        raise ScheduleNotFound(f"there is no schedule {name!r}; see taskd schedules list")
    return None if outcome == "skipped" else list(ids)
