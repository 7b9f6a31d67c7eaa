"""Tasks that can be enqueued, and the decorator `@task` that makes and registers them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeVar,
    Unpack,
    overload,
)

from taskd.client.default import default_client
from taskd.client.options import JobOptions, given
from taskd.core.jobs import backoff as backoffs
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import PRIORITY_DEFAULT, NewJob
from taskd.core.jobs.limit import Limit
from taskd.core.jobs.unique import Unique
from taskd.core.tasks import other_words
from taskd.core.tasks import registry as registries
from taskd.core.tasks import task as core
from taskd.core.tasks.argument_versions import Upgrade
from taskd.core.tasks.batch import Item
from taskd.core.tasks.context import Context, ProcessContext, TransactionContext
from taskd.core.tasks.other_words import TASK_METHODS, unknown_option

P = ParamSpec("P")
R = TypeVar("R")
A = TypeVar("A")
S_co = TypeVar("S_co", covariant=True)
TASK_OPTIONS = frozenset(core.Task.__init__.__kwdefaults__ or ())
KeepLogsOption = Literal["off", "failed", "all"] | None


class Enqueues(Generic[P, R]):
    """Methods that make and enqueue jobs with typed arguments. R is the type of a job's result."""

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """Return a job as a value: to change it before it is enqueued, or for a bulk enqueue.

        Raises:
            InvalidArgs: the arguments do not fit the handler's signature, or have no JSON form.
        """
        raise NotImplementedError

    def on(self, conn: object) -> OnConnection[P, R]:
        """Return the task on the caller's connection: `send.on(conn).enqueue(to="ada")`.

        The job becomes part of the transaction of `conn`: it exists only after the caller commits.

        Args:
            conn: a connection of asyncpg, psycopg, psycopg2 or Django, or a connection or session
                of SQLAlchemy.

        Raises:
            TypeError: `conn` is None. If taskd does not support the type of `conn`, the methods of
                the returned object raise TypeError.
        """
        if conn is None:
            raise TypeError("on(None): pass a connection, or enqueue without on()")
        return OnConnection(self, conn)

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued[R]:
        """Enqueue a job; return its id, or the id of the job that holds its unique key.

        The default client enqueues the job over one of the client's own connections. To make the
        job part of your transaction, use on().

        Args:
            args, kwargs: the handler's arguments, checked against its signature.

        Raises:
            InvalidArgs: the arguments do not fit, have no JSON form, or take over 256 KiB.
            InvalidJob: an option is outside its limits.
            KeyHeld: another job holds the unique key of the job, and on_conflict is `raise`.
            QueueFull: the queue has as many waiting jobs as its limit allows.
            StoreUnavailable: PostgreSQL cannot be reached. If the connection broke before the
                reply, the job may have been written.
        """
        return _typed(await default_client().enqueue(self.job(*args, **kwargs)), self.decode_result)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued[R]:
        """Enqueue like enqueue(), without an event loop.

        Raises:
            RuntimeError: called in an event loop, which the call would block.
        """
        return _typed(default_client().enqueue_sync(self.job(*args, **kwargs)), self.decode_result)

    def decode_result(self, text: str) -> R:
        """Decode the JSON text of a job's result to the type that the handler returns."""
        raise NotImplementedError

    if not TYPE_CHECKING:  # type checkers refuse unknown names

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError; for a method of another job queue, name taskd's method."""
            hint = TASK_METHODS.get(name)
            text = f"a task has no attribute {name!r}"
            if hint is not None:
                text += f": write {hint.format(task=self.__dict__.get('__name__', 'task'))}"
            raise AttributeError(text, name=name, obj=self)


