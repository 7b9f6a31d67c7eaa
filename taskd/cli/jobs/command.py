"""`taskd jobs`: list and show jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from taskd.cli.jobs.by_hand import complete, delete, restart, run_again
from taskd.cli.jobs.change import cancel, retry, set_, unknown_jobs
from taskd.cli.jobs.filters import filter_of, filter_options
from taskd.cli.jobs.logs import print_attempt
from taskd.cli.shared.name_hints import ask_named
from taskd.cli.shared.output import (
    Row,
    as_json_values,
    count,
    cut_text,
    moment,
    print_fields,
    print_json,
    print_rows,
    printable,
    span,
    text,
    text_of,
)
from taskd.cli.shared.session import JOB_ID, Session, json_option, pass_session
from taskd.core.humanize import worker_text
from taskd.core.jobs.job import JobState
from taskd.errors import JobNotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

    from taskd.core.stored_json import PastError
    from taskd.store.connections.lanes import Lane
    from taskd.store.reading.reports import Progress

LIST_MAX = 10_000
# Longer values of a job are cut for people; --json prints them whole.
VALUE_CHARS_MAX = 20_000
NEWER_FOLLOWS = "a newer job of its key follows"


def _attempts(row: Row) -> str:
    return f"{row['attempt']}/{row['max_attempts'] or '-'}"


def _note(row: Row) -> str:
    """Return the text of the column NOTE: why the job failed or waits, or its due time."""
    note = _state_note(row)
    return "; ".join(filter(None, (note, NEWER_FOLLOWS))) if row["newer_follows"] else note


def _state_note(row: Row) -> str:
    if row["state"] == JobState.SCHEDULED:
        due = row["due_in_s"]
        when = f"in {span(due)}" if due > 0 else "due"
        return f"{when}: {row['last_error']}" if row["last_error"] else when
    if row["state"] == JobState.DONE:
        return row["reason"] or ""
    return row["reason"] or row["last_error"] or ""


def _age(row: Row) -> str:
    return f"{row['age_of']} {span(row['age_s'])} ago"


COLUMNS = {
    "ID": text_of("id"),
    "STATE": text_of("state"),
    "QUEUE": text_of("queue"),
    "TASK": text_of("task"),
    "ATTEMPT": _attempts,
    "AGE": _age,
    "NOTE": _note,
}


@click.group()
def jobs() -> None:
    """List, show, retry, cancel, change, complete, restart and delete jobs."""


@jobs.command("list")
@filter_options(*JobState)
@click.option(
    "--limit",
    type=click.IntRange(1, LIST_MAX),
    default=50,
    show_default=True,
    help="Show at most this many jobs.",
)
@click.option("--ids", is_flag=True, help="Print only ids, one per line, for pipes.")
@json_option
@pass_session
def list_(session: Session, /, limit: int, ids: bool, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first; with only --state failed or cancelled, in the order of their ends.

    AGE is the time since the end of a finished job, since the claim of a running job, and since the
    enqueue of a waiting job, even if the waiting job has had attempts.
    """
    from taskd.store.reading import job_pages

    chosen = filter_of(filters).listed()
    rows = ask_named(
        session,
        lambda lane: job_pages.list_jobs(lane, chosen, limit),
        queue=chosen.queue,
        task=chosen.task,
    )
    if ids:
        for row in rows:
            click.echo(row["id"])
        return
    print_rows(rows, COLUMNS, as_json=as_json)
    if len(rows) == limit:
        session.echo(f"these are the newest {count(len(rows), 'job')}; see more with --limit")


@jobs.command()
@click.argument("job_id", metavar="ID", type=JOB_ID)
@click.option("--unredacted", is_flag=True, help="Also show the arguments that the task redacts.")
@click.option("--logs", is_flag=True, help="Show the log lines of the handler, if they were kept.")
@json_option
@pass_session
def show(session: Session, job_id: int, unredacted: bool, logs: bool, as_json: bool) -> None:
    """Show everything about a job: arguments, times, and every error with its traceback.

    Redacted arguments are shown as ***. Values are cut after 20,000 characters; --json prints them
    whole. Running times are from the claim until the outcome was written; duration_ms in the log is
    the time of the handler alone.
    """
    from taskd.store.jobs import logs as stored_logs
    from taskd.store.reading import reports

    async def ask(lane: Lane) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        row = await reports.show_job(lane, job_id, unredacted=unredacted)
        return row, await stored_logs.of_job(lane, job_id) if logs and row else []

    row, attempts = session.run(ask)
    if row is None:
        raise JobNotFound(unknown_jobs([job_id]))
    if as_json:
        whole = as_json_values(row, "args", "result", "metadata")
        print_json(whole | {"logs": attempts} if logs else whole)
        return
    _print_job(row)
    for each in attempts:
        print_attempt(each)
    if logs and not attempts:
        session.echo("no log lines of this job are kept; see the setting keep_logs")


def _print_job(row: dict[str, Any]) -> None:
    errors, actions, workers = (row.pop(name) for name in ("errors", "actions", "past_workers"))
    texts = {}
    for name, value in row.items():
        if value is None:
            continue
        if name in ("args", "result", "metadata"):
            texts[name] = cut_text(value, VALUE_CHARS_MAX)
        elif name == "progress":
            texts[name] = _progress(value)
        else:
            texts[name] = text(value)
    print_fields(texts)
    for action in actions:
        click.echo(printable(f"by hand: {moment(action.at)} {action.text()}"))
    for error in errors:
        _print_error(error, workers)


def _progress(progress: Progress) -> str:
    """Return `37 of 120 (31 %): importing, 2s ago`."""
    done, total, note = progress.done, progress.total, progress.note
    line = f"{done:,.10g}"
    if total is not None:
        line += f" of {total:,.10g}" + (f" ({done / total:.0%})" if total > 0 else "")
    return f"{line}{f': {note}' if note else ''}, {span(progress.reported_ago_s)} ago"


def _print_error(error: PastError, workers: Mapping[str, dict[str, Any]]) -> None:
    click.echo()
    known = workers.get(error.worker or "")
    worker = worker_text(**known) if known else f"worker {error.worker}"
    head = f"attempt {error.attempt} on {worker}"
    began, ended = error.started, error.ended
    if began is not None:
        head += f", claimed {moment(began)}"
    if began is not None and ended is not None:
        head += f", running for {span((ended - began).total_seconds())}"
    click.secho(printable(head), bold=True)
    click.echo(printable(cut_text(f"{error.type}: {error.message}", VALUE_CHARS_MAX)))
    if error.traceback:
        click.echo(printable(error.traceback.rstrip()))


for _command in (retry, cancel, set_, complete, restart, run_again, delete):
    jobs.add_command(_command)
