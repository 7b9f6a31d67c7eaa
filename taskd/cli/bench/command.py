"""`taskd bench`: measure how fast your own database is as a job queue, and what limits it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from taskd import events
from taskd.cli.bench.figures import COLUMNS, Figures, limits, rows, to_json
from taskd.cli.bench.measures import STEPS, Measures, Plan, Report, Stopped
from taskd.cli.health import EXIT_CHECK_FAILED
from taskd.cli.shared.output import count, print_json, print_rows
from taskd.cli.shared.session import DURATION, REPORT_TIMEOUT_S, Session, json_option, pass_session
from taskd.cli.shared.windows import refuse_windows
from taskd.errors import PermissionDenied, TaskdError
from taskd.store.reading import bench as stored

if TYPE_CHECKING:
    from taskd.client import Target
    from taskd.config import Settings
    from taskd.store.connections.lanes import Lane

EACH_S_MIN, EACH_S_MAX = 0.1, 60.0
SHOW_EVERY_S = 0.1


class Occupied(TaskdError):
    """The database has live jobs."""

    exit_code = EXIT_CHECK_FAILED


def _each_s(_ctx: click.Context, _option: click.Parameter, value: float) -> float:
    if not EACH_S_MIN <= value <= EACH_S_MAX:
        raise click.BadParameter(f"it is not between {EACH_S_MIN:g} s and {EACH_S_MAX:g} s")
    return value


@click.command()
@click.option(
    "--jobs",
    type=click.IntRange(2000, 1_000_000),
    default=20_000,
    show_default=True,
    help="Jobs to enqueue and drain.",
)
@click.option(
    "--wake-ups",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Jobs to give to an idle worker, one at a time.",
)
@click.option(
    "--each",
    "each_s",
    type=DURATION,
    callback=_each_s,
    default="2s",
    show_default=True,
    help="Longest time for each measurement of round trips, commits and single enqueues.",
)
@click.option("--with-live-jobs", is_flag=True, help="Measure even if the database has live jobs.")
@json_option
@pass_session
def bench(
    session: Session,
    /,
    jobs: int,
    wake_ups: int,
    each_s: float,
    with_live_jobs: bool,
    as_json: bool,
) -> None:
    """Measure how fast your database is as a job queue.

    The benchmark measures commits, enqueueing, a worker that drains no-op jobs, and how soon an
    idle worker starts a job; then it prints what limits the rates. The worker runs with your
    settings, in this process, on a queue of its own. At the end, even after Ctrl-C, the benchmark
    removes all its rows.

    Run the benchmark as the owner of the schema (the user that runs `taskd db migrate`). If the
    database has live jobs, the benchmark ends with exit code 4: these jobs and the benchmark would
    slow each other down.
    """
    refuse_windows("bench")
    import uvloop

    plan = Plan(jobs, wake_ups, each_s)
    try:
        figures = uvloop.run(_bench(session, plan, with_live_jobs))
    except (asyncio.CancelledError, Stopped):
        raise click.Abort from None
    if as_json:
        print_json(to_json(figures))
        return
    print_rows(rows(figures), COLUMNS, as_json=False)
    for sentence in limits(figures):
        click.echo(f"\n{sentence}")


async def _bench(session: Session, plan: Plan, with_live_jobs: bool) -> Figures:
    from taskd.store.connections.lanes import Lane
    from taskd.store.schema import migrations

    settings = session.load().settings
    events.configure(settings.log_format, settings.log_level if session.verbose else "error")
    async with session.target() as target:
        await migrations.check(target.database)
        # Removing many jobs can take longer than the timeout of a worker's statements.
        patient = target.database.with_timeout(REPORT_TIMEOUT_S)
        lane = Lane(patient, "bench")
        try:
            await _clear_left(session, lane)
            environment = await _checked(lane, with_live_jobs)
            session.echo(
                f"taskd: measuring {target.describe()}, PostgreSQL {environment.postgresql}"
            )
            return await _measured_and_cleared(session, plan, settings, target, lane, environment)
        finally:
            await lane.close()


async def _clear_left(session: Session, lane: Lane) -> None:
    """Remove the rows of earlier runs that were killed.

    Raises:
        PermissionDenied: the login does not own the schema.
    """
    if not (await stored.read_environment(lane)).owner:
        raise PermissionDenied(
            "taskd bench removes its queue, worker and jobs at the end, and only the owner of the "
            "schema can do so. Connect as the user that runs `taskd db migrate`."
        )
    for name in await stored.left(lane):
        session.echo(f"taskd: removing {name}, which an earlier run has left")
        await stored.clear(lane, name)


async def _checked(lane: Lane, with_live_jobs: bool) -> stored.Environment:
    """Describe the database, and check that it has no live jobs.

    Raises:
        Occupied: the database has live jobs.
    """
    environment = await stored.read_environment(lane)
    if environment.live and not with_live_jobs:
        more = " or more" if environment.live == stored.LIVE_COUNTED_MAX else ""
        raise Occupied(
            f"this database has {count(environment.live, 'live job')}{more}. They and the "
            "benchmark would slow each other down. Measure another database, wait until the jobs "
            "are done, or give --with-live-jobs."
        )
    return environment


async def _measured_and_cleared(
    session: Session,
    plan: Plan,
    settings: Settings,
    target: Target,
    lane: Lane,
    environment: stored.Environment,
) -> Figures:
    from taskd.client import Client

    with _interruptible() as regain:
        name = await stored.new_name(lane)
        measures = Measures(name, plan, settings, regain)
        try:
            await stored.begin(lane, name)
            async with Client(settings=settings) as client:
                with _progress(session) as report:
                    return await measures.run(target, client, environment, report)
        except (asyncio.CancelledError, Stopped):
            session.echo("taskd: interrupted; removing the rows of the benchmark")
            raise
        finally:
            await _clear(session, lane, name)


async def _clear(session: Session, lane: Lane, name: str) -> None:
    try:
        await stored.clear(lane, name)
    except BaseException:
        session.echo(
            f"taskd: some rows named {name} were not removed; a `taskd bench` that starts at least "
            "a minute later removes them"
        )
        raise


@contextmanager
def _interruptible() -> Iterator[Callable[[], None]]:
    """Let the first Ctrl-C or SIGTERM cancel the measurements, and the second one the clean-up.

    A worker replaces the handlers of these signals while it runs. After the end of the worker, the
    yielded function installs these handlers again.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    numbers = (signal.SIGINT, signal.SIGTERM)

    def regain() -> None:
        for number in numbers:
            loop.add_signal_handler(number, task.cancel)

    regain()
    try:
        yield regain
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def _progress(session: Session) -> Iterator[Report]:
    """Show a progress bar on a terminal; each step takes the same share of the bar."""
    if session.quiet or not sys.stderr.isatty():
        yield lambda _step, _share: None
        return
    shown_at = 0.0
    whole = len(STEPS) * 100
    with click.progressbar(
        length=whole,
        label="measuring",
        show_eta=False,
        item_show_func=lambda step: step or "",
        file=sys.stderr,
    ) as bar:

        def report(step: str, share: float) -> None:
            # Drawing more often would affect the measurement.
            nonlocal shown_at
            now = time.monotonic()
            if now - shown_at >= SHOW_EVERY_S:
                shown_at = now
                at = int((STEPS.index(step) + min(share, 1.0)) * 100)
                bar.update(max(0, at - bar.pos), step)

        yield report
        bar.update(whole - bar.pos, "done")
