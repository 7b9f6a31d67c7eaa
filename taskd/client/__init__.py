"""The producer API: tasks that enqueue themselves, the client, and where the database is.

A name is imported when it is first used: a module that only declares tasks needs no PostgreSQL
driver.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from taskd.client.client import Client
    from taskd.client.connecting.database_location import Target, open_target
    from taskd.client.default import (
        aclose_default,
        configure,
        default_client,
        set_default_client,
    )
    from taskd.client.tasks import Task, WithOptions, task

__all__ = [
    "Client",
    "Target",
    "Task",
    "WithOptions",
    "aclose_default",
    "configure",
    "default_client",
    "open_target",
    "set_default_client",
    "task",
]

_HOME = {
    "Client": "client",
    "Target": "connecting.database_location",
    "Task": "tasks",
    "WithOptions": "tasks",
    "aclose_default": "default",
    "configure": "default",
    "default_client": "default",
    "open_target": "connecting.database_location",
    "set_default_client": "default",
    "task": "tasks",
}


def __getattr__(name: str) -> Any:
    """A public name, imported now.

    Raises:
        AttributeError: any other name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'taskd.client' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"taskd.client.{_HOME[name]}"), name)
    return value
