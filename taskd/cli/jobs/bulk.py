"""Act on all jobs that match a filter, batch by batch.

Each batch is its own transaction, so that an action on hundreds of thousands of jobs blocks no
worker for long. The command can be interrupted at any time, and run again for the remaining jobs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.jobs.filters import filter_of
from taskd.cli.shared.name_hints import ask_named
from taskd.cli.shared.output import count, print_json
from taskd.cli.shared.session import Session
from taskd.core.jobs.job import JobState
from taskd.core.jobs.job_filter import JobFilter

if TYPE_CHECKING:
    from taskd.client.operations.bulk import Act
    from taskd.store.connections.lanes import Lane

# On a terminal, the command asks before it changes more than this number of jobs.
ASK_ABOVE_JOBS = 100


@dataclass(frozen=True, slots=True)
class How:
    """Options of a bulk action.

    Attributes:
        done: the verb for messages, as a participle: `retried`.
        dry_run: whether to print what would happen, and change nothing.
        yes: whether to act without a confirmation.
        limit: maximum number of jobs to change; None to change all.
    """

    done: str
    dry_run: bool
    yes: bool
    limit: int | None
    as_json: bool


def bulk_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a bulk action."""
    options = [
        click.option("--limit", type=click.IntRange(1), help="At most this many jobs."),
        click.option(
            "--dry-run", is_flag=True, help="Print what would happen, and change nothing."
        ),
        click.option("--yes", is_flag=True, help="Do not ask for confirmation."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def chosen(
    ids: Sequence[int], options: dict[str, Any], able: Collection[JobState]
) -> JobFilter | None:
    """Return the filter for jobs in the states in which the action is possible.

    Returns:
        None if ids were given.

    Raises:
        UsageError: both ids and a filter were given, or neither; or a value is not allowed.
        InvalidArgs: a value is not JSON.
    """
    selected = filter_of(options)
    if bool(ids) is not selected.empty:
        raise click.UsageError(
            "give ids, or options that choose jobs: --task, --queue, --state ..."
        )
    return None if ids else selected.within(able)


def in_bulk(session: Session, selected: JobFilter, act: Act, how: How) -> None:
    """Find the jobs, act on them, and print how many were changed."""
    from taskd.client.operations import bulk

    confirms = on_terminal() and not how.yes
    if how.dry_run or confirms:
        found, sample = ask_named(
            session,
            lambda lane: bulk.preview(lane, selected, how.limit),
            queue=selected.queue,
            task=selected.task,
            empty=lambda preview: not preview[0],
        )
        if how.dry_run:
            _print_sample(session, found, sample, how)
            return
        if found > ASK_ABOVE_JOBS:
            click.confirm(
                f"{count(found, 'job')} will be {how.done}. Continue?", abort=True, err=True
            )
    ids = ask_named(
        session,
        lambda lane: _act(session, lane, selected, act, how),
        queue=selected.queue,
        task=selected.task,
    )
    if how.as_json:
        print_json({how.done: ids, "dry_run": False, "refused": []})
    session.echo(f"{count(len(ids), 'job')} {how.done}")


def on_terminal() -> bool:
    """Return whether a user at a terminal can answer a question."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _print_sample(session: Session, found: int, sample: list[int], how: How) -> None:
    if how.as_json:
        print_json({"found": found, "sample": sample, "dry_run": True})
        return
    for job_id in sample:
        click.echo(job_id)
    more = f"; the first {len(sample)} are listed" if found > len(sample) else ""
    session.echo(f"{count(found, 'job')} would be {how.done}{more}")


async def _act(session: Session, lane: Lane, selected: JobFilter, act: Act, how: How) -> list[int]:
    from taskd.client.operations import bulk

    acted: list[int] = []
    shows = sys.stderr.isatty() and not session.quiet
    try:
        async for ids in bulk.batches(lane, selected, how.limit):
            done = sorted(await act(lane, ids))
            acted += done
            if not how.as_json:
                click.echo("".join(f"{job_id}\n" for job_id in done), nl=False)
            if shows:
                click.echo(f"\r{len(acted):,} {how.done}", err=True, nl=False)
    except BaseException:
        session.echo(
            f"{count(len(acted), 'job')} {how.done} so far, and perhaps one more batch. "
            "Run the same command again for the other jobs."
        )
        raise
    finally:
        if shows and acted:
            click.echo(err=True)
    return acted
