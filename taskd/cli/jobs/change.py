"""`taskd jobs retry|cancel|set`: change jobs, by id or by a filter."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.jobs.bulk import How, bulk_options, chosen, in_bulk
from taskd.cli.jobs.filters import filter_options
from taskd.cli.shared.output import Row, count, print_json
from taskd.cli.shared.session import (
    DURATION,
    JOB_ID,
    MOMENT,
    MOMENT_OR_DURATION,
    QUEUE,
    REASON,
    Session,
    json_option,
    pass_session,
)
from taskd.core.jobs.job import FINISHED_BADLY, LIVE, WAITING, JobState
from taskd.core.jobs.job_changes import Change, ChangeOutcome
from taskd.errors import InvalidTransition, JobNotFound

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane
    from taskd.store.connections.statements import Fetches

# States after a cancel: ended, or still running with a cancellation requested.
AFTER_CANCEL = (JobState.CANCELLED, JobState.RUNNING)

ids_argument = click.argument("ids", metavar="[ID]...", type=JOB_ID, nargs=-1)


def how_of(done: str, options: dict[str, Any], as_json: bool) -> How:
    """Take the options of a bulk action out of the options of a command."""
    return How(done, options.pop("dry_run"), options.pop("yes"), options.pop("limit"), as_json)


@click.command()
@ids_argument
@filter_options(*FINISHED_BADLY)
@bulk_options
@click.option("--failed", is_flag=True, help="The same as --state failed.")
@click.option(
    "--at", "run_at", type=MOMENT, help="Run no sooner than this time: 2026-12-01T08:00:00+01:00."
)
@click.option("--in", "delay_s", type=DURATION, help="Delay before the job is due: 5m.")
@json_option
@pass_session
def retry(
    session: Session,
    /,
    ids: tuple[int, ...],
    failed: bool,
    run_at: datetime | None,
    delay_s: float | None,
    as_json: bool,
    **filters: Any,
) -> None:
    """Retry failed and cancelled jobs, by id or by a filter.

    Jobs keep their ids and get at least one more attempt. The command prints the ids of the retried
    jobs.

    \b
    taskd jobs retry --failed --task send_report --error 'timed out' --in 5m --dry-run
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    if delay_s is not None and run_at is not None:
        raise click.UsageError("give either --in or --at")
    if failed:
        filters["states"] = (*filters["states"], JobState.FAILED.value)
    how = how_of("retried", filters, as_json)
    selected = chosen(ids, filters, FINISHED_BADLY)

    async def bring_back(on: Fetches, batch: Sequence[int]) -> Collection[int]:
        from taskd.store.jobs import jobs as store

        return await store.retry(on, batch, run_at, delay_s)

    if selected is not None:
        in_bulk(session, selected, bring_back, how)
        return

    async def work(lane: Lane) -> tuple[list[int], dict[int, JobState]]:
        from taskd.store.reading import reports

        unique_ids = list(dict.fromkeys(ids))
        before = await reports.job_states(lane, unique_ids)
        if how.dry_run:
            return [i for i in unique_ids if before.get(i) in FINISHED_BADLY], before
        return list(await bring_back(lane, unique_ids)), before

    back, before = session.run(work)
    left = set(ids) - set(back)
    if as_json:
        print_json({"retried": back, "dry_run": how.dry_run, "refused": refused_rows(left, before)})
    else:
        for job_id in back:
            click.echo(job_id)
    if back:
        session.echo(f"{count(len(back), 'job')} {'would be ' if how.dry_run else ''}retried")
    raise_for(left, before, _not_retryable)


