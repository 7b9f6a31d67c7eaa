"""`taskd jobs complete|restart|run-again|delete`: actions by hand on jobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.jobs.bulk import bulk_options, chosen, in_bulk
from taskd.cli.jobs.change import (
    how_of,
    ids_argument,
    raise_for,
    refused_rows,
    unknown_jobs,
)
from taskd.cli.jobs.filters import filter_options
from taskd.cli.shared.output import count, print_json
from taskd.cli.shared.session import (
    DURATION,
    JOB_ID,
    REASON,
    Session,
    json_option,
    pass_session,
)
from taskd.core.jobs.job import FINISHED, FINISHED_BADLY, WAITING, JobState
from taskd.core.jobs.job_changes import RESTART_DELAY_S, DeleteOutcome
from taskd.errors import InvalidTransition, JobNotFound

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane
    from taskd.store.connections.statements import Fetches

needed_ids = click.argument("ids", metavar="ID...", type=JOB_ID, nargs=-1, required=True)
reason_option = click.option(
    "--reason",
    type=REASON,
    default="",
    help="Reason; `taskd jobs show` and `taskd actions` show it.",
)


class Json(click.ParamType[str]):
    """A JSON value."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, if it is JSON that PostgreSQL can store."""
        import msgspec

        try:
            msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            self.fail(f"it is not JSON: {error}. Write a text as '\"text\"'", param, ctx)
        return str(value)


@click.command()
@needed_ids
@click.option("--result", type=Json(), help="The result, as JSON; without it, there is none.")
@reason_option
@json_option
@pass_session
def complete(
    session: Session, ids: tuple[int, ...], result: str | None, reason: str, as_json: bool
) -> None:
    """Complete jobs by hand: they end as done, and their workflows continue.

    Jobs that wait, run, have failed or were cancelled can be completed. The worker of a running job
    cancels its handler, and cannot write an outcome any more. Jobs that wait for a completed job
    start; in a pipeline, the next stage begins with the result. The command prints one line per
    job: the id, and the state before.

    \b
    taskd jobs complete 4711 --result '{"sent": true}' --reason 'sent by post'
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself

    async def work(lane: Lane) -> tuple[dict[int, JobState], dict[int, JobState]]:
        from taskd.store.jobs import jobs as store
        from taskd.store.reading import reports

        before = await reports.job_states(lane, ids)
        return await store.complete(lane, sorted(set(ids)), result, reason), before

    completed, before = session.run(work)
    left = set(ids) - set(completed)
    if as_json:
        print_json({"completed": completed, "refused": refused_rows(left, before)})
    else:
        for job_id, state in sorted(completed.items()):
            click.echo(f"{job_id}\t{state}")
    raise_for(left, before, lambda job_id, state: f"job {job_id} is {state} already")


@click.command()
@ids_argument
@filter_options(JobState.RUNNING)
@bulk_options
@click.option(
    "--in",
    "delay_s",
    type=DURATION,
    default=RESTART_DELAY_S,
    show_default="5s",
    help="Delay before the next attempt, in which the handler of the ended one can end.",
)
@reason_option
@json_option
@pass_session
def restart(
    session: Session,
    /,
    ids: tuple[int, ...],
    delay_s: float,
    reason: str,
    as_json: bool,
    **filters: Any,
) -> None:
    """End running attempts, for example because they hang, and start their jobs again.

    The worker cancels the handler, and cannot write an outcome any more. A handler that ignores its
    cancellation, such as a plain function in a thread, still runs beside the next attempt. A job
    with a newer version ends as cancelled, and the newer version starts in its place. With ids, the
    command prints one line per job: the id, and the new state. With a filter, it prints only the
    ids.

    \b
    taskd jobs restart 4711 --reason 'it hangs in the driver'
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    how = how_of("restarted", filters, as_json)
    selected = chosen(ids, filters, {JobState.RUNNING})

    async def start(on: Fetches, batch: Sequence[int]) -> dict[int, JobState]:
        from taskd.store.jobs import jobs as store

        return await store.restart(on, batch, reason, delay_s)

    if selected is not None:
        in_bulk(session, selected, start, how)
        return

    async def work(lane: Lane) -> tuple[dict[int, JobState], dict[int, JobState]]:
        from taskd.store.reading import reports

        before = await reports.job_states(lane, ids)
        if how.dry_run:
            return {i: s for i, s in before.items() if s is JobState.RUNNING}, before
        return await start(lane, sorted(set(ids))), before

    restarted, before = session.run(work)
    left = set(ids) - set(restarted)
    if as_json:
        print_json(
            {
                "restarted": sorted(restarted),
                "dry_run": how.dry_run,
                "refused": refused_rows(left, before),
            }
        )
    else:
        for job_id, state in sorted(restarted.items()):
            click.echo(f"{job_id}\t{state}")
    raise_for(left, before, _not_restartable)


