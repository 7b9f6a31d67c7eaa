"""The vocabulary: one function per event. The log, the metrics and the tests read the same stream.

The metrics have a door of their own (`Meter`): a subscriber is given a dictionary for each event,
and for the end of every single attempt that costs more than counting it.

A renamed event is a type error, not a silent gap in somebody's dashboard. One line per finished
attempt; beyond `job_lines_per_s` successes per second the rest is counted in one `jobs.folded`
line. Failures are never folded.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any, Protocol, TextIO, cast

import structlog

from taskd.config import hide_password
from taskd.core.jobs.job import Job
from taskd.core.outcomes.ack import Ack

Subscriber = Callable[[str, Mapping[str, Any]], None]


class Meter(Protocol):
    """What makes numbers of events."""

    def done(self, job: Job, duration_s: float) -> None:
        """An attempt ended well."""

    def claimed(self, queue: str, jobs: Sequence[Job], claim_s: float) -> None:
        """A batch of jobs was claimed."""

    def heard(self, name: str, fields: Mapping[str, Any]) -> None:
        """Any other event; from any thread."""


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_subscribers: list[Subscriber] = []
_meter: Meter | None = None
# Somebody reads what is not logged: subscribers, or a meter. One look where it must cost nothing.
_watched = False
_bound: dict[str, Any] = {}
_log: Any = None
_log_level = LEVELS["error"] + 1


def configure(
    log_format: str = "auto",
    log_level: str = "info",
    *,
    job_lines_per_s: int = 10,
    stream: TextIO | None = None,
) -> None:
    """Send events to a stream (stderr by default): readable on a terminal, JSON otherwise.

    Args:
        log_format: `auto`, `console` or `json`.
        log_level: `debug`, `info`, `warning` or `error`.
        job_lines_per_s: successes logged one by one per second.
    """
    global _log, _log_level  # noqa: PLW0603 - one process, one log
    stream = stream or sys.stderr
    console = log_format == "console" or (log_format == "auto" and stream.isatty())
    _log_level = LEVELS[log_level]
    _folding.lines_per_s = job_lines_per_s
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=20, sort_keys=False)
        if console
        else structlog.processors.JSONRenderer(ensure_ascii=False)
    )
    stamp = structlog.processors.TimeStamper(fmt="%H:%M:%S" if console else "iso", utc=not console)
    # The bound logger is kept: structlog's lazy proxy costs 650 ns even for lines not written.
    _log = structlog.wrap_logger(
        # A line is one write, so that those of several processes on one pipe do not mix.
        structlog.WriteLogger(cast("TextIO", _Unbreakable(stream))),
        processors=[stamp, structlog.processors.add_log_level, _mask, _in_order, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_log_level),
    ).bind(**_bound)


def bind(**fields: Any) -> None:
    """Put these into every line from now on, such as which of several processes writes it."""
    global _log  # noqa: PLW0603 - one process, one log
    _bound.update(fields)
    _log = _log if _log is None else _log.bind(**fields)


def is_written() -> bool:
    """Whether events go to a stream, as in `taskd run`."""
    return _log is not None


def level() -> int:
    """The level from which lines are written, as the standard library numbers it."""
    return _log_level


def line(level: str, text: str, fields: Mapping[str, Any]) -> None:
    """Write a line that is no event: of a handler, or a library, that has no log of its own."""
    if _log is not None and LEVELS.get(level, LEVELS["info"]) >= _log_level:
        said = {name: value for name, value in fields.items() if name not in {"event", "level"}}
        getattr(_log, level if level in LEVELS else "info")(text, **said)


class _Unbreakable:
    """A stream whose reader may go away: a log that cannot be written must not stop the work."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call `subscriber(name, fields)` for every event; returns what ends it."""

    def end() -> None:
        _subscribers.remove(subscriber)
        _look_who_watches()

    _subscribers.append(subscriber)
    _look_who_watches()
    return end


def measure(meter: Meter | None) -> None:
    """Have `meter` count every event from now on; None: nobody does."""
    global _meter  # noqa: PLW0603 - one process, one stream
    _meter = meter
    _look_who_watches()


