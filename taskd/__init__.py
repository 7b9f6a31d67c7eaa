"""taskd: a job queue in the PostgreSQL you already have. `@task` makes one, `taskd run` runs it."""

from typing import Any

from taskd.client import Client, Task, aclose_default, configure, task
from taskd.core.backoff import Custom, Exponential, Fixed, Linear
from taskd.core.context import Context
from taskd.core.job import JobState, NewJob
from taskd.core.outcome import Cancel, Fail, Retry, Snooze
from taskd.core.resource import resource
from taskd.core.unique import Enqueued, Unique
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


def __getattr__(name: str) -> Any:
    """`taskd.__version__`, read when asked for: importlib.metadata takes longer than all of taskd.

    Raises:
        AttributeError: any other name.
    """
    if name != "__version__":
        raise AttributeError(f"module 'taskd' has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("taskd")
    except PackageNotFoundError:  # a checkout that was never installed
        return "0+unknown"