class OnConnection(Generic[P, R]):
    """A task whose jobs are enqueued over the caller's connection; made by `Task.on`."""

    def __init__(self, task: Enqueues[P, R], conn: object) -> None:
        self._task, self._conn = task, conn

    async def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued[R]:
        """Enqueue a job in the transaction of the connection; see Task.enqueue().

        Raises:
            TypeError: taskd does not support the type of the connection, or the connection blocks.
            As Task.enqueue().
        """
        job = self._task.job(*args, **kwargs)
        enqueued = await default_client().enqueue(job, conn=self._conn)
        return _typed(enqueued, self._task.decode_result)

    def enqueue_sync(self, *args: P.args, **kwargs: P.kwargs) -> Enqueued[R]:
        """Enqueue like enqueue(), over a blocking connection.

        Raises:
            TypeError: taskd does not support the type of the connection, or the connection needs an
                event loop.
            As Task.enqueue().
        """
        job = self._task.job(*args, **kwargs)
        enqueued = default_client().enqueue_sync(job, conn=self._conn)
        return _typed(enqueued, self._task.decode_result)


def _typed(enqueued: Enqueued, decode: Callable[[str], R]) -> Enqueued[R]:
    enqueued.decode = decode
    return enqueued


class Task(core.Task[P, R], Enqueues[P, R]):
    """A handler with a stable name. A call runs the handler; `enqueue` enqueues a job."""

    def options(self, **options: Unpack[JobOptions]) -> WithOptions[P, R]:
        """Return the task with options for its jobs: `send.options(delay_s=60).enqueue(...)`.

        Args:
            queue: name of the queue.
            priority: an integer of 32 bits; smaller numbers run first. By default, the priority of
                the task.
            run_at: when the job is due, a datetime with a time zone; excludes `delay_s`.
            delay_s: seconds from the start of the enqueueing transaction until the job is due.
            max_attempts: maximum number of attempts, 1 to 1000.
            timeout_s: timeout of one attempt in seconds.
            unique: the job's unique key.
            no_key: with True, the job gets no unique key, even if the task has one.
            deadline: no attempt starts after this time, a datetime with a time zone; excludes
                `deadline_s`.
            deadline_s: the deadline in seconds after the start of the enqueueing transaction.
            metadata: further values that are stored with the job, such as tags. They override those
                of the task.

        Raises:
            TypeError: an option does not exist. If another job queue has the option, the message
                names taskd's option.
        """
        return WithOptions(self, given(options))


class AsyncTask(Task[P, R]):
    """A task with an `async def` handler; R is the type that the handler's coroutine returns."""

    def __call__(  # type: ignore[override]
        self, *args: P.args, **kwargs: P.kwargs
    ) -> Coroutine[Any, Any, R]:
        """Call the handler as a plain function, without a job."""
        made: Coroutine[Any, Any, R] = self.handler(*args, **kwargs)
        return made


class WithOptions(Enqueues[P, R]):
    """A task together with options for its jobs; made by `Task.options`."""

    def __init__(self, task: Task[P, R], options: Mapping[str, Any]) -> None:
        self.task = task
        self._options = options

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """Return a job of the task with these options, as a value.

        Raises:
            InvalidArgs: the arguments do not fit the handler's signature, or have no JSON form.
            InvalidJob: an option is outside its limits.
            TypeError: the unique key names an argument that the task does not have.
        """
        job = self.task.job(*args, **kwargs)
        options = dict(self._options)
        if "unique" in options:
            options["unique"] = self.task.keyed(options["unique"], job.args)
        elif "no_key" in options:
            options["unique"] = None
        if "metadata" in options and job.metadata is not None:
            options["metadata"] = {**job.metadata, **options["metadata"]}
        return replace(job, **options)

    def decode_result(self, text: str) -> R:
        """Decode the JSON text of a job's result to the type that the handler returns."""
        return self.task.decode_result(text)


# Type checkers can remove the context from a handler's parameters only if it is the first one.
class WithCtx(Protocol[P, S_co]):
    """A handler whose first parameter is named `ctx`."""

    def __call__(self, ctx: Context, *args: P.args, **kwargs: P.kwargs) -> S_co:
        """Run an attempt."""


class WithContext(Protocol[P, S_co]):
    """A handler whose first parameter is named `context`."""

    def __call__(self, context: Context, *args: P.args, **kwargs: P.kwargs) -> S_co:
        """Run an attempt."""


