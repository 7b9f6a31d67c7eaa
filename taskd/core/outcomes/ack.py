"""The ack: the outcome of one attempt, ready to be written."""

from __future__ import annotations

import msgspec

from taskd.core.jobs.job import JobState


class Ack(msgspec.Struct, gc=False):
    """One attempt's end, ready to be written.

    Attributes:
        state: where the job goes; `scheduled` and `queued` bring it back.
        delay_s: seconds until it is due again.
        refund: the attempt does not count.
        interrupted: a stop took it; counted, and refunded ten times only.
        error: JSON object for the job's `errors`, or None.
        result: JSON text of what the handler returned, or None.
        next: JSON text of the stage that it named as the next of its pipeline, or of its end there.
        parked: given back because its task is paused.
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
