"""`taskd schedules`: list, preview, make, pause, run and delete schedules."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Collection, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import click

from taskd.cli.shared.arguments import PAIRS, arguments, with_json_hint
from taskd.cli.shared.output import (
    Row,
    moment,
    pause_note,
    paused_for,
    print_json,
    print_rows,
    printable,
    span,
    span_of,
    text_of,
)
from taskd.cli.shared.session import (
    DURATION,
    MOMENT,
    QUEUE,
    Session,
    json_option,
    pass_session,
    pause_options,
)
from taskd.cli.shared.session import run as run_
from taskd.core.jobs.arguments import encode_args
from taskd.core.jobs.job import NewJob
from taskd.core.schedule import CATCH_UP_MAX_LIMIT, CatchUp, Cron, Every, Overlap, Schedule
from taskd.errors import ScheduleNotFound

if TYPE_CHECKING:
    from taskd.store.connections.lanes import Lane

NEXT_MAX = 1000


def _rhythm(row: Row) -> str:
    return f"every {span(row['every_s'])}" if row["every_s"] else f"{row['cron']} {row['timezone']}"


def _next(row: Row) -> str:
    if row["withdrawn_at"]:
        return f"withdrawn since {moment(row['withdrawn_at'])}"
    if not row["paused"]:
        waits = row["waits_since"] is not None and row["due_in_s"] <= 0
        return moment(row["next_at"]) + (", waits for a live job" if waits else "")
    until = f"paused until {moment(row['paused_until'])}" if row["paused_until"] else "paused"
    return until + pause_note(row)


def _withdrawn(row: Row) -> str:
    name = printable(row["name"])
    return (
        f"{name} is withdrawn: no live worker of the app {printable(row['app'])} declares this "
        "schedule. It resumes when a worker declares it again. To keep it without that app: taskd "
        f"schedules set. To remove it: taskd schedules delete {shlex.quote(name)}"
    )


def _zones(tick: Row) -> str:
    zones = tick["zones"]
    return f"{zones[0]} and {len(zones) - 1} more" if zones else tick["timezone"]


COLUMNS = {
    "SCHEDULE": text_of("name"),
    "TASK": text_of("task"),
    "QUEUE": text_of("queue"),
    "RHYTHM": _rhythm,
    "NEXT": _next,
    "LAST": text_of("last_run"),
    "LIVE": text_of("live"),
    "SKIPPED": text_of("skipped"),
    "LATE": lambda row: str(row["late"] + row["ended_late"]),
    "EXPIRED": text_of("expired"),
    "APP": text_of("app"),
    "LAST ERROR": text_of("last_error"),
}
NEXT_COLUMNS = {
    "SCHEDULE": text_of("schedule"),
    "TICK": text_of("local"),
    "ZONE": _zones,
    "IN": span_of("in_s"),
}


@click.group()
def schedules() -> None:
    """List, make, pause, run and delete schedules, and show their next ticks."""


@schedules.command("list")
@json_option
@pass_session
def list_(session: Session, as_json: bool) -> None:
    """List schedules: their times, their next and last ticks, and their errors."""
    from taskd.store import schedules as store

    rows = session.run(store.list_)
    print_rows(rows, COLUMNS, as_json=as_json)
    for row in rows:
        if row["withdrawn_at"] and not as_json:
            session.echo(_withdrawn(row))
        if row["delayed_by"]:
            session.echo(
                f"{printable(row['name'])}: the tick fails repeatedly, and is retried every "
                f"second: {printable(row['delayed_by'])}"
            )
        if row["last_tick"] is not None and row["last_tick"] > row["now"]:
            ahead = span((row["last_tick"] - row["now"]).total_seconds())
            session.echo(
                f"{printable(row['name'])}: the last tick, {moment(row['last_tick'])}, is {ahead} "
                "ahead of the database's clock, because that clock was set back; see taskd docs "
                "clocks"
            )


@schedules.command("next")
@click.argument("names", metavar="[NAME]...", nargs=-1)
@click.option(
    "-n",
    "number",
    type=click.IntRange(1, NEXT_MAX),
    default=5,
    show_default=True,
    help="Ticks per schedule.",
)
@json_option
@pass_session
def next_(session: Session, names: tuple[str, ...], number: int, as_json: bool) -> None:
    """Print the next ticks of the named schedules, or of all, in the time zone of each schedule."""
    from taskd.store import schedules as store

    rows = session.run(store.list_)
    _check_exist(names, {row["name"] for row in rows})
    selected = [row for row in rows if not names or row["name"] in names]
    coming = [
        _tick(row, tick, zones)
        for row in selected
        if not row["stopped"]
        for tick, zones in itertools.islice(_ticks(row), number)
    ]
    print_rows(coming, NEXT_COLUMNS, as_json=as_json)
    for row in selected:
        if row["withdrawn_at"]:
            session.echo(_withdrawn(row))
        elif row["stopped"]:
            session.echo(f"{row['name']} is paused: it has no ticks until you resume it")


def _ticks(row: Row) -> Iterator[tuple[datetime, list[str] | None]]:
    """Yield the next ticks, each with its zones if the rows of the query have time zones."""
    from taskd.store.schedules import rhythm

    when = rhythm(row["every_s"], row["cron"], row["timezone"], row["starts_at"])
    existing = row["next_at"]
    # If next_at is NULL, no worker has computed the next tick yet, for example after a resume.
    begin = existing or max(row["now"], row["paused_until"] or row["now"])
    if isinstance(when, Cron) and when.per_row:
        return iter(when.ticks_of_zones(begin - timedelta(seconds=1) if existing else begin))
    ticks = itertools.chain([existing] if existing else [], when.ticks(begin))
    return ((tick, None) for tick in ticks)


def _tick(row: Row, tick: datetime, zones: list[str] | None) -> dict[str, Any]:
    local = tick.astimezone(UTC if zones else ZoneInfo(row["timezone"]))
    return {
        "schedule": row["name"],
        "tick": tick.astimezone(UTC).isoformat(),
        "local": local.isoformat(sep=" ", timespec="seconds"),
        "timezone": row["timezone"],
        "zones": zones,
        "in_s": (tick - row["now"]).total_seconds(),
    }


@schedules.command("set")
@click.argument("name")
@click.argument("task")
@PAIRS
@click.option("--args", "args_json", metavar="OBJECT", help="The arguments as a JSON object.")
@click.option("--every", "every_s", type=DURATION, help="A period: 30s, 5m, 2h.")
@click.option("--starts-at", type=MOMENT, help="With --every: the first tick.")
@click.option(
    "--cron", metavar="EXPRESSION", help="Five cron fields: 'minute hour day month weekday'."
)
@click.option(
    "--timezone",
    metavar="ZONE",
    help="With --cron: the time zone, or 'per row': the "
    "column job.timezone of the query names it.  [default: UTC]",
)
@click.option(
    "--query",
    metavar="SQL",
    help="Enqueue a job per row of this query; the columns of the row are the job's arguments.",
)
@click.option("--queue", type=QUEUE, help="Name of the queue; by default that of the task.")
@click.option(
    "--priority", type=int, help="Smaller numbers run first; by default that of the task."
)
@click.option("--max-attempts", type=int, help="Most attempts; by default as the task defines.")
@click.option("--timeout", "timeout_s", type=DURATION, help="Timeout of one attempt.")
@click.option(
    "--catch-up",
    type=click.Choice([each.value for each in CatchUp]),
    default="last",
    show_default=True,
    help="Which missed ticks to fire later.",
)
@click.option(
    "--catch-up-max",
    type=click.IntRange(1, CATCH_UP_MAX_LIMIT),
    default=100,
    show_default=True,
    help="With --catch-up all or --overlap wait: fire only the newest missed ticks, at most this "
    "many.",
)
@click.option(
    "--overlap",
    type=click.Choice([each.value for each in Overlap]),
    default="allow",
    show_default=True,
    help="At a tick while a job of the schedule is live: enqueue another job, skip the tick, wait "
    "until the live job has ended, or cancel the live job and wait until it has ended.",
)
@click.option(
    "--jitter",
    "jitter_s",
    type=DURATION,
    help="Delay the job of each tick by a random time, at most this long.",
)
@click.option(
    "--deadline",
    "deadline_s",
    type=DURATION,
    help="Expire the job if it has not started within this time.",
)
@click.option(
    "--no-key", is_flag=True, help="Enqueue the jobs without the unique key that their task has."
)
@click.option(
    "--ends-by",
    metavar="HH:MM | DURATION",
    help="By when the job should have ended, otherwise it is late: a time of day (08:00), or a "
    "duration after the tick (5h).",
)
@json_option
@pass_session
def set_(
    session: Session,
    /,
    name: str,
    task: str,
    pairs: tuple[str, ...],
    args_json: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Make a schedule, or change the schedule of that name.

    taskd schedules set nightly report of=sales --cron '0 3 * * *' --timezone Europe/Berlin

    Options that are not given get their defaults, even if the schedule exists. A paused schedule
    stays paused.
    """
    every_s, cron = options.pop("every_s"), options.pop("cron")
    starts_at, timezone = options.pop("starts_at"), options.pop("timezone")
    if (every_s is None) == (cron is None):
        raise click.UsageError("give either --every or --cron")
    if (starts_at is not None and cron is not None) or (timezone is not None and cron is None):
        raise click.UsageError("--starts-at needs --every, --timezone needs --cron")
    of_job = {
        key: value
        for key in ("queue", "priority", "max_attempts", "timeout_s", "no_key")
        if (value := options.pop(key)) is not None
    }
    if (ends_by := options.get("ends_by")) is not None and ":" not in ends_by:
        options["ends_by"] = None
        options["ends_by_s"] = DURATION.convert(ends_by, None, None)
    schedule = Schedule(
        name,
        NewJob(task, encode_args(task, arguments(pairs, args_json)), **of_job),
        Cron(cron, timezone or "UTC") if cron is not None else Every(every_s, starts_at),
        **options,
    )
    with with_json_hint(pairs):
        outcome, row = run_(_set(session, schedule))
    if as_json:
        print_json(row | {"outcome": outcome})
        return
    session.echo(f"{outcome}: {name}, {_rhythm(row)}; next: {_next(row) or 'not computed yet'}")
    if row["next_at"] is not None and row["next_at"] < row["now"] and row["waits_since"] is None:
        session.echo(
            f"its ticks since then were missed: workers fire the newest of them, at most "
            f"{row['catch_up_max']}"
        )
    if row["app"] is not None and outcome != "unchanged":
        session.echo(
            f"app {row['app']} declares this schedule in its code. Your change overrides the code "
            "until you delete the schedule."
        )


