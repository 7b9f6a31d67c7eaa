"""`taskd stats`: how it went."""

from __future__ import annotations

from typing import Any

import click

from taskd.cli.output import print_rows, span_of, text_of
from taskd.cli.session import DURATION, QUEUE, Session, json_option, pass_session

COLUMNS = {
    "QUEUE": text_of("queue"),
    "TASK": text_of("task"),
    "DONE": text_of("done"),
    "FAILED": text_of("failed"),
    "CANCELLED": text_of("cancelled"),
    "RETRIED": text_of("retried"),
    "WAIT P50": span_of("wait_p50_s"),
    "WAIT P95": span_of("wait_p95_s"),
    "RUN P50": span_of("run_p50_s"),
    "RUN P95": span_of("run_p95_s"),
}


@click.command()
@click.option(
    "--since",
    "since_s",
    type=DURATION,
    default="24h",
    show_default=True,
    help="Count what finished that recently.",
)
@click.option("--by", type=click.Choice(["hour"]), help="One line per hour, queue and task.")
@click.option("--queue", type=QUEUE, help="Only this queue.")
@click.option("--task", help="Only this task.")
@json_option
@pass_session
def stats(session: Session, /, by: str | None, as_json: bool, **filters: Any) -> None:
    """Outcomes, waits and run times of late.

    By queue and task, from the history. The wait is from the due time to the start, the run
    from the start to the end, both of the last attempt; retried are jobs that needed several.
    """
    from taskd.store import reports

    rows = session.ask(lambda lane: reports.stats(lane, by_hour=by is not None, **filters))
    columns = ({"HOUR": text_of("hour")} if by else {}) | COLUMNS
    print_rows(rows, columns, as_json=as_json)