def _look_who_watches() -> None:
    global _watched  # noqa: PLW0603 - one process, one stream
    _watched = bool(_subscribers) or _meter is not None


def _emit(name: str, level: str, /, **fields: Any) -> None:
    if _meter is not None:
        _meter.heard(name, fields)
    for subscriber in tuple(_subscribers):
        subscriber(name, fields)
    if _log is not None and LEVELS[level] >= _log_level:
        getattr(_log, level)(name, **fields)


def _in_order(_logger: Any, _method: str, event: Any) -> Any:
    """When and what first: a line is read from the left."""
    first = {key: event.pop(key) for key in ("timestamp", "level", "event") if key in event}
    return first | event


def _mask(_logger: Any, _method: str, event: Any) -> Any:
    """No password reaches a log, whoever put it into an error's text."""
    for key, value in event.items():
        if isinstance(value, str) and ("://" in value or "password" in value):
            event[key] = hide_password(value)
    return event


class _Folding:
    """Lets so many lines through between two calls of turn(), and counts the others.

    It is asked after each success, and so reads no clock: with one it took 0.47 us, and takes 0.12.
    """

    def __init__(self) -> None:
        self.lines_per_s = 10
        self.lines = 0
        self.folded = 0

    def lets_through(self) -> bool:
        if self.lines < self.lines_per_s:
            self.lines += 1
            return True
        self.folded += 1
        return False

    def turn(self) -> None:
        folded, self.folded, self.lines = self.folded, 0, 0
        if folded:
            jobs_folded(folded)


_folding = _Folding()


def turn_second() -> None:
    """Write the count of the successes folded so far; called once a second, and at the end."""
    _folding.turn()


def _job_fields(job: Job | None, duration_s: float | None = None) -> dict[str, Any]:
    if job is None:
        return {}
    fields = {"job_id": job.id, "task": job.task, "queue": job.queue, "attempt": job.attempt}
    if duration_s is not None:
        fields["wait_ms"] = round(job.wait_s * 1000, 1)
        fields["duration_ms"] = round(duration_s * 1000, 1)
    return fields


# The attempts.


def job_done(job: Job, duration_s: float) -> None:
    """An attempt ended well."""
    if _watched:
        if _meter is not None:
            _meter.done(job, duration_s)
        if _subscribers:
            fields = _job_fields(job, duration_s)
            for subscriber in tuple(_subscribers):
                subscriber("job.done", fields)
    # Checked before the line is made: a structlog line costs 5 us, running a small handler 0.3.
    if _log_level <= LEVELS["info"] and _log is not None and _folding.lets_through():
        _log.info("job.done", **_job_fields(job, duration_s))


def jobs_folded(count: int) -> None:
    """So many successes were not logged one by one."""
    _emit("jobs.folded", "info", count=count)


def job_started(job: Job) -> None:
    """An attempt that waits for something began; attempts that never wait only report their end."""
    if _subscribers or _log_level <= LEVELS["debug"]:
        _emit("job.started", "debug", **_job_fields(job))


def job_retried(job: Job, ack: Ack, duration_s: float) -> None:
    """An attempt failed and another one follows."""
    _emit(
        "job.retried",
        "warning",
        **_job_fields(job, duration_s),
        delay_s=round(ack.delay_s, 1),
        error=_error(ack),
    )


def job_failed(job: Job, ack: Ack, duration_s: float) -> None:
    """A job failed for good."""
    _emit(
        "job.failed", "error", **_job_fields(job, duration_s), reason=ack.reason, error=_error(ack)
    )


def job_cancelled(job: Job, ack: Ack, duration_s: float) -> None:
    """A running job was cancelled, by itself or by somebody."""
    _emit("job.cancelled", "info", **_job_fields(job, duration_s), reason=ack.reason)


def job_snoozed(job: Job, ack: Ack, duration_s: float) -> None:
    """An attempt asked to be repeated later without counting."""
    _emit("job.snoozed", "info", **_job_fields(job, duration_s), delay_s=round(ack.delay_s, 1))


def job_released(job: Job) -> None:
    """A job that was claimed and not started was given back; the attempt does not count."""
    _emit("job.released", "info", **_job_fields(job))


