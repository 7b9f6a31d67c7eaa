"""Changes of waiting jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, TypedDict

from taskd.core.jobs.job import (
    PRIORITY_MAX,
    PRIORITY_MIN,
    check_attempt_options,
    check_queue,
    check_times,
)
from taskd.core.validation import check_int
from taskd.errors import InvalidJob

# The delay before the next attempt of a restarted job. During this delay, the handler of the
# previous attempt can end.
RESTART_DELAY_S = 5.0


class ChangeOutcome(StrEnum):
    """Whether a job was changed, or why not."""

    CHANGED = "changed"
    RUNNING = "running"
    FINISHED = "finished"
    # There is no job with the given id.
    UNKNOWN = "unknown"


class DeleteOutcome(StrEnum):
    """Whether a job was deleted, or why not."""

    DELETED = "deleted"
    # A worker runs the job: cancel the job before you delete it.
    RUNNING = "running"
    # Other jobs of its workflow are live, and need it.
    IN_A_WORKFLOW = "in a workflow"
    UNKNOWN = "unknown"


class Changes(TypedDict, total=False):
    """The attributes of a Change, as keyword arguments."""

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
    """New values for waiting jobs. A value that is None does not change.

    Attributes:
        priority: an integer of 32 bits; workers claim jobs with smaller numbers first.
        run_at: when the job is due, sooner or later than before; excludes `delay_s`.
        delay_s: seconds from now until the job is due; with 0, the job is due now.
        args: all arguments, in place of the present ones; excludes `update_args`.
        update_args: new values of some arguments; the others stay.
        queue: the new queue.
        max_attempts: 1 to 1000.
        timeout_s: timeout of one attempt in seconds.
        deadline: no attempt starts after this moment; excludes `deadline_s`.
        deadline_s: the deadline, in seconds from now.
        no_deadline: with True, the deadline is removed; excludes `deadline` and `deadline_s`.

    Raises:
        InvalidJob: a value is outside its limits, or two values exclude each other.
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
        check_attempt_options(self.max_attempts, self.timeout_s)
        check_times(self.run_at, self.delay_s, self.deadline, self.deadline_s)
        if self.no_deadline and (self.deadline, self.deadline_s) != (None, None):
            raise InvalidJob("give a deadline or no_deadline, not both")
        if self.queue is not None:
            check_queue(self.queue)
        if self.args is not None and self.update_args is not None:
            raise InvalidJob("give args or update_args, not both")

    @property
    def empty(self) -> bool:
        """Whether no new value is given."""
        return self == Change()
