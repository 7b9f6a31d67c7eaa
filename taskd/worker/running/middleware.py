"""Middleware in a worker: each task with middleware is replaced by a copy that runs inside it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

from taskd.core.tasks.middleware import through
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task


def with_middleware(registry: Registry) -> Registry:
    """Return a registry in which the attempts of each task run inside the middleware for it."""
    if not registry.middleware:
        return registry
    tasks = []
    for task in registry:
        chain = [each.around for each in registry.middleware if each.fits(task.name)]
        tasks.append(inside(task, partial(through, chain)) if chain else task)
    return registry.with_tasks(tasks)


def inside(task: Task[..., Any], around: Any) -> Task[..., Any]:
    """Return a copy of the task whose attempts run inside `around`, and therefore get a context."""
    inside = copy.copy(task)
    inside.around = around
    if not task.takes_context:
        inside.takes_context = True
        inside.handler = _without_context(task)
    return inside


def _without_context(task: Task[..., Any]) -> Any:
    handler = task.handler

    def called(_ctx: Any, **arguments: Any) -> Any:
        return handler(**arguments)

    called.__module__, called.__qualname__ = handler.__module__, handler.__qualname__
    return called