def job_interrupted(job: Job, ack: Ack, duration_s: float, why: str) -> None:
    """An attempt was cut short, as its worker stops (`stop`) or has no lease (`fence`)."""
    _emit(
        "job.interrupted",
        "warning",
        **_job_fields(job, duration_s),
        why=why,
        delay_s=round(ack.delay_s, 1),
    )


def job_abandoned(job: Job, why: str, stack: str) -> None:
    """An attempt ignored its cancellation and was left behind; its place is free again."""
    _emit("job.abandoned", "error", **_job_fields(job), why=why, stack=stack)


def process_killed(job: Job, why: str, pid: int) -> None:
    """A process ignored that its attempt must end, and was killed; another one replaces it."""
    _emit("process.killed", "warning", **_job_fields(job), why=why, pid=pid)


def job_lost(job_id: int, fence: int) -> None:
    """An outcome was not written: somebody else has taken the job over."""
    _emit("job.lost", "warning", job_id=job_id, fence=fence)


def job_outcome_refused(job_id: int, error: str) -> None:
    """PostgreSQL refused one job's outcome; it was replaced by a storable one."""
    _emit("job.outcome_refused", "error", job_id=job_id, error=error)


def task_unknown(task: str, queue: str, count: int) -> None:
    """Claimed jobs name a task that this worker does not know; they were given back."""
    _emit("task.unknown", "warning", task=task, queue=queue, count=count)


def task_outdated(task: str, queue: str, args_version: int) -> None:
    """Claimed jobs have arguments of a newer form than this code knows; they were given back."""
    _emit("task.outdated", "warning", task=task, queue=queue, args_version=args_version)


def tasks_paused(tasks: Sequence[str]) -> None:
    """Which tasks are paused has changed; jobs of these are not run, and none means all are run."""
    _emit("tasks.paused", "info", tasks=list(tasks))


def jobs_parked(task: str, queue: str, count: int) -> None:
    """Claimed jobs of a paused task were given back; their attempts do not count."""
    if _watched or _log_level <= LEVELS["debug"]:
        _emit("jobs.parked", "debug", task=task, queue=queue, count=count)


def jobs_unparked(queues: Mapping[str, int]) -> None:
    """Jobs of tasks that are paused no longer came back to their queues."""
    _emit("jobs.unparked", "info", queues=dict(queues))


def jobs_expired(tasks: Mapping[str, int]) -> None:
    """The deadlines of waiting jobs were over: they failed as `expired`."""
    _emit("jobs.expired", "error", count=sum(tasks.values()), tasks=dict(tasks))


def logs_dropped(count: int, error: str) -> None:
    """What so many attempts have logged could not be kept; their outcomes were."""
    _emit("logs.dropped", "warning", count=count, error=error)


def task_leaks(job: Job, count: int, *, cancelled: int, stack: str) -> None:
    """Asyncio tasks that a handler made outlive its attempt; `stack` is where one of them waits."""
    _emit(
        "task.leaks",
        "warning",
        task=job.task,
        queue=job.queue,
        job_id=job.id,
        count=count,
        cancelled=cancelled,
        stack=stack,
    )


# The worker.


def worker_started(worker_id: int, queues: Mapping[str, int], **facts: Any) -> None:
    """A worker incarnation registered itself."""
    _emit("worker.started", "info", worker_id=str(worker_id), queues=dict(queues), **facts)


def worker_ready(queues: Sequence[str]) -> None:
    """The worker listens and claims."""
    _emit("worker.ready", "info", queues=list(queues))


def worker_draining(why: str, running: int, released: int) -> None:
    """The worker stops: it claims nothing more and lets running attempts end."""
    _emit("worker.draining", "info", why=why, running=running, released=released)


def worker_stopped(**report: Any) -> None:
    """The worker has stopped; the drain report."""
    _emit("worker.stopped", "info", **report)


def worker_crashed(process: int, pid: int, code: int, delay_s: float) -> None:
    """One of several processes ended unasked or without a report; another one follows, if any."""
    ended = f"exit code {code}" if code >= 0 else f"signal {-code}"
    _emit("worker.crashed", "error", process=process, pid=pid, ended=ended, delay_s=delay_s)


