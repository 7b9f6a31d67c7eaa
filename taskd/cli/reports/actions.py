"""`taskd actions`: who has cancelled, retried, paused or changed what by hand, and when."""

from __future__ import annotations

from typing import Any

import click

from taskd.cli.shared.output import (
    as_json_values,
    moment,
    print_json,
    print_rows,
    text_of,
)
from taskd.cli.shared.session import DURATION, Session, json_option, pass_session

ACTIONS_MAX = 10_000
COLUMNS = {
    "AT": lambda row: moment(row["at"]),
    "ACTION": text_of("action"),
    "TARGET": text_of("target"),
    "BY": text_of("by"),
    "REASON": text_of("reason"),
}


@click.command()
@click.option(
    "--since",
    "since_s",
    type=DURATION,
    default="7d",
    show_default=True,
    help="Only actions within this time.",
)
@click.option(
    "--target", help="Only what was done to this: `job 17`, `queue email`, `schedule nightly` ..."
)
@click.option("--by", help="Only actions of this database user or actor; a part is enough.")
@click.option(
    "--limit",
    type=click.IntRange(1, ACTIONS_MAX),
    default=50,
    show_default=True,
    help="Show at most this many actions.",
)
@json_option
@pass_session
def actions(session: Session, /, as_json: bool, **filters: Any) -> None:
    """List what people have done by hand, newest first.

    BY is the database user, and in parentheses the person for whom a client acted: the user of the
    shell, or the login of the dashboard. PostgreSQL knows the user; the rest is what the client
    says. Actions are kept as long as finished jobs, at least for 30 days.
    """
    from taskd.store.reading import reports

    rows = session.run(lambda lane: reports.list_actions(lane, **filters))
    if as_json:
        for row in rows:
            print_json(as_json_values(row, "detail"))
        return
    print_rows(rows, COLUMNS, as_json=False)
