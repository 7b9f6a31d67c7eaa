"""`taskd health`: a check for containers, load balancers and cron."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from taskd.cli import typed
from taskd.cli.shared.output import count, failure_text, print_json
from taskd.cli.shared.session import QUEUE, Session, json_option

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane
    from taskd.store.reading.reports import DueQueues, Row

EXIT_CHECK_FAILED = 4
# Maximum number of queue names in a message; --json prints up to a thousand.
NAMES_MAX = 10


@click.command()
@click.option("--queue", "queues", type=QUEUE, multiple=True, help="Check only these queues.")
@click.option("--worker", is_flag=True, help="Check the worker of this host or container instead.")
@json_option
@click.pass_context
def health(ctx: click.Context, queues: tuple[str, ...], worker: bool, as_json: bool) -> None:
    """Exit 0 if every queue with due jobs has a live worker.

    At least one live worker that is not draining must serve each queue with due jobs. Paused queues
    are not checked. With --queue, the command checks only the given queues, even if they are paused
    or have no due jobs.

    With --worker, the command checks no queue: a worker of this host (in a container: of this
    container) must run, hold its lease and not drain.

    If a service of a worker, such as the pruner, fails repeatedly, the check does not fail. Without
    --worker, stderr and the key `failing` of --json name the services that fail repeatedly.

    Exit 4: the check failed; 69: the database cannot be reached, so the state of the workers is
    unknown; 78: this taskd does not work with the schema.
    """
    if worker and queues:
        raise click.UsageError("--worker checks no queue; give either --worker or --queue")
    session = ctx.ensure_object(Session)
    healthy = (
        _check_worker(session, as_json=as_json)
        if worker
        else _check_queues(session, queues, as_json=as_json)
    )
    if not healthy:
        ctx.exit(EXIT_CHECK_FAILED)


def _check_queues(session: Session, queues: tuple[str, ...], *, as_json: bool) -> bool:
    from taskd.store.reading import reports

    async def read(lane: Lane) -> tuple[DueQueues, list[Row], Row]:
        versions, failing = await _versions(lane), await reports.failing_services(lane)
        if not queues:
            return await reports.queues_with_due_jobs(lane), failing, versions
        served = {queue: await reports.count_serving(lane, queue) for queue in queues}
        number = list(served.values()).count(0)
        return reports.DueQueues(served, len(served), number), failing, versions

    found, failing, versions = session.run(read)
    unserved = [queue for queue, serving in found.workers.items() if not serving]
    if as_json:
        numbers = {"queues": found.queues, "unserved_queues": found.unserved}
        row = {"healthy": not unserved, "unserved": unserved, "workers": found.workers} | numbers
        print_json(row | {"failing": failing} | versions)
    elif not unserved:
        served = (
            f"{count(found.queues, 'queue')} served"
            if found.queues
            else "no queue has due jobs (paused queues are not checked)"
        )
        click.echo(f"healthy: {served}; {_versions_text(versions)}")
    if unserved:
        names = ", ".join(unserved[:NAMES_MAX])
        if found.unserved > NAMES_MAX:
            names += f" and {found.unserved - NAMES_MAX:,} more queues"
        click.echo(
            typed(
                f"taskd: no live worker serves {names}. Start one: taskd run --queue {unserved[0]}"
            ),
            err=True,
        )
    for row in failing:
        session.echo(f"taskd: {failure_text(row)}")
    return not unserved


def _check_worker(session: Session, *, as_json: bool) -> bool:
    from taskd.store.reading import reports
    from taskd.worker.lease.process_identity import new_incarnation

    me = new_incarnation(app="")

    async def read(lane: Lane) -> tuple[list[Row], Row]:
        return await reports.list_workers_here(lane, me), await _versions(lane)

    rows, versions = session.run(read)
    workers = [_with_its_process(row) for row in rows]
    live = [row for row in workers if row["state"] == "live"]
    if as_json:
        print_json({"healthy": bool(live), "host": me.host, "workers": workers} | versions)
    elif live:
        worker = f"the worker with pid {live[0]['pid']} on {me.host} is live"
        click.echo(f"healthy: {worker}; {_versions_text(versions)}")
    if not live:
        found = ", ".join(f"the worker with pid {row['pid']} is {row['state']}" for row in workers)
        click.echo(
            f"taskd: no live worker on {me.host}: " + (found or "none is registered"), err=True
        )
    return bool(live)


async def _versions(lane: Lane) -> Row:
    """Return the schema version of the database, and the versions that this taskd works with."""
    from taskd.core.migration import version
    from taskd.store.schema import migration_history, migrations

    code = migrations.of_this_code()
    schema = version(await migration_history.entries(lane))
    return {"schema": schema, "schema_oldest": code.oldest, "schema_newest": code.newest}


def _versions_text(versions: Row) -> str:
    from taskd.core.migration import CodeRange

    code = CodeRange(versions["schema_oldest"], versions["schema_newest"])
    return f"schema {versions['schema']:04d}, taskd {code}"


def _with_its_process(row: Row) -> Row:
    """Return parts of the row; the state is `gone` if the process of the worker has ended."""
    from taskd.store.workers import Other
    from taskd.worker.lease.process_identity import is_gone

    pid, started = row["pid"], row["pid_started"]
    gone = is_gone(Other(int(row["id"]), pid, started, neighbour=True, silent=False))
    state = "gone" if gone else row["state"]
    return {"id": row["id"], "pid": pid, "state": state, "renewed_ago_s": row["renewed_ago_s"]}