def worker_not_started(process: int, error: OSError, delay_s: float) -> None:
    """One of several processes could not be started; it is tried again, if others run."""
    said = f"{type(error).__name__}: {error}"
    _emit("worker.not_started", "error", process=process, error=said, delay_s=delay_s)


def worker_quiet(quiet: bool) -> None:
    """Claiming was switched off or on by a signal."""
    _emit("worker.quiet", "info", quiet=quiet)


def worker_reloaded(limits: Mapping[str, int]) -> None:
    """SIGHUP: the settings were read again."""
    _emit("worker.reloaded", "info", queues=dict(limits))


def worker_buried(worker_id: int) -> None:
    """This worker was declared dead while it lived; it drops its jobs and starts anew."""
    _emit("worker.buried", "error", worker_id=str(worker_id))


def worker_fenced(silent_s: float) -> None:
    """PostgreSQL has been silent for too long; attempts are cancelled before others run them."""
    _emit("worker.fenced", "error", silent_s=round(silent_s, 1))


def workers_buried(workers: Sequence[str], proof: str) -> None:
    """Dead workers were found; their jobs are taken back."""
    _emit("workers.buried", "warning", workers=list(workers), proof=proof)


def loop_blocked(blocked_s: float, job: Job | None, stack: str, untold: int) -> None:
    """The event loop is blocked, by a handler if a job is named; `untold` times before, too."""
    _emit(
        "loop.blocked",
        "warning",
        blocked_s=round(blocked_s, 2),
        **_job_fields(job),
        untold=untold,
        stack=stack,
    )


def loop_unblocked(blocked_s: float, job: Job | None) -> None:
    """The event loop, which was named as blocked, turns again."""
    _emit("loop.unblocked", "info", blocked_s=round(blocked_s, 2), **_job_fields(job))


def worker_stuck(job: Job | None, running: int, released: int, stack: str) -> None:
    """A stop is over its time and the loop does not answer: the worker leaves as it is."""
    _emit(
        "worker.stuck", "error", **_job_fields(job), running=running, released=released, stack=stack
    )


def service_crashed(service: str, error: BaseException, crashes: int, delay_s: float) -> None:
    """A service of the worker raised; it is started again."""
    _emit(
        "service.crashed",
        "error",
        service=service,
        crashes=crashes,
        delay_s=round(delay_s, 2),
        error=f"{type(error).__name__}: {error}",
    )


def http_listening(address: str) -> None:
    """HTTP requests are answered at this address."""
    _emit("http.listening", "info", address=address)


def request_failed(method: str, path: str, error: BaseException) -> None:
    """An HTTP request could not be answered, by a mistake in this code; it got a 500."""
    said = f"{type(error).__name__}: {error}"
    _emit("request.failed", "error", method=method, path=path[:200], error=said)


def figures_delayed(error: str) -> None:
    """A scrape got nothing of the database; told once, until it does again."""
    _emit("figures.delayed", "warning", error=error)


def login_accepted(who: str, address: str) -> None:
    """Somebody has logged in to the dashboard."""
    _emit("login.accepted", "info", who=who, address=address)


def login_refused(who: str, address: str, why: str, times: int) -> None:
    """Somebody could not log in to the dashboard; `times` above 1: so often, this the last time."""
    _emit("login.refused", "warning", who=who[:100], address=address[:100], why=why, times=times)


def action_taken(action: str, who: str, target: str, jobs: int, job_ids: Sequence[int]) -> None:
    """Somebody has done something in the dashboard, to so many jobs."""
    ids = list(job_ids)[:20]
    _emit("action.taken", "info", action=action, who=who, target=target, jobs=jobs, job_ids=ids)


def task_replaced(name: str, by: str) -> None:
    """A task of the app replaces a built-in one of the same name."""
    _emit("task.replaced", "info", task=name, by=by)


# The database.


def store_back(outage_s: float) -> None:
    """PostgreSQL answers again."""
    _emit("store.back", "info", outage_s=round(outage_s, 1))


def store_pooled() -> None:
    """A pooler stands before PostgreSQL: each statement takes its settings along."""
    _emit("store.pooled", "info")


