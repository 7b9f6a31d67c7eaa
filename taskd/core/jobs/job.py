"""Jobs as values: a job to enqueue, a claimed job, and the allowed state changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Self

import msgspec

from taskd.core.jobs.json_values import has_odd_float, to_json_type
from taskd.core.jobs.limit import LimitOf
from taskd.core.jobs.unique import Unique
from taskd.core.validation import check_int, check_seconds, quoted
from taskd.errors import InvalidArgs, InvalidJob

PAYLOAD_BYTES_MAX = 256 * 1024
TASK_NAME_BYTES_MAX = 200
MAX_ATTEMPTS_LIMIT = 1000
TIMEOUT_S_MAX = 30 * 86400.0
DELAY_S_MAX = 10 * 365 * 86400.0
ARGS_VERSION_MAX = 32767
METADATA_BYTES_MAX = 8 * 1024
PRIORITY_DEFAULT = 100
PRIORITY_MIN, PRIORITY_MAX = -(2**31), 2**31 - 1
ESCAPED_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
RUN_AT_MAX = datetime(9000, 1, 1, tzinfo=UTC)

# The name of a queue is part of the name of its NOTIFY channel, which has at most 63 bytes. A path
# of the dashboard cannot contain `.` and `..`.
QUEUE_NAME = re.compile(r"(?!\.+\Z)[a-z0-9_.-]{1,48}")


class JobState(StrEnum):
    """The state of a job. A job is live in the first four states, and finished in the others."""

    BLOCKED = "blocked"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


LIVE = frozenset({JobState.BLOCKED, JobState.SCHEDULED, JobState.QUEUED, JobState.RUNNING})
WAITING = LIVE - {JobState.RUNNING}
FINISHED = frozenset(JobState) - LIVE
FINISHED_BADLY = FINISHED - {JobState.DONE}

# The list of allowed state changes; None is the state before a job is enqueued. A limit *admits* a
# job when it gives the job a slot. A *suspect* is a job whose worker died while it ran the job.
# Each statement in sql/queries lists its changes on a `-- moves:` line, and the documentation has a
# diagram of all changes. A test compares this list with these lines and with the diagram.
TRANSITIONS: frozenset[tuple[JobState | None, JobState]] = frozenset(
    {
        (None, JobState.QUEUED),  # enqueue
        (None, JobState.SCHEDULED),
        (None, JobState.BLOCKED),  # part of a workflow, or due and not yet admitted by its limit
        (
            JobState.BLOCKED,
            JobState.QUEUED,
        ),  # the last job that it waited for has ended, or its limit has admitted it
        (
            JobState.BLOCKED,
            JobState.SCHEDULED,
        ),  # the same, but the job is due later, or is a suspect
        (JobState.BLOCKED, JobState.CANCELLED),  # by hand, or by its option `on_failed`
        (JobState.BLOCKED, JobState.FAILED),  # its deadline has passed
        (JobState.SCHEDULED, JobState.BLOCKED),  # due, but not yet admitted by its limit
        (
            JobState.QUEUED,
            JobState.BLOCKED,
        ),  # an operator, or a new job with the same unique key, changes arguments or due time
        (JobState.RUNNING, JobState.BLOCKED),  # release
        (
            JobState.SCHEDULED,
            JobState.QUEUED,
        ),  # due; or an operator, or a new job with the same unique key, changes the due time
        (JobState.QUEUED, JobState.SCHEDULED),
        (JobState.QUEUED, JobState.RUNNING),  # claim
        (JobState.SCHEDULED, JobState.RUNNING),  # claim of a suspect, for the quarantine
        (JobState.RUNNING, JobState.DONE),  # ack
        (JobState.RUNNING, JobState.FAILED),
        (JobState.RUNNING, JobState.CANCELLED),
        (JobState.RUNNING, JobState.SCHEDULED),  # retry, snooze, rescue
        (JobState.RUNNING, JobState.QUEUED),  # release
        (JobState.SCHEDULED, JobState.CANCELLED),  # cancel by hand
        (JobState.QUEUED, JobState.CANCELLED),
        (JobState.SCHEDULED, JobState.FAILED),  # its deadline has passed
        (JobState.QUEUED, JobState.FAILED),
        (JobState.BLOCKED, JobState.DONE),  # completed by hand
        (JobState.SCHEDULED, JobState.DONE),
        (JobState.QUEUED, JobState.DONE),
        (JobState.FAILED, JobState.DONE),
        (JobState.CANCELLED, JobState.DONE),
        (JobState.FAILED, JobState.QUEUED),  # retry by hand
        (JobState.FAILED, JobState.SCHEDULED),
        (JobState.CANCELLED, JobState.QUEUED),
        (JobState.CANCELLED, JobState.SCHEDULED),
        (JobState.FAILED, JobState.BLOCKED),  # retry by hand: a limit has to admit it first
        (
            JobState.CANCELLED,
            JobState.BLOCKED,
        ),  # retry by hand: it waits for a job that is retried as well
    }
)


def check_queue(name: str) -> str:
    """Check the name of a queue, and return it.

    Raises:
        InvalidJob: the name is not 1 to 48 of the characters a-z 0-9 _ . - or it consists only of
            dots.
    """
    if not isinstance(name, str) or not QUEUE_NAME.fullmatch(name):
        raise InvalidJob(
            f"queue {quoted(name)} is not a queue name: use 1 to 48 of the characters a-z 0-9 _ . -"
            ", and not only dots"
        )
    return name


def check_task_name(name: str) -> str:
    """Check the name of a task, and return it.

    Raises:
        InvalidJob: the name is empty, takes over 200 bytes, or has characters that are not
            printable.
    """
    try:
        fits = isinstance(name, str) and 1 <= len(name.encode()) <= TASK_NAME_BYTES_MAX
    except UnicodeEncodeError:
        fits = False
    if not fits or not name.isprintable():
        raise InvalidJob(
            f"task name {quoted(name)}: use printable characters, 1 to {TASK_NAME_BYTES_MAX} bytes "
            "in UTF-8"
        )
    return name


def check_payload(task: str, args: str) -> str:
    """Check that a task's arguments, as JSON text, can be stored, and return the text.

    Raises:
        InvalidArgs: `args` is not a text, takes over 256 KiB, or contains U+0000 or a lone
            surrogate.
    """
    if not isinstance(args, str):
        raise InvalidArgs(
            f"task {task}: args must be the JSON text of an object, not a {type(args).__name__}"
        )
    try:
        size = len(args.encode())
    except UnicodeEncodeError:
        raise InvalidArgs(
            f"task {task}: the arguments contain a lone surrogate, which is not a character"
        ) from None
    if size > PAYLOAD_BYTES_MAX:
        raise InvalidArgs(
            f"task {task}: the arguments take {size:,} bytes; the limit is {PAYLOAD_BYTES_MAX:,}. "
            "Store the data elsewhere and pass a reference to it."
        )
    # After an odd number of backslashes, `u0000` is part of an escape; otherwise it is text.
    if "\\u0000" in args and ESCAPED_NUL.search(args):
        raise InvalidArgs(
            f"task {task}: the arguments contain the character U+0000, "
            "which PostgreSQL cannot store"
        )
    return args


def check_moment(name: str, moment: object, seconds: object, instead: str) -> None:
    """Check an option that is a point in time.

    Args:
        name: the name of the option.
        moment: the value of the option.
        seconds: the value of another option, which excludes the option `name`.
        instead: the name of that other option.

    Raises:
        InvalidJob: both options are given; the value is no datetime or has no time zone; or its
            year is not between 2 and 8999.
    """
    if seconds is not None:
        raise InvalidJob(f"give {name} or {instead}, not both")
    if isinstance(moment, str):
        raise InvalidJob(
            f"{name} {quoted(moment)} is a text, not a datetime: pass "
            f"datetime.fromisoformat({quoted(moment)})"
        )
    if not isinstance(moment, datetime):
        raise InvalidJob(
            f"{name} {quoted(moment)} is of the type {type(moment).__name__}, not a datetime; for "
            f"seconds from now, pass {instead}"
        )
    if moment.tzinfo is None:
        raise InvalidJob(
            f"{name} {quoted(moment)} has no time zone: pass a datetime with one, such as "
            "datetime.now(timezone.utc)"
        )
    # A time near datetime's own bounds can overflow when it is converted to UTC.
    if moment.replace(tzinfo=UTC) >= RUN_AT_MAX - timedelta(days=2) or moment.year < 2:
        raise InvalidJob(f"{name} {quoted(moment)} is not between the years 2 and 8999")


def check_attempt_options(max_attempts: int | None, timeout_s: float | None) -> None:
    """Check two options of a new or changed job. An option that is None is not given.

    Raises:
        InvalidJob: a value is outside its limits.
    """
    if max_attempts is not None:
        check_int("max_attempts", max_attempts, 1, MAX_ATTEMPTS_LIMIT)
    if timeout_s is not None:
        check_seconds("timeout_s", timeout_s, 0.001, TIMEOUT_S_MAX)


def check_times(
    run_at: datetime | None,
    delay_s: float | None,
    deadline: datetime | None,
    deadline_s: float | None,
) -> None:
    """Check the due time and the deadline of a new or changed job. None means: not given.

    Raises:
        InvalidJob: a value is outside its limits, or both forms of one time are given.
    """
    if delay_s is not None:
        check_seconds("delay_s", delay_s, 0.0, DELAY_S_MAX)
    if run_at is not None:
        check_moment("run_at", run_at, delay_s, "delay_s")
    if deadline_s is not None:
        check_seconds("deadline_s", deadline_s, 0.0, DELAY_S_MAX)
    if deadline is not None:
        check_moment("deadline", deadline, deadline_s, "deadline_s")


def check_metadata(metadata: Mapping[str, Any]) -> str:
    """Return the JSON text of the metadata of a job.

    Raises:
        InvalidJob: the metadata is not a mapping, has no JSON form, takes over 8 KiB, or has
            U+0000.
    """
    try:
        payload = msgspec.json.encode(metadata, enc_hook=to_json_type)
        odd = b"null" in payload and has_odd_float(metadata)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidJob(f"metadata: {error}") from None
    if odd:
        raise InvalidJob("metadata: NaN and infinities have no JSON form")
    if not payload.startswith(b"{"):
        raise InvalidJob(f"metadata must be a mapping by name, not a {type(metadata).__name__}")
    # Measured as PostgreSQL writes jsonb: with a space after each comma and colon.
    size = len(payload) + payload.count(b",") + payload.count(b":")
    if size > METADATA_BYTES_MAX:
        raise InvalidJob(
            f"metadata takes {size:,} bytes; the limit is {METADATA_BYTES_MAX:,}. "
            "Pass the data that the handler needs as arguments."
        )
    if b"\\u0000" in payload and ESCAPED_NUL.search(payload.decode()):
        raise InvalidJob("metadata contains the character U+0000, which PostgreSQL cannot store")
    return payload.decode()


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to enqueue: an immutable value, checked when created.

    Attributes:
        task: the task's name.
        queue: the queue's name. With None, the job goes to the queue of the published task.
        args: the arguments, as the text of a JSON object of at most 256 KiB.
        priority: an integer of 32 bits; workers claim jobs with smaller numbers first. With None,
            the job has the priority of the published task, or 100.
        run_at: when the job is due (with a time zone); excludes `delay_s`.
        delay_s: seconds from the start of the enqueueing transaction until the job is due.
        max_attempts: the maximum number of attempts, 1 to 1000; with None, the option of the task
            applies.
        timeout_s: timeout of one attempt in seconds; with None, the option of the task applies.
        checked: whether the arguments were checked against the task's signature, as by
            `Task.job()`. If not, they are checked against the published task when the job is
            enqueued.
        unique: the unique key of the job. With None, a job that is `checked` has no key. Any other
            job gets a key by the rule of the published task, if there is one. If the key is made of
            arguments and the job is `checked`, the key is made at once. If the job is not
            `checked`, the key is made when the job is enqueued, because the task can redact these
            arguments.
        no_key: with True, the job gets no unique key, even if the published task has a rule.
        deadline: no attempt starts after this time (with a time zone). If the job still waits at
            this time, the job fails with the reason `expired`. Excludes `deadline_s`.
        deadline_s: the deadline in seconds after the start of the enqueueing transaction.
        args_version: the version of the arguments (see the task's option). None means version 1 if
            the job is `checked`, and otherwise the version of the published task.
        limit: the limit that applies to the job, and the values of the limit's key.
        metadata: further values that are stored with the job, by name, such as tags or the context
            of a trace (`traceparent`). Each value must have a JSON form; all take at most 8 KiB.

    Raises:
        InvalidJob: an option is outside its limits, or options exclude each other.
        InvalidArgs: check_payload() refuses the arguments.
    """

    task: str
    args: str = "{}"
    queue: str | None = None
    priority: int | None = None
    run_at: datetime | None = None
    delay_s: float | None = None
    max_attempts: int | None = None
    timeout_s: float | None = None
    checked: bool = False
    unique: Unique | None = None
    no_key: bool = False
    deadline: datetime | None = None
    deadline_s: float | None = None
    args_version: int | None = None
    limit: LimitOf | None = None
    metadata: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        check_task_name(self.task)
        check_payload(self.task, self.args)
        if self.queue is not None:
            check_queue(self.queue)
        if self.priority is not None:
            check_int("priority", self.priority, PRIORITY_MIN, PRIORITY_MAX)
        check_attempt_options(self.max_attempts, self.timeout_s)
        check_times(self.run_at, self.delay_s, self.deadline, self.deadline_s)
        if self.args_version is not None:
            check_int("args_version", self.args_version, 1, ARGS_VERSION_MAX)
        if self.metadata is not None:
            check_metadata(self.metadata)
        if self.unique is not None:
            keyed = self._keyed(self.unique)
            if self.checked:
                object.__setattr__(self, "unique", keyed)

    def _keyed(self, unique: Unique) -> Unique:
        if not isinstance(unique, Unique):
            raise InvalidJob(f"unique {quoted(unique)} is not a Unique(...)")
        if self.no_key:
            raise InvalidJob("give a unique key or no_key, not both")
        return unique.of(self.args)

    def at(self, run_at: datetime) -> Self:
        """Return a copy of the job that is due at `run_at` (a datetime with a time zone)."""
        return replace(self, run_at=run_at, delay_s=None)

    def after(self, delay_s: float) -> Self:
        """Return a copy that is due `delay_s` seconds after the enqueueing transaction began."""
        return replace(self, delay_s=delay_s, run_at=None)


