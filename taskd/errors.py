"""The errors of taskd, and the exit code that each one means for a shell or a supervisor.

```
TaskdError                       1
├── ConfigError                 78  a setting is wrong: which, where it came from, what is right
├── EmbeddedError               69  the embedded PostgreSQL cannot be started or joined
├── StoreUnavailable            69  PostgreSQL cannot be reached now; worth trying again
├── PermissionDenied            77  PostgreSQL or the file system refuses this user
├── SchemaError                 78
│   ├── SchemaMissing               no schema `taskd` in this database: run `taskd db migrate`
│   ├── SchemaOutdated              the database is older than this code
│   ├── SchemaTooNew                this code is older than the database works with
│   ├── SchemaEdited                a migration was edited after it was applied
│   └── MigrationFailed          1  a migration was not applied; the message says what it left
├── AppError                    78  the module of --app does not import, or registers nothing usable
├── ResourceError                1  a resource of the app could not be made; worth another start
├── EnqueueError                 2
│   ├── UnknownTask                 nobody has published that task and no queue was named
│   ├── InvalidArgs                 do not fit the signature, are not JSON, or are too large
│   ├── InvalidJob                  queue, priority, time or attempts outside their limits
│   ├── InvalidSchedule             its name, cron, time zone, period or another part is wrong
│   ├── InvalidWorkflow             circles, unknown or doubled names, stages that do not fit
│   ├── KeyHeld                     another job holds the unique key, and that was to be said
│   └── QueueFull                1  as many jobs wait in the queue as may
├── NotEnqueued                  1  what a buffer could not write, job by job
├── BufferFull                   1  a buffer holds as many jobs as it may
├── JobFailed                    1  a job whose result was waited for failed
├── JobCancelled                 1  it was cancelled
├── JobNotFound                  3  no live or finished job has that id
├── ScheduleNotFound             3  no schedule has that name
├── WorkflowNotFound             3  no workflow has that id
├── LimitNotFound                3  no limit has that name
├── InvalidTransition            1  a job in that state cannot do that
├── ResultsTooLarge              1  what the jobs before this one have returned is too much to read
└── LeaseLost                    1  this attempt no longer owns its job
Verdicts (core/jobs/verdicts.py) are not errors: a handler raises one to decide about its job.
```
A message says what is wrong, why, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class TaskdError(Exception):
    """The root of everything that taskd raises on purpose."""

    exit_code: ClassVar[int] = 1


class ConfigError(TaskdError):
    """A setting is missing or wrong."""

    exit_code = 78


class EmbeddedError(TaskdError):
    """The embedded PostgreSQL cannot be started, joined or stopped."""

    exit_code = 69


class StoreUnavailable(TaskdError):
    """PostgreSQL cannot be reached at the moment; the same call may succeed later."""

    exit_code = 69


class PermissionDenied(TaskdError):
    """The database or the operating system refuses this user."""

    exit_code = 77


class SchemaError(TaskdError):
    """The schema `taskd` in the database does not fit this code."""

    exit_code = 78


class SchemaMissing(SchemaError):
    """The database has no schema `taskd`."""


class SchemaOutdated(SchemaError):
    """The database lacks migrations that this code needs."""


class SchemaTooNew(SchemaError):
    """The database no longer works with code as old as this."""


class SchemaEdited(SchemaError):
    """A migration was applied with other SQL than this code brings."""


class MigrationFailed(SchemaError):
    """A migration could not be applied; the message says what it left, and what to do."""

    exit_code = 1


class AppError(TaskdError):
    """The module named by --app cannot be used."""

    exit_code = 78


class ResourceError(TaskdError):
    """A resource of the app could not be made when the worker started."""


class EnqueueError(TaskdError):
    """A job was refused before anything was written."""

    exit_code = 2


class UnknownTask(EnqueueError):
    """No worker has published a task of that name, and no queue was named."""


class InvalidArgs(EnqueueError):
    """The arguments do not fit the task's signature, are not JSON, or are too large."""


class InvalidJob(EnqueueError):
    """An option of the job (queue, priority, time, attempts, timeout) is outside its limits."""


class InvalidSchedule(EnqueueError):
    """A part of a schedule (name, cron, time zone, period, a limit) is wrong."""


class InvalidWorkflow(EnqueueError):
    """A workflow has a circle, a wrong name, stages that do not fit, or too many jobs."""


class KeyHeld(EnqueueError):
    """Another job holds the unique key of a job that is to fail then; nothing was written."""


class QueueFull(EnqueueError):
    """As many jobs wait in the queue as its max_depth allows; nothing was written."""

    exit_code = 1


class BufferFull(TaskdError):
    """The buffer holds as many jobs as it may; this one was not taken."""


class NotEnqueued(TaskdError):
    """What a buffer could not write; nothing else of it is missing.

    Attributes:
        jobs: NewJobs that were surely not written: keep them, enqueue them later.
        refused: (NewJob, error) of those that the database or the task's arguments do not allow.
        unsure: NewJobs that may have been written: the COMMIT was not answered.
    """

    def __init__(
        self,
        message: str,
        jobs: Sequence[Any] = (),
        refused: Sequence[tuple[Any, Exception]] = (),
        unsure: Sequence[Any] = (),
    ) -> None:
        super().__init__(message)
        self.jobs = list(jobs)
        self.refused = list(refused)
        self.unsure = list(unsure)


class JobFailed(TaskdError):
    """A job whose result was waited for failed.

    Attributes:
        job_id: which.
        reason: why, in a word or a sentence.
        error: its last attempt's error: `type`, `message`, `traceback` and more; None without one.
    """

    def __init__(self, job_id: int, reason: str, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"job {job_id} failed: {reason}")
        self.job_id, self.reason, self.error = job_id, reason, error


class JobCancelled(TaskdError):
    """A job whose result was waited for was cancelled.

    Attributes:
        job_id, reason, error: as in JobFailed.
    """

    def __init__(self, job_id: int, reason: str, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"job {job_id} was cancelled: {reason}")
        self.job_id, self.reason, self.error = job_id, reason, error


class JobNotFound(TaskdError):
    """No live or finished job has that id."""

    exit_code = 3


class ScheduleNotFound(TaskdError):
    """No schedule has that name."""

    exit_code = 3


class WorkflowNotFound(TaskdError):
    """No workflow has that id, or none of its jobs is kept any more."""

    exit_code = 3


class LimitNotFound(TaskdError):
    """No code has published a limit of that name, and nobody has set one."""

    exit_code = 3


class ResultsTooLarge(TaskdError):
    """The results of the jobs that a job has waited for take more than may be read at once."""


class InvalidTransition(TaskdError):
    """A job in that state cannot be moved that way."""


class LeaseLost(TaskdError):
    """The attempt no longer owns its job: its worker was buried and the job taken back."""
