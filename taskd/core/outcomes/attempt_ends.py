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


# What most handlers return; to make one each time took 0.6 us.
RETURNED_NONE = Returned(None)


@dataclass(frozen=True, slots=True)
class Raised:
    """The handler raised `error`, a verdict or anything else."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The attempt ran into its deadline of `timeout_s`.

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
    """Somebody asked to cancel the job while it ran, and said why."""

    reason: str = "cancel asked"


@dataclass(frozen=True, slots=True)
class NotStarted:
    """Claimed, but never started: given back."""


@dataclass(frozen=True, slots=True)
class StillRuns:
    """Claimed, but an abandoned attempt of the job still runs in this process."""


@dataclass(frozen=True, slots=True)
class IdTaken:
    """Claimed, but a job that a failover has forgotten runs here by the same id: given back."""


@dataclass(frozen=True, slots=True)
class TaskUnknown:
    """This worker does not know the task: given back, for one that does.

    Attributes:
        delay_s: seconds until it is looked at again (unknown_tasks.py).
    """

    delay_s: float = unknown_tasks.DELAY_S


@dataclass(frozen=True, slots=True)
class Settled:
    """Another process ran the handler, and has settled the attempt there.

    Attributes:
        decided: the handler returned, or raised a verdict.
    """

    ack: Ack
    decided: bool


@dataclass(frozen=True, slots=True)
class ArgsNewer:
    """Its arguments have a form that this code does not know yet: given back, for newer code.

    Attributes:
        delay_s: seconds until it is looked at again (unknown_tasks.py).
    """

    delay_s: float = unknown_tasks.DELAY_S


@dataclass(frozen=True, slots=True)
class TaskPaused:
    """Its task is paused: given back, out of the claims' way, until it is resumed."""


@dataclass(frozen=True, slots=True)
class Expired:
    """Claimed after its deadline."""


AttemptEnd = (
    Returned
    | Raised
    | Settled
    | TimedOut
    | Interrupted
    | CancelRequested
    | NotStarted
    | StillRuns
    | IdTaken
    | TaskUnknown
    | ArgsNewer
    | TaskPaused
    | Expired
)


def outcomes(count: int, happened: AttemptEnd) -> list[AttemptEnd]:
    """What became of each job of a batch whose handler ended so.

    None is success for all; a list says it job by job: an exception or a verdict in it is as if
    raised, anything else is the job's result. What is raised is raised for all.
    """
    if not isinstance(happened, Returned) or happened.value is None:
        return [happened] * count
    values = happened.value
    if not isinstance(values, list | tuple) or len(values) != count:
        said = f"{len(values)} outcomes" if isinstance(values, list | tuple) else type(values)
        error = TypeError(f"a batch handler returns None or a list of {count} outcomes, not {said}")
        return [Raised(error)] * count
    return [
        Raised(value) if isinstance(value, BaseException) else Returned(value) for value in values
    ]