class Firing(msgspec.Struct, frozen=True):
    """The schedule that enqueued a job, and its tick."""

    schedule: str | None = None
    tick: datetime | None = None


_NO_FIRING = Firing()


class Job(msgspec.Struct, gc=False):
    """A claimed job: the columns that the claim returns, its queue, and the worker.

    Attributes:
        fence: token of this attempt; every write for the attempt checks the token.
        args: JSON text. The claim does not decode the text, so a text that cannot be decoded fails
            only its own job, and not the whole claim.
        max_attempts, timeout_s: options of the job; with None, the option of the task applies.
        wait_s: seconds from the job's due time to the claim, by the database's clock.
        due_at_s: the due time in seconds since 1970, by the database's clock.
        workflow_id: the workflow that the job is part of, if any.
        args_version: the version of the arguments; None means version 1.
        late: whether the deadline had passed when the job was claimed; None if there is no
            deadline.
        metadata: JSON text, or None.
        firing: JSON text of the Firing, or None if no schedule has enqueued the job.
    """

    id: int
    fence: int
    task: str
    args: str
    attempt: int
    max_attempts: int | None
    timeout_s: float | None
    priority: int
    crashes: int
    wait_s: float
    due_at_s: float
    workflow_id: int | None = None
    args_version: int | None = None
    late: bool | None = None
    metadata: str | None = None
    firing: str | None = None
    queue: str = ""
    worker_id: int = 0

    def read_metadata(self) -> Mapping[str, Any]:
        """Return the metadata as a read-only mapping."""
        decoded = {} if self.metadata is None else msgspec.json.decode(self.metadata)
        return MappingProxyType(decoded)

    def read_firing(self) -> Firing:
        """Return the schedule and the tick for which the job was enqueued.

        Both are None if no schedule has enqueued the job.
        """
        if self.firing is None:
            return _NO_FIRING
        found = msgspec.json.decode(self.firing, type=Firing)
        return Firing(found.schedule, found.tick and found.tick.astimezone(UTC))
