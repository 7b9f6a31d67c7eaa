"""The ack: the outcome of one attempt, ready to be written."""

from __future__ import annotations

import msgspec

from taskd.core.jobs.job import JobState


class Ack(msgspec.Struct, gc=False):
    """The outcome of one attempt, ready to be written.

    Attributes:
        state: the new state of the job. If it is `scheduled` or `queued`, the job runs again.
        delay_s: seconds until a scheduled job is due.
        refund: whether the attempt does not count towards `max_attempts`.
        interrupted: whether the worker ended the attempt because the worker stopped or lost its
            lease. At most ten such attempts of a job are refunded.
        reason: why the job has failed or was cancelled, or why its result was not stored, or None.
        error: JSON object that is appended to the job's `errors`, or None.
        result: JSON text of the job's result, or None.
        next: JSON text of the pipeline stage that the handler chose, or of the handler's decision
            to end the run; otherwise None.
        parked: whether the job waits because its task is paused, or because no live worker can run
            the job.
        wrong_delay: why `delay_s` is not the delay that the code of the task gave, or None. This is
            logged, and not written to the database.
    """

    id: int
    worker_id: int
    fence: int
    state: JobState
    delay_s: float = 0.0
    refund: bool = False
    interrupted: bool = False
    reason: str | None = None
    error: str | None = None
    result: str | None = None
    next: str | None = None
    parked: bool = False
    wrong_delay: str | None = None
