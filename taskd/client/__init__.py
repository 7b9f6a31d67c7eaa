"""The producer API: tasks with their enqueue methods, the client, and the location of its database.

A public name is imported at its first use, so a module that only declares tasks imports no
PostgreSQL driver.
"""

from typing import TYPE_CHECKING

from taskd.lazy_names import lazy_names

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
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "client": "Client",
            "connecting.database_location": "Target open_target",
            "default": "aclose_default configure default_client set_default_client",
            "tasks": "Task WithOptions task",
        },
    )

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
