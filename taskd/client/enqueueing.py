"""Enqueue jobs: check them against published tasks, cut them into batches, insert them."""

from __future__ import annotations

import difflib
from collections.abc import (
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from taskd.client import traces
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import NewJob
from taskd.core.tasks.task import Task
from taskd.errors import InvalidArgs, UnknownTask
from taskd.store import tasks as stored_tasks
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs as stored_jobs

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

BATCH_JOBS = 1000
# Limits the size of a statement: client and server hold the statement in memory, and it must end
# within the statement timeout.
BATCH_CHARACTERS = 8 * 1024 * 1024
MESSAGE_CHARACTERS = 300

# A function that returns the built-in tasks. It is called only for a job without a queue whose task
# is not published.
BuiltIns = Callable[[], Sequence[Task[..., Any]]]


def no_built_ins() -> Sequence[Task[..., Any]]:
    """Return no tasks, so that only published tasks are known."""
    return ()


def enqueue_job(
    on: Fetches, job: NewJob, built_ins: BuiltIns = no_built_ins
) -> Coroutine[Any, Any, Enqueued]:
    """Return a coroutine that enqueues one job as enqueue_jobs() does, and returns its id.

    A job that is complete and has no unique key takes a short path if the app uses no traces: the
    result is a coroutine of the store. The short path avoids the lists and the five coroutines of
    enqueue_jobs(), which take a third of the time in Python.
    """
    if is_complete(job) and job.unique is None and traces.tracer() is None:
        return stored_jobs.enqueue_one(on, job)
    return _enqueue_only(on, job, built_ins)


async def _enqueue_only(on: Fetches, job: NewJob, built_ins: BuiltIns) -> Enqueued:
    return (await enqueue_jobs(on, [job], built_ins))[0]


async def enqueue_jobs(
    on: Fetches, jobs: Iterable[NewJob], built_ins: BuiltIns = no_built_ins
) -> list[Enqueued]:
    """Insert jobs as insert_jobs() does, within a span if the app uses traces.

    Raises:
        As insert_jobs().
    """
    tracer = traces.tracer()
    if tracer is None:
        return await insert_jobs(on, jobs, built_ins)
    with traces.sending(tracer) as span:
        enqueued = await insert_jobs(on, span.jobs(jobs), built_ins)
    span.end(enqueued)
    return enqueued


async def insert_jobs(
    on: Fetches, jobs: Iterable[NewJob], built_ins: BuiltIns = no_built_ins
) -> list[Enqueued]:
    """Insert jobs in batches of at most BATCH_JOBS and BATCH_CHARACTERS, one statement per batch.

    Arguments that were not checked against a signature in this process are checked against the
    published task. If no worker has published the task, a job with a queue is inserted without a
    check. A job without a queue must then be of a built-in task, and its arguments are checked
    against that task.

    Returns:
        The ids, in the order of the jobs.

    Raises:
        UnknownTask: a job names no queue, and its task is neither published nor built in.
        InvalidArgs: a job's arguments do not fit its published or built-in task.
        TaskdError: any error of jobs.enqueue() of the store.
    """
    ids: list[Enqueued] = []
    for batch in _batches(jobs):
        complete = await completed(on, batch, built_ins)
        for job, enqueued in zip(complete, await stored_jobs.enqueue(on, complete), strict=True):
            if not job.checked:
                enqueued.published = False
            ids.append(enqueued)
    return ids


def _batches(jobs: Iterable[NewJob]) -> Iterator[list[NewJob]]:
    batch: list[NewJob] = []
    characters = 0
    for job in jobs:
        if len(batch) == BATCH_JOBS or (batch and characters + len(job.args) > BATCH_CHARACTERS):
            yield batch
            batch, characters = [], 0
        batch.append(job)
        characters += len(job.args)
    if batch:
        yield batch


def is_complete(job: NewJob) -> bool:
    """Return whether the job has a queue, and its arguments were checked."""
    return job.checked and job.queue is not None


async def completed(on: Fetches, jobs: list[NewJob], built_ins: BuiltIns) -> list[NewJob]:
    """Return the jobs, each completed by its published or built-in task.

    If the arguments of a job were not checked yet, they are checked now. The job also gets the
    limit, the argument version and the default metadata of the task. It gets the task's unique key,
    unless the job has a key or `no_key`. If the job has no queue or no priority, it gets that of
    the task. If a job has a queue and its task is not published, the job is not `checked`, and gets
    nothing from the task. If the job itself has a rule for its unique key, this rule is still
    applied.

    Raises:
        UnknownTask, InvalidArgs: as insert_jobs().
    """
    incomplete = {job.task for job in jobs if not is_complete(job)}
    if not incomplete:
        return jobs
    published = await stored_tasks.find(on, incomplete)
    tasks: dict[str, stored_tasks.PublishedTask | Task[..., Any]] = {}
    if any(job.queue is None and job.task not in published for job in jobs):
        tasks.update({task.name: task for task in built_ins()})
    tasks.update(published)
    complete = []
    for job in jobs:
        # If the job has a queue, ignore a built-in task of this name: the job can belong to a task
        # of an app with the same name.
        if job.queue is not None and (job.checked or job.task not in published):
            complete.append(_with_key(job))
        elif job.task in tasks:
            complete.append(_complete(job, tasks[job.task]))
        else:
            raise UnknownTask(_unknown(job.task, {*tasks, *await stored_tasks.names(on)}))
    return complete


def _complete(job: NewJob, task: stored_tasks.PublishedTask | Task[..., Any]) -> NewJob:
    if not job.checked:
        check_args(job.task, job.args, task.args_schema, task.redact)
        job = _with_key(job, task.redact)
        unique = task.unique_of(job.args) if job.unique is None and not job.no_key else job.unique
        job = replace(
            job,
            checked=True,
            args_version=_stored_version(task),
            limit=task.limit_of(job.args),
            unique=unique,
            metadata=_merged(task.metadata, job.metadata),
        )
    if job.priority is None:
        job = replace(job, priority=task.priority)
    return job if job.queue is not None else replace(job, queue=task.queue)


def _merged(
    defaults: Mapping[str, Any] | None, metadata: Mapping[str, Any] | None
) -> Mapping[str, Any] | None:
    return metadata if defaults is None else {**defaults, **(metadata or {})}


def _with_key(job: NewJob, redact: Collection[str] = ()) -> NewJob:
    """Apply the rule for the unique key that the job itself has, if any; return the job."""
    if job.unique is None or not job.unique.by:
        return job
    return replace(job, unique=job.unique.of(job.args, redact=redact))


def _stored_version(task: stored_tasks.PublishedTask | Task[..., Any]) -> int | None:
    if isinstance(task, Task):
        return task.versions.stored
    return None if task.args_version == 1 else task.args_version


def _unknown(task: str, tasks: Iterable[str]) -> str:
    near = difflib.get_close_matches(task, sorted(tasks), n=3)
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"no worker has published a task named {task!r}, and the job names no queue.{meant} "
        "Start a worker that knows the task, or name the queue."
    )


