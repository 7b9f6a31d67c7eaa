"""`taskd stats`: outcomes, times and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from taskd.cli.shared.name_hints import ask_named
from taskd.cli.shared.output import Row, count, print_rows, span, span_of, text_of
from taskd.cli.shared.session import QUEUE, SINCE, Session, json_option, pass_session
from taskd.core.jobs.job import MAX_ATTEMPTS_LIMIT

GROUPS_MAX = 1000
# Maximum number of failed jobs, and of scheduled jobs, whose errors are read.
ERRORS_READ_MAX = 10_000
COLUMNS = {
    "QUEUE": text_of("queue"),
    "TASK": text_of("task"),
    "DONE": text_of("done"),
    "FAILED": text_of("failed"),
    "CANCELLED": text_of("cancelled"),
    "RETRIED": text_of("retried"),
    "RETRYING": text_of("retrying"),
    "WAIT AVG": span_of("wait_avg_s"),
    "WAIT P50": span_of("wait_p50_s"),
    "WAIT P95": span_of("wait_p95_s"),
    "RUNNING AVG": span_of("run_avg_s"),
    "RUNNING P50": span_of("run_p50_s"),
    "RUNNING P95": span_of("run_p95_s"),
    "RUNNING SUM": span_of("run_sum_s"),
}
# The columns of `stats attempts`: the lowest and the highest number of attempts of each.
ATTEMPTS = ((1, 1), (2, 2), (3, 3), (4, 5), (6, 10), (11, 20), (21, MAX_ATTEMPTS_LIMIT))

ERROR_COLUMNS = {
    "FAILED": text_of("failed"),
    "RETRYING": text_of("retrying"),
    "LAST AGO": span_of("last_ago_s"),
    "FIRST AGO": span_of("first_ago_s"),
    "EXAMPLE": text_of("job_id"),
    "TASK": text_of("task"),
    "ERROR": text_of("error"),
}


def filter_options(words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options --since, --queue and --task; `words` is the help text of --since."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--task", help="Only this task."),
            click.option("--queue", type=QUEUE, help="Only this queue."),
            click.option(
                "--since",
                type=SINCE,
                default="24h",
                show_default=True,
                help=f"{words} within this duration, or since this time: 12h, 2026-12-01.",
            ),
        ):
            command = option(command)
        return command

    return add


@click.group(invoke_without_command=True)
@filter_options("Count jobs that ended")
@click.option(
    "--by",
    type=click.Choice(["hour", "day"]),
    help="Show one line per hour or day (in UTC), queue and task.",
)
@json_option
@pass_session
def stats(session: Session, /, by: str | None, as_json: bool, **filters: Any) -> None:
    """Show recent outcomes, wait and run times, and errors.

    The table has one line per queue and task. It counts the finished jobs that the queues still
    keep. WAIT is the time from the due time to the claim. RUNNING is the time from the claim until
    the outcome was written. A busy worker claims and writes in batches, so RUNNING includes waits,
    and is longer than duration_ms in the log. Both times are of the last attempt of a job. p95: 95
    of 100 jobs took no longer. RETRIED counts finished jobs with more than one attempt. RETRYING
    counts the jobs that now wait for another attempt after a failed one.
    """
    if _is_for_a_command():
        return
    from taskd.store.reading import reports

    recently = reports.Recently(**filters)
    rows = ask_named(
        session,
        lambda lane: reports.stats(lane, recently, by),
        queue=recently.queue,
        task=recently.task,
    )
    columns = COLUMNS
    if by:
        others = {name: shown for name, shown in COLUMNS.items() if name != "RETRYING"}
        columns = {by.upper(): text_of(by)} | others
    print_rows(rows, columns, as_json=as_json)


def _is_for_a_command() -> bool:
    """Return whether a subcommand follows; refuse options before it, which would have no effect."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        return False
    for param in context.command.params:
        if context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"write {param.opts[0]} after {context.invoked_subcommand}: "
                f"{context.command_path} {context.invoked_subcommand} {param.opts[0]} ..."
            )
    return True


@stats.command()
@filter_options("Count jobs that ended")
@json_option
@pass_session
def attempts(session: Session, /, as_json: bool, **filters: Any) -> None:
    """Show after how many attempts jobs ended, by queue and task.

    Each column counts the jobs with this number of attempts. AVG is the mean of all jobs.
    """
    from taskd.store.reading import reports

    recently = reports.Recently(**filters)
    rows = ask_named(
        session,
        lambda lane: reports.stats_attempts(lane, recently),
        queue=recently.queue,
        task=recently.task,
    )
    for row in rows:
        tries = sum(int(number) * jobs for number, jobs in row["attempts"].items())
        row["attempts_avg"] = round(tries / row["jobs"], 2)
    names = ("QUEUE", "TASK", "JOBS")
    columns = {name: text_of(name.lower()) for name in names}
    columns |= {_heading(low, high): _between(low, high) for low, high in ATTEMPTS}
    print_rows(rows, columns | {"AVG": text_of("attempts_avg")}, as_json=as_json)


def _heading(low: int, high: int) -> str:
    if low == high:
        return f"{low}"
    return f"{low}-{high}" if high < MAX_ATTEMPTS_LIMIT else f">{low - 1}"


def _between(low: int, high: int) -> Callable[[Row], str]:
    def total(row: Row) -> str:
        counts = row["attempts"].items()
        return str(sum(jobs for number, jobs in counts if low <= int(number) <= high))

    return total


@stats.command()
@filter_options("Count errors")
@click.option(
    "--limit",
    type=click.IntRange(1, GROUPS_MAX),
    default=20,
    show_default=True,
    help="Show at most this many kinds of errors.",
)
@json_option
@pass_session
def errors(session: Session, /, limit: int, as_json: bool, **filters: Any) -> None:
    """Show errors by task and kind, the most frequent first.

    Errors that differ only in numbers, ids, quoted text and paths count as one kind; `#` and `…`
    stand for the differing parts. FAILED jobs have ended; RETRYING jobs are scheduled for another
    attempt. Each job is counted once, by its last error. EXAMPLE is the id of the job that failed
    last; `taskd jobs show` shows the job.
    """
    from taskd.core.explain.error_groups import group
    from taskd.store.reading import reports

    recently = reports.Recently(**filters)
    read = ask_named(
        session,
        lambda lane: reports.stats_errors(lane, recently, ERRORS_READ_MAX),
        queue=recently.queue,
        task=recently.task,
        empty=lambda errors: not errors.failures,
    )
    groups = group(read.failures)
    rows = [msgspec.structs.asdict(each) for each in groups[:limit]]
    print_rows(rows, ERROR_COLUMNS, as_json=as_json)
    if len(groups) > limit:
        session.echo(
            f"these are the {limit:,} most frequent of {count(len(groups), 'kind')}; "
            "see more with --limit"
        )
    if read.failed_back_s is not None:
        session.echo(
            f"only the newest {ERRORS_READ_MAX:,} failed jobs were read, which failed in the last "
            f"{span(read.failed_back_s)}"
        )
    if not read.all_scheduled:
        session.echo(
            f"RETRYING counts only the {ERRORS_READ_MAX:,} scheduled jobs that are due first; "
            "other scheduled jobs were not read"
        )