async def _set(session: Session, schedule: Schedule) -> tuple[str, dict[str, Any]]:
    async with session.client() as client:
        outcome = await client.schedules.set(schedule)
        [row] = [row for row in await client.schedules.list() if row["name"] == schedule.name]
        return outcome, row


@schedules.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@pause_options("`taskd schedules list`")
@json_option
@pass_session
def pause(
    session: Session,
    names: tuple[str, ...],
    for_s: float | None,
    reason: str | None,
    as_json: bool,
) -> None:
    """Pause schedules until they are resumed, or for a time. Ticks during a pause are skipped."""
    from taskd.store import schedules as store

    paused = session.run(lambda lane: store.pause(lane, names, for_s, reason))
    answer = {"paused": paused, "for_s": for_s, "reason": reason}
    _print_outcome(session, paused_for(for_s), names, paused, answer if as_json else None)


@schedules.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@json_option
@pass_session
def resume(session: Session, names: tuple[str, ...], as_json: bool) -> None:
    """Resume schedules, from their next tick on."""
    from taskd.store import schedules as store

    async def work(lane: Lane) -> tuple[list[str], dict[str, Row]]:
        return await store.resume(lane, names), {
            row["name"]: row for row in await store.list_(lane)
        }

    resumed, existing = session.run(work)
    _check_exist(names, existing)
    if as_json:
        print_json({"resumed": resumed, "not_paused": sorted(set(names) - set(resumed))})
        return
    for name in dict.fromkeys(names):
        session.echo(f"resumed: {name}" if name in resumed else f"was not paused: {name}")
        if existing[name]["withdrawn_at"]:
            session.echo(_withdrawn(existing[name]))


