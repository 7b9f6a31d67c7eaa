"""`taskd workflows`: list, show, cancel, retry and start workflows and pipelines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from taskd.cli.shared.output import (
    Row,
    as_json_values,
    count,
    moment,
    print_json,
    print_rows,
    printable,
    span_of,
    text_of,
)
from taskd.cli.shared.session import REASON, Session, json_option, pass_session
from taskd.cli.workflows.runs import set_, start
from taskd.core.workflows.tree import Line, Part, lines, state_counts, state_of, with_stages
from taskd.errors import WorkflowNotFound

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane

LIST_MAX = 1000
PARTS_MAX = 1000
NAME_MAX = 34
ALSO_MAX = 3
WORKFLOW_ID = click.IntRange(1, 2**63 - 1)
COUNTS = ("blocked", "waiting", "running", "done", "failed", "cancelled")


COLUMNS = {
    "ID": text_of("id"),
    "NAME": text_of("name"),
    "KIND": text_of("kind"),
    "STATE": state_of,
    "AGE": span_of("age_s"),
    "JOBS": text_of("jobs"),
    **{state.upper(): text_of(state) for state in COUNTS},
}
STATS_COLUMNS = {
    "PART": lambda row: row["part"] or "-",
    "QUEUE": text_of("queue"),
    "TASK": text_of("task"),
    "JOBS": text_of("jobs"),
    **{state.upper(): text_of(state) for state in COUNTS},
}


@click.group()
def workflows() -> None:
    """List, show, count, cancel, retry and start workflows and pipelines."""


@workflows.command("list")
@click.option("--name", help="Only workflows of this name.")
@click.option(
    "--limit",
    type=click.IntRange(1, LIST_MAX),
    default=50,
    show_default=True,
    help="Show at most this many workflows.",
)
@json_option
@pass_session
def list_(session: Session, name: str | None, limit: int, as_json: bool) -> None:
    """List workflows, newest first, with the states of their jobs."""
    from taskd.store import workflows as store

    rows = session.run(lambda lane: store.list_workflows(lane, name, limit))
    rows = [row | {"state": state_of(row)} for row in rows]
    print_rows(rows, COLUMNS, as_json=as_json)


@workflows.command()
@click.argument("workflow_id", metavar="ID", type=WORKFLOW_ID)
@json_option
@pass_session
def show(session: Session, workflow_id: int, as_json: bool) -> None:
    """Show a workflow as a tree: each job under the job that it waits for.

    The members of a group share one line, as do all runs of a stage of a pipeline.
    """
    from taskd.store import workflows as store

    async def work(lane: Lane) -> tuple[Row | None, list[dict[str, Any]]]:
        found = await store.find(lane, workflow_id)
        return found, await store.parts(lane, workflow_id, PARTS_MAX)

    found, rows = session.run(work)
    if found is None:
        raise WorkflowNotFound(_unknown(workflow_id))
    parts = with_stages(rows, found["plan"])
    if as_json:
        shown = {name: value for name, value in found.items() if name != "plan"}
        print_json(as_json_values(shown, "stages") | {"parts": parts})
        return
    stopped = f", cancelled {moment(found['stopped_at'])}" if found["stopped_at"] else ""
    head = f"{found['kind']} {found['id']}, {printable(found['name'])}"
    click.secho(f"{head}, started {moment(found['created_at'])}{stopped}", bold=True)
    drawn = lines(
        Part(row["part"], row["states"], row["after"], row["on_failed"], row["first_id"])
        for row in parts
    )
    labels = [_cut(f"{line.branch}{printable(line.part.name)}") for line in drawn]
    width = max(map(len, labels), default=0)
    for line, label in zip(drawn, labels, strict=True):
        click.echo(f"{label:<{width}}  {_tail(line)}".rstrip())
    if len(rows) == PARTS_MAX:
        session.echo(f"only the first {count(PARTS_MAX, 'part')} are shown")


def _cut(label: str) -> str:
    return label if len(label) <= NAME_MAX else f"{label[: NAME_MAX - 1]}…"


def _tail(line: Line) -> str:
    """Return the text after the name: states, the id of a single job, and further parents."""
    part = line.part
    tail = state_counts(part.states)
    if sum(part.states.values()) == 1:
        tail += f"  job {part.first_id}"
    if line.also_after:
        more = len(line.also_after) - ALSO_MAX
        also = ", ".join(map(printable, line.also_after[:ALSO_MAX]))
        tail += f"  also after {also}" + (f" and {more} more" if more > 0 else "")
    return tail + (f"  (on failed: {part.on_failed})" if part.on_failed else "")


@workflows.command()
@click.argument("workflow_id", metavar="ID", type=WORKFLOW_ID)
@click.option(
    "--reason",
    type=REASON,
    default="cancelled by hand",
    show_default=True,
    help="Reason to store with the jobs.",
)
@json_option
@pass_session
def cancel(session: Session, workflow_id: int, reason: str, as_json: bool) -> None:
    """Cancel a workflow: waiting jobs end now, running jobs are asked to stop.

    No further stage of a pipeline starts. To continue the workflow later: taskd workflows retry.
    """

    async def work(lane: Lane) -> tuple[int, int]:
        from taskd.client.operations import bulk
        from taskd.core.jobs.job import JobState

        moved = await bulk.cancel_workflow(lane, workflow_id, reason)
        if moved is None:
            raise WorkflowNotFound(_unknown(workflow_id))
        stopping = list(moved.values()).count(JobState.RUNNING)
        return len(moved) - stopping, stopping

    ended, stopping = session.run(work)
    if as_json:
        print_json({"id": workflow_id, "cancelled": ended, "stop_requested": stopping})
        return
    session.echo(f"{count(ended, 'job')} cancelled, {count(stopping, 'running job')} asked to stop")


@workflows.command()
@click.argument("workflow_id", metavar="ID", type=WORKFLOW_ID)
@json_option
@pass_session
def retry(session: Session, workflow_id: int, as_json: bool) -> None:
    """Retry the failed and cancelled jobs of a workflow; done jobs stay done.

    The jobs wait for each other again. A callback that was cancelled because it was not needed
    stays cancelled. A job that started because another one failed does not run again.
    """

    async def work(lane: Lane) -> tuple[list[int], list[int]]:
        from taskd.client.operations import bulk
        from taskd.store import workflows as store

        if await store.find(lane, workflow_id) is None:
            raise WorkflowNotFound(_unknown(workflow_id))
        return await bulk.retry_workflow(lane, workflow_id)

    back, refused = session.run(work)
    if as_json:
        print_json({"id": workflow_id, "retried": back, "refused": refused})
    else:
        session.echo(f"{count(len(back), 'job')} retried")
        if refused:
            session.echo(
                f"{count(len(refused), 'job')} cannot be retried. See: taskd why {refused[0]}"
            )


@workflows.command()
@click.argument("name")
@json_option
@pass_session
def stats(session: Session, name: str, as_json: bool) -> None:
    """Count the jobs of all workflows of one name, by stage or part.

    Each run of a pipeline counts once for each stage that it has reached. If it has gone back to a
    stage, its earlier jobs of this and of later stages do not count.
    """
    from taskd.store import workflows as store

    rows = session.run(lambda lane: store.stats(lane, name, PARTS_MAX))
    if not rows:
        raise WorkflowNotFound(
            f"no workflow is named {name!r}, or no job of these workflows is kept any more"
        )
    print_rows(rows, STATS_COLUMNS, as_json=as_json)


workflows.add_command(set_)
workflows.add_command(start)


def _unknown(workflow_id: int) -> str:
    return f"no workflow has the id {workflow_id}: it never started, or none of its jobs is kept"
