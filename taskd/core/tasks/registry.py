"""The registry of tasks by name.

taskd finds the code of a job only here, and never imports a name from a job's row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from taskd.core.schedule import Schedule
from taskd.core.tasks.middleware import Middleware
from taskd.core.tasks.task import Task

if TYPE_CHECKING:
    from taskd.core.tasks.hooks import ThreadHook
    from taskd.core.tasks.reporter import Reporter

# The name of the app under which a worker without --app publishes the built-in tasks.
BUILT_IN_APP = "taskd"


class Registry:
    """The tasks that a process knows, and the resources of their handlers.

    Attributes:
        resources: generator functions by name; see taskd.core.tasks.resource.
        schedules: the schedules that the app declares, by name.
        middleware: functions around attempts, outermost first; see taskd.core.tasks.middleware.
        reporters: functions that receive error reports; see taskd.core.tasks.reporter.
        hooks: functions in the threads of handlers, outermost first; see taskd.core.tasks.hooks.
        module: the module of the app, as for `taskd run --app`; None: there is no app.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self._built_in: set[str] = set()
        self.module: str | None = None
        self.resources: dict[str, Callable[[], Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.middleware: list[Middleware] = []
        self.hooks: list[ThreadHook] = []
        self.reporters: list[Reporter] = []

    def add(self, task: Task[..., Any]) -> None:
        """Register a task.

        Raises:
            ValueError: a task with another handler has the name or a former name of this task.
        """
        for name in (task.name, *task.aliases):
            existing = self._tasks.get(name)
            if existing is not None and not _same(existing, task):
                raise ValueError(
                    f"two tasks are named {name!r}: {_where(existing)} and {_where(task)}; "
                    "give one of them another name"
                )
        for name in (task.name, *task.aliases):
            self._tasks[name] = task

    def add_built_in(self, task: Task[..., Any]) -> None:
        """Register a task that belongs to taskd and not to the app."""
        self.add(task)
        self._built_in.add(task.name)

    def is_built_in(self, name: str) -> bool:
        """Return whether the task with this name belongs to taskd and not to the app."""
        return name in self._built_in

    def add_resource(self, maker: Callable[[], Any]) -> None:
        """Register a resource under the name of its function.

        Raises:
            ValueError: another resource has this name.
        """
        name = maker.__name__
        existing = self.resources.get(name)
        if existing is not None and _defined_at(existing) != _defined_at(maker):
            raise ValueError(
                f"two resources are named {name!r}: {_defined_at(existing)} and "
                f"{_defined_at(maker)}; rename one of the functions"
            )
        self.resources[name] = maker

    def add_schedule(self, schedule: Schedule) -> None:
        """Declare a schedule; the workers of the app publish it.

        Raises:
            ValueError: another schedule has this name.
        """
        if self.schedules.get(schedule.name, schedule) != schedule:
            raise ValueError(f"two schedules are named {schedule.name!r}; rename one of them")
        self.schedules[schedule.name] = schedule

    def add_middleware(self, middleware: Middleware) -> None:
        """Register middleware; if its module was reloaded, replace the function's older version."""
        _add(self.middleware, middleware)

    def add_hook(self, hook: ThreadHook) -> None:
        """Register a hook; if its module was reloaded, replace the function's older version."""
        _add(self.hooks, hook)

    def add_reporter(self, reporter: Reporter) -> None:
        """Register a reporter; if its module was reloaded, replace the function's older version."""
        _add(self.reporters, reporter)

    def with_tasks(self, tasks: Iterable[Task[..., Any]]) -> Registry:
        """Return a copy of this registry that has these tasks in place of its own."""
        made = copy.copy(self)
        made._tasks = {  # noqa: SLF001 - one of ours
            name: task for task in tasks for name in (task.name, *task.aliases)
        }
        return made

    def get(self, name: str) -> Task[..., Any] | None:
        """Return the task with this name or former name, or None."""
        return self._tasks.get(name)

    def names(self) -> list[str]:
        """Return all names, former ones included, sorted."""
        return sorted(self._tasks)

    def args_versions(self) -> dict[str, int]:
        """Return the newest version of the arguments that this code reads, by name of the task."""
        return {name: self._tasks[name].versions.args_version for name in self.names()}

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return (task for name, task in self._tasks.items() if name == task.name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks


def _add(those: list[Any], new: tuple[Callable[..., Any], Any]) -> None:
    for index, existing in enumerate(those):
        if _defined_at(existing[0]) == _defined_at(new[0]):
            those[index] = new
            return
    those.append(new)


def _same(one: Task[..., Any], other: Task[..., Any]) -> bool:
    # If a module is reloaded, it defines the function of a task again. That is no second task.
    return _where(one) == _where(other)


def _where(task: Task[..., Any]) -> str:
    return _defined_at(task.handler)


def _defined_at(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


# The registry that `@task` uses by default.
DEFAULT = Registry()
