"""The ways in which an attempt can end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from taskd.core.outcomes import unknown_tasks
from taskd.core.outcomes.ack import Ack

# The error that a cancelled handler raised instead of the cancellation: an exception, or the JSON
# of a Failure if the handler ran in a separate process. None if there is no such error.
Cleanup = BaseException | str | None


@dataclass(frozen=True, slots=True)
class Returned:
    """The handler returned `value`."""

    value: Any


# A shared object: most handlers return None, and creating an object for each costs 0.6 us.
RETURNED_NONE = Returned(None)


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised `error`, which can be a verdict."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The attempt exceeded its `timeout_s`.

    Attributes:
        abandoned: the handler ignored the cancellation and possibly still runs.
        killed: the handler ignored the cancellation, and the worker killed its process.
        error: the exception with which the cancelled handler ended, or None.
        cleanup: the error that the handler raised instead of the cancellation, if any.
    """

    timeout_s: float
    abandoned: bool = False
    killed: bool = False
    error: BaseException | None = None
    cleanup: Cleanup = None


# The values of Interrupted.why.
INTERRUPTIONS = ("stop", "fence", "by hand", "foreign")


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The worker or code of the app cancelled the attempt.

    Attributes:
        abandoned: the handler ignored the cancellation and possibly still runs.
        why: `stop` if the worker stops; `fence` if the worker had lost its lease, or could not
            renew it; `by hand` if a user has completed or restarted the job; `foreign` if code of
            the app outside of the handler cancelled the attempt's asyncio task.
        cleanup: as in TimedOut.
    """

    abandoned: bool = False
    why: str = "stop"
    cleanup: Cleanup = None


@dataclass(frozen=True, slots=True)
class CancelRequested:
    """A cancellation of the job was requested while it ran.

    Attributes:
        cleanup: as in TimedOut.
    """

    reason: str = "cancel requested"
    cleanup: Cleanup = None


@dataclass(frozen=True, slots=True)
class NotStarted:
    """The job was claimed, but not started: it is released."""


@dataclass(frozen=True, slots=True)
class StillRuns:
    """The job was claimed and is released: an abandoned attempt of it still runs in this process.

    The claims of this worker leave the job out until that attempt has ended.
    """


@dataclass(frozen=True, slots=True)
class AttemptsSpent:
    """The job was claimed, but has no attempt left: it fails."""

    limit: int


@dataclass(frozen=True, slots=True)
class IdTaken:
    """The job was claimed and is released: another job with the same id runs in this process.

    A failover has lost the row of the other job, and the new primary has given the same id to this
    job.
    """


@dataclass(frozen=True, slots=True)
class TaskUnknown:
    """No live worker of the queue knows the task: the job is parked until a worker knows it.

    Attributes:
        delay_s: seconds until the job is due again (unknown_tasks.py).
    """

    delay_s: float = unknown_tasks.DELAY_S


@dataclass(frozen=True, slots=True)
class RunsElsewhere:
    """This worker cannot run the job, but another live worker can: the job is released."""


@dataclass(frozen=True, slots=True)
class DecidedElsewhere:
    """The handler ran in a separate process, which has decided the outcome.

    Attributes:
        ack: the outcome.
        decided: whether the handler chose the outcome: it returned, or raised a verdict.
    """

    ack: Ack
    decided: bool


@dataclass(frozen=True, slots=True)
class ArgsNewer:
    """No live worker of the queue can read the version of the arguments: the job is parked.

    Attributes:
        delay_s: seconds until the job is due again (unknown_tasks.py).
    """

    delay_s: float = unknown_tasks.DELAY_S


@dataclass(frozen=True, slots=True)
class ArgsUnfit:
    """The arguments do not fit the code of this worker: the job waits for other code.

    Attributes:
        error: JSON of the Failure that says why.
        delay_s: seconds until the job is due again (unknown_tasks.py).
    """

    error: str
    delay_s: float = unknown_tasks.DELAY_S


@dataclass(frozen=True, slots=True)
class TaskPaused:
    """The task is paused: the job is parked until the pause ends."""


@dataclass(frozen=True, slots=True)
class Expired:
    """The deadline of the job had passed when it was claimed: the job fails."""


# Ends of claimed jobs whose handler was not started.
NeverStarted = (
    NotStarted
    | RunsElsewhere
    | TaskUnknown
    | ArgsNewer
    | ArgsUnfit
    | TaskPaused
    | Expired
    | IdTaken
    | StillRuns
    | AttemptsSpent
)
# Ends that the worker caused, not the handler.
EndedByWorker = TimedOut | Interrupted | CancelRequested | NeverStarted
AttemptEnd = Returned | Raised | DecidedElsewhere | EndedByWorker


def error_of(happened: AttemptEnd) -> BaseException | None:
    """Return the exception that the handler raised in this process, or None."""
    if isinstance(happened, Raised | TimedOut):
        return happened.error
    if isinstance(happened, Interrupted | CancelRequested):
        return happened.cleanup if isinstance(happened.cleanup, BaseException) else None
    return None


def outcomes(count: int, happened: AttemptEnd) -> list[AttemptEnd]:
    """Return how the attempt of each job of a batch of `count` jobs ended.

    If the handler returned None, all jobs succeeded. If the handler returned a list of `count`
    entries, each entry belongs to one job. An entry that is an exception or a verdict counts as
    raised by the attempt of its job. Any other entry is the result of its job. If the handler
    returned neither None nor such a list, the attempts of all jobs end with a TypeError.

    Args:
        happened: how the call of the handler ended. If the handler did not return, all jobs of the
            batch end in the same way.
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
