"""The registry: task names to tasks.

The only way from a row to code; nothing is ever imported by a name that stands in a row.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any

from taskd.core.task import Task


class Registry:
    """The tasks that a process knows."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}

    def add(self, task: Task[..., Any]) -> None:
        """Register a task.

        Raises:
            ValueError: another handler has that name already.
        """
        known = self._tasks.get(task.name)
        if known is not None and not _same(known, task):
            raise ValueError(
                f"two tasks are named {task.name!r}: {_where(known)} and {_where(task)}; "
                "give one of them a name of its own"
            )
        self._tasks[task.name] = task

    def get(self, name: str) -> Task[..., Any] | None:
        """The task of that name, if known."""
        return self._tasks.get(name)

    def nearest(self, name: str) -> list[str]:
        """Known names that look like `name`, best first."""
        return difflib.get_close_matches(name, self._tasks, n=3)

    def names(self) -> list[str]:
        """All names, sorted."""
        return sorted(self._tasks)

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return iter(self._tasks.values())

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks


def _same(one: Task[..., Any], other: Task[..., Any]) -> bool:
    # A reloaded module defines the same function again; that is no second task.
    return _where(one) == _where(other)


def _where(task: Task[..., Any]) -> str:
    return f"{task.handler.__module__}.{task.handler.__qualname__}"


# Where `@task` registers unless told otherwise.
DEFAULT = Registry()
