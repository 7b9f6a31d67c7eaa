"""Enqueueing over anything that runs statements: batches, and tasks that are not imported here."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import Enqueued
from taskd.core.tasks.task import Task
from taskd.errors import InvalidArgs, UnknownTask
from taskd.store import tasks as stored_tasks
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs as stored_jobs

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

BATCH_JOBS = 1000
# A statement is built in memory on both sides, and the server has its time limit.
BATCH_CHARACTERS = 8 * 1024 * 1024
MESSAGE_CHARACTERS = 300

# Tasks to go by while nobody has published one of their name; made only when they are needed.
BuiltIns = Callable[[], Sequence[Task[..., Any]]]


def no_built_ins() -> Sequence[Task[..., Any]]:
    """No task is known but those that workers have published."""
    return ()


async def produce(
    on: Fetches, jobs: Iterable[NewJob], built_ins: BuiltIns = no_built_ins
) -> list[Enqueued]:
    """Insert jobs, a statement per thousand (or 8 MiB); their ids, in the order of the jobs.

    Arguments that were not checked against a signature here are checked against what workers have
    published about the task; a task that nobody has published needs a queue, and goes unchecked.
    Without a queue it may be a built-in one, and is checked against that.

    Raises:
        UnknownTask: a job names no queue, and nobody knows its task.
        InvalidArgs: a job's arguments do not fit the published task.
    """
    ids: list[Enqueued] = []
    for batch in _batches(jobs):
        ids += await stored_jobs.enqueue(on, await placed(on, batch, built_ins))
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


def is_placed(job: NewJob) -> bool:
    """Whether it has a queue, and arguments that somebody has checked."""
    return job.checked and job.queue is not None


async def placed(on: Fetches, jobs: list[NewJob], built_ins: BuiltIns) -> list[NewJob]:
    """The jobs, each with a queue and with arguments that somebody has checked."""
    asked = {job.task for job in jobs if not is_placed(job)}
    if not asked:
        return jobs
    published = await stored_tasks.find(on, asked)
    known: dict[str, stored_tasks.PublishedTask | Task[..., Any]] = {}
    if any(job.queue is None and job.task not in published for job in jobs):
        known.update({task.name: task for task in built_ins()})
    known.update(published)
    placed = []
    for job in jobs:
        # A queue that is named may be that of an app's own task with a built-in one's name.
        if job.queue is not None and (job.checked or job.task not in published):
            placed.append(job)
        elif job.task in known:
            placed.append(_place(job, known[job.task]))
        else:
            raise UnknownTask(_unknown(job.task, {*known, *await stored_tasks.names(on)}))
    return placed


def _place(job: NewJob, task: stored_tasks.PublishedTask | Task[..., Any]) -> NewJob:
    if not job.checked:
        check_args(job.task, job.args, task.args_schema, task.redact)
        unique = task.unique_of(job.args) if job.unique is None and not job.no_key else job.unique
        job = replace(
            job,
            args_version=_stored_version(task),
            limit=task.limit_of(job.args),
            unique=unique,
        )
    return job if job.queue is not None else replace(job, queue=task.queue)


def _stored_version(task: stored_tasks.PublishedTask | Task[..., Any]) -> int | None:
    if isinstance(task, Task):
        return task.form.stored
    return None if task.args_version == 1 else task.args_version


def _unknown(task: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(task, sorted(known), n=3)
    meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return (
        f"no worker has published a task named {task!r}, and no queue was named.{meant} "
        "Start a worker that knows the task, or say which queue."
    )


def check_args(task: str, text: str, args_schema: str, redact: Collection[str] = ()) -> None:
    """Check the JSON text of arguments against the published schema.

    Raises:
        InvalidArgs: they do not fit. The value itself is not told, and of an argument that is
            hidden nothing but its name.
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
            raise InvalidArgs(f"task {task}: the value is not as the task wants it - at `$.{name}`")
        # The value that does not fit may be personal, and errors are logged.
        rest = odd.message.removeprefix(repr(odd.instance))
        told = odd.message if rest == odd.message else f"the value{rest}"
        takes = "" if odd.absolute_path else _takes(odd)
        raise InvalidArgs(f"task {task}: {told[:MESSAGE_CHARACTERS]}{at}{takes}")


def _takes(odd: ValidationError) -> str:
    """The arguments there are, for a name that is missing or wrong: mostly both at once."""
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
    """The formats that msgspec writes into a schema, checked as the worker will read them."""
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
