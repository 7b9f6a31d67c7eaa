"""Events of the database: connections, claims, acks, schedules, upkeep and migrations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime

from taskd.events import stream
from taskd.events.stream import emit


def store_unusable(error: str, remedies: Sequence[str]) -> None:
    """The database lacks or refuses what the worker needs; the worker waits and keeps outcomes."""
    emit("store.unusable", "error", error=error, remedy=" ".join(remedies))


def store_back(outage_s: float) -> None:
    """PostgreSQL answers again."""
    emit("store.back", "info", outage_s=round(outage_s, 1))


def store_pooled() -> None:
    """A pooler is in front of PostgreSQL: taskd sends its settings with each statement."""
    emit("store.pooled", "info")


def store_verified() -> None:
    """The DSN requires channel binding; instead, taskd verifies the server's certificate."""
    emit("store.verified", "info")


def listeners_none() -> None:
    """The pooler does not forward notifications, so the worker polls. Set TASKD_LISTEN_DSN."""
    emit("listeners.none", "warning")


def listener_pooled(queues: Sequence[str]) -> None:
    """TASKD_LISTEN_DSN leads to a pooler that does not forward notifications: the worker polls."""
    emit("listener.pooled", "warning", queues=list(queues))


def listener_connected(queues: Sequence[str]) -> None:
    """The worker listens on the channels of these queues."""
    emit("listener.connected", "debug", queues=list(queues))


def listener_lost(queues: Sequence[str], error: str, delay_s: float) -> None:
    """The LISTEN connection of these queues broke; the worker polls, and opens it again."""
    emit("listener.lost", "warning", queues=list(queues), error=error, delay_s=round(delay_s, 2))


def queue_resized(queue: str, concurrency: int) -> None:
    """An operator has set or reset the concurrency of a queue."""
    emit("queue.resized", "info", queue=queue, concurrency=concurrency)


def queue_polled(queue: str) -> None:
    """This worker polls a queue continuously; producers send no NOTIFY until `queue.unpolled`."""
    emit("queue.polled", "debug", queue=queue)


def queue_unpolled(queue: str) -> None:
    """This worker no longer polls a queue continuously; producers notify again."""
    emit("queue.unpolled", "debug", queue=queue)


def queue_mark_refused(queue: str, error: str) -> None:
    """PostgreSQL refuses a queue's busy mark, so producers notify; logged at most once a minute."""
    emit("queue.mark_refused", "warning", queue=queue, error=error)


def queue_woken(queue: str, source: str) -> None:
    """The worker claims again from an idle queue; `source` is `notify`, `idle_poll` or `time`."""
    if stream.is_watched("debug"):
        emit("queue.woken", "debug", queue=queue, source=source)


def acks_written(count: int, ack_s: float) -> None:
    """A batch of outcomes was written."""
    if stream.is_watched("debug"):
        emit("acks.written", "debug", count=count, ack_ms=round(ack_s * 1000, 2))


def claims_delayed(queue: str, error: str) -> None:
    """A claim failed; the worker retries until a claim succeeds, and logs this once."""
    emit("claims.delayed", "warning", queue=queue, error=error)


def acks_delayed(buffered: int, error: str) -> None:
    """Outcomes cannot be written now; the worker keeps them and retries."""
    emit("acks.delayed", "warning", buffered=buffered, error=error)


def jobs_rescued(states: Mapping[int, str]) -> None:
    """Jobs of dead workers were rescued."""
    counts: dict[str, int] = {}
    for state in states.values():
        counts[str(state)] = counts.get(str(state), 0) + 1
    emit("jobs.rescued", "warning", count=len(states), states=counts, job_ids=list(states)[:20])


def connections_short(needed: int, free: int) -> None:
    """The server has fewer free connections than the worker may need; the worker still starts."""
    emit("connections.short", "warning", needed=needed, free=free)


def connections_none(error: str, delay_s: float) -> None:
    """The server has no free connection; the worker waits for one before it starts."""
    emit("connections.none", "warning", error=error, delay_s=round(delay_s, 2))