def check_args(task: str, text: str, args_schema: str, redact: Collection[str] = ()) -> None:
    """Check the JSON text of arguments against the published schema.

    Raises:
        InvalidArgs: the arguments do not fit. The message does not quote the wrong value. For a
            redacted argument, it contains only the name.
    """
    from jsonschema.exceptions import best_match

    try:
        args = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgs(f"task {task}: the arguments are not JSON: {error}") from None
    odd = best_match(_validator(args_schema).iter_errors(args))
    if odd is not None:
        at = f" - at `{odd.json_path}`" if odd.absolute_path else ""
        if odd.absolute_path and odd.absolute_path[0] in redact:
            name = odd.absolute_path[0]
            raise InvalidArgs(f"task {task}: the value does not fit the task - at `$.{name}`")
        # Leave the value out of the message: it can be personal data, and errors are logged.
        rest = odd.message.removeprefix(repr(odd.instance))
        message = odd.message if rest == odd.message else f"the value{rest}"
        takes = "" if odd.absolute_path else _takes(odd)
        raise InvalidArgs(f"task {task}: {message[:MESSAGE_CHARACTERS]}{at}{takes}")


def _takes(odd: ValidationError) -> str:
    """Return the arguments of the task as text, if the error is a missing or unknown argument."""
    if odd.validator not in ("required", "additionalProperties"):
        return ""
    schema: Any = odd.schema
    names = ", ".join(sorted(schema.get("properties", ())))
    return f"; it takes {names[:MESSAGE_CHARACTERS] or 'no arguments'}"


@lru_cache(maxsize=256)
def _validator(args_schema: str) -> Validator:
    import jsonschema

    schema = msgspec.json.decode(args_schema)
    return jsonschema.Draft202012Validator(schema, format_checker=_formats())


@lru_cache(maxsize=1)
def _formats() -> Any:
    """Return a checker of the formats that msgspec writes into a schema.

    In the worker, msgspec checks the arguments. This checker accepts the same texts as msgspec.
    """
    import datetime as dt
    import decimal
    import uuid

    import jsonschema

    checker = jsonschema.FormatChecker(formats=())
    kinds = {
        "date-time": dt.datetime,
        "date": dt.date,
        "time": dt.time,
        "duration": dt.timedelta,
        "uuid": uuid.UUID,
        "decimal": decimal.Decimal,
    }
    for name, kind in kinds.items():
        checker.checkers[name] = (_converts(kind), msgspec.ValidationError)
    return checker


def _converts(kind: type) -> Any:
    def check(value: object) -> bool:
        if isinstance(value, str):
            msgspec.convert(value, kind)
        return True

    return check
