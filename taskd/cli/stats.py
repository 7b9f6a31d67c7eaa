"""`taskd stats`: how it went."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from taskd.cli.shared.name_hints import ask_named
from taskd.cli.shared.output import count, print_rows, span, span_of, text_of
from taskd.cli.shared.session import DURATION, QUEUE, Session, json_option, pass_session

GROUPS_MAX = 1000
# So many failed jobs, and so many scheduled ones, are read for their errors.
ERRORS_READ_MAX = 10_000
COLUMNS = {
    "QUEUE": text_of("queue"),
    "TASK": text_of("task"),
    "DONE": text_of("done"),
    "FAILED": text_of("failed"),
    "CANCELLED": text_of("cancelled"),
    "RETRIED": text_of("retried"),
    "WAIT P50": span_of("wait_p50_s"),
    "WAIT P95": span_of("wait_p95_s"),
    "RUNNING P50": span_of("run_p50_s"),
    "RUNNING P95": span_of("run_p95_s"),
}

ERROR_COLUMNS = {
    "FAILED": text_of("failed"),
    "RETRYING": text_of("retrying"),
    "LAST AGO": span_of("last_ago_s"),
    "FIRST AGO": span_of("first_ago_s"),
    "EXAMPLE": text_of("job_id"),
    "TASK": text_of("task"),
    "ERROR": text_of("error"),
}


def of_late(words: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options that say which jobs count: --since, --queue and --task."""

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in (
            click.option("--task", help="Only this task."),
            click.option("--queue", type=QUEUE, help="Only this queue."),
            click.option(
                "--since", "since_s", type=DURATION, default="24h", show_default=True, help=words
            ),
        ):
            command = option(command)
        return command

    return add


@click.group(invoke_without_command=True)
@of_late("Count what finished that recently.")
@click.option("--by", type=click.Choice(["hour"]), help="One line per hour, queue and task.")
@json_option
@pass_session
def stats(session: Session, /, by: str | None, as_json: bool, **filters: Any) -> None:
    """Outcomes, waits, running times and errors of late.

    By queue and task, from the history. WAIT is from the due time to the claim; RUNNING is from
    the claim until the outcome was written. A busy worker claims and writes in batches, so RUNNING
    includes the wait for a free slot in the worker: the log's duration_ms is the handler's own
    time. Both are of the last attempt; p95: of a hundred jobs, 95 took no longer. Retried jobs
    needed several attempts.
    """
    if _is_for_a_command():
        return
    from taskd.store.reading import reports

    rows = ask_named(
        session,
        lambda lane: reports.stats(lane, by_hour=by is not None, **filters),
        queue=filters["queue"],
        task=filters["task"],
    )
    columns = ({"HOUR": text_of("hour")} if by else {}) | COLUMNS
    print_rows(rows, columns, as_json=as_json)


def _is_for_a_command() -> bool:
    """Whether another command follows; then the options must, too."""
    context = click.get_current_context()
    if context.invoked_subcommand is None:
        return False
    for param in context.command.params:
        if context.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"write {param.opts[0]} behind {context.invoked_subcommand}: "
                f"{context.command_path} {context.invoked_subcommand} {param.opts[0]} ..."
            )
    return True


@stats.command()
@of_late("Count what went wrong that recently.")
@click.option(
    "--limit",
    type=click.IntRange(1, GROUPS_MAX),
    default=20,
    show_default=True,
    help="At most so many kinds of errors.",
)
@json_option
@pass_session
def errors(session: Session, /, limit: int, as_json: bool, **filters: Any) -> None:
    """What goes wrong, by task and kind of error, the most frequent first.

    Errors that differ in numbers, ids, quoted text and paths only are counted as one; `#` and `…`
    stand for what differs. FAILED are jobs that have ended so, RETRYING those that are scheduled
    for another attempt; each is counted by its last error. EXAMPLE is the job that failed last, for
    `taskd jobs show`.
    """
    from taskd.core.explain.error_groups import group
    from taskd.store.reading import reports

    read = ask_named(
        session,
        lambda lane: reports.stats_errors(lane, read_max=ERRORS_READ_MAX, **filters),
        queue=filters["queue"],
        task=filters["task"],
        empty=lambda errors: not errors.told,
    )
    groups = group(read.told)
    rows = [msgspec.structs.asdict(each) for each in groups[:limit]]
    print_rows(rows, ERROR_COLUMNS, as_json=as_json)
    if len(groups) > limit:
        session.say(
            f"the {limit:,} most frequent of {count(len(groups), 'kind')}; more with --limit"
        )
    if read.failed_back_s is not None:
        session.say(
            f"only the newest {ERRORS_READ_MAX:,} failed jobs were read: "
            f"those of the last {span(read.failed_back_s)}"
        )
    if not read.all_scheduled:
        session.say(
            f"only {ERRORS_READ_MAX:,} scheduled jobs were read for retries, those due first"
        )