class BatchTask(Task[[A], Any], Generic[A, R]):
    """A task whose handler gets a list of jobs. To enqueue a job, give one argument, an `A`."""

    def __call__(self, items: list[Item[A]]) -> R:  # type: ignore[override]
        """Run the handler as a plain function, without a job."""
        made: R = self.handler(items)
        return made


class WithTransaction(Protocol[P, S_co]):
    """A handler with transaction=."""

    def __call__(self, ctx: TransactionContext, *args: P.args, **kwargs: P.kwargs) -> S_co:
        """Run an attempt."""


class BatchDecorator(Protocol):
    """The decorator that `@task(batch=...)` returns."""

    def __call__(self, handler: Callable[[list[Item[A]]], R], /) -> BatchTask[A, R]:
        """Make the task."""


class TransactionDecorator(Protocol):
    """The decorator that `@task(transaction=...)` returns."""

    def __call__(self, handler: WithTransaction[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]:
        """Make the task."""


class WithProcessContext(Protocol[P, S_co]):
    """A handler with process=True whose first parameter is named `ctx`."""

    def __call__(self, ctx: ProcessContext, *args: P.args, **kwargs: P.kwargs) -> S_co:
        """Run an attempt."""


class ProcessDecorator(Protocol):
    """The decorator that `@task(process=True)` returns."""

    @overload
    def __call__(self, handler: WithProcessContext[P, R], /) -> Task[P, R]: ...

    @overload
    def __call__(self, handler: Callable[P, R], /) -> Task[P, R]: ...


class Decorator(Protocol):
    """The decorator that `@task(...)` with other options returns."""

    @overload
    def __call__(
        self,
        handler: WithCtx[P, Coroutine[Any, Any, R]] | WithContext[P, Coroutine[Any, Any, R]],
        /,
    ) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, handler: WithCtx[P, R], /) -> Task[P, R]: ...

    @overload
    def __call__(self, handler: WithContext[P, R], /) -> Task[P, R]: ...

    @overload
    def __call__(self, handler: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...

    @overload
    def __call__(self, handler: Callable[P, R], /) -> Task[P, R]: ...


@overload
def task(
    handler: WithCtx[P, Coroutine[Any, Any, R]] | WithContext[P, Coroutine[Any, Any, R]], /
) -> AsyncTask[P, R]: ...


@overload
def task(handler: WithCtx[P, R], /) -> Task[P, R]: ...


@overload
def task(handler: WithContext[P, R], /) -> Task[P, R]: ...


@overload
def task(handler: Callable[P, Coroutine[Any, Any, R]], /) -> AsyncTask[P, R]: ...


@overload
def task(handler: Callable[P, R], /) -> Task[P, R]: ...


@overload
def task(
    *,
    name: str | None = None,
    queue: str = core.QUEUE_DEFAULT,
    priority: int = PRIORITY_DEFAULT,
    max_attempts: int = core.MAX_ATTEMPTS_DEFAULT,
    max_crashes: int | None = None,
    timeout_s: float | None = core.TIMEOUT_S_DEFAULT,
    backoff: backoffs.Backoff = backoffs.DEFAULT,
    on_error: Mapping[type[BaseException], core.Rule] | None = None,
    unique: Unique | None = None,
    limit: Limit | None = None,
    args_version: int = 1,
    upgrade: Mapping[int, Upgrade] | None = None,
    aliases: Sequence[str] = (),
    redact: Sequence[str] = (),
    metadata: Mapping[str, Any] | None = None,
    keep_logs: KeepLogsOption = None,
    registry: registries.Registry = registries.DEFAULT,
) -> Decorator: ...


@overload
def task(
    *,
    batch: int,
    max_wait_s: float = core.MAX_WAIT_S_DEFAULT,
    name: str | None = None,
    queue: str = core.QUEUE_DEFAULT,
    priority: int = PRIORITY_DEFAULT,
    max_attempts: int = core.MAX_ATTEMPTS_DEFAULT,
    max_crashes: int | None = None,
    timeout_s: float | None = core.TIMEOUT_S_DEFAULT,
    backoff: backoffs.Backoff = backoffs.DEFAULT,
    on_error: Mapping[type[BaseException], core.Rule] | None = None,
    unique: Unique | None = None,
    metadata: Mapping[str, Any] | None = None,
    keep_logs: KeepLogsOption = None,
    registry: registries.Registry = registries.DEFAULT,
) -> BatchDecorator: ...


@overload
def task(
    *,
    transaction: Literal[True, "read_committed", "repeatable_read", "serializable"],
    name: str | None = None,
    queue: str = core.QUEUE_DEFAULT,
    priority: int = PRIORITY_DEFAULT,
    max_attempts: int = core.MAX_ATTEMPTS_DEFAULT,
    max_crashes: int | None = None,
    timeout_s: float | None = core.TIMEOUT_S_DEFAULT,
    backoff: backoffs.Backoff = backoffs.DEFAULT,
    on_error: Mapping[type[BaseException], core.Rule] | None = None,
    unique: Unique | None = None,
    metadata: Mapping[str, Any] | None = None,
    keep_logs: KeepLogsOption = None,
    registry: registries.Registry = registries.DEFAULT,
) -> TransactionDecorator: ...


@overload
def task(
    *,
    process: Literal[True],
    name: str | None = None,
    queue: str = core.QUEUE_DEFAULT,
    priority: int = PRIORITY_DEFAULT,
    max_attempts: int = core.MAX_ATTEMPTS_DEFAULT,
    max_crashes: int | None = None,
    timeout_s: float | None = core.TIMEOUT_S_DEFAULT,
    backoff: backoffs.Backoff = backoffs.DEFAULT,
    on_error: Mapping[type[BaseException], core.Rule] | None = None,
    unique: Unique | None = None,
    metadata: Mapping[str, Any] | None = None,
    keep_logs: KeepLogsOption = None,
    registry: registries.Registry = registries.DEFAULT,
) -> ProcessDecorator: ...


def task(
    handler: Callable[..., Any] | None = None,
    /,
    *,
    registry: registries.Registry = registries.DEFAULT,
    **options: Any,
) -> Any:
    """Make a function the handler of a task: `@task` or `@task(queue="email", timeout_s=30)`.

    If the setting `task_prefix` is set, a name without a dot gets this prefix. For example,
    `export` becomes `billing.export`. Former names (`aliases`) do not get the prefix.

    Args:
        handler: `async def`, or plain `def`, which runs in the worker's thread pool. A parameter
            named `ctx`, or annotated as Context, receives the attempt's context and is no argument
            of the job. Type checkers recognize the context only as the first parameter.
        registry: where the task is registered.
        options: see taskd.core.tasks.task.Task. They are name, queue, priority, max_attempts,
            max_crashes, timeout_s, backoff, on_error, unique, limit, args_version, upgrade,
            aliases, redact, metadata, keep_logs, and one of process, batch (with max_wait_s) and
            transaction.

    Raises:
        TypeError: the signature cannot be checked, or an option does not exist, has a wrong type or
            cannot be combined with the others.
        ValueError: another handler has this name, or an option is outside its limits.
        InvalidJob: the name or the queue is not valid.
        ConfigError: the setting `task_prefix` cannot be read.
    """
    for name in options.keys() - TASK_OPTIONS:
        raise TypeError(unknown_option("@task", name, TASK_OPTIONS, other_words.TASK_OPTIONS))
    if isinstance(handler, str):
        raise TypeError(f"@task({handler!r}): write @task(queue={handler!r}), or name={handler!r}")

    def register(handler: Callable[..., Any]) -> Task[..., Any]:
        from taskd.config import task_prefix  # producers that declare no task do not need it

        is_async = inspect.iscoroutinefunction(handler)
        kind = BatchTask if "batch" in options else AsyncTask if is_async else Task
        named = options
        if prefix := task_prefix():
            named = {**options, "name": _prefixed(prefix, options.get("name"), handler)}
        made: Task[..., Any] = kind(handler, **named)
        registry.add(made)
        return made

    return register if handler is None else register(handler)


def _prefixed(prefix: str, name: str | None, handler: Callable[..., Any]) -> str | None:
    name = getattr(handler, "__name__", None) if name is None else name
    return f"{prefix}.{name}" if isinstance(name, str) and name and "." not in name else name