def resource_slow(resource: str, doing: str, waits_s: float, limit_s: float) -> None:
    """A resource takes long to `open` or to `close`; after `limit_s` the worker gives up."""
    emit(
        "resource.slow", "warning", resource=resource, doing=doing, waits_s=waits_s, limit_s=limit_s
    )


def resources_not_closed(resource: str, error: BaseException) -> None:
    """A resource of the app failed or took too long when the worker closed it."""
    text = f"{type(error).__name__}: {error}"
    emit("resources.not_closed", "error", resource=resource, error=text)


def jobs_reconciled(job_ids: Sequence[int]) -> None:
    """The worker released jobs that it had claimed but never received."""
    emit("jobs.reconciled", "warning", count=len(job_ids), job_ids=list(job_ids)[:20])


def jobs_promoted(queues: Mapping[str, int]) -> None:
    """Scheduled jobs that are due were queued."""
    if stream.is_watched("debug"):
        emit("jobs.promoted", "debug", queues=dict(queues))


def schedule_fired(schedule: str, tick: datetime, jobs: int, late_s: float) -> None:
    """A schedule fired; `jobs` jobs were enqueued, for the tick and for missed ticks before it."""
    if stream.is_watched("debug"):
        emit(
            "schedule.fired",
            "debug",
            schedule=schedule,
            tick=tick.isoformat(),
            jobs=jobs,
            late_s=round(late_s, 3),
        )


def schedule_skipped(schedule: str, tick: datetime) -> None:
    """A tick enqueued no job, because an earlier job of the schedule is live (overlap `skip`)."""
    emit("schedule.skipped", "info", schedule=schedule, tick=tick.isoformat())


def schedule_waits(schedule: str, tick: datetime) -> None:
    """A tick waits for the end of a job of its schedule (overlap `wait` or `cancel`)."""
    emit("schedule.waits", "info", schedule=schedule, tick=tick.isoformat())


def schedules_withdrawn(schedules: Sequence[str], app: str) -> None:
    """No live worker of the app declares these schedules any more, so they have no ticks now."""
    emit("schedules.withdrawn", "warning", schedules=list(schedules), app=app)


def schedules_declared_again(schedules: Sequence[str], app: str) -> None:
    """A worker declares withdrawn schedules again; they continue with their next tick."""
    emit("schedules.declared_again", "info", schedules=list(schedules), app=app)


def tasks_contested(app: str, owners: Mapping[str, str]) -> None:
    """The app defines tasks of other apps with other arguments; the worker does not start."""
    emit("tasks.contested", "warning", app=app, owners=dict(owners))


def limits_contested(app: str, owners: Mapping[str, str]) -> None:
    """Live apps declare these limits with other bounds; the bounds published last apply."""
    emit("limits.contested", "warning", app=app, owners=dict(owners))


def app_published(app: str) -> None:
    """No live worker has another version of the app any more; this worker published its version."""
    emit("app.published", "info", app=app)


def app_not_published(app: str, error: str) -> None:
    """The app was not published again; `error` says why, such as a name that another app took."""
    emit("app.not_published", "warning", app=app, error=error)


def clock_set_back(ahead_s: float, schedules: Sequence[str]) -> None:
    """The database's clock was set back; ticks of `schedules` are computed from the new time."""
    emit("clock.set_back", "warning", ahead_s=round(ahead_s, 1), schedules=list(schedules))


def schedule_missed(schedule: str, since: datetime | None, caught_up: int) -> None:
    """Missed ticks of a schedule are skipped, as `catch_up` says; `caught_up` ticks are fired."""
    since_text = since and since.isoformat()
    emit("schedule.missed", "warning", schedule=schedule, since=since_text, caught_up=caught_up)


def schedule_failed(schedule: str, tick: datetime, error: str | None) -> None:
    """A tick enqueued no job: the query or its result is wrong. Later ticks still fire."""
    emit("schedule.failed", "error", schedule=schedule, tick=tick.isoformat(), error=error)


