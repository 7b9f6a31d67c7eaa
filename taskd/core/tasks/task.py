"""Tasks: handlers with a stable name and options, and the check of the arguments of their jobs.

A Task makes a msgspec Struct of the handler's signature. When a job is enqueued, its arguments are
encoded. The JSON text is decoded once for a check, because the worker will decode the same text.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

import msgspec

from taskd.core.jobs import backoff as backoffs
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job import (
    MAX_ATTEMPTS_LIMIT,
    PRIORITY_DEFAULT,
    PRIORITY_MAX,
    PRIORITY_MIN,
    TIMEOUT_S_MAX,
    NewJob,
    check_metadata,
    check_queue,
    check_task_name,
)
from taskd.core.jobs.limit import Limit, LimitOf, limit_of
from taskd.core.jobs.log_lines import keep_logs_of
from taskd.core.jobs.unique import Unique, redacted_version
from taskd.core.jobs.verdicts import Snooze, Verdict
from taskd.core.tasks import batch as batches
from taskd.core.tasks.argument_types import check_constraints, from_json_type, refusal
from taskd.core.tasks.argument_versions import ArgsVersions, Upgrade, check_aliases, check_redact
from taskd.core.tasks.handler_kind import HandlerKind, isolation_of, kind_of
from taskd.core.tasks.signature import (
    args_fields,
    args_schema_of,
    check_context,
    check_version_type,
    defaults_of,
    item_class,
    result_decoder,
    signature_of,
)
from taskd.core.validation import check_int
from taskd.errors import InvalidArgs, InvalidJob, InvalidResult

if TYPE_CHECKING:
    from taskd.core.tasks.hooks import Hook

P = ParamSpec("P")
R = TypeVar("R")

# msgspec quotes a value only in messages that begin like this.
QUOTED_VALUE = re.compile(r"(?s)^(Invalid (?:enum )?value) .*?(?= - at `|$)")
MAX_ATTEMPTS_DEFAULT = 20
MAX_CRASHES_LIMIT = 100
TIMEOUT_S_DEFAULT = 3600.0
MAX_WAIT_S_DEFAULT = 0.2
QUEUE_DEFAULT = "default"

Rule = Verdict | type[Verdict] | backoffs.Backoff


class Task(Generic[P, R]):
    """A handler registered under a stable name.

    Args:
        handler: `async def`, or plain `def` (run in the worker's thread pool). A parameter receives
            the attempt's context if it is named `ctx`, is annotated as a Context, or is named
            `context` without an annotation. This parameter is no argument of the job.
        name: the task's name in the job's row; by default the function's name.
        queue: the default queue of the task's jobs.
        priority: the priority of jobs that are enqueued without one, an integer of 32 bits; smaller
            numbers run first.
        max_attempts: the maximum number of attempts of a job, 1 to 1000. With 1, the handler begins
            at most once: if the worker dies or stops during the attempt, the job fails.
        max_crashes: after how many deaths of its worker a job starts again, 0 to 100. Each death
            counts, even if another job has caused the death. With None, only crashes that the job
            has probably caused count, and usually the third of them fails the job.
        timeout_s: timeout of one attempt in seconds; with None, there is no timeout.
        backoff: the delay after each failed attempt.
        on_error: maps exception classes to a verdict (Fail, Cancel, Retry or Snooze(seconds)), or
            to a backoff for that class.
        unique: the unique key of the task's jobs, or the arguments that make a key; see Unique.
        limit: how many of the task's jobs can run at the same time, or start in a period of time;
            see Limit.
        process: with True, a plain `def` runs in a separate process, which taskd can stop and kill.
            The context of the handler is a ProcessContext.
        batch: the maximum number of jobs that the handler receives in one call, as a list of Items.
        max_wait_s: how long the first job of a batch waits for further jobs, 0 to 3 seconds.
        transaction: gives the handler `ctx.conn`, a connection with an open transaction, which
            commits together with the completion of the job. The value is an isolation level
            (`read_committed`, `repeatable_read`, `serializable`), or True for `read_committed`.
        args_version: the current version of the arguments; 1 is the first.
        upgrade: a dict with a function for each older version that can still be in the database.
            The function converts arguments of that version (a dict) into arguments of the next one.
        aliases: former names of the task; jobs that were enqueued under these names run, too.
        redact: names of arguments whose values are shown as `***` by the command line and in
            errors, and as hashes in keys. If the task has `upgrade`, also name arguments that only
            older versions have.
        metadata: default metadata of the task's jobs, such as tags. Values that are given when a
            job is enqueued override values of the same names. The metadata also applies to jobs
            that SQL clients, schedules and the command line enqueue.
        keep_logs: which attempts keep the handler's log lines with the job: `off` (none), `failed`
            or `all`; with None, the worker's setting applies.

    Attributes:
        takes_context: whether the worker makes a context for each attempt.
        context_name: the parameter of the handler that receives the context, or None.
        around: in a worker, the middleware of the task's attempts; see with_middleware().
        hooks: in a worker, the hooks around the handler in its thread or process.
        limit_defaults: the default values of the arguments that make the key of the limit.
        unique_defaults: the default values of the arguments that make the unique key or its
            version.

    Raises:
        TypeError: the signature cannot be checked (variadic or positional-only parameters, types
            without a JSON form, a parameter named `conn`). The handler is not a function, or does
            not fit `process`, `batch` or `transaction`. Or an option has a wrong type, or names an
            argument that the task does not have.
        InvalidJob: `name`, `queue`, `priority`, a former name or `metadata` is not valid.
        ValueError: another option is outside its limits.
    """

    __name__: str
    __wrapped__: Callable[..., Any]
    around: Callable[[Any, Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]] | None = None
    hooks: Sequence[Hook] = ()

    def __init__(
        self,
        handler: Callable[..., Any],
        *,
        name: str | None = None,
        queue: str = QUEUE_DEFAULT,
        priority: int = PRIORITY_DEFAULT,
        max_attempts: int = MAX_ATTEMPTS_DEFAULT,
        max_crashes: int | None = None,
        timeout_s: float | None = TIMEOUT_S_DEFAULT,
        backoff: backoffs.Backoff = backoffs.DEFAULT,
        on_error: Mapping[type[BaseException], Rule] | None = None,
        unique: Unique | None = None,
        limit: Limit | None = None,
        process: bool = False,
        batch: int | None = None,
        max_wait_s: float = MAX_WAIT_S_DEFAULT,
        transaction: bool | str = False,
        args_version: int = 1,
        upgrade: Mapping[int, Upgrade] | None = None,
        aliases: Sequence[str] = (),
        redact: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        keep_logs: str | None = None,
    ) -> None:
        _check_handler(handler)
        self.handler = handler
        self.kind = kind_of(
            handler, process=process, batch=batch, max_wait_s=max_wait_s, transaction=transaction
        )
        self.batch = batch or 1
        self.max_wait_s = max_wait_s
        self.isolation = isolation_of(handler.__name__, transaction)
        self.name = check_task_name(handler.__name__ if name is None else name)
        self.queue = check_queue(queue)
        _check_limits(self.name, max_attempts, timeout_s)
        check_int(f"task {self.name}: priority", priority, PRIORITY_MIN, PRIORITY_MAX)
        self.priority = priority
        self.max_attempts = max_attempts
        self.max_crashes = _max_crashes(self.name, max_crashes, max_attempts)
        self.timeout_s = timeout_s
        self.backoff = backoff
        self.on_error = dict(on_error or {})
        _check_policies(self.name, backoff, self.on_error)
        self.is_async = inspect.iscoroutinefunction(handler)
        functools.update_wrapper(self, handler, updated=())
        if self.is_async:
            # With the attributes of a function, inspect.iscoroutinefunction() is true for the task.
            for attribute in ("__code__", "__defaults__", "__kwdefaults__"):
                setattr(self, attribute, getattr(handler, attribute))
        self._take_arguments(handler)
        self.versions = ArgsVersions(self.name, args_version, upgrade or {})
        self.aliases = check_aliases(self.name, aliases)
        self.redact = check_redact(self.name, redact, self._fields, older=bool(upgrade))
        self.unique = unique
        _check_unique(self.name, unique, self.args_type, self.redact)
        self.keep_logs = keep_logs_of(self.name, keep_logs)
        self.metadata = _metadata(self.name, metadata)
        self.limit = limit
        _check_limit(self.name, limit, self._fields)
        self.limit_defaults = defaults_of(self.args_type, limit.arguments if limit else ())
        self.unique_defaults = defaults_of(self.args_type, unique.arguments if unique else ())

    def _take_arguments(self, handler: Callable[..., Any]) -> None:
        """Derive the checks of arguments, and their published schema, from the signature."""
        self._signature, self.context_name = signature_of(self.name, handler)
        self.takes_context = self.context_name is not None
        check_context(self.name, self.kind, takes_context=self.takes_context)
        self._item: type | None = None
        if self.kind is HandlerKind.BATCH:
            # The handler's only parameter is a list of items; a job has the arguments of one item.
            self._item = item_class(self.name, handler, self._signature)
            self.takes_context = True
            fields = batches.args_fields(self._item)
        else:
            fields = args_fields(self.name, handler, self._signature)
        check_constraints(self.name, fields)
        self.args_type = msgspec.defstruct(
            self.name, fields, kw_only=True, forbid_unknown_fields=True, gc=False
        )
        try:
            self._decoder = msgspec.json.Decoder(self.args_type, dec_hook=from_json_type)
            self.args_schema: str = args_schema_of(self.args_type)
        except TypeError as error:
            raise refusal(self.name, fields, error) from None
        self.signature_hash = hashlib.sha256(self.args_schema.encode()).hexdigest()[:32]
        self._fields = self.args_type.__struct_fields__

    @property
    def limit_name(self) -> str | None:
        """The name of the limit, by default the name of the task; None if there is no limit."""
        return None if self.limit is None else check_task_name(self.limit.name or self.name)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the handler as a plain function; if it takes `ctx`, call `.handler(ctx, ...)`."""
        made: R = self.handler(*args, **kwargs)
        return made

    def call(self, context: Any, arguments: dict[str, Any]) -> Any:
        """Call the handler with the arguments of a job, and with the context if it takes one."""
        if self.context_name is not None:
            arguments[self.context_name] = context
        return self.handler(**arguments)

    def __repr__(self) -> str:
        return f"<task {self.name} on queue {self.queue}>"

    def encode(self, *args: Any, **kwargs: Any) -> str:
        """Check the arguments against the signature, and return their JSON text.

        Raises:
            InvalidArgs: the arguments do not fit the signature, or have no JSON form.
        """
        try:
            bound = self._signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise InvalidArgs(f"task {self.name}: {self._why_unbound(error, kwargs)}") from None
        if self._item is not None:
            (given,) = bound.values()
            if not isinstance(given, self._item):
                raise InvalidArgs(
                    f"task {self.name}: the argument must be a {self._item.__qualname__}, "
                    f"not a {type(given).__qualname__}"
                )
            bound = {field: getattr(given, field) for field in self._fields}
        text = encode_args(self.name, bound)
        try:
            self._decoder.decode(text)
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            raise InvalidArgs(f"task {self.name}: {_without_value(error)}") from None
        return text

    def _why_unbound(self, error: TypeError, kwargs: Mapping[str, Any]) -> object:
        if "conn" in kwargs:
            return f"{self.__name__}.on(conn).enqueue(...) enqueues over a connection"
        if self.context_name in kwargs:
            return (
                f"the worker passes {self.context_name}, the context of the attempt. An argument "
                "named context needs a type: `context: dict[str, str]`"
            )
        return error

    def decode(self, args: str, args_version: int | None = None) -> dict[str, Any]:
        """Decode the JSON text of a job's arguments, and upgrade them if necessary.

        Args:
            args_version: the version of the arguments; None means version 1.

        Returns:
            The keyword arguments for the handler.

        Raises:
            InvalidArgs: the arguments no longer fit the signature, or cannot be upgraded.
        """
        if (args_version or 1) != self.versions.args_version:
            args = self.versions.lift(args, args_version or 1)
        try:
            decoded = self._decoder.decode(args)
        except (msgspec.ValidationError, msgspec.DecodeError, RecursionError, ValueError) as error:
            raise InvalidArgs(f"task {self.name}: {_without_value(error)}") from None
        return msgspec.structs.asdict(decoded)

    def decode_result(self, text: str) -> R:
        """Decode the JSON text of a job's result to the type that the handler returns.

        If taskd cannot decode this type, decode the text to JSON's types.

        Raises:
            InvalidResult: the result is not of this type.
        """
        try:
            result: R = self._result_decoder.decode(text)
        except (msgspec.ValidationError, ValueError, RecursionError) as error:
            raise InvalidResult(
                f"task {self.name}: the result is not of the type that the handler is annotated to "
                f"return: {_without_value(error)}. Read it as JSON: client.result(int(id))"
            ) from None
        return result

    @functools.cached_property
    def _result_decoder(self) -> msgspec.json.Decoder[Any]:
        return result_decoder(self.handler, batch=self.kind is HandlerKind.BATCH)

    def parameters(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the required arguments of a job, and of all its arguments."""
        fields = msgspec.structs.fields(self.args_type)
        return tuple(each.name for each in fields if each.required), tuple(self._fields)

    def item(self, args: str, args_version: int | None = None) -> Any:
        """Return `Item.args` for a batch handler, from the JSON text of a job's arguments.

        Raises:
            InvalidArgs: the arguments no longer fit the handler's annotation, or they cannot be
                upgraded, or their class refuses them.
        """
        assert self._item is not None
        try:
            return self._item(**self.decode(args, args_version))
        except (TypeError, ValueError) as error:  # from a __post_init__ of the app
            raise InvalidArgs(f"task {self.name}: {error}") from error

    def job(self, *args: P.args, **kwargs: P.kwargs) -> NewJob:
        """Return a job of this task as a value: `send.job(to="ada@example.org").after(60)`.

        Raises:
            InvalidArgs: the arguments do not fit the signature.
        """
        text = self.encode(*args, **kwargs)
        return NewJob(
            self.name,
            text,
            queue=self.queue,
            priority=self.priority,
            checked=True,
            unique=self.unique_of(text),
            args_version=self.versions.stored,
            limit=self.limit_of(text),
            metadata=self.metadata,
        )

    def limit_of(self, args: str) -> LimitOf | None:
        """Return the limit of a job. `args`: its arguments, as the text of a JSON object."""
        if self.limit is None:
            return None
        name = self.limit.name or self.name
        return limit_of(name, self.limit.arguments, args, self.limit_defaults, self.redact)

    def unique_of(self, args: str) -> Unique | None:
        """Return the unique key of a job. `args`: its arguments, as the text of a JSON object."""
        if self.unique is None:
            return None
        return self.unique.of(args, self.unique_defaults, self.redact)

    def check_key(self, unique: Unique) -> None:
        """Check that the arguments of the task can make this key.

        Raises:
            TypeError: the key uses an argument that the task does not have, or the version is one
                that the task redacts.
        """
        _check_unique(self.name, unique, self.args_type, self.redact)

    def rule_of(self, unique: Unique) -> str:
        """Return the JSON text with which producers that do not import the task make this key."""
        return unique.rule(defaults_of(self.args_type, unique.arguments), self.redact)

    def keyed(self, unique: Unique, args: str) -> Unique:
        """Return a copy of `unique` with the key that these arguments and their defaults make.

        Raises:
            TypeError: the key uses an argument that the task does not have, or the version is one
                that the task redacts.
            InvalidJob: no key or no version can be made of the arguments.
        """
        _check_unique(self.name, unique, self.args_type, self.redact)
        return unique.of(args, defaults_of(self.args_type, unique.arguments), self.redact)


def _without_value(error: Exception) -> str:
    """Return the message of an error without the quoted value, which can be personal data."""
    return QUOTED_VALUE.sub(r"\1", str(error), count=1)


def _is_method(handler: Any) -> bool:
    """Return whether the handler is a method, which needs an object or its class."""
    if isinstance(handler, classmethod):
        return True
    return next(iter(inspect.signature(handler).parameters), "") == "self"


def _check_handler(handler: Callable[..., Any]) -> None:
    if not inspect.isroutine(handler):
        raise TypeError(
            f"a task's handler must be a function, not {handler!r}: wrap the object in a function"
        )
    if _is_method(handler):
        raise TypeError(
            f"task {handler.__name__}: a method needs an object, which no worker has: write a "
            "function that makes the object. For Celery's self of bind=True, write ctx"
        )
    if inspect.isgeneratorfunction(handler) or inspect.isasyncgenfunction(handler):
        raise TypeError(f"task {handler.__name__}: a handler that yields would never run")


def _check_limits(task: str, max_attempts: int, timeout_s: float | None) -> None:
    whole = isinstance(max_attempts, int) and not isinstance(max_attempts, bool)
    if not whole or not 1 <= max_attempts <= MAX_ATTEMPTS_LIMIT:
        raise ValueError(
            f"task {task}: max_attempts {max_attempts!r} is not 1 to {MAX_ATTEMPTS_LIMIT}"
        )
    if timeout_s is None:
        return
    if not isinstance(timeout_s, int | float) or not 0.001 <= timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(
            f"task {task}: timeout_s {timeout_s!r} is not 0.001 to {TIMEOUT_S_MAX:.0f} seconds"
        )


def _max_crashes(task: str, max_crashes: int | None, max_attempts: int) -> int | None:
    if max_crashes is None:
        return None
    whole = isinstance(max_crashes, int) and not isinstance(max_crashes, bool)
    if not whole or not 0 <= max_crashes <= MAX_CRASHES_LIMIT:
        raise ValueError(
            f"task {task}: max_crashes {max_crashes!r} is not 0 to {MAX_CRASHES_LIMIT}"
        )
    if max_crashes and max_attempts == 1:
        raise ValueError(
            f"task {task}: with max_attempts=1 the handler begins only once, so max_crashes "
            f"{max_crashes} has no effect: leave max_crashes out, or set max_attempts to 2 or more"
        )
    return max_crashes


def _metadata(task: str, metadata: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Check the metadata, and return a copy of it; None if it is empty."""
    try:
        return None if metadata is None else msgspec.json.decode(check_metadata(metadata)) or None
    except InvalidJob as error:
        raise InvalidJob(f"task {task}: {error}") from None


def _check_policies(
    task: str, backoff: backoffs.Backoff, on_error: Mapping[type[BaseException], Rule]
) -> None:
    # Without this check, a wrong policy would show only when the first attempt fails.
    if not isinstance(backoff, backoffs.Backoff):
        raise TypeError(f"task {task}: backoff {backoff!r} is not a policy; use Custom(function)")
    for kind, rule in on_error.items():
        if not (isinstance(kind, type) and issubclass(kind, BaseException)):
            raise TypeError(f"task {task}: on_error: {kind!r} is not an exception class")
        if rule is Snooze:
            raise TypeError(f"task {task}: on_error: Snooze needs its delay, as in Snooze(60)")
        named = isinstance(rule, type) and issubclass(rule, Verdict)
        if not named and not isinstance(rule, Verdict | backoffs.Backoff):
            raise TypeError(f"task {task}: on_error: {rule!r} is neither a verdict nor a backoff")


def _check_unique(
    task: str, unique: Unique | None, args_type: type[msgspec.Struct], redact: tuple[str, ...]
) -> None:
    if unique is None:
        return
    if not isinstance(unique, Unique):
        raise TypeError(f"task {task}: unique {unique!r} is not a Unique(...)")
    missing = [name for name in unique.arguments if name not in args_type.__struct_fields__]
    if missing:
        raise TypeError(f"task {task}: unique: the task has no argument {missing[0]!r}")
    if unique.version_by in redact:
        raise TypeError(f"task {task}: {redacted_version(unique.version_by)}")
    if unique.version_by:
        check_version_type(task, args_type, unique.version_by)


def _check_limit(task: str, limit: Limit | None, fields: tuple[str, ...]) -> None:
    if limit is None:
        return
    if not isinstance(limit, Limit):
        raise TypeError(f"task {task}: limit {limit!r} is not a Limit(...)")
    missing = [name for name in limit.arguments if name not in fields]
    if missing:
        raise TypeError(f"task {task}: limit: the task has no argument {missing[0]!r}")
