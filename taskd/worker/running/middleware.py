"""Replace tasks with middleware or hooks by copies that run inside the middleware and hooks."""

from __future__ import annotations

import copy
from functools import partial, wraps
from typing import Any

from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.middleware import through
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.worker.running.returned_awaitables import finished


def with_middleware(registry: Registry) -> Registry:
    """Return a registry in which each task runs inside the middleware and the hooks for it."""
    if not registry.middleware and not registry.hooks:
        return registry
    tasks = []
    for task in registry:
        chain = [each.around for each in registry.middleware if each.fits(task.name)]
        hooks = [each.hook for each in registry.hooks if each.fits(task.name)]
        made = inside(task, partial(through, chain)) if chain else task
        if hooks:
            made = copy.copy(made)
            made.hooks = hooks
        tasks.append(made)
    return registry.with_tasks(tasks)


def inside(task: Task[..., Any], around: Any) -> Task[..., Any]:
    """Return a copy of the task whose attempts run inside `around`, and therefore get a context."""
    inside = copy.copy(task)
    inside.around = around
    inside.takes_context = True
    if task.kind is HandlerKind.ASYNC:
        inside.handler = _awaited(task.handler)
    return inside


def _awaited(handler: Any) -> Any:
    @wraps(handler)
    async def awaited(**arguments: Any) -> Any:
        # Middleware must not take a returned coroutine for the result of an `async def` handler.
        return await finished(handler(**arguments))

    return awaited
