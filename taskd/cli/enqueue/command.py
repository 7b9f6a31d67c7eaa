"""`taskd enqueue`: one job from arguments, or many from stdin."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, closing
from datetime import datetime
from typing import IO, TYPE_CHECKING, Any

import click

from taskd.cli.enqueue.ndjson import Bar, Chunk, LineError, Progress, read_chunks, with_unique
from taskd.cli.shared.arguments import PAIRS, arguments, with_json_hint
from taskd.cli.shared.output import count
from taskd.cli.shared.session import (
    DURATION,
    MOMENT,
    MOMENT_OR_DURATION,
    QUEUE,
    Session,
    Version,
    pass_session,
    run,
)
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.unique import KeyScope, NewerStarts, OnConflict
from taskd.errors import EnqueueError, StoreUnavailable, TaskdError

if TYPE_CHECKING:
    from taskd.client import Client

UNPUBLISHED = "no worker has published"
# What happened to a job whose unique key another job holds, by outcome.
HELD = {
    "skipped": "job {} holds the unique key, so no job was added",
    "replaced": "job {} holds the unique key, and now has the new arguments",
    "debounced": "job {} holds the unique key, and now has the new arguments and due time",
    "follows": "job {} holds the unique key; the new job starts after it",
    "ignored": "job {} has this version or a newer one, so no job was added",
}


@click.command()
@click.argument("task")
@PAIRS
@click.option("--json", "args_json", metavar="OBJECT", help="The arguments as a JSON object.")
@click.option("--queue", type=QUEUE, help="Name of the queue; by default that of the task.")
@click.option(
    "--priority", type=int, help="Smaller numbers run first; by default that of the task."
)
@click.option("--in", "delay_s", type=DURATION, help="Delay before the job is due: 5m.")
@click.option(
    "--at", "run_at", type=MOMENT, help="Run no sooner than this time: 2026-12-01T08:00:00+01:00."
)
@click.option("--max-attempts", type=int, help="Most attempts; by default as the task defines.")
@click.option(
    "--timeout",
    "timeout_s",
    type=DURATION,
    help="Timeout of one attempt; by default as the task defines.",
)
@click.option(
    "--deadline",
    type=MOMENT_OR_DURATION,
    help="Expire the job if no attempt has started by this time, or after this duration: 2h.",
)
@click.option(
    "--metadata",
    metavar="KEY=TEXT | KEY:=JSON",
    multiple=True,
    help="A value for the metadata of the job, such as a tag; repeatable.",
)
@click.option("--unique-key", metavar="KEY", help="At most one job of the task holds this key.")
@click.option("--no-key", is_flag=True, default=None, help="Enqueue without the task's unique key.")
@click.option(
    "--key-scope",
    type=click.Choice([each.value for each in KeyScope]),
    help="Hold the key until the claim (waiting), until the end of the job (live), for as long as "
    "taskd stores the job (history), or for ever (forever).  [default: live]",
)
@click.option("--key-for", "for_s", type=DURATION, help="Hold the key for at least this time: 1h.")
@click.option(
    "--on-conflict",
    type=click.Choice([each.value for each in OnConflict]),
    help="What to do if another job holds the key.  [default: skip]",
)
@click.option(
    "--debounce-max",
    "debounce_max_s",
    type=DURATION,
    help="With --on-conflict debounce: how long new jobs can postpone the job that holds the key, "
    "since that job was enqueued.",
)
@click.option(
    "--version",
    type=Version(),
    help="Version of the job's data: a whole number, or a time such as 2026-12-01T08:00:00Z. The "
    "job is enqueued only if this version is newer than the last version with the same key.",
)
@click.option(
    "--newer-starts",
    type=click.Choice([each.value for each in NewerStarts]),
    help="With --version or --on-conflict latest: when the newer job starts after a failed "
    "attempt of the older one.  "
    "[default: at_once]",
)
@click.option("--ids", is_flag=True, help="With -: print the ids.")
@pass_session
def enqueue(
    session: Session,
    /,
    task: str,
    pairs: tuple[str, ...],
    args_json: str | None,
    ids: bool,
    **options: Any,
) -> None:
    """Enqueue a job, or many from stdin.

    The command prints the id of the job: taskd enqueue send_report to=ada@example.org n:=3

    If the job has a unique key (by its task's rule, or by --unique-key), the printed id can be that
    of another job that holds the key. Then a line on stderr says what happened to the new job.

    With - as the task, stdin has one JSON object per line; only its key `task` is required:

    \b
    {"task": "send_report", "args": {"to": "ada@example.org"}, "queue": "email",
     "priority": 10, "run_at": "2026-12-01T08:00:00Z", "delay_s": 300 (or "in": "5m"),
     "deadline": "2026-12-01T09:00:00Z" (or "deadline_s": 3600),
     "max_attempts": 5, "timeout_s": 30, "unique_key": "ada", "key_scope": "waiting",
     "on_conflict": "debounce", "debounce_max_s": 60, "for_s": 3600, "version": 7, "no_key": true,
     "metadata": {"tag": "vip"}}

    Options on the command line are defaults for the lines. Up to 1,000 lines are one transaction.
    The first wrong line ends the command, which prints how many lines were enqueued.
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    if options["delay_s"] is not None and options["run_at"] is not None:
        raise click.UsageError("give either --in or --at")
    options["deadline"], options["deadline_s"] = _ends(options["deadline"])
    options["metadata"] = arguments(options["metadata"], None) or None
    if task == "-":
        if pairs or args_json is not None:
            raise click.UsageError("with -, give the arguments in the lines of stdin")
        _enqueue_lines(session, sys.stdin.buffer, options, ids)
        return
    args = arguments(pairs, args_json)
    with with_json_hint(pairs):
        enqueued = run(_enqueue_one(session, task, args, with_unique(_given(options))))
    if not enqueued.published:
        keyed = options["unique_key"] is not None or options["no_key"]
        hint = "" if keyed else ", and no unique key of the task applies; --unique-key gives one"
        session.echo(f"taskd: {UNPUBLISHED} task {task!r}: the arguments were not checked{hint}")
    if enqueued.outcome != "enqueued":
        session.echo(f"taskd: {HELD[enqueued.outcome].format(enqueued)}")
    click.echo(enqueued)


async def _enqueue_one(
    session: Session, task: str, args: dict[str, Any], options: dict[str, Any]
) -> Enqueued:
    async with session.client() as client:
        return await client.enqueue_named(task, args, **options)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that were given."""
    return {name: value for name, value in options.items() if value is not None}


def _ends(deadline: datetime | float | None) -> tuple[datetime | None, float | None]:
    """Return the values of `deadline` and `deadline_s`; at least one of them is None."""
    if isinstance(deadline, datetime):
        return deadline, None
    return None, deadline


def _enqueue_lines(session: Session, source: IO[bytes], options: dict[str, Any], ids: bool) -> None:
    """Enqueue the lines of stdin in chunks, and print how many were enqueued."""
    progress = Progress()
    try:
        _enqueue_chunks(session, source, _given(options), ids, progress)
    except TaskdError as error:
        why = str(error).removesuffix(".")
        raise type(error)(progress.summary(why, isinstance(error, StoreUnavailable))) from error
    except (KeyboardInterrupt, BrokenPipeError) as error:
        # A BrokenPipeError means that the reader of --ids, such as `head`, has closed the pipe.
        # Stop without an error message, but print how many lines were enqueued.
        why = (
            "interrupted"
            if isinstance(error, KeyboardInterrupt)
            else "the reader of the ids has closed the pipe"
        )
        click.echo(f"taskd: {progress.summary(why, doubtful=True)}", err=True)
        raise
    others = progress.jobs - progress.enqueued
    held = f"; for {count(others, 'line')}, another job holds the key" if others else ""
    session.echo(f"{count(progress.enqueued, 'job')} enqueued{held}")
    if progress.unpublished:
        session.echo(
            f"{UNPUBLISHED} the tasks of {count(progress.unpublished, 'line')}: the arguments were "
            "not checked, and no unique keys of these tasks apply"
        )


def _enqueue_chunks(
    session: Session, source: IO[bytes], defaults: dict[str, Any], ids: bool, progress: Progress
) -> None:
    # The event loop runs only while a chunk is sent: during a blocking read of stdin, the loop
    # would not handle Ctrl-C.
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:
        client = runner.run(stack.enter_async_context(session.client()))
        try:
            with closing(Bar(source, session.quiet)) as bar:
                for chunk in read_chunks(source, defaults):
                    progress.sent = chunk
                    enqueued = runner.run(_send(session, client, chunk))
                    progress.committed(chunk, enqueued)
                    bar.at(chunk.end_byte, progress.jobs)
                    if ids:
                        click.echo("\n".join(map(str, enqueued)))
        finally:
            runner.run(stack.aclose())


async def _send(session: Session, client: Client, chunk: Chunk) -> list[Enqueued]:
    try:
        return await client.enqueue_many(chunk.jobs)
    except EnqueueError as error:
        line, why = await _blame(session, client, chunk, error)
        raise LineError(f"line {line:,}: {why}") from error


async def _blame(
    session: Session, client: Client, chunk: Chunk, error: EnqueueError
) -> tuple[int, EnqueueError]:
    """Return the number of the first refused line of a chunk, and the error.

    A binary search finds the shortest prefix of the chunk that is refused. The last line of this
    prefix is the refused one. Each try is rolled back.
    """
    good, bad = 0, len(chunk.jobs)
    async with session.target() as target, target.database.connection("cli") as connection:
        while bad - good > 1:
            middle = (good + bad) // 2
            transaction = connection.transaction()
            await transaction.start()
            try:
                await client.enqueue_many(chunk.jobs[:middle], conn=connection)
                good = middle
            except EnqueueError as refusal:
                bad, error = middle, refusal
            finally:
                await transaction.rollback()
    return chunk.lines[bad - 1], error
