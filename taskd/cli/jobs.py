"""`taskd jobs`: look at jobs, bring them back, stop them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.output import (
    Row,
    count,
    moment,
    print_fields,
    print_json,
    print_rows,
    printable,
    span,
    span_of,
    text,
    text_of,
)
from taskd.cli.session import (
    DURATION,
    JOB_ID,
    QUEUE,
    REASON,
    Session,
    json_option,
    pass_session,
)
from taskd.core.job import JobState
from taskd.errors import InvalidTransition, JobNotFound

if TYPE_CHECKING:
    from taskd.store.database import Lane

LIST_MAX = 10_000
RETRY_MAX = 1000
STATES = click.Choice([state.value for state in JobState])
RETRYABLE = (JobState.FAILED, JobState.CANCELLED)
# Where a job is once it was cancelled: ended, or with a worker that is asked to stop it.
CANCELLABLE = (JobState.CANCELLED, JobState.RUNNING)


def _attempts(row: Row) -> str:
    return f"{row['attempt']}/{row['max_attempts'] or '-'}"


def _note(row: Row) -> str:
    """What a reader wants to know next: why it failed, or when it is due."""
    if row["state"] == JobState.SCHEDULED:
        due = row["due_in_s"]
        when = f"in {span(due)}" if due > 0 else "due"
        return f"{when}: {row['last_error']}" if row["last_error"] else when
    if row["state"] == JobState.DONE:
        return ""
    return row["reason"] or row["last_error"] or ""


COLUMNS = {
    "ID": text_of("id"),
    "STATE": text_of("state"),
    "QUEUE": text_of("queue"),
    "TASK": text_of("task"),
    "ATTEMPT": _attempts,
    "AGE": span_of("age_s"),
    "NOTE": _note,
}


@click.group()
def jobs() -> None:
    """List, show, retry and cancel jobs."""


@jobs.command("list")
@click.option("--queue", type=QUEUE, help="Only this queue.")
@click.option("--task", help="Only this task.")
@click.option("--state", "states", type=STATES, multiple=True, help="Only this state; repeatable.")
@click.option("--since", "since_s", type=DURATION, help="Enqueued, or finished, that recently.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIST_MAX),
    default=50,
    show_default=True,
    help="At most so many.",
)
@click.option("--ids", is_flag=True, help="Print ids alone, one a line, for pipes.")
@json_option
@pass_session
def list_(session: Session, /, ids: bool, as_json: bool, **filters: Any) -> None:
    """List jobs, newest first.

    The age is the time since a job finished, started, or was enqueued, whichever came last.
    """
    from taskd.store import reports

    rows = session.ask(lambda lane: reports.list_jobs(lane, **filters))
    if ids:
        for row in rows:
            click.echo(row["id"])
        return
    print_rows(rows, COLUMNS, as_json=as_json)
    if len(rows) == filters["limit"]:
        session.say(f"the newest {count(len(rows), 'job')}; more with --limit")


@jobs.command()
@click.argument("job_id", metavar="ID", type=JOB_ID)
@json_option
@pass_session
def show(session: Session, job_id: int, as_json: bool) -> None:
    """Show everything about a job: arguments, times, every error with its traceback."""
    from taskd.store import reports

    row = session.ask(lambda lane: reports.show_job(lane, job_id))
    if row is None:
        raise JobNotFound(unknown_jobs([job_id]))
    if as_json:
        print_json(row)
    else:
        _print_job(row)


def _print_job(row: dict[str, Any]) -> None:
    import msgspec

    errors = row.pop("errors")
    shown = {}
    for name, value in row.items():
        if value is None:
            continue
        if name in ("args", "result"):
            shown[name] = msgspec.json.format(msgspec.json.encode(value), indent=0).decode()
        elif name == "progress":
            shown[name] = _progress(value)
        else:
            shown[name] = text(value)
    print_fields({name: printable(said) for name, said in shown.items()})
    for error in errors:
        _print_error(error)


def _progress(told: Row) -> str:
    """`37 of 120 (31 %): importing, 2s ago`."""
    done, total, note = told["done"], told["total"], told["note"]
    said = f"{done:,.10g}"
    if total is not None:
        said += f" of {total:,.10g}" + (f" ({done / total:.0%})" if total > 0 else "")
    return f"{said}{f': {note}' if note else ''}, {span(told['told_s'])} ago"


def _print_error(error: dict[str, Any]) -> None:
    click.echo()
    head = f"attempt {error.get('attempt')} on worker {error.get('worker')}"
    began, ended = (_moment(error.get(name)) for name in ("started", "ended"))
    if began is not None:
        head += f", started {moment(began)}"
    if began is not None and ended is not None:
        head += f", took {span((ended - began).total_seconds())}"
    click.secho(head, bold=True)
    click.echo(printable(f"{error.get('type')}: {error.get('message')}"))
    if error.get("traceback"):
        click.echo(printable(str(error["traceback"]).rstrip()))


def _moment(written: str | None) -> datetime | None:
    """A time as PostgreSQL writes it into JSON."""
    return datetime.fromisoformat(written) if written else None


@jobs.command()
@click.argument("ids", metavar="[ID]...", type=JOB_ID, nargs=-1)
@click.option(
    "--state",
    "states",
    type=click.Choice([state.value for state in RETRYABLE]),
    multiple=True,
    help="Instead of ids: all jobs in this state; repeatable.",
)
@click.option("--queue", type=QUEUE, help="With --state: only this queue.")
@click.option("--task", help="With --state: only this task.")
@click.option("--since", "since_s", type=DURATION, help="With --state: finished that recently.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIST_MAX),
    default=RETRY_MAX,
    show_default=True,
    help="With --state: at most so many, the newest.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be retried, and change nothing.")
@json_option
@pass_session
def retry(
    session: Session,
    /,
    ids: tuple[int, ...],
    states: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
    **filters: Any,
) -> None:
    """Bring failed and cancelled jobs back, by id or by filter.

    They keep their ids and get at least one more attempt. The ids go to stdout.
    """
    if bool(ids) == bool(states):
        raise click.UsageError("give ids, or --state failed with other filters")
    if ids and (filters["queue"] or filters["task"] or filters["since_s"]):
        raise click.UsageError("--queue, --task and --since choose among --state; ids say it all")

    async def work(lane: Lane) -> tuple[Sequence[int], list[int], dict[int, JobState]]:
        from taskd.store import jobs as store
        from taskd.store import reports

        wanted: Sequence[int] = list(dict.fromkeys(ids))
        if states:
            rows = await reports.list_jobs(lane, states=states, **filters)
            wanted = [row["id"] for row in rows]
        before = await reports.job_states(lane, wanted)
        if dry_run:
            return wanted, [i for i in wanted if before.get(i) in RETRYABLE], before
        return wanted, await store.retry(lane, wanted), before

    wanted, back, before = session.ask(work)
    # What a filter found may have moved meanwhile; what was named by id must be answered for.
    left = set(wanted) - set(back) if ids else set()
    if as_json:
        print_json({"retried": back, "dry_run": dry_run, "refused": _refused(left, before)})
    else:
        for job_id in back:
            click.echo(job_id)
    if back or states:
        session.say(f"{count(len(back), 'job')} {'would be retried' if dry_run else 'retried'}")
    _answer_for(left, before, _not_retryable)


@jobs.command()
@click.argument("ids", metavar="ID...", type=JOB_ID, nargs=-1, required=True)
@click.option(
    "--reason",
    type=REASON,
    default="cancelled by hand",
    show_default=True,
    help="Kept with the job.",
)
@json_option
@pass_session
def cancel(session: Session, ids: tuple[int, ...], reason: str, as_json: bool) -> None:
    """Cancel jobs: waiting ones end now, running ones are asked to stop.

    Prints one line per job: its id, and cancelled or running (its worker stops it within seconds).
    """

    async def work(lane: Lane) -> tuple[dict[int, JobState], dict[int, JobState]]:
        from taskd.store import jobs as store
        from taskd.store import reports

        before = await reports.job_states(lane, ids)
        return await store.cancel(lane, sorted(set(ids)), reason), before

    ended, before = session.ask(work)
    left = set(ids) - set(ended)
    if as_json:
        by_state: dict[str, Any] = {
            state: [job_id for job_id in sorted(ended) if ended[job_id] == state]
            for state in CANCELLABLE
        }
        print_json(by_state | {"refused": _refused(left, before)})
    else:
        for job_id, state in sorted(ended.items()):
            click.echo(f"{job_id}\t{state}")
    _answer_for(left, before, _not_cancellable)


def _refused(left: set[int], before: dict[int, JobState]) -> list[Row]:
    """Jobs that were left as they are, each with its state; null when nobody knows the job."""
    return [{"id": job_id, "state": before.get(job_id)} for job_id in sorted(left)]


def _not_retryable(job_id: int, state: JobState) -> str:
    if state in RETRYABLE:
        return f"job {job_id} has had 1,000 attempts; enqueue it anew"
    return f"job {job_id} is {state}; only failed and cancelled jobs can be retried"


def _not_cancellable(job_id: int, state: JobState) -> str:
    return f"job {job_id} is {state} already; only live jobs can be cancelled"


def _answer_for(left: set[int], before: dict[int, JobState], why: Any) -> None:
    """Say why jobs were left as they are.

    Raises:
        JobNotFound: nobody knows some of them.
        InvalidTransition: their state forbids it.
    """
    refused = [why(job_id, before[job_id]) for job_id in sorted(left) if job_id in before]
    unknown = [job_id for job_id in sorted(left) if job_id not in before]
    if unknown:
        raise JobNotFound("; ".join([unknown_jobs(unknown), *refused]))
    if refused:
        raise InvalidTransition("; ".join(refused))


def unknown_jobs(ids: Sequence[int]) -> str:
    """What is said of ids that no job has."""
    names = ", ".join(map(str, ids))
    return f"no job has the id {names}: never enqueued, or its queue keeps it no longer"
