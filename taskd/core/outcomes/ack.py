"""The ack: the outcome of one attempt, ready to be written."""

from __future__ import annotations

import msgspec

from taskd.core.jobs.job import JobState


class Ack(msgspec.Struct, gc=False):
    """The outcome of one attempt, ready to be written.

    Attributes:
        state: the new state of the job; `scheduled` and `queued` mean that it runs again.
        delay_s: seconds until the job is due again.
        refund: the attempt does not count for `max_attempts`.
        interrupted: the worker ended the attempt because it stopped or lost its lease. At most ten
            such attempts of a job are refunded.
        error: JSON object that is appended to the job's `errors`, or None.
        result: JSON text of the value that the handler returned, or None.
        next: JSON text of the next stage of a pipeline that the handler chose, or of its end.
        parked: the job is released because its task is paused, or no live worker can run it.
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
