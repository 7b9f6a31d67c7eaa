"""`taskd health`: the check for containers, load balancers and cron."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from taskd.cli.output import count, print_json
from taskd.cli.session import QUEUE, Session, json_option

if TYPE_CHECKING:
    from taskd.store.database import Lane

EXIT_CHECK_FAILED = 4


@click.command()
@click.option("--queue", "queues", type=QUEUE, multiple=True, help="Check these queues alone.")
@json_option
@click.pass_context
def health(ctx: click.Context, queues: tuple[str, ...], as_json: bool) -> None:
    """Exit 0 when every queue with due jobs is served.

    Served: a live worker that does not drain claims from it. Paused queues need not be. With
    --queue, that queue must be served whether or not jobs wait in it. Exit 4: one is not;
    69: the database cannot be reached; 78: its schema does not fit.
    """
    from taskd.store import reports

    async def look(lane: Lane) -> dict[str, int]:
        if queues:
            return {queue: await reports.count_serving(lane, queue) for queue in queues}
        return await reports.queues_in_need(lane)

    session = ctx.ensure_object(Session)
    workers = session.ask(look)
    unserved = [queue for queue, serving in workers.items() if not serving]
    if as_json:
        print_json({"healthy": not unserved, "unserved": unserved, "workers": workers})
    elif not unserved:
        served = f"{count(len(workers), 'queue')} served" if workers else "no queue has due jobs"
        click.echo(f"healthy: {served}")
    if unserved:
        names = ", ".join(unserved)
        click.echo(
            f"taskd: no live worker serves {names}; start one: taskd run --queue {unserved[0]}",
            err=True,
        )
        ctx.exit(EXIT_CHECK_FAILED)