def _not_restartable(job_id: int, state: JobState) -> str:
    if state in FINISHED_BADLY:
        return f"job {job_id} is {state}; retry it: taskd jobs retry {job_id}"
    if state is JobState.DONE:
        return f"job {job_id} is done; run it again as a copy: taskd jobs run-again {job_id}"
    if state is JobState.RUNNING:
        return f"job {job_id} still runs: another job waits with its unique key, so cancel it"
    return f"job {job_id} is {state}; only running jobs can be restarted"


@click.command("run-again")
@ids_argument
@filter_options(*FINISHED)
@bulk_options
@reason_option
@json_option
@pass_session
def run_again(
    session: Session, /, ids: tuple[int, ...], reason: str, as_json: bool, **filters: Any
) -> None:
    """Run finished jobs again, as copies: new jobs with the same task, arguments and options.

    The finished job stays as it is, with its result. The copy belongs to no workflow and no
    schedule, and has no deadline. A job is not copied while another job holds its unique key. With
    ids, the command prints one line per job: the id, and the id of the copy. With a filter, it
    prints the ids of the copies.
    """
    how = how_of("copied", filters, as_json)
    selected = chosen(ids, filters, FINISHED)

    async def copied(on: Fetches, batch: Sequence[int]) -> Collection[int]:
        from taskd.store.jobs import jobs as store

        return (await store.run_again(on, batch, reason)).values()

    if selected is not None:
        in_bulk(session, selected, copied, how)
        return
    if how.dry_run:
        raise click.UsageError("--dry-run works with options that choose jobs, not with ids")

    async def work(lane: Lane) -> tuple[dict[int, int], dict[int, JobState]]:
        from taskd.store.jobs import jobs as store
        from taskd.store.reading import reports

        before = await reports.job_states(lane, ids)
        return await store.run_again(lane, sorted(set(ids)), reason), before

    copies, before = session.run(work)
    left = set(ids) - set(copies)
    if as_json:
        print_json({"copies": copies, "refused": refused_rows(left, before)})
    else:
        for job_id, copy_id in sorted(copies.items()):
            click.echo(f"{job_id}\t{copy_id}")
    raise_for(left, before, _not_copied)


def _not_copied(job_id: int, state: JobState) -> str:
    if state in (*FINISHED_BADLY, JobState.DONE):
        return f"job {job_id} is not copied: another job holds its unique key"
    return f"job {job_id} is {state}; only finished jobs can run again"


@click.command()
@ids_argument
@filter_options(*WAITING, *FINISHED)
@bulk_options
@reason_option
@json_option
@pass_session
def delete(
    session: Session, /, ids: tuple[int, ...], reason: str, as_json: bool, **filters: Any
) -> None:
    """Delete waiting and finished jobs, with their log lines and unique keys.

    A running job is not deleted: cancel it first. Jobs of a workflow are deleted only when no other
    job of it is live, or together. The command prints the ids of the deleted jobs; `taskd actions`
    keeps who has deleted them.
    """
    how = how_of("deleted", filters, as_json)
    selected = chosen(ids, filters, WAITING | FINISHED)

    async def remove(on: Fetches, batch: Sequence[int]) -> dict[int, DeleteOutcome]:
        from taskd.store.jobs import jobs as store

        return await store.delete(on, batch, reason)

    async def removed(on: Fetches, batch: Sequence[int]) -> Collection[int]:
        outcomes = await remove(on, batch)
        return [job_id for job_id, each in outcomes.items() if each is DeleteOutcome.DELETED]

    if selected is not None:
        in_bulk(session, selected, removed, how)
        return
    if how.dry_run:
        raise click.UsageError("--dry-run works with options that choose jobs, not with ids")
    outcomes = session.run(lambda lane: remove(lane, sorted(set(ids))))
    by_outcome = {
        str(each): [job_id for job_id in outcomes if outcomes[job_id] is each]
        for each in DeleteOutcome
    }
    if as_json:
        print_json(by_outcome)
    else:
        for job_id in by_outcome[DeleteOutcome.DELETED]:
            click.echo(job_id)
        session.echo(f"{count(len(by_outcome[DeleteOutcome.DELETED]), 'job')} deleted")
    _raise_for_kept(by_outcome)


def _raise_for_kept(by_outcome: dict[str, list[int]]) -> None:
    """If some jobs were not deleted, raise an error that says why.

    Raises:
        JobNotFound: some ids are unknown.
        InvalidTransition: some jobs run, or other jobs of their workflows are live.
    """
    if unknown := by_outcome[DeleteOutcome.UNKNOWN]:
        raise JobNotFound(unknown_jobs(unknown))
    if running := by_outcome[DeleteOutcome.RUNNING]:
        names = " ".join(map(str, running))
        raise InvalidTransition(f"running: {names}; cancel them first: taskd jobs cancel {names}")
    if needed := by_outcome[DeleteOutcome.IN_A_WORKFLOW]:
        names = ", ".join(map(str, needed))
        raise InvalidTransition(
            f"in a workflow: {names}; other jobs of the workflow are live and need them. Cancel "
            "the workflow first (taskd workflows cancel), or delete all of its jobs together"
        )
