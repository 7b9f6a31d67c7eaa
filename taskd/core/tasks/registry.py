"""The registry of tasks by name.

taskd finds the code of a job only here, and never imports a name from a job's row.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from taskd.core.schedule import Schedule
from taskd.core.tasks.middleware import Middleware
from taskd.core.tasks.task import Task

if TYPE_CHECKING:
    from taskd.core.tasks.hooks import ThreadHook
    from taskd.core.tasks.reporter import Reporter

# The name of the app under which a worker without --app publishes the built-in tasks.
BUILT_IN_APP = "taskd"


class PipelinePlan(NamedTuple):
    """A pipeline as workers publish it, so that its runs can be started by its name.

    Attributes:
        first: the task of the first stage; the arguments of a run are those of this task.
        queue, priority, max_attempts, timeout_s: those of the first stage.
        unique_rule: how a run gets its unique key, as JSON text; None without a key.
        stages: JSON text of all stages.
    """

    name: str
    first: Task[..., Any]
    queue: str
    priority: int
    max_attempts: int
    timeout_s: float | None
    unique_rule: str | None
    stages: str


class Registry:
    """The tasks that a process knows, and the resources of their handlers.

    Attributes:
        resources: generator functions by name; see taskd.core.tasks.resource.
        schedules: the schedules that the app declares, by name.
        pipelines: the pipelines that the app declares, by name.
        middleware: functions around attempts, outermost first; see taskd.core.tasks.middleware.
        reporters: functions that receive error reports; see taskd.core.tasks.reporter.
        hooks: functions in the threads of handlers, outermost first; see taskd.core.tasks.hooks.
        module: the module of the app, as `taskd run --app` takes it; None if there is no app.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, Task[..., Any]] = {}
        self._built_in: set[str] = set()
        self.module: str | None = None
        self._places: dict[tuple[str, str], _Place] = {}
        self.resources: dict[str, Callable[[], Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.pipelines: dict[str, PipelinePlan] = {}
        self.middleware: list[Middleware] = []
        self.hooks: list[ThreadHook] = []
        self.reporters: list[Reporter] = []

    def add(self, task: Task[..., Any]) -> None:
        """Register a task.

        If the module of the task was reloaded, the task replaces its older version.

        Raises:
            ValueError: a task with another handler, or a pipeline, already has a name or former
                name of this task.
        """
        names = (task.name, *task.aliases)
        for name in names:
            self._refuse_both(name, name in self.pipelines)
        self._take_names("task", names, _Place.of(task.handler))
        self._tasks |= dict.fromkeys(names, task)

    def _take_names(self, noun: str, names: Sequence[str], place: _Place) -> None:
        """Record the place at which the function or pipeline with these names is defined.

        Raises:
            ValueError: another function or pipeline already has one of the names.
        """
        for name in names:
            existing = self._places.get((noun, name))
            if existing is not None and not place.replaces(existing):
                raise ValueError(
                    f"two {noun}s are named {name!r}: {existing} and {place}; "
                    "give one of them another name"
                )
        self._places |= {(noun, name): place for name in names}

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
        self._take_names("resource", (name,), _Place.of(maker))
        self.resources[name] = maker

    def add_schedule(self, schedule: Schedule) -> None:
        """Declare a schedule; the workers of the app publish it.

        Raises:
            ValueError: another schedule has this name.
        """
        if self.schedules.get(schedule.name, schedule) != schedule:
            raise ValueError(f"two schedules are named {schedule.name!r}; rename one of them")
        self.schedules[schedule.name] = schedule

    def add_pipeline(self, plan: PipelinePlan, maker: types.FrameType) -> None:
        """Declare a pipeline; the workers of the app publish it.

        If its module was reloaded, the pipeline replaces its older version.

        Args:
            maker: the code that makes the pipeline.

        Raises:
            ValueError: a task, or a pipeline that other code makes, has this name.
        """
        self._refuse_both(plan.name, plan.name in self._tasks)
        self._take_names("pipeline", (plan.name,), _Place.of_frame(maker))
        self.pipelines[plan.name] = plan

    def _refuse_both(self, name: str, both: bool) -> None:
        if both:
            raise ValueError(
                f"a task and a pipeline are both named {name!r}, and jobs are enqueued by this "
                "name; give one of them another name"
            )

    def add_middleware(self, middleware: Middleware) -> None:
        """Register middleware; if its module was reloaded, replace its older version.

        Raises:
            ValueError: another middleware of the same module has this name.
        """
        self._add("middleware", self.middleware, middleware)

    def add_hook(self, hook: ThreadHook) -> None:
        """Register a hook in the same way as add_middleware()."""
        self._add("hook", self.hooks, hook)

    def add_reporter(self, reporter: Reporter) -> None:
        """Register a reporter in the same way as add_middleware()."""
        self._add("reporter", self.reporters, reporter)

    def _add(self, noun: str, those: list[Any], new: tuple[Callable[..., Any], Any]) -> None:
        self._take_names(noun, (_defined_at(new[0]),), _Place.of(new[0]))
        for index, existing in enumerate(those):
            if _defined_at(existing[0]) == _defined_at(new[0]):
                those[index] = new
                return
        those.append(new)

    def with_tasks(self, tasks: Iterable[Task[..., Any]]) -> Registry:
        """Return a copy of this registry with these tasks instead of the tasks of this registry."""
        made = copy.copy(self)
        made._tasks = {  # noqa: SLF001 - a copy of this object
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
        """Return the newest version of arguments that this code reads, by task or pipeline."""
        tasks = {name: self._tasks[name] for name in self.names()}
        tasks |= {plan.name: plan.first for plan in self.pipelines.values()}
        return {name: task.versions.args_version for name, task in tasks.items()}

    def __iter__(self) -> Iterator[Task[..., Any]]:
        return (task for name, task in self._tasks.items() if name == task.name)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: str) -> bool:
        return name in self._tasks


class _Place(NamedTuple):
    """The place at which a handler, another function or a pipeline of the app is defined.

    Attributes:
        name: the module and the qualified name.
        file, line: the file and the line of the source; the file is empty if it is unknown.
        load: the namespace and the spec of the module; a reload replaces one or both of them.
    """

    name: str
    file: str
    line: int
    load: tuple[Any, Any]

    @classmethod
    def of(cls, handler: Callable[..., Any]) -> Self:
        """Return the place of a handler; for a decorated handler, that of the inner function."""
        function = inspect.unwrap(handler)
        code, names = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        file, line = (code.co_filename, code.co_firstlineno) if code is not None else ("", 0)
        return cls(_defined_at(handler), file, line, (names, names.get("__spec__")))

    @classmethod
    def of_frame(cls, frame: types.FrameType) -> Self:
        """Return the place that a frame is at."""
        names = frame.f_globals
        name = f"{names.get('__name__')}.{frame.f_code.co_qualname}"
        return cls(name, frame.f_code.co_filename, frame.f_lineno, (names, names.get("__spec__")))

    def replaces(self, other: _Place) -> bool:
        """Return whether this is the handler at the other place, defined again.

        A reload of a module defines its handlers again. A user can also define a handler again, at
        a prompt or in a notebook. At a prompt, the name of the file is `<stdin>`; in a notebook,
        each cell is a file.
        """
        if self.name != other.name:
            return False
        reloaded = any(one is not two for one, two in zip(self.load, other.load, strict=True))
        same_line = (self.file, self.line) == (other.file, other.line)
        return reloaded or same_line or self.file != other.file or self.file[:1] in ("", "<")

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


def _defined_at(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


# The registry that `@task` uses by default.
DEFAULT = Registry()