@click.command()
@ids_argument
@filter_options(*LIVE)
@bulk_options
@click.option(
    "--reason",
    type=REASON,
    default="cancelled by hand",
    show_default=True,
    help="Reason to store with the job.",
)
@json_option
@pass_session
def cancel(
    session: Session, /, ids: tuple[int, ...], reason: str, as_json: bool, **filters: Any
) -> None:
    """Cancel jobs, by id or by a filter: waiting jobs end now, running jobs are asked to stop.

    With ids, the command prints one line per job: the id, and `cancelled` or `running` (the worker
    then stops the attempt within seconds). With a filter, it prints only the ids.
    """
    how = how_of("cancelled", filters, as_json)
    selected = chosen(ids, filters, LIVE)
    states = [*selected.states] if selected is not None else ()

    async def end(on: Fetches, batch: Sequence[int]) -> dict[int, JobState]:
        from taskd.store.jobs import jobs as store

        return await store.cancel(on, batch, reason, states)

    if selected is not None:
        in_bulk(session, selected, end, how)
        return

    async def work(lane: Lane) -> tuple[dict[int, JobState], dict[int, JobState]]:
        from taskd.store.reading import reports

        before = await reports.job_states(lane, ids)
        if how.dry_run:
            live = {i: s for i, s in before.items() if s in LIVE}
            return {i: JobState.CANCELLED if s in WAITING else s for i, s in live.items()}, before
        return await end(lane, sorted(set(ids))), before

    ended, before = session.run(work)
    left = set(ids) - set(ended)
    if as_json:
        by_state: dict[str, Any] = {
            state: [job_id for job_id in sorted(ended) if ended[job_id] == state]
            for state in AFTER_CANCEL
        }
        print_json(by_state | {"dry_run": how.dry_run, "refused": refused_rows(left, before)})
    else:
        for job_id, state in sorted(ended.items()):
            click.echo(f"{job_id}\t{state}")
    raise_for(left, before, _not_cancellable)