def listeners_none() -> None:
    """Through a pooler nothing is heard: queues are only polled. Set TASKD_LISTEN_DSN."""
    _emit("listeners.none", "warning")


def listener_pooled(channels: int) -> None:
    """TASKD_LISTEN_DSN leads to a pooler, through which nothing is heard; the queues are polled."""
    _emit("listener.pooled", "warning", channels=channels)


def listener_connected(channels: int) -> None:
    """The channels of all queues are listened to."""
    _emit("listener.connected", "debug", channels=channels)


def listener_lost(channels: int, error: str, delay_s: float) -> None:
    """The LISTEN connection broke; polling goes on, and it is made again."""
    _emit("listener.lost", "warning", channels=channels, error=error, delay_s=round(delay_s, 2))


def queue_resized(queue: str, concurrency: int) -> None:
    """So many attempts run at the same time from now on, as somebody has set or unset it."""
    _emit("queue.resized", "info", queue=queue, concurrency=concurrency)


def queue_claimed(queue: str, jobs: Sequence[Job], batch: int, claim_s: float) -> None:
    """A batch of jobs was claimed."""
    if _meter is not None:
        _meter.claimed(queue, jobs, claim_s)
    if _subscribers or _log_level <= LEVELS["debug"]:
        _emit(
            "queue.claimed",
            "debug",
            queue=queue,
            count=len(jobs),
            batch=batch,
            claim_ms=round(claim_s * 1000, 2),
        )


def queue_attended(queue: str) -> None:
    """A queue is claimed from all the time: until further notice, nobody need ring for it."""
    _emit("queue.attended", "debug", queue=queue)


def queue_left(queue: str) -> None:
    """A queue is not attended any more: who enqueues rings again."""
    _emit("queue.left", "debug", queue=queue)


def queue_woken(queue: str, source: str) -> None:
    """A queue is claimed from again: it was rung for, the scout found something, or by time."""
    if _watched or _log_level <= LEVELS["debug"]:
        _emit("queue.woken", "debug", queue=queue, source=source)


def acks_written(count: int, ack_s: float) -> None:
    """A batch of outcomes was written."""
    if _watched or _log_level <= LEVELS["debug"]:
        _emit("acks.written", "debug", count=count, ack_ms=round(ack_s * 1000, 2))


def claims_delayed(queue: str, error: str) -> None:
    """A queue cannot be claimed from at the moment; told once, and tried again until it can."""
    _emit("claims.delayed", "warning", queue=queue, error=error)


def acks_delayed(buffered: int, error: str) -> None:
    """Outcomes cannot be written now; they are kept and tried again."""
    _emit("acks.delayed", "warning", buffered=buffered, error=error)


def jobs_rescued(states: Mapping[int, str]) -> None:
    """Jobs of dead workers were taken back."""
    counts: dict[str, int] = {}
    for state in states.values():
        counts[str(state)] = counts.get(str(state), 0) + 1
    _emit("jobs.rescued", "warning", count=len(states), states=counts, job_ids=list(states)[:20])


def connections_short(needed: int, free: int) -> None:
    """The server has fewer free connections now than this worker may use; it goes on trying."""
    _emit("connections.short", "warning", needed=needed, free=free)


def connections_none(error: str, delay_s: float) -> None:
    """The server has no connection left for this worker, which waits for one to start."""
    _emit("connections.none", "warning", error=error, delay_s=round(delay_s, 2))


def resources_not_closed(error: BaseException) -> None:
    """A resource of the app failed, or took too long, when it was taken down."""
    _emit("resources.not_closed", "error", error=f"{type(error).__name__}: {error}")


def jobs_reconciled(job_ids: Sequence[int]) -> None:
    """The database says this worker runs jobs that it never received; they were given back."""
    _emit("jobs.reconciled", "warning", count=len(job_ids), job_ids=list(job_ids)[:20])


def jobs_promoted(queues: Mapping[str, int]) -> None:
    """Scheduled jobs became due."""
    if _watched or _log_level <= LEVELS["debug"]:
        _emit("jobs.promoted", "debug", queues=dict(queues))


