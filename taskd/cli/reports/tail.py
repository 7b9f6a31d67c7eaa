"""`taskd tail`: follow the events of jobs, one line each."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.jobs.change import unknown_jobs
from taskd.cli.jobs.filters import state_choice
from taskd.cli.shared.name_hints import hint_unknown
from taskd.cli.shared.output import cell, first_line, print_json, span
from taskd.cli.shared.refreshing import Asking, watching
from taskd.cli.shared.session import (
    DURATION,
    JOB_ID,
    QUEUE,
    Session,
    json_option,
    pass_session,
    run,
)
from taskd.cli.top.command import Interval
from taskd.core.humanize import clock, zone
from taskd.core.jobs.job import FINISHED, JobState
from taskd.core.watching.tail import Event, Reporter, Watch, events_of
from taskd.errors import JobNotFound

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane

# Maximum number of jobs that --since shows. If more jobs have events, the jobs with the latest
# events are shown.
PAST_MAX = 10_000
COLOURS = {
    "done": "green",
    "failed": "red",
    "gone": "yellow",
    "retried": "yellow",
    "cancelled": "yellow",
}


@click.command()
@click.option("--queue", type=QUEUE, help="Only this queue.")
@click.option("--task", help="Only this task.")
@click.option(
    "--state",
    "states",
    type=state_choice(*JobState),
    multiple=True,
    help="Only events after which the job is in this state; repeatable.",
)
@click.option(
    "--job", "job_id", type=JOB_ID, help="Follow only this job, from its enqueue to its end."
)
@click.option(
    "--since", "since_s", type=DURATION, help="First print the events of this period: 10m."
)
@click.option("--count", type=click.IntRange(1), help="Exit after this many events.")
@click.option(
    "--interval",
    "interval_s",
    type=Interval(0.2, 3600),
    default="1s",
    show_default=True,
    help="How often to poll.",
)
@json_option
@pass_session
def tail(session: Session, /, **options: Any) -> None:
    """Follow the events of jobs: enqueued, claimed, retried, done, failed, cancelled.

    Each event is one line, with the time by the database's clock, and is printed by the next poll
    after the commit. Ends of jobs are printed even after an outage of the database; `taskd docs
    watching` lists the events that can be missed. Ctrl-C ends the command with exit code 0. With
    --job, the command exits when the job has ended.
    """
    if options["job_id"] is not None and (options["since_s"] is not None):
        raise click.UsageError("--job shows all events of the job; leave out --since")
    with suppress(KeyboardInterrupt):
        run(_tail(session, Lines(**_popped(options)), **options))


def _popped(options: dict[str, Any]) -> dict[str, Any]:
    names = ("queue", "task", "states", "count", "as_json")
    return {name: options.pop(name) for name in names}


class Full(Exception):
    """The requested number of events has been printed."""


class Lines:
    """Prints the events that match the options."""

    def __init__(
        self,
        queue: str | None,
        task: str | None,
        states: Sequence[str],
        count: int | None,
        as_json: bool,
    ) -> None:
        self.queue, self.task = queue, task
        self._states, self._left, self._as_json = states, count, as_json

    def print(self, events: Iterable[Event]) -> None:
        """Print events.

        Raises:
            Full: the last requested event was printed.
        """
        for event in events:
            if not self._is_selected(event):
                continue
            if self._as_json:
                print_json(event)
            else:
                click.echo(line(event))
            if self._left is not None:
                self._left -= 1
                if self._left == 0:
                    raise Full

    def _is_selected(self, event: Event) -> bool:
        if self._states and event.state not in self._states:
            return False
        return self.queue in (None, event.queue) and self.task in (None, event.task)


def line(event: Event) -> str:
    """Return an event as a line for people."""
    at = clock(event.at)
    name = click.style(f"{event.event:<9}", fg=COLOURS.get(event.event))
    parts = [at, name, f"{event.job_id:>8}", cell(f"{event.queue or '?'} {event.task or '?'}")]
    return "  ".join([*parts, *filter(None, [_details(event)])])


def _details(event: Event) -> str:
    parts = []
    if event.event in ("enqueued", "released") and event.state not in (None, "queued"):
        parts.append(f"{event.state}")
    if event.attempt is not None and (event.attempt > 1 or event.event == "retried"):
        parts.append(f"attempt {event.attempt}")
    if event.worker is not None:
        parts.append(f"by {event.worker}")
    if event.wait_s is not None:
        parts.append(f"waited {span(event.wait_s)}")
    if event.run_s is not None:
        parts.append(f"running for {span(event.run_s)}")
    if event.run_at is not None:
        parts.append(_due(event.at, event.run_at))
    if event.event == "gone":
        parts.append("the job has ended, and its queue keeps no finished jobs")
    if event.error:
        parts.append(first_line(event.error))
    return cell(", ".join(parts))


def _due(at: datetime, run_at: datetime) -> str:
    after_s = (run_at - at).total_seconds()
    return f"due in {span(after_s)}" if after_s > 0 else "due"


async def _tail(
    session: Session, lines: Lines, job_id: int | None, since_s: float | None, interval_s: float
) -> None:
    async with watching(session, "tail") as lane:
        await hint_unknown(session, lane, queue=lines.queue, task=lines.task)
        tail = Tail(session, lane, lines, interval_s)
        with suppress(Full):
            if job_id is not None:
                await tail.follow(job_id)
            else:
                began = await tail.begin(since_s)
                # Without this line, a command that waits for events would look like one that hangs.
                if sys.stderr.isatty():
                    session.echo(f"taskd: following events, times in {zone(began)}; Ctrl-C to stop")
                await tail.go_on()


class Tail:
    """Polls the database, and prints the events since the last poll."""

    def __init__(self, session: Session, lane: Lane, lines: Lines, interval_s: float) -> None:
        self._session, self._lane, self._lines = session, lane, lines
        self._refreshing = Asking(interval_s)
        self._watch = Watch()
        self._reporter: Reporter | None = None
        self._silent = False

    async def begin(self, since_s: float | None) -> datetime:
        """Poll for the first time, and print the events of the last `since_s` seconds.

        Returns:
            The time of the database.
        """
        from taskd.store.reading import watching as store

        poll = await store.poll(self._lane, None, [])
        _, self._watch = self._watch.compare(poll)
        self._reporter = Reporter(poll.now - timedelta(seconds=since_s or 0.0))
        if since_s is None:
            return poll.now
        where = (self._lines.queue, self._lines.task)
        ids = await store.since(self._lane, since_s, *where, PAST_MAX)
        past = self._reporter.past(await store.jobs(self._lane, ids))
        if len(ids) == PAST_MAX:
            self._session.echo(f"only the {PAST_MAX:,} jobs with the latest events are shown")
        self._lines.print(past)
        return poll.now

    async def go_on(self) -> None:
        """Print events until cancelled."""
        while True:
            events = await self._query(self._poll)
            if events is not None:
                self._lines.print(events)
                await asyncio.sleep(self._refreshing.rest_s())

    async def _poll(self) -> list[Event]:
        from taskd.store.reading import watching as store

        assert self._reporter is not None
        poll = await store.poll(self._lane, self._watch.after_id, list(self._watch.missing))
        changes, going = self._watch.compare(poll)
        rows = await store.jobs(self._lane, changes.all())
        # Set `_watch` only after both statements have succeeded. If the second one fails, the next
        # poll repeats both, so that no event is missed.
        self._watch = going
        return self._reporter.report(rows, changes, poll.now)

    async def _query(self, query: Any) -> Any:
        answer = await self._refreshing(query)
        if answer is None and not self._silent:
            self._silent = True
            self._session.echo(f"taskd: {self._refreshing.error}; retrying")
        elif answer is not None and self._silent:
            self._silent = False
            self._session.echo("taskd: the database answers again")
        return answer

    async def follow(self, job_id: int) -> None:
        """Print the events of one job until its end.

        Raises:
            JobNotFound: no job has this id.
        """
        from taskd.store.reading import watching as store

        printed: list[Event] = []
        rows = await store.jobs(self._lane, [job_id])
        if not rows:
            raise JobNotFound(unknown_jobs([job_id]))
        while True:
            if rows is not None:
                events = events_of(rows[0]) if rows else _gone(printed)
                seen = {(each.at, each.event) for each in printed}
                new = [each for each in events if (each.at, each.event) not in seen]
                printed += new
                self._lines.print(new)
                if not rows or rows[0].state in FINISHED:
                    return
                await asyncio.sleep(self._refreshing.rest_s())
            rows = await self._query(lambda: store.jobs(self._lane, [job_id]))


def _gone(events: Sequence[Event]) -> list[Event]:
    last = events[-1]
    return [Event(last.at, "gone", last.job_id, last.queue, last.task)]
