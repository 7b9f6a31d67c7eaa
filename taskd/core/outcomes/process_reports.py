"""Handlers in a process of their own: what is raised in them, and what is said when one dies."""

from __future__ import annotations

import signal
from typing import Any

import msgspec

from taskd.core.jobs.failure import Failure
from taskd.core.jobs.job import JobState
from taskd.core.jobs.pipeline_steps import Next, Stop
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import Settled


class MustEnd(BaseException):
    """Raised inside a handler with process=True that must end; some seconds later it is killed.

    No Exception, so that `except Exception` does not swallow it.

    Attributes:
        why: `timeout`, or `stop`: its worker stops, or somebody asked to cancel the job.
    """

    def __init__(self, why: str) -> None:
        super().__init__("its time is over" if why == "timeout" else "it was told to stop")
        self.why = why


class ProcessDied(Exception):
    """The process of a handler with process=True ended in the middle of an attempt.

    Args:
        hung_up: it had closed its line to the worker, did not end, and was killed for that.
    """

    def __init__(self, pid: int, code: int, *, hung_up: bool = False) -> None:
        how = "closed its line to the worker" if hung_up else f"ended with {ended(code)}"
        super().__init__(f"process {pid} {how} in the middle of the attempt")
        self.code = code


class ProcessNotStarted(Exception):
    """No process could be started for a handler with process=True; its message says why."""


class HandlerRaised(Exception):
    """What middleware sees of what a handler with process=True has raised, verdicts too.

    The exception itself stays in its process, where the rules of `on_error` have decided already.
    Its text is the type and the message of that one.

    Attributes:
        settled: the outcome; taskd's own.
    """

    def __init__(self, settled: Settled) -> None:
        ack = settled.ack
        text = ack.reason or ("it asked to come back later" if ack.refund else ack.state)
        if ack.error is not None:
            failure = msgspec.json.decode(ack.error, type=Failure)
            text = f"{failure.type}: {failure.message}"
        super().__init__(text)
        self.settled = settled


class Answer(msgspec.Struct, gc=False):
    """What a process says at the end of an attempt.

    Attributes:
        ack: the outcome.
        decided: the handler returned, or raised a verdict.
        lines: what it has logged, each line as JSON, if that is kept.
        left_out: how many lines were left out of them.
    """

    ack: Ack
    decided: bool
    lines: list[str] = []
    left_out: int = 0


def value_of(settled: Settled) -> Any:
    """What a handler has returned in its process, as JSON can hold it.

    Raises:
        HandlerRaised: it has raised something.
    """
    ack = settled.ack
    if ack.state is not JobState.DONE:
        raise HandlerRaised(settled)
    result = None if ack.result is None else msgspec.json.decode(ack.result)
    if ack.next is None:
        return result
    step = msgspec.json.decode(ack.next, type=dict[str, Any])
    return Stop(result) if "stop" in step else Next(step["stage"], **step["args"])


def ended(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps by the kernel as memory ran out" if name == "SIGKILL" else ""
    return f"{name}{hint}"