def schedule_fired(schedule: str, tick: datetime, jobs: int, late_s: float) -> None:
    """A tick of a schedule has come: so many jobs were made for it, and those that it caught up."""
    if _watched or _log_level <= LEVELS["debug"]:
        _emit(
            "schedule.fired",
            "debug",
            schedule=schedule,
            tick=tick.isoformat(),
            jobs=jobs,
            late_s=round(late_s, 3),
        )


def schedule_skipped(schedule: str, tick: datetime) -> None:
    """A tick made no job, as an earlier job of its schedule is live, and overlap is `skip`."""
    _emit("schedule.skipped", "info", schedule=schedule, tick=tick.isoformat())


def schedule_missed(schedule: str, since: datetime | None, caught_up: int) -> None:
    """No worker fired ticks in time; those that catch_up leaves out are not made up for."""
    told = since and since.isoformat()
    _emit("schedule.missed", "warning", schedule=schedule, since=told, caught_up=caught_up)


def schedule_failed(schedule: str, tick: datetime, error: str | None) -> None:
    """A tick made no job: the query, or what it returns, is wrong; the next one goes on."""
    _emit("schedule.failed", "error", schedule=schedule, tick=tick.isoformat(), error=error)


def schedule_delayed(schedule: str, tick: datetime | None, error: str) -> None:
    """A tick could not be fired now, as a lock was held too long; it stays due."""
    since = tick.isoformat() if tick else None
    _emit("schedule.delayed", "warning", schedule=schedule, tick=since, error=error)


def schedule_stalled(schedule: str, error: str) -> None:
    """The next tick of a schedule cannot be told; it was paused."""
    _emit("schedule.stalled", "error", schedule=schedule, error=error)


def jobs_admitted(queues: Mapping[str, int]) -> None:
    """Jobs that their limits had blocked were admitted."""
    if _watched or _log_level <= LEVELS["debug"]:
        _emit("jobs.admitted", "debug", queues=dict(queues))


def partitions_made(count: int) -> None:
    """History partitions for the days to come were made."""
    _emit("partitions.made", "debug", count=count)


def partition_dropped(name: str) -> None:
    """An expired history partition was dropped."""
    _emit("partition.dropped", "info", partition=name)


def upkeep_postponed(what: str, error: str) -> None:
    """Upkeep of the history could not go on, as it is in use or not permitted; it tries again."""
    _emit("upkeep.postponed", "info", what=what, error=error)


def migration_applied(number: int, name: str) -> None:
    """A migration was applied."""
    _emit("migration.applied", "info", number=number, name=name)


def migration_delayed(
    number: int, name: str, error: str, delay_s: float, held_by: Sequence[str]
) -> None:
    """A migration got no lock, or met a deadlock; nothing was changed, and it is tried again."""
    _emit(
        "migration.delayed",
        "warning",
        number=number,
        name=name,
        error=error,
        delay_s=round(delay_s, 2),
        held_by=list(held_by),
    )


def migration_announced(number: int, name: str, workers: Sequence[str]) -> None:
    """A migration is about to be applied: the workers that are too old for it are to drain."""
    _emit("migration.announced", "warning", number=number, name=name, workers=list(workers))


def migration_postponed(number: int, name: str, workers: Sequence[str]) -> None:
    """A migration was not applied: living workers are too old for it."""
    _emit("migration.postponed", "warning", number=number, name=name, workers=list(workers))


def migration_waits() -> None:
    """Another process migrates this database; this one goes on when that has ended."""
    _emit("migration.waits", "info")


def worker_outgrown(knows: int, works_with: int) -> None:
    """The schema works with newer code only, or is about to: this worker drains."""
    _emit("worker.outgrown", "error", knows=knows, works_with=works_with)


def embedded_started(home: str, major: int) -> None:
    """The embedded PostgreSQL was started, because no DSN is configured."""
    _emit("embedded.started", "info", postgresql=major, data=home)


def _error(ack: Ack) -> str | None:
    """`Type: message` out of the ack's error; the traceback stays in the job's row."""
    if ack.error is None:
        return None
    import msgspec

    described = msgspec.json.decode(ack.error)
    return f"{described['type']}: {described['message']}"
