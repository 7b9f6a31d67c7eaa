"""`taskd queues`: see them, pause them, limit them, say how long finished jobs are kept."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from taskd.cli.limits import bounds, burst_option, number, rate_option
from taskd.cli.shared.output import (
    Row,
    paused,
    paused_for,
    print_json,
    print_rows,
    span_of,
    text_of,
)
from taskd.cli.shared.session import DURATION, QUEUE, REASON, Session, json_option, pass_session
from taskd.core.humanize import rate_text
from taskd.core.jobs.limit import CONCURRENCY_MAX
from taskd.errors import StoreUnavailable

if TYPE_CHECKING:
    from taskd.store.connections.database import Lane

# 10 years, as the column's CHECK has it.
KEEP_S_MAX = 315_360_000
# As the columns' CHECKs have them.
RUNNING_MAX = 100_000
DEPTH_MAX = 100_000_000


def _limits(row: Row) -> str:
    said = [
        f"{row[name]:,} {words}"
        for name, words in (("max_running", "running"), ("max_depth", "deep"))
        if row[name] is not None
    ]
    return "; ".join([*said, *filter(None, [rate_text(row["rate"], row["burst"])])])


COLUMNS = {
    "QUEUE": text_of("queue"),
    "QUEUED": text_of("queued"),
    "SCHEDULED": text_of("scheduled"),
    "BLOCKED": text_of("blocked"),
    "RUNNING": text_of("running"),
    "FAILED 24H": text_of("failed_last_day"),
    "OLDEST DUE": span_of("oldest_due_s"),
    "WORKERS": text_of("workers"),
    "CONCURRENCY": text_of("concurrency"),
    "LIMITS": _limits,
    "PAUSED": paused,
}


@click.group()
def queues() -> None:
    """List, pause, resume and limit queues, and say how long they keep finished jobs."""


@queues.command("list")
@json_option
@pass_session
def list_(session: Session, as_json: bool) -> None:
    """List queues: what waits, what runs, what failed in the last day, who serves them."""
    from taskd.store.reading import reports

    print_rows(session.ask(reports.list_queues), COLUMNS, as_json=as_json)


@queues.command()
@click.argument("names", metavar="NAME...", type=QUEUE, nargs=-1, required=True)
@click.option("--for", "for_s", type=DURATION, help="Resume by itself after so long.")
@click.option("--reason", type=REASON, help="Shown by `taskd queues list`.")
@json_option
@pass_session
def pause(
    session: Session,
    names: tuple[str, ...],
    for_s: float | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Stop claiming from queues; what runs goes on. Workers need not be told.

    A queue may be paused before it has jobs or workers; it is called new then.
    """
    if for_s == 0:
        raise click.BadParameter("write a time above zero", param_hint="--for")
    from taskd.store import queues as store
    from taskd.store.reading import reports

    async def work(lane: Lane) -> tuple[list[str], list[str]]:
        known = {row["queue"] for row in await reports.list_queues(lane)}
        stopped = await store.pause(lane, names, for_s, reason)
        return stopped, [name for name in stopped if name not in known]

    stopped, new = session.ask(work)
    if as_json:
        print_json({"paused": stopped, "new": new, "for_s": for_s, "reason": reason})
        return
    session.say(f"{paused_for(for_s)}: {', '.join(stopped)}")
    for name in new:
        session.say(f"{name} is new: no worker serves it and no job names it")


@queues.command()
@click.argument("names", metavar="NAME...", type=QUEUE, nargs=-1, required=True)
@json_option
@pass_session
def resume(session: Session, names: tuple[str, ...], as_json: bool) -> None:
    """Claim from paused queues again."""
    from taskd.store import queues as store

    resumed = session.ask(lambda lane: store.resume(lane, names))
    if as_json:
        print_json({"resumed": resumed, "not_paused": sorted(set(names) - set(resumed))})
        return
    for name in dict.fromkeys(names):
        session.say(f"resumed: {name}" if name in resumed else f"not paused: {name}")


@queues.command("set")
@click.argument("name", type=QUEUE)
@click.option(
    "--concurrency",
    type=number(CONCURRENCY_MAX, word="default"),
    help="Attempts at the same time, in each worker process; `default`: as its settings say.",
)
@click.option("--max-running", type=number(RUNNING_MAX), help="Running at the same time; or none.")
@click.option("--max-depth", type=number(DEPTH_MAX), help="Waiting, then enqueuing fails; or none.")
@rate_option
@burst_option
@json_option
@pass_session
def set_(session: Session, /, name: str, as_json: bool, **options: Any) -> None:
    """Limit a queue. What is not given stays as it is.

    `taskd queues set email --max-running 10 --rate 100/s --max-depth 100000` holds for all workers
    together. --concurrency holds for each worker process that runs now, at once or within seconds,
    and for those to come, whatever their own is. What runs already goes on to its end.
    """
    from taskd.store.jobs import limits

    given, without = bounds(**options)
    row = session.ask(lambda lane: limits.limit_queue(lane, name, **given, without=without))
    columns = {
        "QUEUE": text_of("name"),
        "CONCURRENCY": text_of("concurrency"),
        "LIMITS": _limits,
    }
    if as_json:
        print_json(row)
    else:
        print_rows([row], columns, as_json=False)


@queues.command()
@click.argument("name", type=QUEUE)
@click.option("--done", "done_s", type=DURATION, help="Keep jobs that are done so long.")
@click.option("--failed", "failed_s", type=DURATION, help="Keep failed and cancelled jobs so long.")
@json_option
@pass_session
def keep(
    session: Session, name: str, done_s: float | None, failed_s: float | None, as_json: bool
) -> None:
    """Say how long a queue keeps its finished jobs; 0 forgets them at once.

    Holds for jobs that finish from now on: `taskd queues keep email --done 7d --failed 30d`.
    """
    if done_s is None and failed_s is None:
        raise click.UsageError("give --done, --failed, or both")
    for option, seconds in (("--done", done_s), ("--failed", failed_s)):
        if seconds is not None and seconds > KEEP_S_MAX:
            raise click.BadParameter("at most 3650d", param_hint=option)
    whole = [None if seconds is None else round(seconds) for seconds in (done_s, failed_s)]
    row = session.ask(lambda lane: _keep(lane, name, whole))
    columns = {
        "QUEUE": text_of("name"),
        "DONE": span_of("keep_done_s"),
        "FAILED": span_of("keep_failed_s"),
    }
    print_rows([row], columns, as_json=as_json)


async def _keep(lane: Lane, name: str, seconds: list[int | None]) -> Any:
    from taskd.store.jobs import history
    from taskd.store.reading import reports

    row = await reports.keep_queue(lane, name, *seconds)
    # Its partitions now, or what finishes until the next upkeep falls into the default partition.
    with suppress(StoreUnavailable):
        await history.make_partitions(lane)
    return row
