"""Workflows that take arguments.

Such a workflow is declared as a task. The handler of the task makes a Workflow from the arguments
of a job. The handler then adds the jobs of the Workflow to the workflow that contains the handler's
job.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from taskd.client.tasks import TASK_OPTIONS, Task, task
from taskd.client.workflows import Workflow
from taskd.core.tasks import other_words
from taskd.core.tasks import registry as registries
from taskd.core.tasks.other_words import unknown_option
from taskd.core.tasks.signature import CONTEXT_NAME

P = ParamSpec("P")
B = TypeVar("B", bound=Workflow | Awaitable[Workflow])
OPTIONS = TASK_OPTIONS - {"process", "batch", "max_wait_s", "transaction"}


class WorkflowDecorator(Protocol):
    """The decorator that `@workflow(...)` with options returns."""

    def __call__(self, builder: Callable[P, B], /) -> Task[P, None]:
        """Make the builder a task."""


@overload
def workflow(builder: Callable[P, B], /) -> Task[P, None]: ...


@overload
def workflow(*, registry: registries.Registry = ..., **options: Any) -> WorkflowDecorator: ...


def workflow(
    builder: Callable[..., Any] | None = None,
    /,
    *,
    registry: registries.Registry = registries.DEFAULT,
    **options: Any,
) -> Any:
    """Make a task of a function that returns a Workflow: `@workflow`, `@workflow(queue="shop")`.

    A job of the task calls the function with the job's arguments. One statement then adds all jobs
    of the returned Workflow to the workflow of the calling job. A producer starts the workflow in
    the same way as any job of a task: by the name of the task, from SQL, from a shell or by a
    schedule. The added jobs do not wait for the job that adds them. The unique key and the limit of
    the task do not apply to the added jobs. If an attempt fails after it has added the jobs, a
    later attempt adds only jobs whose names the workflow does not contain.

    Args:
        builder: a function, `def` or `async def`, whose arguments are those of the task.
        registry: where the task is registered.
        options: those of `@task`, without process, batch and transaction.

    Raises:
        TypeError, ValueError, InvalidJob, ConfigError: see `@task`.
    """
    for name in options.keys() - OPTIONS:
        raise TypeError(unknown_option("@workflow", name, OPTIONS, other_words.TASK_OPTIONS))

    def register(builder: Callable[..., Any]) -> Any:
        decorate: Any = task(registry=registry, **options)
        return decorate(_adding(builder))

    return register if builder is None else register(builder)


def _adding(builder: Callable[..., Any]) -> Callable[..., Any]:
    """Return a handler that adds the workflow that the builder returns."""
    signature = inspect.signature(builder)
    takes_context = CONTEXT_NAME in signature.parameters

    def arguments(ctx: Any, given: dict[str, Any]) -> dict[str, Any]:
        return given | {CONTEXT_NAME: ctx} if takes_context else given

    if inspect.iscoroutinefunction(builder):

        @functools.wraps(builder)
        async def add(*, ctx: Any, **given: Any) -> None:
            await ctx.workflow.add_all(_checked(builder, await builder(**arguments(ctx, given))))

    else:

        @functools.wraps(builder)
        def add(*, ctx: Any, **given: Any) -> None:
            ctx.workflow.add_all_sync(_checked(builder, builder(**arguments(ctx, given))))

    context = inspect.Parameter(CONTEXT_NAME, inspect.Parameter.KEYWORD_ONLY)
    if not takes_context:
        signature = signature.replace(parameters=[*signature.parameters.values(), context])
    add.__signature__ = signature  # type: ignore[attr-defined]
    add.__annotations__ = {**builder.__annotations__, "return": None}
    return add


def _checked(builder: Callable[..., Any], made: object) -> Workflow:
    if not isinstance(made, Workflow):
        raise TypeError(f"{builder.__qualname__}() returned {made!r} in place of a Workflow")
    return made
