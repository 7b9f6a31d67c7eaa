"""The producer API: tasks that enqueue themselves, the client, and where the database is."""

from taskd.client.client import Client
from taskd.client.default import aclose_default, configure, default_client, set_default_client
from taskd.client.target import Target, open_target
from taskd.client.task import Task, WithOptions, task

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
