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
    "RUNNING P50": span_of("run_p50_s"),
    "RUNNING P95": span_of("run_p95_s"),
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
    """Outcomes, waits and running times of late.

    By queue and task, from the history. WAIT is from the due time to the claim; RUNNING is from
    the claim until the outcome was written. A busy worker claims and writes in batches, so RUNNING
    includes the wait for a free slot in the worker: the log's duration_ms is the handler's own
    time. Both are of the last attempt; p95: of a hundred jobs, 95 took no longer. Retried jobs
    needed several attempts.
    """
    from taskd.store import reports

    rows = session.ask(lambda lane: reports.stats(lane, by_hour=by is not None, **filters))
    columns = ({"HOUR": text_of("hour")} if by else {}) | COLUMNS
    print_rows(rows, columns, as_json=as_json)
