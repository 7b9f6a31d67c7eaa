"""Find handlers and hooks by their names, in the process that runs them."""

from __future__ import annotations

import sys
from functools import reduce
from typing import Any

from taskd.core.tasks.handler_kind import HandlerKind
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import ConfigError


def find(module: str, name: str) -> Any:
    """Return the object with this qualified name in an imported module; None if there is none."""
    try:
        return reduce(getattr, name.split("."), sys.modules[module])
    except (AttributeError, KeyError):
        return None


def find_task(module: str, name: str) -> Task[..., Any] | None:
    """Return the task with this qualified name in an imported module; None if there is none."""
    found = find(module, name)
    return found if isinstance(found, Task) else None


def check_found(registry: Registry) -> None:
    """Check that other processes will find the handlers with process=True, and their hooks.

    Raises:
        ConfigError: the handler's module does not have the task under the handler's name, or a
            hook's module does not have the hook.
    """
    for task in registry:
        if task.kind is not HandlerKind.PROCESS:
            continue
        module, name = task.handler.__module__, task.handler.__qualname__
        found = None if module == "__main__" else find_task(module, name)
        if found is None or found.name != task.name:
            raise ConfigError(
                f"task {task.name}: with process=True, other processes must find the task as "
                f"{name} in the module {module}, but cannot. Decorate the function where it is "
                "defined, in a module that can be imported"
            )
        for hook in task.hooks:
            module, name = hook.__module__, hook.__qualname__
            if module == "__main__" or find(module, name) is not hook:
                raise ConfigError(
                    f"hook {name}: the process of task {task.name} must find the hook in the "
                    f"module {module}, but cannot. Define the function at the top level of a "
                    "module that can be imported, or limit the hook to other tasks with "
                    "@in_thread(tasks=[...])"
                )
