"""Events of attempts and jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taskd.core.jobs.job import Job
from taskd.core.outcomes.ack import Ack
from taskd.events import stream
from taskd.events.stream import emit, job_fields


def job_started(job: Job) -> None:
    """An attempt has started. An attempt that ends without ever waiting logs only its end."""
    if stream.is_subscribed("debug"):
        emit("job.started", "debug", **job_fields(job))


def job_retried(job: Job, ack: Ack, duration_s: float) -> None:
    """An attempt failed and will be retried."""
    emit(
        "job.retried",
        "warning",
        **job_fields(job, duration_s),
        delay_s=round(ack.delay_s, 1),
        error=_error(ack),
    )


def job_result_unstored(job: Job, reason: str) -> None:
    """The job is done, but its result could not be stored; `reason` says why."""
    emit("job.result_unstored", "warning", **job_fields(job), reason=reason)


def job_result_refused(job_id: int) -> None:
    """The job failed after `job.done`: the next stage of its pipeline cannot get its result.

    `taskd why` shows the reason.
    """
    emit("job.result_refused", "error", job_id=job_id)


def job_failed(job: Job, ack: Ack, duration_s: float) -> None:
    """A job failed, and will not be retried."""
    emit("job.failed", "error", **job_fields(job, duration_s), reason=ack.reason, error=_error(ack))


def job_cancelled(job: Job, ack: Ack, duration_s: float) -> None:
    """A running job was cancelled, by its handler or by a user."""
    emit("job.cancelled", "info", **job_fields(job, duration_s), reason=ack.reason)


def job_snoozed(job: Job, ack: Ack, duration_s: float) -> None:
    """A handler snoozed its job: the job runs again later, and the attempt does not count."""
    emit("job.snoozed", "info", **job_fields(job, duration_s), delay_s=round(ack.delay_s, 1))


def job_released(job: Job) -> None:
    """A claimed job that had not started was released; the attempt does not count."""
    emit("job.released", "info", **job_fields(job))


def job_interrupted(job: Job, ack: Ack, duration_s: float, why: str) -> None:
    """An attempt was cut short; `why`: `stop`, `fence` (lease lost), `by hand`, or `foreign`.

    `by hand` means that a user has completed or restarted the job. `foreign` means that code
    outside of taskd has cancelled the asyncio task of the attempt.
    """
    emit(
        "job.interrupted",
        "warning",
        **job_fields(job, duration_s),
        why=why,
        delay_s=round(ack.delay_s, 1),
    )


def job_abandoned(job: Job, why: str, stack: str) -> None:
    """An attempt ignored its cancellation and was abandoned; its slot is free for another job."""
    emit("job.abandoned", "error", **job_fields(job), why=why, stack=stack)


def process_killed(job: Job, why: str, pid: int) -> None:
    """The process of an attempt ignored the cancellation and was killed; a new one replaces it."""
    emit("process.killed", "warning", **job_fields(job), why=why, pid=pid)


def job_lost(job_id: int, fence: int) -> None:
    """An outcome was not written, because another worker owns the job now."""
    emit("job.lost", "warning", job_id=job_id, fence=fence)


def job_ended_by_hand(job_id: int, fence: int) -> None:
    """An outcome was not written, because a user has completed or restarted the job meanwhile."""
    emit("job.ended_by_hand", "warning", job_id=job_id, fence=fence)


def job_deleted(job_id: int, fence: int) -> None:
    """An outcome was not written, because the row of the job was deleted."""
    emit("job.deleted", "error", job_id=job_id, fence=fence)


def job_outcome_refused(job_id: int, error: str) -> None:
    """PostgreSQL refused an outcome. The worker replaces refused values by an error, or retries."""
    emit("job.outcome_refused", "error", job_id=job_id, error=error)


def job_change_refused(job_id: int, action: str, error: str) -> None:
    """PostgreSQL refuses to change a job, for example because of a trigger; other jobs go on.

    The worker retries every minute, and logs this once. `action` is claim, promote, admit, expire,
    unpark or rescue.
    """
    emit("job.change_refused", "error", job_id=job_id, action=action, error=error)


def task_unknown(task: str, queue: str, count: int, *, elsewhere: bool) -> None:
    """This worker does not know the task of claimed jobs; `elsewhere`: whether another one does."""
    emit("task.unknown", "warning", task=task, queue=queue, count=count, elsewhere=elsewhere)


def task_outdated(task: str, queue: str, args_version: int) -> None:
    """Claimed jobs were released: this code reads only older versions of the arguments."""
    emit("task.outdated", "warning", task=task, queue=queue, args_version=args_version)


def task_args_unfit(job: Job, error: str) -> None:
    """The arguments of a claimed job do not fit its task's code; the claim counts as no attempt.

    Logged once for each task and version of its arguments; `taskd doctor` counts the jobs.
    """
    emit("task.args_unfit", "warning", **job_fields(job), error=error)


def task_delay_invalid(job: Job, error: str, delay_s: float) -> None:
    """The backoff of a task raised an error, or it or a verdict gave no delay; `delay_s` is used.

    Logged once for each task by each worker process. Correct the code of the task.
    """
    emit("task.delay_invalid", "error", **job_fields(job), error=error, delay_s=round(delay_s, 1))


def tasks_paused(tasks: Sequence[str]) -> None:
    """The set of paused tasks has changed to `tasks`; workers start no jobs of these tasks."""
    emit("tasks.paused", "info", tasks=list(tasks))


def jobs_parked(task: str, queue: str, count: int) -> None:
    """Claimed jobs of a paused task were released and parked; their attempts do not count."""
    if stream.is_watched("debug"):
        emit("jobs.parked", "debug", task=task, queue=queue, count=count)


def jobs_unparked(queues: Mapping[str, int]) -> None:
    """Parked jobs of resumed tasks were returned to their queues."""
    emit("jobs.unparked", "info", queues=dict(queues))


def jobs_expired(tasks: Mapping[str, int]) -> None:
    """Jobs that had not started failed as `expired`, because their deadlines had passed."""
    emit("jobs.expired", "error", count=sum(tasks.values()), tasks=dict(tasks))


def logs_dropped(count: int, error: str) -> None:
    """Log lines of `count` attempts could not be stored; outcomes are not affected."""
    emit("logs.dropped", "warning", count=count, error=error)


def errors_not_reported(count: int, why: str) -> None:
    """`count` errors did not reach a function with @report_errors; logged at most once a minute."""
    emit("errors.not_reported", "warning", count=count, why=why)


def task_leaks(job: Job, count: int, *, cancelled: int, stack: str) -> None:
    """Handlers of a task left `count` asyncio tasks running; `stack` shows one of these tasks."""
    emit(
        "task.leaks",
        "warning",
        task=job.task,
        queue=job.queue,
        job_id=job.id,
        count=count,
        cancelled=cancelled,
        stack=stack,
    )


def _error(ack: Ack) -> str | None:
    """Return the error of an ack as `Type: message`, without the traceback, or None."""
    if ack.error is None:
        return None
    import msgspec

    described = msgspec.json.decode(ack.error)
    return f"{described['type']}: {described['message']}"
