"""taskd: a job queue in the PostgreSQL that you already have.

`@task` declares a task, `taskd run` starts a worker. A name is imported at its first use, so that
`import taskd` is quick, and each command imports only the modules that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskd.client import Client, Task, aclose_default, configure, task
    from taskd.core.jobs.backoff import Custom, Exponential, Fixed, Linear
    from taskd.core.jobs.job import JobState, NewJob
    from taskd.core.jobs.unique import Enqueued, Unique
    from taskd.core.jobs.verdicts import Cancel, Fail, Retry, Snooze
    from taskd.core.tasks.context import Context
    from taskd.core.tasks.resource import resource
    from taskd.errors import TaskdError

__all__ = [
    "Cancel",
    "Client",
    "Context",
    "Custom",
    "Enqueued",
    "Exponential",
    "Fail",
    "Fixed",
    "JobState",
    "Linear",
    "NewJob",
    "Retry",
    "Snooze",
    "Task",
    "TaskdError",
    "Unique",
    "aclose_default",
    "configure",
    "resource",
    "task",
]


_HOME = {
    "Cancel": "core.jobs.verdicts",
    "Client": "client.client",
    "Context": "core.tasks.context",
    "Custom": "core.jobs.backoff",
    "Enqueued": "core.jobs.unique",
    "Exponential": "core.jobs.backoff",
    "Fail": "core.jobs.verdicts",
    "Fixed": "core.jobs.backoff",
    "JobState": "core.jobs.job",
    "Linear": "core.jobs.backoff",
    "NewJob": "core.jobs.job",
    "Retry": "core.jobs.verdicts",
    "Snooze": "core.jobs.verdicts",
    "Task": "client.tasks",
    "TaskdError": "errors",
    "Unique": "core.jobs.unique",
    "aclose_default": "client.default",
    "configure": "client.default",
    "resource": "core.tasks.resource",
    "task": "client.tasks",
}


def __getattr__(name: str) -> Any:
    """Import and return a public name, or `taskd.__version__`.

    Raises:
        AttributeError: there is no public name like that.
    """
    if name in _HOME:
        value = globals()[name] = getattr(import_module(f"taskd.{_HOME[name]}"), name)
        return value
    if name != "__version__":
        raise AttributeError(f"module 'taskd' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("pgtaskd")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    """Return all public names, also those that were not imported yet."""
    return sorted({*globals(), *_HOME})
