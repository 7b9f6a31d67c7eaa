"""Schedules: jobs at fixed times.

    schedule("tidy", tidy.job(), every("5m"))
    schedule("nightly", report.job(of="sales"), cron("0 3 * * *", "Europe/Berlin"), overlap="skip")
    schedule("hourly", ingest.job(url="https://example.org"), every("1h"))  # a run of a pipeline

At the top level of a module of the app, these calls declare schedules; the workers of the app
publish them when they start. At run time, `client.schedules` makes and changes schedules.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from taskd.config import parse_duration_s
from taskd.core.jobs.job import NewJob
from taskd.core.schedule import (
    CATCH_UP_MAX_DEFAULT,
    PER_ROW,
    CatchUp,
    Cron,
    Every,
    Overlap,
    Schedule,
    When,
)
from taskd.core.tasks import registry as registries
from taskd.core.tasks.task import Task
from taskd.errors import InvalidSchedule, ScheduleNotFound

if TYPE_CHECKING:  # the import loads the driver, which declarations do not need
    from taskd.client.workflows import Pipeline

__all__ = [
    "PER_ROW",
    "CatchUp",
    "Cron",
    "Every",
    "InvalidSchedule",
    "Overlap",
    "Schedule",
    "ScheduleNotFound",
    "cron",
    "every",
    "schedule",
]


def every(period: float | str | timedelta, starts_at: datetime | None = None) -> Every:
    """Return ticks with a fixed period. A tick that is fired late does not shift later ticks.

    Args:
        period: seconds, or a text such as `30s`, `5m`, `2h`; from 1 s to ten years.
        starts_at: the first tick, with a time zone; by default one period after the schedule is
            made. If this time is in the past, the schedule begins with the next tick. With the
            catch-up `all`, the schedule begins with the missed ticks instead.

    Raises:
        InvalidSchedule: the period is not valid, or `starts_at` has no time zone.
    """
    if isinstance(period, timedelta):
        return Every(period.total_seconds(), starts_at)
    if isinstance(period, str):
        try:
            period = parse_duration_s(period)
        except ValueError as error:
            raise InvalidSchedule(f"every: {error}") from None
    return Every(period, starts_at)


def cron(expression: str, timezone: str = "UTC") -> Cron:
    """Return ticks by a cron expression of minute, hour, day of the month, month and weekday.

    Args:
        expression: five fields, such as `0 3 * * MON-FRI`.
        timezone: the time zone of the expression, by its name in the time zone database. With
            PER_ROW (`per row`), each row of the schedule's query names its own time zone, in the
            column `job.timezone`.

    Raises:
        InvalidSchedule: the expression cannot be parsed or never has a tick, or the time zone does
            not exist.
    """
    return Cron(expression, timezone)


def schedule(
    name: str,
    job: NewJob | Task[..., Any] | Pipeline,
    when: When,
    *,
    query: str | None = None,
    catch_up: CatchUp | str = CatchUp.LAST,
    catch_up_max: int = CATCH_UP_MAX_DEFAULT,
    overlap: Overlap | str = Overlap.ALLOW,
    jitter_s: float | None = None,
    deadline_s: float | None = None,
    ends_by: str | None = None,
    ends_by_s: float | None = None,
    registry: registries.Registry = registries.DEFAULT,
) -> Schedule:
    """Declare a schedule of the app; the workers of the app publish it when they start.

    Args:
        name: unique in the database.
        job: the job that a tick enqueues, `task.job(...)`, or the run that a tick starts,
            `pipeline.job(...)`. With a query, give the task or the pipeline itself; the columns of
            the query are the arguments.
        when: every(...) or cron(...).
        query: a SELECT; a tick enqueues one job per row. Four columns are not arguments of the job.
            `job.timezone` is the time zone of the row. `job.run_at` is the due time of the job,
            `job.deadline` its deadline, and `job.ends_by` the time by which the job should have
            ended.
        catch_up: which missed ticks are fired later: `none`, `last` or `all`.
        catch_up_max: with `all`, and with the overlap `wait`, fire only the newest missed ticks, at
            most this many.
        overlap: what a tick does while a job of the schedule, or a later stage of its run, is live.
            With `allow`, the tick enqueues another job; with `skip`, it enqueues none. With `wait`,
            it enqueues another job when the live job has ended. With `cancel`, it cancels the live
            job, and then waits as with `wait`.
        jitter_s: the job of a tick is due at a random time up to this many seconds after the tick.
        deadline_s: the deadline of the job, in seconds after its tick. If no attempt has started by
            then, the job expires.
        ends_by: the time of day, such as `08:00`, by which the job should have ended. The first
            such time after the tick counts, in the time zone of the schedule or of the row. A job
            that has not ended by then runs on, but is reported as late.
        ends_by_s: as `ends_by`, but in seconds after the tick.
        registry: where the schedule is declared.

    Raises:
        InvalidSchedule: a value is outside its limits.
        InvalidArgs: the task needs arguments, and there is no query.
        ValueError: another schedule has that name.
    """
    if not isinstance(job, NewJob) and hasattr(job, "job"):  # a task or a pipeline
        job = job.job() if query is None else NewJob(job.name, queue=job.queue)
    of: Any = job  # checked by Schedule
    made = Schedule(
        *(name, of, when, query, catch_up, catch_up_max, overlap, jitter_s),
        *(deadline_s, ends_by, ends_by_s),
    )
    registry.add_schedule(made)
    return made
