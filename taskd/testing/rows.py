"""Jobs as values for tests, and their text in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from taskd.core.jobs.failure import ARGS_UNFIT

VALUE_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job, as it was when its row was read.

    Attributes:
        state: a value of JobState.
        args: the arguments by name, as decoded from JSON, without omitted defaults.
        due_in_s: seconds until the due time of the job; negative after the due time.
        attempt: number of started attempts that count for max_attempts.
        crashes: number of worker crashes that were counted against the job.
        error: type and message of the error of its last failed attempt; empty if none has failed.
        traceback: the traceback of that error.
        reason: why it was cancelled or failed, or why its result was not stored.
        result: the value that its handler returned.
    """

    id: int
    task: str
    queue: str
    state: str
    args: dict[str, Any]
    priority: int
    attempt: int
    crashes: int
    due_in_s: float
    unique_key: str | None = None
    reason: str | None = None
    error: str = ""
    traceback: str = field(default="", repr=False)
    result: Any = None

    @classmethod
    def of(cls, row: Mapping[str, Any], names: Sequence[str] = ()) -> Self:
        """Return the job of a row of testing_jobs, with its arguments in the order of `names`."""
        fields = dict(row)
        last = msgspec.json.decode(fields.pop("last_error") or "{}")
        args = msgspec.json.decode(fields["args"])
        fields["args"] = {name: args[name] for name in names if name in args} | args
        if fields["result"] is not None:
            fields["result"] = msgspec.json.decode(fields["result"])
        if last:
            fields["error"] = f"{last['type']}: {last['message']}"
            fields["traceback"] = last.get("traceback", "")
        return cls(**fields)

    @property
    def waits(self) -> bool:
        """Return whether the job waits for a worker, its due time, its limit or other jobs."""
        return self.state in {"queued", "scheduled", "blocked"}

    @property
    def unfit(self) -> bool:
        """Return whether the job waits because its arguments do not fit the code of its task."""
        return self.waits and self.error.startswith(f"{ARGS_UNFIT}: ")

    def __str__(self) -> str:
        text = f"job {self.id} {called(self.task, self.args)}: {self.state}"
        if self.state == "scheduled":
            text += f", due in {self.due_in_s:.1f} s"
        if self.attempt:
            text += f", attempt {self.attempt}"
        note = self.error or self.reason
        return f"{text}: {note}" if note else text


def called(task: str, args: Mapping[str, Any]) -> str:
    """Return a task and its arguments, written as a call."""
    return f"{task}({', '.join(f'{name}={quoted(value)}' for name, value in args.items())})"


def quoted(value: object) -> str:
    """Return the repr() of a value, shortened if it is very long."""
    text = repr(value)
    return text if len(text) <= VALUE_CHARACTERS else f"{text[:VALUE_CHARACTERS]}..."
