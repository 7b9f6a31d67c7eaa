"""`taskd workers`: the workers and their queues; declare a worker dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from taskd.cli.shared.output import (
    failure_text,
    print_json,
    print_rows,
    span_of,
    text_of,
)
from taskd.cli.shared.session import DURATION, REASON, Session, json_option, pass_session
from taskd.core.humanize import given_up, worker_text
from taskd.core.migration import CodeRange

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane
    from taskd.store.reading.reports import Row

FAILURE = ("service", "error", "for_s")
COLUMNS = {
    "ID": text_of("id"),
    "STATE": text_of("state"),
    "NAME": text_of("name"),
    "HOST": text_of("host"),
    "PID": text_of("pid"),
    "APP": text_of("app"),
    "QUEUES": text_of("queues"),
    "RUNNING": text_of("running"),
    "RENEWED": span_of("renewed_ago_s"),
    "UP": span_of("up_s"),
    "VERSION": text_of("version"),
    "SCHEMA": lambda row: str(CodeRange(row["schema_oldest"], row["schema_newest"])),
}


@click.group(invoke_without_command=True)
@click.option(
    "--dead",
    "dead_s",
    type=DURATION,
    default="1h",
    show_default=True,
    help="Also list workers that ended within this time.",
)
@json_option
@click.pass_context
def workers(ctx: click.Context, dead_s: float, as_json: bool) -> None:
    """List live workers, and workers that ended recently.

    STATE is `live`, `draining` (the worker is stopping), `late`, `silent` or `dead`. Late: the
    worker has not renewed its lease for a third of the lease's duration, because it has died, hangs
    or cannot reach the database. Silent: the lease has expired. Dead: the worker has ended, or
    another worker has declared it dead. SCHEMA is the schema version, or the range of versions, for
    which the code of the worker is made. If a service of a worker fails repeatedly, stderr names
    the service.
    """
    if ctx.invoked_subcommand is not None:
        return
    from taskd.store.reading import reports

    session: Session = ctx.obj

    async def read(lane: Lane) -> tuple[list[Row], list[Row]]:
        return await reports.list_workers(lane, dead_s), await reports.failing_services(lane)

    rows, failing = session.run(read)
    for row in rows:
        mine = [each for each in failing if each["worker_id"] == row["id"]]
        row["failures"] = [{key: each[key] for key in FAILURE} for each in mine]
    print_rows(rows, COLUMNS, as_json=as_json)
    for row in failing:
        session.echo(failure_text(row))
    for row in rows:
        if row["state"] == "late":
            silence = given_up(row["renewed_ago_s"], row["lease_s"], row["lease_until"])
            worker = worker_text(row["host"], row["pid"], row["name"])
            session.echo(f"{worker} is late: it {silence}")
    if not any(row["state"] in ("live", "late") for row in rows):
        session.echo("no live worker. Start one: taskd run")


@workers.command("declare-dead")
@click.argument("worker_id", metavar="ID", type=click.IntRange(1, 2**63 - 1))
@click.option("--reason", type=REASON, default="", help="Reason; `taskd actions` shows it.")
@json_option
@pass_session
def declare_dead(session: Session, worker_id: int, reason: str, as_json: bool) -> None:
    """Declare a worker dead before its lease expires, so that its jobs run elsewhere at once.

    Use this only if you know that its process has ended or stands still: a worker that is merely
    cut off from the database still runs its handlers, until it stops them two thirds of a lease
    after its last renewal. A worker that has renewed its lease within the last third of the lease
    is not declared dead: stop it instead. A worker that comes back registers anew, and cannot write
    the outcomes of its old jobs.
    """
    from taskd.store import workers as store

    outcome = session.run(lambda lane: store.declare_dead_by_hand(lane, worker_id, reason))
    if as_json:
        print_json({"id": str(worker_id), "outcome": outcome})
    if (error := store.why_not_declared_dead(worker_id, outcome)) is not None:
        raise error
    session.echo(f"worker {worker_id} is declared dead; its jobs are rescued now")
