"""The registry: task names to tasks.

The only way from a row to code; nothing is ever imported by a name that stands in a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from taskd.core.schedule import Schedule
from taskd.core.tasks.middleware import Middleware
from taskd.core.tasks.task import Task

# What publishes the built-in tasks when no app was named.
BUILT_IN_APP = "taskd"


class Registry:
    """The tasks that a process knows, and the resources of their handlers.

    Attributes:
        resources: generator functions by name; see taskd.core.tasks.resource.
        schedules: those that the app declares, by name.
        middleware: what goes around attempts, outermost first; see taskd.core.tasks.middleware.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self.resources: dict[str, Callable[[], Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.middleware: list[Middleware] = []

    def add(self, task: Task[..., Any]) -> None:
        """Register a task.

        Raises:
            ValueError: another handler has that name, or one of its former names, already.
        """
        for name in (task.name, *task.aliases):
            known = self._tasks.get(name)
            if known is not None and not _same(known, task):
                raise ValueError(
                    f"two tasks are named {name!r}: {_where(known)} and {_where(task)}; "
                    "give one of them a name of its own"
                )
        for name in (task.name, *task.aliases):
            self._tasks[name] = task

    def add_resource(self, maker: Callable[[], Any]) -> None:
        """Register a resource under the name of its function.

        Raises:
            ValueError: another resource has that name already.
        """
        name = maker.__name__
        known = self.resources.get(name)
        if known is not None and _place(known) != _place(maker):
            raise ValueError(
                f"two resources are named {name!r}: {_place(known)} and {_place(maker)}; "
                "rename one of the functions"
            )
        self.resources[name] = maker

    def add_schedule(self, schedule: Schedule) -> None:
        """Declare a schedule; its workers publish it.

        Raises:
            ValueError: another one has that name already.
        """
        if self.schedules.get(schedule.name, schedule) != schedule:
            raise ValueError(f"two schedules are named {schedule.name!r}; rename one of them")
        self.schedules[schedule.name] = schedule

    def add_middleware(self, middleware: Middleware) -> None:
        """Register what goes around attempts; a reloaded module's in place of the same one."""
        for place, known in enumerate(self.middleware):
            if _place(known.around) == _place(middleware.around):
                self.middleware[place] = middleware
                return
        self.middleware.append(middleware)

    def with_tasks(self, tasks: Iterable[Task[..., Any]]) -> Registry:
        """One with these tasks in place of its own, and all else as it is."""
        made = copy.copy(self)
        made._tasks = {  # noqa: SLF001 - one of ours
            name: task for task in tasks for name in (task.name, *task.aliases)
        }
        return made

    def get(self, name: str) -> Task[..., Any] | None:
        """The task of that name, or of that former name, if known."""
        return self._tasks.get(name)

    def names(self) -> list[str]:
        """All names, former ones too, sorted."""
        return sorted(self._tasks)

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return (task for name, task in self._tasks.items() if name == task.name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks


def _same(one: Task[..., Any], other: Task[..., Any]) -> bool:
    # A reloaded module defines the same function again; that is no second task.
    return _where(one) == _where(other)


def _where(task: Task[..., Any]) -> str:
    return _place(task.handler)


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


# Where `@task` registers unless told otherwise.
DEFAULT = Registry()
