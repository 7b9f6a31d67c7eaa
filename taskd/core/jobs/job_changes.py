"""What may be changed about a job that waits, and which jobs are meant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, TypedDict

import msgspec

from taskd.core.jobs.job import (
    DELAY_S_MAX,
    MAX_ATTEMPTS_LIMIT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    TIMEOUT_S_MAX,
    JobState,
    check_moment,
    check_queue,
)
from taskd.core.validation import check_int, check_seconds
from taskd.errors import InvalidJob

FINISHED_BADLY = frozenset({JobState.FAILED, JobState.CANCELLED})
# What stands for changing text in a pattern: `*`, and what `taskd stats errors` writes.
WILD = "*#…"


class ChangeOutcome(StrEnum):
    """What became of a job that was to be changed."""

    CHANGED = "changed"
    # It runs: what it does is decided.
    RUNNING = "running"
    FINISHED = "finished"
    UNKNOWN = "unknown"


class Changes(TypedDict, total=False):
    """The parts of a Change, as keyword arguments."""

    priority: int | None
    run_at: datetime | None
    delay_s: float | None
    args: Mapping[str, Any] | None
    update_args: Mapping[str, Any] | None
    queue: str | None
    max_attempts: int | None
    timeout_s: float | None
    deadline: datetime | None
    deadline_s: float | None
    no_deadline: bool


@dataclass(frozen=True, slots=True)
class Change:
    """What is to change about jobs that wait; None leaves it as it is.

    Attributes:
        priority: smaller first.
        run_at: not before this moment: sooner, or later, than it was; excludes `delay_s`.
        delay_s: not before that many seconds from now; 0 is now.
        args: all arguments, in place of those that it has.
        update_args: some arguments; the others stay.
        queue: where it waits from now on.
        max_attempts: 1 to 1000.
        timeout_s: seconds of one attempt.
        deadline: no attempt starts after this moment; excludes `deadline_s`.
        deadline_s: the same in seconds from now.
        no_deadline: it has a deadline no longer.

    Raises:
        InvalidJob: a value is outside its limits.
    """

    priority: int | None = None
    run_at: datetime | None = None
    delay_s: float | None = None
    args: Mapping[str, Any] | None = None
    update_args: Mapping[str, Any] | None = None
    queue: str | None = None
    max_attempts: int | None = None
    timeout_s: float | None = None
    deadline: datetime | None = None
    deadline_s: float | None = None
    no_deadline: bool = False

    def __post_init__(self) -> None:
        if self.priority is not None:
            check_int("priority", self.priority, PRIORITY_MIN, PRIORITY_MAX)
        if self.max_attempts is not None:
            check_int("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS_LIMIT)
        if self.timeout_s is not None:
            check_seconds("timeout_s", self.timeout_s, 0.001, TIMEOUT_S_MAX)
        if self.delay_s is not None:
            check_seconds("delay_s", self.delay_s, 0.0, DELAY_S_MAX)
        if self.run_at is not None:
            check_moment("run_at", self.run_at, self.delay_s, "delay_s")
        if self.deadline_s is not None:
            check_seconds("deadline_s", self.deadline_s, 0.0, DELAY_S_MAX)
        if self.deadline is not None:
            check_moment("deadline", self.deadline, self.deadline_s, "deadline_s")
        if self.no_deadline and (self.deadline, self.deadline_s) != (None, None):
            raise InvalidJob("give a deadline or no_deadline, not both")
        if self.queue is not None:
            check_queue(self.queue)
        if self.args is not None and self.update_args is not None:
            raise InvalidJob("give args or update_args, not both")

    @property
    def empty(self) -> bool:
        """Whether nothing is to change."""
        return self == Change()


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs are meant, by what they are; what is not given says nothing.

    Attributes:
        queue: their queue.
        task: their task's name.
        states: one of these.
        error: part of their last error or reason, whatever its case; `*` stands for any text, and
            so do `#` and `…`, which `taskd stats errors` writes.
        older_than_s: enqueued, or finished, longer ago than this.
        since_s: enqueued, or finished, that recently.
        args: part of their arguments.
    """

    queue: str | None = None
    task: str | None = None
    states: tuple[JobState, ...] = ()
    error: str | None = None
    older_than_s: float | None = None
    since_s: float | None = None
    args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def error_pattern(self) -> str | None:
        """The error as a pattern for ILIKE."""
        if self.error is None:
            return None
        escaped = "".join(f"\\{c}" if c in "\\%_" else c for c in self.error)
        for wild in WILD:
            escaped = escaped.replace(wild, "%")
        return f"%{escaped}%"

    @property
    def args_json(self) -> str | None:
        """The arguments as JSON text."""
        return msgspec.json.encode(self.args).decode() if self.args else None