def schedule_rows_left_out(schedule: str, tick: datetime, error: str) -> None:
    """A tick was fired, but some rows of the schedule's query got no jobs; `error` says why."""
    emit("schedule.rows_left_out", "error", schedule=schedule, tick=tick.isoformat(), error=error)


def schedule_delayed(schedule: str, tick: datetime | None, error: str) -> None:
    """A tick is delayed: a lock is held, or PostgreSQL refuses the tick. The worker retries it.

    Logged when the delay begins, and then every ten minutes. If the delay lasts, `service.failing`
    follows.
    """
    since = tick.isoformat() if tick else None
    emit("schedule.delayed", "warning", schedule=schedule, tick=since, error=error)


def schedule_stalled(schedule: str, error: str) -> None:
    """The next tick of a schedule cannot be computed; the schedule was paused."""
    emit("schedule.stalled", "error", schedule=schedule, error=error)


def jobs_admitted(queues: Mapping[str, int]) -> None:
    """Blocked jobs were queued, because their limits admit them."""
    if stream.is_watched("debug"):
        emit("jobs.admitted", "debug", queues=dict(queues))


def admission_timed_out(error: str) -> None:
    """The admission of blocked jobs did not end in time, so no limit admits jobs; it is retried.

    Logged once until an admission succeeds; `service.failing` follows if it fails repeatedly.
    """
    emit("admission.timed_out", "error", error=error)


def partitions_made(count: int) -> None:
    """History partitions for the next days were created."""
    emit("partitions.made", "debug", count=count)


def partition_dropped(name: str) -> None:
    """An expired history partition was dropped."""
    emit("partition.dropped", "info", partition=name)


def upkeep_postponed(what: str, error: str) -> None:
    """A step of the upkeep is retried in a minute: a lock is held, or the database is down."""
    emit("upkeep.postponed", "info", what=what, error=error)


def upkeep_failed(what: str, error: str) -> None:
    """A step of the upkeep failed, and is retried in a minute; the other steps are not affected.

    Logged once for each error; `service.failing` follows if the step fails repeatedly.
    """
    emit("upkeep.failed", "warning", what=what, error=error)


def sequences_mended(sequences: Sequence[str]) -> None:
    """Sequences had values below the ids of rows, as after a switch-over, and were advanced."""
    emit("sequences.mended", "warning", sequences=list(sequences))


def sequences_behind(error: str, remedy: str) -> None:
    """Sequences could not be checked or advanced; run the command `remedy`."""
    emit("sequences.behind", "error", error=error, remedy=remedy)


def migration_applied(number: int, name: str) -> None:
    """A migration was applied."""
    emit("migration.applied", "info", number=number, name=name)


def migration_delayed(
    number: int, name: str, error: str, delay_s: float, held_by: Sequence[str]
) -> None:
    """A migration got no lock, or met a deadlock. It has changed nothing, and taskd retries it."""
    emit(
        "migration.delayed",
        "warning",
        number=number,
        name=name,
        error=error,
        delay_s=round(delay_s, 2),
        held_by=list(held_by),
    )


def migration_announced(number: int, name: str, workers: Sequence[str]) -> None:
    """A migration is about to be applied: workers that are too old for it should drain."""
    emit("migration.announced", "warning", number=number, name=name, workers=list(workers))


def migration_postponed(number: int, name: str, workers: Sequence[str]) -> None:
    """A migration was not applied, because live workers are too old for it."""
    emit("migration.postponed", "warning", number=number, name=name, workers=list(workers))


def migration_waits() -> None:
    """Another process is migrating this database; this process waits until it has finished."""
    emit("migration.waits", "info")


def worker_outgrown(knows: int, works_with: int) -> None:
    """The schema, or an announced migration, requires newer code: this worker drains."""
    emit("worker.outgrown", "error", knows=knows, works_with=works_with)


def embedded_started(home: str, major: int) -> None:
    """The embedded PostgreSQL was started, because no DSN is configured."""
    emit("embedded.started", "info", postgresql=major, data=home)
