"""Handlers in a process of their own: what is raised in them, and what is said when one dies."""

from __future__ import annotations

import signal

import msgspec

from taskd.core.outcome import Ack


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
    """The process of a handler with process=True ended in the middle of an attempt."""

    def __init__(self, pid: int, code: int) -> None:
        super().__init__(f"process {pid} ended with {ended(code)} in the middle of the attempt")
        self.code = code


class ProcessNotStarted(Exception):
    """No process could be started for a handler with process=True; its message says why."""


class Answer(msgspec.Struct, gc=False):
    """What a process says at the end of an attempt.

    Attributes:
        ack: the outcome.
        decided: the handler returned, or raised a verdict.
    """

    ack: Ack
    decided: bool


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
