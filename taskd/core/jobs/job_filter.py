"""Filters that select jobs; the command line, the dashboard and clients share them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from typing import Any, Self

import msgspec

from taskd.core.jobs.job import (
    DELAY_S_MAX,
    FINISHED_BADLY,
    JobState,
    check_moment,
    check_queue,
)
from taskd.core.jobs.json_values import to_json_type
from taskd.core.jobs.unique import normal_key
from taskd.core.validation import check_int, check_seconds, quoted
from taskd.errors import InvalidJob

# In the text of a filter, each of these characters matches any text. `taskd stats errors` prints #
# and ….
WILD = "*#…"
ID_MAX = 2**63 - 1
# A hundred years: PostgreSQL can subtract this interval from the current time.
AGE_S_MAX = 10 * DELAY_S_MAX
_TEXTS = ("task", "error", "args_text", "schedule", "unique_key")


@dataclass(frozen=True, slots=True)
class JobFilter:
    """A filter for jobs. A job matches if it fits all attributes that are given.

    Attributes:
        queue: the queue of the job.
        task: the name of the job's task.
        states: the job is in one of these states, given as JobStates or their names.
        error: a part of the job's last error or reason, in upper or lower case. `*`, `#` and `…`
            match any text: `taskd stats errors` prints `#` and `…` for parts that differ.
        since_s: a live job matches if it was enqueued within the last `since_s` seconds. A finished
            job matches if it ended within these seconds. Excludes `since`.
        since: as `since_s`, but from this time on (a datetime with a time zone).
        older_than_s: a live job matches if it was enqueued more than this many seconds ago. A
            finished job matches if it ended more than this many seconds ago.
        running_for_s: a running job matches if its worker claimed it more than this many seconds
            ago. A finished job matches if its last attempt took longer than this. A waiting job
            does not match.
        retrying: with True, only jobs that wait for another attempt after a failed one match; with
            False, all other jobs match.
        args: the values that the arguments of the job have, by name.
        args_text: a part of the JSON text of the arguments, with wildcards like `error`. Redacted
            arguments are not searched.
        worker: the worker that runs the job, or has run its last attempt. It is given by its id, or
            by the setting `name`; several workers can have the same name.
        workflow: the id or the name of the workflow or pipeline of the job.
        schedule: the name of the schedule that has enqueued the job.
        late: with True, only jobs of schedules match that have not ended by their `ends_by`, or
            that have expired.
        unique_key: the unique key of the job. A key that is a JSON list or object is compared by
            value.
        metadata: values in the metadata of the job, such as tags, by name. A list matches if the
            stored list contains its items.

    Raises:
        InvalidJob: a value is outside its limits.
    """

    queue: str | None = None
    task: str | None = None
    states: Collection[JobState | str] = ()
    error: str | None = None
    since_s: float | None = None
    since: datetime | None = None
    older_than_s: float | None = None
    running_for_s: float | None = None
    retrying: bool | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    args_text: str | None = None
    worker: int | str | None = None
    workflow: int | str | None = None
    schedule: str | None = None
    late: bool = False
    unique_key: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.queue is not None:
            check_queue(self.queue)
        for name in _TEXTS:
            if (value := getattr(self, name)) is not None:
                _check_text(name, value)
        object.__setattr__(self, "states", _job_states(self.states))
        self._check_times()
        for name in ("worker", "workflow"):
            if (value := getattr(self, name)) is not None:
                _check_id_or_name(name, value)
        if self.retrying is not None:
            _check_bool("retrying", self.retrying)
        _check_bool("late", self.late)
        for name in ("args", "metadata"):
            _json(name, getattr(self, name))

    def _check_times(self) -> None:
        for name in ("since_s", "older_than_s", "running_for_s"):
            if (value := getattr(self, name)) is not None:
                check_seconds(name, value, 0.0, AGE_S_MAX)
        if self.since is not None:
            check_moment("since", self.since, self.since_s, "since_s")

    @property
    def empty(self) -> bool:
        """Whether no attribute is given, so that all jobs match."""
        return self == JobFilter()

    @property
    def by_end(self) -> bool:
        """Whether only failed and cancelled jobs match.

        An index contains these jobs by the time of their end.
        """
        return bool(self.states) and FINISHED_BADLY.issuperset(self.states)

    @property
    def private(self) -> bool:
        """Whether the filter uses values of jobs that observers are not allowed to read."""
        return bool(self.args or self.args_text or self.unique_key or self.metadata)

    def within(self, states: Collection[JobState]) -> Self:
        """Return the filter for the matching jobs that are in one of these states.

        Raises:
            InvalidJob: the filter selects none of these states.
        """
        able = [state for state in JobState if state in states]
        left = [state for state in able if state in self.states] if self.states else able
        if not left:
            raise InvalidJob(
                f"states {', '.join(self.states)}: give one of the states {', '.join(able)}"
            )
        return replace(self, states=left)

    def listed(self) -> Self:
        """Return the filter for a list of jobs.

        If `running_for_s` is given without `states`, only running jobs match.
        """
        if self.running_for_s is not None and not self.states:
            return self.within([JobState.RUNNING])
        return self

    def document(self, **bounds: object) -> str:
        """Return the filter as taskd.find_jobs() takes it: a JSON object of the given attributes.

        Args:
            bounds: `at` and `up_to_id` of that function.
        """
        values = {each.name: getattr(self, each.name) for each in fields(self)} | bounds
        values |= {name: pattern(values[name]) for name in ("error", "args_text") if values[name]}
        if self.unique_key is not None:
            values["unique_key"] = normal_key(self.unique_key)
        for name in ("worker", "workflow"):
            if isinstance(values[name], str):
                values[f"{name}_name"] = values.pop(name)
        given = {
            name: value
            for name, value in values.items()
            if value or (value == 0.0 and name != "late")
        }
        return _json("filter", given)


def pattern(text: str) -> str:
    """Return the pattern for ILIKE that matches texts with this part."""
    escaped = "".join(f"\\{c}" if c in "\\%_" else c for c in text)
    for wild in WILD:
        escaped = escaped.replace(wild, "%")
    return f"%{escaped}%"


def _job_states(states: object) -> tuple[JobState, ...]:
    if isinstance(states, str) or not isinstance(states, Collection):
        raise InvalidJob(f"states {quoted(states)} is not a list of states, such as ['failed']")
    try:
        return tuple(dict.fromkeys(JobState(state) for state in states))
    except (ValueError, TypeError):
        known = ", ".join(JobState)
        raise InvalidJob(f"states {quoted(states)}: a job has one of the states {known}") from None


def _check_id_or_name(field: str, value: object) -> None:
    if isinstance(value, str):
        _check_text(field, value)
    else:
        check_int(field, value, 1, ID_MAX)


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidJob(f"{name} {quoted(value)} is not True or False")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise InvalidJob(f"{name} {quoted(value)} is not a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidJob(
            f"{name} {quoted(value)} has a lone surrogate, which is not a character"
        ) from None
    if not value or "\0" in value:
        raise InvalidJob(f"{name} {quoted(value)} must not be empty or contain U+0000")


def _json(name: str, values: object) -> str:
    if not isinstance(values, Mapping):
        raise InvalidJob(f"{name} {quoted(values)} is not a mapping by name")
    try:
        text = msgspec.json.encode(values, enc_hook=to_json_type).decode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob(f"{name}: {error}") from None
    if "\\u0000" in text:
        raise InvalidJob(f"{name} contains the character U+0000, which PostgreSQL cannot store")
    return text
