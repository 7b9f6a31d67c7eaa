"""The messages that the worker sends to a process, and the kinds of replies of the process."""

from __future__ import annotations

from typing import Any

import msgspec

from taskd.config import Settings
from taskd.core.jobs.job import Job
from taskd.worker.running.job_processes.context import ContextFields

READY, BEGUN, PROGRESS = b"ready\n", b"begun\n", b"progress "


class Boot(msgspec.Struct):
    """The data that a process needs before its first attempt.

    Attributes:
        path: Python's search path for modules.
        app: the module to import at the start; with None, only modules of handlers are imported.
        settings: the settings of the worker, for the log and for clients that handlers use.
    """

    path: list[str]
    app: str | None
    settings: Settings


class Request(msgspec.Struct, gc=False):
    """An attempt to run.

    Attributes:
        module: the module in which the handler is defined.
        name: the qualified name of the handler in this module.
        hooks: the module and the qualified name of each hook around the handler.
        keep: whether the answer must include the log lines of the handler.
        context: the fields of the handler's context; None if the handler takes no context.
    """

    module: str
    name: str
    job: Job
    hooks: list[tuple[str, str]]
    keep: bool = False
    context: ContextFields | None = None


def to_builtins(value: Any) -> str:
    """Return a path in the settings as text; the `enc_hook` of `msgspec.json.encode`."""
    return str(value)
