"""The reports of a process (process=True) to its worker, and how the process can fail."""

from __future__ import annotations

import signal
from typing import Any

import msgspec

from taskd.core.jobs.failure import Failure
from taskd.core.jobs.job import JobState
from taskd.core.jobs.pipeline_steps import Next, Stop
from taskd.core.outcomes.ack import Ack
from taskd.core.outcomes.attempt_ends import DecidedElsewhere


class MustEnd(BaseException):
    """Raised in a handler with process=True to end it.

    If the handler goes on, the worker kills the process a few seconds later. MustEnd is a
    BaseException, so that `except Exception` does not catch it.

    Attributes:
        why: `timeout` after a timeout; otherwise `stop`: the worker stops or has lost its lease, or
            a cancellation was requested.
    """

    def __init__(self, why: str) -> None:
        super().__init__("it exceeded its timeout" if why == "timeout" else "it was asked to stop")
        self.why = why


class ProcessDied(Exception):
    """The process of a handler with process=True ended during an attempt.

    Args:
        pid: the id of the process.
        code: the exit code, or the negative number of the signal that ended the process.
        hung_up: whether the process closed its connection to the worker; the worker then killed the
            process.
    """

    def __init__(self, pid: int, code: int, *, hung_up: bool = False) -> None:
        how = "closed its connection to the worker" if hung_up else f"ended with {ended(code)}"
        super().__init__(f"process {pid} {how} during the attempt")
        self.code = code


class ProcessNotStarted(Exception):
    """No process could be started for a handler with process=True; the message says why."""


class HandlerRaised(Exception):
    """An exception or verdict of a handler with process=True, as its middleware sees it.

    The original exception stays in the process of the handler, which has already applied the rules
    of `on_error`. The text of HandlerRaised consists of the type and the message of the original
    exception, or is the reason of the verdict.

    Attributes:
        outcome: for taskd itself: the outcome of the attempt.
    """

    def __init__(self, outcome: DecidedElsewhere) -> None:
        ack = outcome.ack
        text = ack.reason or ("the handler asked to run later" if ack.refund else ack.state)
        if ack.error is not None:
            failure = msgspec.json.decode(ack.error, type=Failure)
            text = f"{failure.type}: {failure.message}"
        super().__init__(text)
        self.outcome = outcome


class Answer(msgspec.Struct, gc=False):
    """The message that a process sends to its worker at the end of an attempt.

    Attributes:
        ack: the outcome.
        decided: whether the handler chose the outcome: it returned, or raised a verdict.
        lines: the kept log lines of the handler, each as a JSON object.
        left_out: number of log lines that were dropped.
    """

    ack: Ack
    decided: bool
    lines: list[str] = []
    left_out: int = 0


def value_of(outcome: DecidedElsewhere) -> Any:
    """Return the value that the handler returned in its process, decoded from JSON.

    Raises:
        HandlerRaised: the handler raised an exception or a verdict.
    """
    ack = outcome.ack
    if ack.state is not JobState.DONE:
        raise HandlerRaised(outcome)
    result = None if ack.result is None else msgspec.json.decode(ack.result)
    if ack.next is None:
        return result
    step = msgspec.json.decode(ack.next, type=dict[str, Any])
    return Stop(result) if "stop" in step else Next(step["stage"], **step["args"])


def ended(code: int) -> str:
    """Describe how a process ended: by its exit code, or by the signal with number -`code`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps by the kernel because memory ran out" if name == "SIGKILL" else ""
    return f"{name}{hint}"
