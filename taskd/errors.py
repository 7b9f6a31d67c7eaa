"""The errors of taskd, and the exit code with which a command ends on each error.

```
TaskdError                       1
├── ConfigError                 78  a setting is wrong; the message names it and its source
├── EmbeddedError               69  the embedded PostgreSQL cannot be started or joined
├── StoreUnavailable            69  PostgreSQL cannot be reached now; try again
├── PermissionDenied            77  PostgreSQL or the file system refuses this user
├── StatementRefused             1  PostgreSQL refuses a statement, for example because of a trigger
├── SchemaError                 78
│   ├── SchemaMissing               no schema `taskd` in this database: run `taskd db migrate`
│   ├── SchemaOutdated              the database is older than this code
│   ├── SchemaTooNew                this code is too old for the schema of the database
│   ├── SchemaEdited                a migration was edited after it was applied
│   ├── SequenceBehind              a sequence gives ids that older jobs or workflows already have
│   └── MigrationFailed          1  a migration was not applied; the message says what it changed
├── AppError                    78  the module of --app cannot be imported, or has no usable task
├── ResourceError                1  a resource of the app could not be created; start again
├── EnqueueError                 2
│   ├── UnknownTask                 no worker has published the task, and the job names no queue
│   ├── InvalidArgs                 arguments do not fit the signature, or are too large
│   ├── InvalidJob                  queue, priority, time or attempts have an invalid value
│   ├── InvalidSchedule             name, cron, time zone, period or another part is wrong
│   ├── InvalidWorkflow             a cycle, a wrong name, or stages that do not fit
│   ├── KeyHeld                     another job holds the unique key, and on_conflict is `raise`
│   └── QueueFull                1  the queue has as many waiting jobs as its max_depth allows
├── NotEnqueued                  1  a buffer could not write some jobs; the error lists them
├── BufferFull                   1  a buffer is full
├── JobFailed                    1  the job whose result was awaited failed
├── JobCancelled                 1  the job whose result was awaited was cancelled
├── ResultNotStored              1  the job is done, but its result could not be stored
├── InvalidResult                1  the awaited result is not of the type that the handler returns
├── JobNotFound                  3  no live or finished job has that id
├── TaskInUse                    1  live workers, jobs or schedules use the task
├── KeyFree                      3  no job of the task holds that unique key
├── ScheduleNotFound             3  no schedule has that name
├── WorkflowNotFound             3  no workflow has that id
├── LimitNotFound                3  no limit has that name
├── WorkerNotFound               3  no worker has that id
├── InvalidTransition            1  the state of the job does not allow the action
├── ResultsTooLarge              1  the results of the jobs that a job waited for are too large
└── LeaseLost                    1  this attempt no longer owns its job
Verdicts (core/jobs/verdicts.py) are not errors: a handler raises one to decide about its job.
```
A message says what is wrong, why, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class TaskdError(Exception):
    """The base class of all errors that taskd raises deliberately."""

    exit_code: ClassVar[int] = 1


class ConfigError(TaskdError):
    """A setting is missing or wrong."""

    exit_code = 78


class EmbeddedError(TaskdError):
    """The embedded PostgreSQL cannot be started, joined or stopped."""

    exit_code = 69


class StoreUnavailable(TaskdError):
    """PostgreSQL cannot be reached or undid the statement: repeat the call, or your transaction."""

    exit_code = 69


class PermissionDenied(TaskdError):
    """The database or the operating system refuses this user."""

    exit_code = 77


class StatementRefused(TaskdError):
    """PostgreSQL refused a statement for a reason that taskd does not know; nothing was written.

    A trigger, an event trigger or a rule of the database can raise any error.
    """


class SchemaError(TaskdError):
    """The schema `taskd` in the database is not compatible with this code."""

    exit_code = 78


class SchemaMissing(SchemaError):
    """The database has no schema `taskd`."""


class SchemaOutdated(SchemaError):
    """The database lacks migrations that this code needs."""


class SchemaTooNew(SchemaError):
    """The schema in the database requires newer code."""


class SchemaEdited(SchemaError):
    """The SQL of an applied migration differs from the SQL in this code."""


class SequenceBehind(SchemaError):
    """The next id of a sequence belongs to an older job or workflow; nothing was written."""


class MigrationFailed(SchemaError):
    """A migration could not be applied; the message says what it changed, and what to do."""

    exit_code = 1


class AppError(TaskdError):
    """The module of the app (--app, TASKD_APP) cannot be used.

    Attributes:
        traceback: the lines of the traceback of the error that the app raised, or an empty text.
    """

    exit_code = 78

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class ResourceError(TaskdError):
    """A resource of the app could not be created when the worker started."""


class EnqueueError(TaskdError):
    """A job was refused before anything was written."""

    exit_code = 2


class UnknownTask(EnqueueError):
    """No worker has published a task of that name, and the job names no queue."""


class InvalidArgs(EnqueueError):
    """The arguments do not fit the task's signature, are not JSON, or are too large."""