@schedules.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@json_option
@pass_session
def delete(session: Session, names: tuple[str, ...], as_json: bool) -> None:
    """Delete schedules; their jobs stay.

    If an app declares a schedule in its code, the schedule is made again when the app starts. A
    schedule that its app has withdrawn is not made again.
    """
    from taskd.store import schedules as store

    deleted = session.run(lambda lane: store.delete(lane, names))
    answer = {"deleted": sorted(deleted)}
    _print_outcome(session, "deleted", names, sorted(deleted), answer if as_json else None)
    for name, app in sorted(deleted.items()):
        if app is not None and not as_json:
            session.echo(
                f"app {app} declares {name} in its code, and makes {name} again when the app starts"
            )


@schedules.command("run")
@click.argument("name")
@json_option
@pass_session
def run(session: Session, name: str, as_json: bool) -> None:
    """Enqueue the jobs of a schedule now, in addition to its ticks, and print their ids.

    The command also works for paused schedules. If the overlap of the schedule is `skip`, no job is
    enqueued while a job of the schedule is live. If the overlap is `wait` or `cancel`, the new job
    waits for the end of the live job, which `cancel` cancels. A run of a pipeline, and a job with a
    unique key, cannot wait: then no job is enqueued.
    """
    from taskd.store import schedules as store

    ran = session.run(lambda lane: store.run(lane, name))
    if as_json:
        print_json({"schedule": name, **ran._asdict()})
    elif ran.ids is None:
        later = "; run the schedule again when it has ended" if ran.outcome == "waits" else ""
        session.echo(f"{ran.outcome}: a job of {name} is live{later}")
    else:
        for job_id in ran.ids:
            click.echo(job_id)
        if not ran.ids:
            session.echo(
                "no job was enqueued: the query has no rows, or live jobs hold the unique keys"
            )


def _print_outcome(
    session: Session,
    done: str,
    names: tuple[str, ...],
    found: list[str],
    answer: dict[str, Any] | None,
) -> None:
    """Print the names of the changed schedules, or `answer` as JSON; then report unknown names."""
    if answer is not None:
        print_json(answer)
    elif found:
        session.echo(f"{done}: {', '.join(found)}")
    _check_exist(names, set(found))


def _check_exist(names: tuple[str, ...], existing: Collection[str]) -> None:
    for name in names:
        if name not in existing:
            raise ScheduleNotFound(
                f"there is no schedule {name!r}. List schedules: taskd schedules list"
            )
