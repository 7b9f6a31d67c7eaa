"""taskd: a job queue in the PostgreSQL that you already have.

`@task` declares a task, `taskd run` starts a worker. taskd imports each public name at the first
use of the name. So `import taskd` is quick, and each command imports only the modules that it
needs.
"""

from typing import TYPE_CHECKING

from taskd.lazy_names import lazy_names

if TYPE_CHECKING:
    from taskd.client import Client, Task, aclose_default, configure, task
    from taskd.core.jobs.backoff import Custom, Exponential, Fixed, Linear
    from taskd.core.jobs.enqueued import Enqueued
    from taskd.core.jobs.job import JobState, NewJob
    from taskd.core.jobs.job_filter import JobFilter
    from taskd.core.jobs.limit import Limit
    from taskd.core.jobs.pipeline_steps import Next, Stop
    from taskd.core.jobs.unique import HeldKey, KeyScope, NewerStarts, OnConflict, Unique, make_key
    from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
    from taskd.core.tasks.batch import Item
    from taskd.core.tasks.context import (
        Context,
        ProcessContext,
        RunningWorkflow,
        TransactionContext,
    )
    from taskd.core.tasks.resource import resource
    from taskd.core.workflows.workflow import OnFailed
    from taskd.errors import TaskdError
    from taskd.schedules import cron, every, schedule
    from taskd.store.acting import acting_as
    from taskd.version import __version__ as __version__
    from taskd.workflows import Workflow, chain, group, pipeline, stage, workflow
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "client.client": "Client",
            "client.default": "aclose_default configure",
            "client.tasks": "Task task",
            "client.workflow_tasks": "workflow",
            "client.workflows": "Workflow chain group pipeline stage",
            "core.jobs.backoff": "Custom Exponential Fixed Linear",
            "core.jobs.job": "JobState NewJob",
            "core.jobs.job_filter": "JobFilter",
            "core.jobs.limit": "Limit",
            "core.jobs.pipeline_steps": "Next Stop",
            "core.jobs.enqueued": "Enqueued",
            "core.jobs.unique": "HeldKey KeyScope NewerStarts OnConflict Unique make_key",
            "core.jobs.verdicts": "Cancel Fail Retry Snooze",
            "core.tasks.batch": "Item",
            "core.tasks.context": "Context ProcessContext RunningWorkflow TransactionContext",
            "core.tasks.resource": "resource",
            "core.workflows.workflow": "OnFailed",
            "errors": "TaskdError",
            "schedules": "cron every schedule",
            "store.acting": "acting_as",
            "version": "__version__",
        },
    )

__all__ = [
    "Cancel",
    "Client",
    "Context",
    "Custom",
    "Enqueued",
    "Exponential",
    "Fail",
    "Fixed",
    "HeldKey",
    "Item",
    "JobFilter",
    "JobState",
    "KeyScope",
    "Limit",
    "Linear",
    "NewJob",
    "NewerStarts",
    "Next",
    "OnConflict",
    "OnFailed",
    "ProcessContext",
    "Retry",
    "RunningWorkflow",
    "Snooze",
    "Stop",
    "Task",
    "TaskdError",
    "TransactionContext",
    "Unique",
    "Workflow",
    "aclose_default",
    "acting_as",
    "chain",
    "configure",
    "cron",
    "every",
    "group",
    "make_key",
    "pipeline",
    "resource",
    "schedule",
    "stage",
    "task",
    "workflow",
]
