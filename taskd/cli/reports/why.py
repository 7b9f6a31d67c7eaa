"""`taskd why`: print why a job does not run, and what to do next."""

from __future__ import annotations

import click
import msgspec

from taskd.cli import typed
from taskd.cli.jobs.change import unknown_jobs
from taskd.cli.shared.output import moment, print_json, printable
from taskd.cli.shared.session import JOB_ID, Session, json_option, pass_session
from taskd.core.explain.sentences import explain, first_line
from taskd.errors import JobNotFound


@click.command()
@click.argument("job_id", metavar="ID", type=JOB_ID)
@json_option
@pass_session
def why(session: Session, job_id: int, as_json: bool) -> None:
    """Explain why a job does not run, or what it is doing, and what to do next.

    Reasons that you must fix come first; reasons that pass without action come last.
    """
    from taskd.store.reading import reports

    facts = session.run(lambda lane: reports.why_job(lane, job_id))
    if facts is None:
        raise JobNotFound(unknown_jobs([job_id]))
    explanations = list(explain(facts))
    if as_json:
        reasons = [
            {"why": reason.why, "needs_action": reason.needs_action, "text": text, "next": commands}
            for reason, text, commands in explanations
        ]
        print_json(msgspec.structs.asdict(facts) | {"reasons": reasons})
        return
    task = click.style(printable(first_line(facts.task)), bold=True)
    made = (
        f", enqueued by the schedule {printable(first_line(facts.schedule))} for the tick "
        f"{moment(facts.tick)}"
        if facts.schedule
        else ""
    )
    where = f"in the queue {facts.queue}"
    click.echo(f"job {facts.id} of the task {task} {where} is {facts.state}{made}")
    for _, text, commands in explanations:
        click.echo(f"- {printable(text)}")
        for command in commands:
            click.echo(f"  next: {click.style(typed(printable(command)), bold=True)}")
