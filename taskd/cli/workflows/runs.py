"""`taskd workflows set|start`: start runs of pipelines, again or at a stage."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.shared.arguments import PAIRS, arguments, with_json_hint
from taskd.cli.shared.output import count, print_json
from taskd.cli.shared.session import DURATION, REASON, Session, json_option, pass_session, run
from taskd.errors import InvalidTransition

if TYPE_CHECKING:
    from taskd.core.jobs.enqueued import Enqueued
    from taskd.store.connections.lanes import Lane
    from taskd.store.workflows import Restarted, RunFilter

ENDED = ("done", "failed", "cancelled")
# On a terminal, the command asks before it starts more than this number of runs.
ASK_ABOVE_RUNS = 100
REFUSALS_SHOWN = 10


@click.command("set")
@click.argument("ids", metavar="[ID]...", type=click.IntRange(1, 2**63 - 1), nargs=-1)
@click.option("--stage", help="Go on with this stage; by default with the one at which it ended.")
@click.option(
    "--args",
    "args_json",
    metavar="OBJECT",
    help="The arguments of the stage as a JSON object; by default those that it had in the run, "
    "or the result of the stage before.",
)
@click.option("--name", help="Instead of ids: ended runs of this pipeline.")
@click.option(
    "--state",
    "states",
    type=click.Choice(ENDED),
    multiple=True,
    help="Runs whose last job is in this state; repeatable.",
)
@click.option("--at", "at_stage", metavar="STAGE", help="Runs that have ended at this stage.")
@click.option(
    "--older-than", "older_than_s", type=DURATION, help="Runs that were started longer ago."
)
@click.option("--since", "since_s", type=DURATION, help="Runs that were started within this time.")
@click.option("--limit", type=click.IntRange(1), help="At most this many runs.")
@click.option("--dry-run", is_flag=True, help="Print which runs are meant, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--reason", type=REASON, default="", help="Reason to store with the action.")
@json_option
@pass_session
def set_(
    session: Session,
    /,
    ids: tuple[int, ...],
    stage: str | None,
    args_json: str | None,
    limit: int | None,
    dry_run: bool,
    yes: bool,
    reason: str,
    as_json: bool,
    **filters: Any,
) -> None:
    """Start stopped or finished runs of pipelines again, at a stage.

    A failed or cancelled job of the stage is retried, unless --args are given. Otherwise, the run
    gets a new job for the stage. A run with a live job is refused: cancel it first.

    \b
    taskd workflows set 7 --stage parse
    taskd workflows set --name ingest --state failed --at save --stage parse --dry-run
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    from taskd.client.operations import bulk

    chosen = _chosen(ids, filters)
    args = None if args_json is None else _text(stage, args_json)
    found = list(ids)
    if chosen is not None:
        found = session.run(lambda lane: bulk.find_runs(lane, chosen, limit))
    if dry_run:
        _print_found(session, found, as_json)
        return
    asks = sys.stdin.isatty() and sys.stderr.isatty() and not yes
    if len(found) > ASK_ABOVE_RUNS and asks:
        click.confirm(
            f"{count(len(found), 'run')} will be started. Continue?", abort=True, err=True
        )

    async def work(lane: Lane) -> dict[int, Restarted]:
        return await bulk.restart_runs(lane, found, stage, args, reason)

    _report(session, session.run(work), as_json)


def _chosen(ids: tuple[int, ...], filters: dict[str, Any]) -> RunFilter | None:
    """Return the filter, or None if ids were given."""
    from taskd.store.workflows import RunFilter

    given = {name: value for name, value in filters.items() if value}
    if bool(ids) == bool(given):
        raise click.UsageError("give ids, or options that choose runs: --name, --state, --at ...")
    if ids:
        return None
    if "at_stage" in given:
        given["stage"] = given.pop("at_stage")
    return RunFilter(**given)


def _text(stage: str | None, args_json: str) -> str:
    from taskd.core.jobs.arguments import encode_args

    return encode_args(f"the stage {stage}", arguments((), args_json))


def _print_found(session: Session, found: list[int], as_json: bool) -> None:
    if as_json:
        print_json({"found": len(found), "ids": found, "dry_run": True})
        return
    for run_id in found:
        click.echo(run_id)
    session.echo(f"{count(len(found), 'run')} would be started")


def _report(session: Session, done: dict[int, Restarted], as_json: bool) -> None:
    started = {run_id: each.job_id for run_id, each in done.items() if each.refusal is None}
    refused = {run_id: each.refusal for run_id, each in done.items() if each.refusal is not None}
    if as_json:
        print_json({"started": started, "refused": refused, "dry_run": False})
    else:
        for run_id in started:
            click.echo(run_id)
        session.echo(f"{count(len(started), 'run')} started")
    if refused:
        listed = [f"workflow {run_id}: {why}" for run_id, why in refused.items()]
        more = f"; and {len(listed) - REFUSALS_SHOWN} more" if len(listed) > REFUSALS_SHOWN else ""
        raise InvalidTransition("; ".join(listed[:REFUSALS_SHOWN]) + more)


@click.command()
@click.argument("name")
@PAIRS
@click.option("--stage", required=True, help="The stage with which the run starts.")
@pass_session
def start(session: Session, name: str, pairs: tuple[str, ...], stage: str) -> None:
    """Start a run of a pipeline at a stage, with the arguments of this stage.

    The command prints the id of the job: taskd workflows start ingest --stage parse doc='a text'

    To start a run at its first stage: taskd enqueue NAME
    """

    async def work() -> Enqueued:
        async with session.client() as client:
            return await client.start_at_stage(name, stage, arguments(pairs, None))

    with with_json_hint(pairs):
        click.echo(run(work()))