@click.command("set")
@ids_argument
@filter_options(*WAITING)
@bulk_options
@click.option("--priority", type=int, help="Smaller numbers run first.")
@click.option(
    "--at", "run_at", type=MOMENT, help="Run no sooner than this time: 2026-12-01T08:00:00+01:00."
)
@click.option(
    "--in", "delay_s", type=DURATION, help="Delay before the job is due: 5m; 0s: due now."
)
@click.option(
    "--args", "args_json", metavar="OBJECT", help="Replace all arguments by a JSON object."
)
@click.option(
    "--arg",
    "pairs",
    metavar="KEY=TEXT | KEY:=JSON",
    multiple=True,
    help="Set one argument; other arguments stay. Repeatable.",
)
@click.option("--move-to", metavar="QUEUE", type=QUEUE, help="Move the job to this queue.")
@click.option("--max-attempts", type=int, help="Most attempts, 1 to 1000.")
@click.option("--timeout", "timeout_s", type=DURATION, help="Timeout of one attempt.")
@click.option(
    "--deadline",
    type=MOMENT_OR_DURATION,
    help="Expire the job if no attempt has started by this time, or after this duration: 2h.",
)
@click.option("--no-deadline", is_flag=True, help="Remove the deadline.")
@json_option
@pass_session
def set_(
    session: Session,
    /,
    ids: tuple[int, ...],
    args_json: str | None,
    pairs: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Change waiting jobs, by id or by a filter; running jobs do not change.

    With ids, the command prints one line per job: the id, and `changed`, `running`, `finished` or
    `unknown`. With a filter, it prints the ids of the changed jobs.

    \b
    taskd jobs set 4711 --in 0s --priority 1     # run job 4711 now, before other jobs
    taskd jobs set --task send_report --state scheduled --in 1h
    """  # noqa: D301 - click's mark for "do not wrap" is the character itself
    change = _change_of(options, args_json, pairs)
    how = how_of("changed", options, as_json)
    selected = chosen(ids, options, WAITING)

    async def alter(on: Fetches, batch: Sequence[int]) -> dict[int, ChangeOutcome]:
        from taskd.client.operations.job_changes import change as changing

        return await changing(on, batch, change)

    async def altered(on: Fetches, batch: Sequence[int]) -> Collection[int]:
        outcomes = await alter(on, batch)
        return [job_id for job_id, became in outcomes.items() if became == ChangeOutcome.CHANGED]

    if selected is not None:
        in_bulk(session, selected, altered, how)
        return
    if how.dry_run:
        raise click.UsageError("--dry-run works with options that choose jobs, not with ids")
    outcomes = session.run(lambda lane: alter(lane, list(dict.fromkeys(ids))))
    by_outcome = {
        str(became): [job_id for job_id in outcomes if outcomes[job_id] == became]
        for became in ChangeOutcome
    }
    if as_json:
        print_json(by_outcome)
    else:
        for job_id, became in outcomes.items():
            click.echo(f"{job_id}\t{became}")
    _raise_for_unchanged(by_outcome)


def _change_of(options: dict[str, Any], args_json: str | None, pairs: tuple[str, ...]) -> Change:
    """Take the options of a change out of `options`, and return the change.

    Raises:
        UsageError: no change is given, or options exclude each other.
        InvalidArgs: an argument is not JSON.
        InvalidJob: a value is outside its limits.
    """
    from taskd.cli.shared.arguments import arguments

    if args_json is not None and pairs:
        raise click.UsageError("give either --args or --arg")
    deadline = options.pop("deadline")
    names = ("priority", "run_at", "delay_s", "max_attempts", "timeout_s", "no_deadline")
    change = Change(
        **{name: options.pop(name) for name in names},
        args=None if args_json is None else arguments((), args_json),
        update_args=arguments(pairs, None) if pairs else None,
        queue=options.pop("move_to"),
        deadline=deadline if isinstance(deadline, datetime) else None,
        deadline_s=deadline if isinstance(deadline, float) else None,
    )
    if change.empty:
        raise click.UsageError("give at least one change: --priority, --at, --in, --arg ...")
    return change


def _raise_for_unchanged(by_outcome: dict[str, list[int]]) -> None:
    """If some jobs were not changed, raise an error that says why.

    Raises:
        JobNotFound: some ids are unknown.
        InvalidTransition: some jobs run, or have finished.
    """
    if unknown := by_outcome[ChangeOutcome.UNKNOWN]:
        raise JobNotFound(unknown_jobs(unknown))
    for became in (ChangeOutcome.RUNNING, ChangeOutcome.FINISHED):
        if left := by_outcome[became]:
            names = ", ".join(map(str, left))
            raise InvalidTransition(f"{became}: {names}; only waiting jobs can be changed")


def refused_rows(left: set[int], before: dict[int, JobState]) -> list[Row]:
    """Return the jobs that were not changed, with their states; an unknown id has state None."""
    return [{"id": job_id, "state": before.get(job_id)} for job_id in sorted(left)]


def _not_retryable(job_id: int, state: JobState) -> str:
    if state in FINISHED_BADLY:
        return (
            f"job {job_id} stays {state}: a job that it needs has failed and was not retried, "
            "another job holds its unique key, or it has had 1,000 attempts. See: "
            f"taskd why {job_id}"
        )
    if state is JobState.DONE:
        return f"job {job_id} is done; run it again as a copy: taskd jobs run-again {job_id}"
    return f"job {job_id} is {state}; only failed and cancelled jobs can be retried"


def _not_cancellable(job_id: int, state: JobState) -> str:
    return f"job {job_id} is {state} already; only live jobs can be cancelled"


def raise_for(
    left: set[int], before: dict[int, JobState], why: Callable[[int, JobState], str]
) -> None:
    """If some jobs were not changed, raise an error that says why.

    Args:
        left: the ids of the jobs that were not changed.
        before: the states of the known jobs before the action.
        why: returns the reason for a job.

    Raises:
        JobNotFound: some ids are unknown.
        InvalidTransition: all ids are known.
    """
    refused = [why(job_id, before[job_id]) for job_id in sorted(left) if job_id in before]
    unknown = [job_id for job_id in sorted(left) if job_id not in before]
    if unknown:
        raise JobNotFound("; ".join([unknown_jobs(unknown), *refused]))
    if refused:
        raise InvalidTransition("; ".join(refused))


def unknown_jobs(ids: Sequence[int]) -> str:
    """Return the message for unknown ids."""
    names = ", ".join(map(str, ids))
    return f"no job has the id {names}: it was never enqueued, or its queue no longer keeps it"
