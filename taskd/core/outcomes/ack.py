"""The ack: the outcome of one attempt, ready to be written."""

from __future__ import annotations

import msgspec

from taskd.core.jobs.job import JobState


class Ack(msgspec.Struct, gc=False):
    """The end of one attempt, ready to be written.

    Attributes:
        state: the new state of the job; `scheduled` and `queued` mean that it runs again.
        delay_s: seconds until it is due again.
        refund: the attempt does not count.
        interrupted: a stop cut it short; counted, and refunded ten times at most.
        error: JSON object for the job's `errors`, or None.
        result: JSON text of what the handler returned, or None.
        next: JSON text of the next stage that it chose for its pipeline, or of the pipeline's end.
        parked: released because its task is paused, or because no live worker can run it.
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