class InvalidJob(EnqueueError):
    """An option of the job (queue, priority, time, attempts, timeout) has an invalid value."""


class InvalidSchedule(EnqueueError):
    """A part of a schedule (name, cron expression, time zone, period, ...) is not valid."""


class InvalidWorkflow(EnqueueError):
    """A workflow has a cycle, an invalid name, stages that do not fit, or too many jobs."""


class KeyHeld(EnqueueError):
    """Another job holds the unique key, and on_conflict is `raise`; nothing was written.

    On a connection of the caller, the error aborts the caller's transaction, like every error of
    PostgreSQL. Roll back to a savepoint, or use on_conflict `skip`, whose outcome is `skipped`.
    """


class QueueFull(EnqueueError):
    """The queue has as many waiting jobs as its max_depth allows; nothing was written.

    On a connection of the caller, the error aborts the caller's transaction, like every error of
    PostgreSQL. Roll back to a savepoint.
    """

    exit_code = 1


class BufferFull(TaskdError):
    """The buffer is full; it did not accept this job."""


class NotEnqueued(TaskdError):
    """A buffer could not write some of its jobs; all other jobs were written.

    Attributes:
        jobs: NewJobs that were not written; the caller can enqueue them later.
        refused: (NewJob, error) for each job that was refused.
        unsure: NewJobs that may or may not have been written: their COMMIT got no reply.
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
    """The job whose result was awaited failed.

    Attributes:
        job_id: id of the job.
        reason: why it failed, in a word or a sentence.
        error: the error of its last attempt: `type`, `message`, `traceback` and more; or None.
    """

    def __init__(self, job_id: int, reason: str, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"job {job_id} failed: {reason}")
        self.job_id, self.reason, self.error = job_id, reason, error


class JobCancelled(TaskdError):
    """The job whose result was awaited was cancelled.

    Attributes:
        job_id, reason, error: the same as in JobFailed.
    """

    def __init__(self, job_id: int, reason: str, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(f"job {job_id} was cancelled: {reason}")
        self.job_id, self.reason, self.error = job_id, reason, error


class ResultNotStored(TaskdError):
    """The job is done, but its result could not be stored.

    If a handler reads this result and does not catch the error, the handler's own job fails without
    a retry.

    Attributes:
        job_id: id of the job whose result was not stored.
        reason: why the result was not stored.
    """

    def __init__(self, job_id: int, reason: str) -> None:
        super().__init__(f"job {job_id} is done, but {reason}")
        self.job_id, self.reason = job_id, reason


class InvalidResult(TaskdError):
    """The awaited result of a job is not of the type that its handler is annotated to return."""


class JobNotFound(TaskdError):
    """No live or finished job has that id."""

    exit_code = 3


class TaskInUse(TaskdError):
    """Live workers, jobs or schedules use the task, so its record stays."""


class KeyFree(TaskdError):
    """No job of the task holds that unique key."""

    exit_code = 3


class ScheduleNotFound(TaskdError):
    """No schedule has that name."""

    exit_code = 3


class WorkflowNotFound(TaskdError):
    """No workflow has that id, or none of its jobs is still stored."""

    exit_code = 3


class LimitNotFound(TaskdError):
    """No worker has published a limit of that name, and no operator has set one."""

    exit_code = 3


class WorkerNotFound(TaskdError):
    """No worker has this id, or its row was deleted a week after its end."""

    exit_code = 3


class ResultsTooLarge(TaskdError):
    """The results of the jobs that a job waited for are too large to be read at once."""


class InvalidTransition(TaskdError):
    """The state of the job does not allow this action."""


class LeaseLost(TaskdError):
    """The attempt no longer owns its job: its worker was declared dead and the job rescued."""
