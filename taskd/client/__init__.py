"""The producer API: tasks with their enqueue methods, the client, and the location of its database.

A public name is imported at its first use, so that a module that only declares tasks imports no
PostgreSQL driver.
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
    """Import a public name and return it.

    Raises:
        AttributeError: this package has no such public name.
    """
    if name not in _HOME:
        raise AttributeError(f"module 'taskd.client' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"taskd.client.{_HOME[name]}"), name)
    return value
