"""`taskd run`: the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from taskd.cli import EXIT_CODES, EXIT_INTERRUPTED
from taskd.cli.shared.output import count
from taskd.cli.shared.session import QUEUE, OfSetting, Session, pass_session

if TYPE_CHECKING:
    from taskd.client import Target
    from taskd.config import Settings
    from taskd.web.endpoint import Endpoint
    from taskd.worker import DrainReport, Notify, Place, Processes, Worker

LEFT_WORDS = {
    "future": "scheduled for later",
    "paused": "in paused queues",
    "unknown": "of tasks that this worker does not know",
    "blocked": "waiting for other jobs",
    "later_retries": "retried in more than 60 s",
}
OUTCOMES = ("done", "failed", "cancelled")
# Not `released`: jobs that were given back before they ran.
TRIED = {
    "retried": "failed and {were} retried",
    "snoozed": "asked to be run later",
    "interrupted": "{were} interrupted and given back",
    "abandoned": "{were} abandoned",
}
CONCURRENCY = OfSetting("concurrency")
EXITS = "Exit codes: " + "; ".join(
    f"{code} {EXIT_CODES[code]}" for code in (0, 1, 2, 69, 75, 77, 78, EXIT_INTERRUPTED)
)


def _check_queues(
    ctx: click.Context, option: click.Parameter, queues: tuple[str, ...]
) -> tuple[str, ...]:
    for queue in queues:
        name, colon, number = queue.partition(":")
        QUEUE.convert(name, option, ctx)
        if colon:
            CONCURRENCY.convert(number, option, ctx)
    return queues


@click.command(epilog=EXITS)
@click.option(
    "--queue",
    "queues",
    multiple=True,
    callback=_check_queues,
    metavar="NAME[:N]",
    help="A queue to serve, with its own concurrency if given. Repeatable; without it, "
    "all queues of the app.",
)
@click.option("--app", metavar="MODULE", help="The module whose @task functions are run.")
@click.option(
    "--processes",
    type=OfSetting("processes"),
    metavar="N",
    help="Processes that run jobs, 1 by default. What is given per queue or as --threads is for "
    "each of them.",
)
@click.option(
    "--concurrency",
    type=CONCURRENCY,
    metavar="N",
    help="Attempts that run at the same time, per queue and process.",
)
@click.option(
    "--threads",
    type=OfSetting("threads"),
    metavar="N",
    help="Threads for plain `def` handlers, per process.",
)
@click.option(
    "--drain",
    "drain_s",
    type=OfSetting("drain_s"),
    metavar="TIME",
    help="How long a stop lets running attempts end.",
)
@click.option(
    "--http",
    type=OfSetting("http"),
    metavar="[HOST:]PORT",
    help="Serve /livez, /readyz and /metrics there; without a host, on 127.0.0.1. Needs the extra "
    "`web`.",
)
@click.option(
    "--until-empty",
    is_flag=True,
    help="End when the queues hold nothing to run soon: 0 if no job failed, else 1.",
)
@click.option(
    "--reload",
    is_flag=True,
    help="For development: drain and start anew whenever a .py file below the current directory "
    "or of the app changes.",
)
@click.option("--log-format", type=click.Choice(["auto", "console", "json"]), default=None)
@pass_session
def run(
    session: Session, /, queues: tuple[str, ...], until_empty: bool, reload: bool, **flags: Any
) -> None:
    """Run jobs until stopped.

    SIGTERM or Ctrl-C drains: nothing new is claimed, running attempts may end, unstarted jobs go
    back. A second one cancels what runs, a third abandons it. SIGQUIT dumps the stacks and
    leaves. SIGHUP reads the settings again. SIGTSTP and SIGCONT stop and resume claiming. SIGUSR2
    dumps the stacks.
    """
    flags["queues"] = queues or None
    if reload:
        from taskd.cli.run.reload import anew_on_changes

        settings = session.load(**flags).settings
        if until_empty or settings.processes > 1:
            raise click.UsageError("--reload is for one process without --until-empty")
        anew_on_changes(settings, session.say)
    sys.exit(_to_its_end(_run(session, flags, until_empty=until_empty)))


def _to_its_end(work: Coroutine[Any, Any, int]) -> int:
    """Run the worker on a loop of its own.

    SystemExit in a task that a handler has made stops the loop, as asyncio wants it; the worker
    goes on.
    """
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        main = loop.create_task(work, name="main")
        while not main.done():
            try:
                loop.run_until_complete(main)
            except SystemExit:
                continue
            except KeyboardInterrupt:
                # Once the worker takes the signals itself, this is not Ctrl-C but a handler's own.
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    raise
        return main.result()


async def _run(session: Session, flags: dict[str, Any], *, until_empty: bool) -> int:
    from taskd import events
    from taskd.worker import Notify, ParentWatch, Place

    def reload() -> Settings:
        return session.load(**flags).settings

    loaded = session.load(**flags)
    settings = loaded.settings
    events.configure(
        settings.log_format, settings.log_level, job_lines_per_s=settings.job_lines_per_s
    )
    place = Place.from_environment(os.environ)
    if not place.alone:
        events.bind(process=place.number)
    notify = Notify.from_environment(os.environ, os.getpid(), to_parent=not place.alone)
    if place.alone:
        session.warn(loaded)
    else:
        ParentWatch(place.lifeline)
    try:
        if settings.processes > 1:
            report, code = await _run_processes(settings, notify, reload)
        else:
            report, code = await _run_here(settings, notify, place, reload, until_empty)
    finally:
        notify.close()
    if report.left is not None and place.alone:
        session.say(summary(report.jobs, report.left))
    if not await _nothing_is_left():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader may have left
                stream.flush()
        os._exit(code)
    return code


async def _run_here(
    settings: Settings,
    notify: Notify,
    place: Place,
    reload: Callable[[], Settings],
    until_empty: bool,
) -> tuple[DrainReport, int]:
    """Be the worker; its report and the exit code."""
    from taskd import aclose_default, configure, tasks
    from taskd.client import open_target
    from taskd.core.tasks.registry import BUILT_IN_APP, Registry
    from taskd.worker import StatsServer, Worker
    from taskd.worker.app_import import load_app, queue_limits, with_built_ins

    # Handlers that enqueue mean this worker's database, also when a flag named it.
    configure(settings=settings)
    registry = load_app(settings.app) if settings.app else Registry()
    with_built_ins(registry, tasks.built_in(settings))
    _check_http(settings)
    queue_limits(settings, registry)  # what is wrong with them is said before a database starts
    target = await open_target(settings)
    worker = Worker(
        settings,
        registry,
        target.database,
        app=settings.app or BUILT_IN_APP,
        until_empty=until_empty,
        reload=reload,
        on_close=[tasks.close],
        notify=notify,
        place=place,
        last=True,
    )
    endpoint: Endpoint | None = None
    try:
        if settings.http != "off":
            worker.begin_counting()
            # One of several is asked by its parent.
            if place.alone:
                worker.beside.append(endpoint := _endpoint(worker, target, settings))
            else:
                worker.beside.append(StatsServer(place.asked, worker.snapshot))
        return worker.report, await worker.run()
    finally:
        await aclose_default()
        _leave(target)
        if endpoint is not None:
            endpoint.close()


def _check_http(settings: Settings) -> None:
    """What is wrong with it is said before a database starts."""
    if settings.http != "off":
        from taskd.web import check_installed

        check_installed("--http")
        import taskd.web.endpoint  # noqa: F401 - it takes a while, and no loop has begun to tick


def _endpoint(of: Worker | Processes, target: Target, settings: Settings) -> Endpoint:
    from taskd.web.endpoint import Endpoint

    return Endpoint(of, target.database, settings.http, settings)


async def _run_processes(
    settings: Settings, notify: Notify, reload: Callable[[], Settings]
) -> tuple[DrainReport, int]:
    """Be the parent of several workers; the sum of their reports and the exit code."""
    from taskd.client import open_target
    from taskd.worker import Processes

    _check_http(settings)
    # The same command once more, whatever Python and its options were: the last flag wins.
    command = [sys.executable, *sys.orig_argv[1:], "--processes", "1"]
    target = await open_target(settings)
    processes = Processes(settings, command, notify=notify, reload=reload)
    endpoint: Endpoint | None = None
    try:
        if settings.http != "off":
            processes.beside.append(endpoint := _endpoint(processes, target, settings))
        return processes.report, await processes.run(target.database)
    finally:
        _ignore_stops()
        _leave(target)
        if endpoint is not None:
            endpoint.close()


def _ignore_stops() -> None:
    # What is asked for now has been done. By default such a signal would still kill the process on
    # its last few milliseconds, and whoever sent it twice would see -15 and not the exit code.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _leave(target: Target) -> None:
    # As process 1 of a container our end kills the server: let it stop cleanly first.
    target.close(wait_s=5.0 if os.getpid() == 1 else 0.0)


async def _nothing_is_left() -> bool:
    """Cancel what handlers have left running, and wait a second for it.

    A task that swallows its cancellation, or a thread, would hold the process at its end for as
    long as it likes.
    """
    loop = asyncio.get_running_loop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    left.add(loop.create_task(loop.shutdown_default_executor()))
    _, still = await asyncio.wait(left, timeout=1.0)
    # At its end the interpreter waits for these: ours with a job, and those that a handler started.
    others = (each for each in threading.enumerate() if each is not threading.main_thread())
    return not still and all(each.daemon for each in others)


def summary(jobs: dict[str, int], left: dict[str, int]) -> str:
    """The last line of `--until-empty`: jobs by outcome, attempts that were none, what stays.

    A job may be retried several times, so what is no outcome of a job is counted by attempts.
    """
    parts = [f"{jobs[what]:,} {what}" for what in OUTCOMES if jobs.get(what)]
    tried = [
        f"{count(jobs[what], 'attempt')} {said.format(were='was' if jobs[what] == 1 else 'were')}"
        for what, said in TRIED.items()
        if jobs.get(what)
    ]
    done = "; ".join([", ".join(parts), *tried] if parts else tried) or "nothing to do"
    stays = ", ".join(f"{number:,} {LEFT_WORDS[why]}" for why, number in left.items())
    return f"taskd: {done}" + (f"; left: {stays}" if stays else "; nothing is left")
