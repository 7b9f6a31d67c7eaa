"""Compare waiting jobs with an expected job, and list the arguments that differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from taskd.core.jobs.json_values import to_argument_type
from taskd.core.tasks.task import Task
from taskd.errors import InvalidArgs
from taskd.testing.rows import JobRow, called, quoted

NEAREST_MAX = 5
NOT_COMMITTED = "A job on the caller's connection is visible once its transaction has committed."


class _Absent:
    def __repr__(self) -> str:
        return "not given"


ABSENT = _Absent()


class Expectation:
    """An expected job: its task, and some of its arguments.

    Args:
        task: the task, or its name; if only the name is given, the defaults of the task's arguments
            are unknown.
        args: arguments by name; other arguments can have any value.

    Raises:
        TypeError: `task` is neither a task nor a name, or the task has no such argument.
    """

    def __init__(self, task: Task[..., Any] | str, args: Mapping[str, Any]) -> None:
        __tracebackhide__ = True
        if not isinstance(task, Task | str):
            raise TypeError(f"{task!r} is not a task: give what @task has made, or a task's name")
        self._task = None if isinstance(task, str) else task
        self.name = task if isinstance(task, str) else task.name
        if self._task is not None:
            fields = self._task.args_type.__struct_fields__
            for name in args:
                if name not in fields:
                    has = ", ".join(fields) or "none"
                    raise TypeError(f"task {self.name} has no argument {name!r}; it has {has}")
        self._args = dict(args)

    def __str__(self) -> str:
        return called(self.name, self._args) if self._args else self.name

    def fits(self, row: JobRow) -> bool:
        """Return whether a job has this task and these arguments."""
        return row.task == self.name and not self.differences(row)

    def differences(self, row: JobRow) -> dict[str, tuple[Any, Any]]:
        """Return the expected and the actual value of each argument that differs."""
        actual = self._arguments(row)
        return {
            name: (expected, actual.get(name, ABSENT))
            for name, expected in self._args.items()
            if name not in actual or _to_builtins(expected) != _to_builtins(actual[name])
        }

    def _arguments(self, row: JobRow) -> Mapping[str, Any]:
        """Return all arguments, including defaults, as the handler would receive them."""
        if self._task is None:
            return row.args
        try:
            return self._task.decode(msgspec.json.encode(row.args).decode())
        except InvalidArgs:  # the job was enqueued by SQL, and a worker will fail it
            return row.args

    # Messages.

    def missing(self, rows: Sequence[JobRow]) -> str:
        """Return the message that no waiting job matches, and list the jobs that were enqueued."""
        waiting = [row for row in rows if row.waits]
        return "\n".join(self._missing(waiting, [row for row in rows if not row.waits]))

    def _missing(self, waiting: list[JobRow], others: list[JobRow]) -> Iterator[str]:
        yield f"{self} is not enqueued."
        for row in filter(self.fits, others[-NEAREST_MAX:]):
            yield f"A matching job was enqueued, but does not wait any more: {row}"
        if not waiting:
            yield f"No job waits. {NOT_COMMITTED}"
            return
        same = [row for row in waiting if row.task == self.name]
        if same:
            yield f"{_count(len(same), 'job')} of {self.name} waiting, with other arguments:"
        nearest = sorted(same, key=lambda row: len(self.differences(row)))
        for row in nearest[:NEAREST_MAX]:
            yield f"  job {row.id} {called(row.task, row.args)}"
            for name, (expected, actual) in self.differences(row).items():
                yield f"      {name}: wanted {quoted(expected)}, is {quoted(actual)}"
        if len(same) > NEAREST_MAX:
            yield f"  and {len(same) - NEAREST_MAX} more, with at least as many differences"
        besides = Counter(row.task for row in waiting if row.task != self.name)
        if besides:
            counts = ", ".join(f"{task} ({_count(n, 'job')})" for task, n in besides.most_common())
            yield f"Waiting {'besides' if same else 'instead'}: {counts}."

    def unexpected(self, rows: Iterable[JobRow]) -> str:
        """Return a message with the jobs that wait, although none of them should."""
        return "\n".join([f"{self} is enqueued, and should not be:", *(f"  {row}" for row in rows)])


def _to_builtins(value: object) -> object:
    """Return a value as decoded from JSON: a date becomes text, a tuple becomes a list."""
    try:
        return msgspec.json.decode(msgspec.json.encode(value, enc_hook=to_argument_type))
    except (TypeError, ValueError, RecursionError):
        return value


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
