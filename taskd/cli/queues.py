"""`taskd queues`: list, pause and limit queues, and set how long they keep finished jobs."""

from __future__ import annotations

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
from taskd.cli.shared.session import (
    DURATION,
    QUEUE,
    Session,
    json_option,
    pass_session,
    pause_options,
)
from taskd.core.humanize import rate_text
from taskd.core.jobs.limit import CONCURRENCY_MAX
from taskd.errors import StoreUnavailable, TaskdError

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane

# 10 years, the bound of the columns keep_done_s and keep_failed_s.
KEEP_S_MAX = 315_360_000
# The bounds of the columns max_running and max_depth.
RUNNING_MAX = 100_000
DEPTH_MAX = 100_000_000


def _limits(row: Row) -> str:
    parts = [
        f"{row[name]:,} {words}"
        for name, words in (("max_running", "running"), ("max_depth", "deep"))
        if row[name] is not None
    ]
    return "; ".join([*parts, *filter(None, [rate_text(row["rate"], row["burst"])])])


COLUMNS = {
    "QUEUE": text_of("queue"),
    "QUEUED": text_of("queued"),
    "SCHEDULED": text_of("scheduled"),
    "RETRYING": text_of("retrying"),
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
    """List, pause, resume and limit queues, and set how long they keep finished jobs."""


@queues.command("list")
@json_option
@pass_session
def list_(session: Session, as_json: bool) -> None:
    """List queues: waiting and running jobs, failures of the last day, and workers.

    SCHEDULED jobs wait for their time. RETRYING jobs wait for another attempt after a failed one.
    """
    from taskd.store.reading import reports

    print_rows(session.run(reports.list_queues), COLUMNS, as_json=as_json)


names_argument = click.argument("names", metavar="[NAME]...", type=QUEUE, nargs=-1)


def _named(names: tuple[str, ...], every: bool) -> tuple[str, ...] | None:
    """Return the names, or None for all queues.

    Raises:
        UsageError: neither names nor --all were given, or both.
    """
    if bool(names) == every:
        raise click.UsageError("give either names of queues, or --all")
    return None if every else names


@queues.command()
@names_argument
@click.option("--all", "every", is_flag=True, help="All queues that exist now.")
@pause_options("`taskd queues list`")
@json_option
@pass_session
def pause(
    session: Session,
    names: tuple[str, ...],
    every: bool,
    for_s: float | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Stop claiming from queues. Running jobs continue; workers need no restart.

    A queue can be paused before it has jobs or workers; the command then says that the queue is
    new. --all pauses the queues that exist now: those that a worker has served, and those with live
    jobs.
    """
    chosen = _named(names, every)
    from taskd.store import queues as store
    from taskd.store.reading import reports

    async def work(lane: Lane) -> tuple[list[str], list[str]]:
        known = {row["queue"] for row in await reports.list_queues(lane)}
        stopped = await store.pause(lane, chosen, for_s, reason)
        return stopped, [name for name in stopped if name not in known and not every]

    stopped, new = session.run(work)
    if as_json:
        print_json({"paused": stopped, "new": new, "for_s": for_s, "reason": reason})
        return
    session.echo(f"{paused_for(for_s)}: {', '.join(stopped) or 'no queue'}")
    for name in new:
        session.echo(f"{name} is new: no worker serves it and no job is in it")


@queues.command()
@names_argument
@click.option("--all", "every", is_flag=True, help="All paused queues.")
@json_option
@pass_session
def resume(session: Session, names: tuple[str, ...], every: bool, as_json: bool) -> None:
    """Let workers claim from paused queues again."""
    from taskd.store import queues as store

    chosen = _named(names, every)
    resumed = session.run(lambda lane: store.resume(lane, chosen))
    if as_json:
        print_json({"resumed": resumed, "not_paused": sorted(set(names) - set(resumed))})
        return
    if every and not resumed:
        session.echo("no queue was paused")
    for name in resumed if every else dict.fromkeys(names):
        session.echo(f"resumed: {name}" if name in resumed else f"was not paused: {name}")


@queues.command("set")
@click.argument("name", type=QUEUE)
@click.option(
    "--concurrency",
    type=number(CONCURRENCY_MAX, word="default"),
    help="Concurrent attempts per worker process; `default`: the setting of the process applies.",
)
@click.option(
    "--max-running",
    type=number(RUNNING_MAX),
    help="Most running jobs, of all workers together; `none`: no limit.",
)
@click.option(
    "--max-depth",
    type=number(DEPTH_MAX),
    help="Most waiting jobs; an enqueue beyond that fails. `none`: no limit.",
)
@rate_option
@burst_option
@json_option
@pass_session
def set_(session: Session, /, name: str, as_json: bool, **options: Any) -> None:
    """Limit a queue. Limits that are not given do not change.

    --max-running, --rate and --max-depth limit the queue as a whole: `taskd queues set email
    --max-running 10 --rate 100/s --max-depth 100000`. --concurrency applies to each worker process
    and overrides the setting of the process: running workers use the new number within seconds,
    later workers from their start. Running attempts continue.
    """
    from taskd.store.jobs import limits

    given, without = bounds(**options)
    row = session.run(lambda lane: limits.limit_queue(lane, name, **given, without=without))
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
@click.option("--done", "done_s", type=DURATION, help="Keep done jobs this long.")
@click.option(
    "--failed", "failed_s", type=DURATION, help="Keep failed and cancelled jobs this long."
)
@json_option
@pass_session
def keep(
    session: Session, name: str, done_s: float | None, failed_s: float | None, as_json: bool
) -> None:
    """Set or show how long a queue keeps its finished jobs; 0 keeps none.

    The times apply to jobs that finish from now on. Without --done and --failed, the command
    changes nothing, and prints the times of the queue.

    taskd queues keep email --done 7d --failed 30d
    """
    from taskd.store.reading import reports

    columns = {
        "QUEUE": text_of("name"),
        "DONE": span_of("keep_done_s"),
        "FAILED": span_of("keep_failed_s"),
    }
    if done_s is None and failed_s is None:
        shown = session.run(lambda lane: reports.kept_by_queue(lane, name))
        print_rows([shown], columns, as_json=as_json)
        return
    for option, seconds in (("--done", done_s), ("--failed", failed_s)):
        if seconds is not None and seconds > KEEP_S_MAX:
            raise click.BadParameter("give at most 3650d", param_hint=option)
    whole = [None if seconds is None else round(seconds) for seconds in (done_s, failed_s)]
    row, refused = session.run(lambda lane: _keep(lane, name, whole))
    print_rows([row], columns, as_json=as_json)
    if refused is not None:
        raise type(refused)(
            f"the times of queue {name!r} are set, but their partitions could not be made. Until "
            f"the partitions exist, finished jobs go to the default partition. {refused}"
        )


async def _keep(lane: Lane, name: str, seconds: list[int | None]) -> tuple[Any, TaskdError | None]:
    from taskd.store.jobs import history
    from taskd.store.reading import reports

    row = await reports.keep_queue(lane, name, *seconds)
    # Make the partitions of the queue now: until the next upkeep, finished jobs would go to the
    # default partition.
    try:
        await history.make_partitions(lane)
    except StoreUnavailable:
        pass  # another session locks job_history; the next upkeep makes the partitions
    except TaskdError as error:
        return row, error
    return row, None
