"""How an attempt can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taskd.core.outcomes import unknown_tasks
from taskd.core.outcomes.ack import Ack


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler returned `value`."""

    value: Any


# Shared, as most handlers return None, and making it each time costs 0.6 us.
RETURNED_NONE = Returned(None)


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised `error`, a verdict or anything else."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The attempt exceeded its `timeout_s`.

    Attributes:
        abandoned: it ignored the cancellation and may still run.
        killed: it ignored the cancellation, and its process was killed.
    """

    timeout_s: float
    abandoned: bool = False
    killed: bool = False


@dataclass(frozen=True, slots=True)
class Interrupted:
    """A stopping worker, or one that lost its lease, cancelled the attempt.

    Attributes:
        abandoned: it ignored the cancellation and may still run.
        why: `stop`, or `fence`: the worker had lost its lease, or could not renew it.
    """

    abandoned: bool = False
    why: str = "stop"


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A cancellation of the job was requested while it ran."""

    reason: str = "cancel requested"


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Claimed, but never started: released."""


@dataclass(frozen=True, slots=True)
class StillRuns:
    """Claimed, but an abandoned attempt of the job still runs in this process."""


@dataclass(frozen=True, slots=True)
class IdTaken:
    """Claimed and released: another job with this id, which a failover has lost, runs here."""


@dataclass(frozen=True, slots=True)
class TaskUnknown:
    """No live worker of the queue knows the task: parked, until one does.

    Attributes:
        delay_s: seconds until the job is due again (unknown_tasks.py).
    """

    delay_s: float = unknown_tasks.DELAY_S


@dataclass(frozen=True, slots=True)
class RunsElsewhere:
    """This worker cannot run the job, and another live worker can: released for that worker."""


@dataclass(frozen=True, slots=True)
class DecidedElsewhere:
    """Another process ran the handler, and has decided the outcome there.

    Attributes:
        decided: the handler returned, or raised a verdict.
    """

    ack: Ack
    decided: bool


@dataclass(frozen=True, slots=True)
class ArgsNewer:
    """No live worker of the queue reads this version of its arguments: parked, until one does.

    Attributes:
        delay_s: seconds until the job is due again (unknown_tasks.py).
    """

    delay_s: float = unknown_tasks.DELAY_S


@dataclass(frozen=True, slots=True)
class TaskPaused:
    """Its task is paused: released and parked, until the task is resumed."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Claimed after its deadline."""


# Claimed jobs whose handler never started.
NeverStarted = NotStarted | RunsElsewhere | TaskUnknown | ArgsNewer | TaskPaused | Expired | IdTaken
# Attempts whose handler did not end by itself.
EndedByWorker = TimedOut | Interrupted | CancelRequested | StillRuns | NeverStarted
AttemptEnd = Returned | Raised | DecidedElsewhere | EndedByWorker


def outcomes(count: int, happened: AttemptEnd) -> list[AttemptEnd]:
    """Return the end of each job of a batch, given the end of its handler.

    None means that all jobs succeeded. A list has one entry per job: an exception or a verdict
    counts as raised, anything else is the job's result. An exception that the handler raises counts
    for all jobs.
    """
    if not isinstance(happened, Returned) or happened.value is None:
        return [happened] * count
    values = happened.value
    if not isinstance(values, list | tuple) or len(values) != count:
        count_or_type = (
            f"{len(values)} outcomes" if isinstance(values, list | tuple) else type(values)
        )
        error = TypeError(
            f"a batch handler returns None or a list of {count} outcomes, not {count_or_type}"
        )
        return [Raised(error)] * count
    return [
        Raised(value) if isinstance(value, BaseException) else Returned(value) for value in values
    ]
