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
    from taskd.worker import DrainReport, Notify, Processes, ProcessIndex, Worker

LEFT_WORDS = {
    "future": "scheduled for later",
    "paused": "in paused queues",
    "unknown": "of tasks that this worker does not know",
    "blocked": "waiting for other jobs",
    "later_retries": "due again in more than 60 s",
}
OUTCOMES = ("done", "failed", "cancelled")
# Without `released`: these jobs were returned to their queues before they ran.
TRIED = {
    "retried": "failed and {were} retried",
    "snoozed": "snoozed by their handlers",
    "interrupted": "{were} interrupted and released",
    "abandoned": "{were} abandoned",
    "lost": "ended, but the outcome was not written (see job.lost and job.deleted in the log)",
}
CONCURRENCY = OfSetting("concurrency")
# Short options of other workers.
OTHER_WORDS = {"-A": "--app", "-Q": "--queue", "-q": "--queue", "-c": "--concurrency"}
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


class RunCommand(click.Command):
    """A command that explains the words with which other workers name their app and queues."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does.

        Raises:
            click.UsageError: an option does not exist, or an argument belongs to no option.
        """
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            meant = OTHER_WORDS.get(error.option_name)
            if meant is None:
                raise
            text = f"No such option {error.option_name!r}. Did you mean {meant!r}?"
            raise click.UsageError(text, ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        if ctx.args:
            first = ctx.args[0]
            ctx.fail(f"unexpected argument {first!r}. Did you mean `--app {first}`?")
        return super().invoke(ctx)


@click.command(cls=RunCommand, epilog=EXITS, context_settings={"allow_extra_args": True})
@click.option(
    "--queue",
    "queues",
    multiple=True,
    callback=_check_queues,
    metavar="NAME[:N]",
    help="A queue to serve, with its concurrency if given. Repeatable. By default "
    "all queues of the app.",
)
@click.option("--app", metavar="MODULE", help="The module whose @task functions run.")
@click.option(
    "--processes",
    type=OfSetting("processes"),
    metavar="N",
    help="Worker processes, 1 by default. The concurrency of a queue and --threads apply to "
    "each process.",
)
@click.option(
    "--concurrency",
    type=CONCURRENCY,
    metavar="N",
    help="Concurrent attempts per queue and process.",
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
    help="How long a drain waits for running attempts.",
)
@click.option(
    "--http",
    type=OfSetting("http"),
    metavar="[HOST:]PORT",
    help="Serve /livez, /readyz and /metrics at this address; without a host, on 127.0.0.1. "
    "Needs the extra `web`.",
)
@click.option(
    "--until-empty",
    is_flag=True,
    help="Exit when no job of the queues runs, can run now, or is due again within 60 s. "
    "Exit code 1: a job failed.",
)
@click.option(
    "--reload",
    is_flag=True,
    help="For development: drain and restart when a .py file below the current directory "
    "or of the app changes.",
)
@click.option(
    "--log-format",
    type=click.Choice(["auto", "console", "json"]),
    default=None,
    help="Format of the log; auto: console on a terminal, json otherwise.",
)
@pass_session
def run(
    session: Session, /, queues: tuple[str, ...], until_empty: bool, reload: bool, **flags: Any
) -> None:
    """Run jobs until stopped.

    SIGTERM or Ctrl-C drains: the worker claims nothing more, lets running attempts finish, and
    releases unstarted jobs. A second signal cancels the running attempts, a third abandons them.
    SIGQUIT dumps the stacks and abandons the running attempts immediately. SIGHUP reads the
    settings again. SIGTSTP and SIGCONT pause and resume claiming. SIGUSR2 dumps the stacks.
    """
    flags["queues"] = queues or None
    if reload:
        from taskd.cli.run.reload import anew_on_changes

        settings = session.load(**flags).settings
        if until_empty or settings.processes > 1:
            raise click.UsageError("--reload works only with one process and without --until-empty")
        anew_on_changes(settings, session.echo)
    sys.exit(_to_its_end(_run(session, flags, until_empty=until_empty)))


def _to_its_end(work: Coroutine[Any, Any, int]) -> int:
    """Run the worker on its own event loop, and return the exit code.

    If an asyncio task of a handler raises SystemExit, asyncio stops the loop. This function then
    runs the loop again.
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
                # Once the worker handles SIGINT itself, only the code of a job can have raised
                # KeyboardInterrupt.
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    raise
        return main.result()


async def _run(session: Session, flags: dict[str, Any], *, until_empty: bool) -> int:
    from taskd import events
    from taskd.worker import Notify, ParentWatch, ProcessIndex

    def reload() -> Settings:
        return session.load(**flags).settings

    loaded = session.load(**flags)
    settings = loaded.settings
    events.configure(
        settings.log_format, settings.log_level, job_lines_per_s=settings.job_lines_per_s
    )
    process_index = ProcessIndex.from_environment(os.environ)
    if not process_index.alone:
        events.bind(process=process_index.number)
    notify = Notify.from_environment(os.environ, os.getpid(), to_parent=not process_index.alone)
    if process_index.alone:
        session.warn(loaded)
    else:
        ParentWatch(process_index.parent_pipe)
    try:
        if settings.processes > 1:
            report, code = await _run_processes(settings, notify, reload)
        else:
            report, code = await _run_here(settings, notify, process_index, reload, until_empty)
    finally:
        notify.close()
    if report.left is not None and process_index.alone:
        session.echo(summary(report.jobs, report.left))
    if not await _nothing_is_left():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # the reader of a pipe can have ended
                stream.flush()
        os._exit(code)
    return code


async def _run_here(
    settings: Settings,
    notify: Notify,
    process_index: ProcessIndex,
    reload: Callable[[], Settings],
    until_empty: bool,
) -> tuple[DrainReport, int]:
    """Run one worker; return its report and exit code."""
    from taskd import aclose_default, configure, tasks
    from taskd.client import open_target
    from taskd.core.tasks.registry import BUILT_IN_APP, Registry
    from taskd.worker import StatsServer, Worker
    from taskd.worker.starting.app_import import load_app, queue_limits, with_built_ins

    # Handlers enqueue into this worker's database, also if it was chosen on the command line.
    configure(settings=settings)
    registry = load_app(settings.app) if settings.app else Registry()
    with_built_ins(registry, tasks.built_in(settings))
    _check_http(settings)
    queue_limits(settings, registry)  # check the limits before the embedded PostgreSQL starts
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
        process_index=process_index,
        last=True,
    )
    endpoint: Endpoint | None = None
    try:
        if settings.http != "off":
            worker.begin_counting()
            # The parent asks a child of --processes for its metrics, so a child serves no HTTP.
            if process_index.alone:
                worker.beside.append(endpoint := _endpoint(worker, target, settings))
            else:
                worker.beside.append(StatsServer(process_index.stats_socket, worker.status))
        return worker.report, await worker.run()
    finally:
        await aclose_default()
        _leave(target)
        if endpoint is not None:
            endpoint.close()


def _check_http(settings: Settings) -> None:
    """With --http, check before the embedded PostgreSQL starts that the web server is installed."""
    if settings.http != "off":
        from taskd.web import check_installed

        check_installed("--http")
        # Import it now: a slow import would block the event loop of a running worker.
        import taskd.web.endpoint  # noqa: F401


def _endpoint(of: Worker | Processes, target: Target, settings: Settings) -> Endpoint:
    from taskd.web.endpoint import Endpoint

    return Endpoint(of, target.database, settings.http, settings)


async def _run_processes(
    settings: Settings, notify: Notify, reload: Callable[[], Settings]
) -> tuple[DrainReport, int]:
    """Run the parent of several workers; return the sum of their reports and the exit code."""
    from taskd.client import open_target
    from taskd.worker import Processes

    _check_http(settings)
    # Each child runs this command with the same Python and options, and an overriding --processes.
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
    # The worker has stopped, so further signals are ignored. With the default action, a second
    # SIGTERM would kill the process in its last milliseconds, with exit code -15.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _leave(target: Target) -> None:
    # If this is process 1 of a container, its exit kills the embedded server, so give the server
    # time to stop.
    target.close(wait_s=5.0 if os.getpid() == 1 else 0.0)


async def _nothing_is_left() -> bool:
    """Cancel the asyncio tasks that handlers have left running, and wait one second for them.

    Returns:
        Whether Python can exit now: no task and no thread is left that would delay the exit.
    """
    loop = asyncio.get_running_loop()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    left.add(loop.create_task(loop.shutdown_default_executor()))
    _, still = await asyncio.wait(left, timeout=1.0)
    # At its exit, Python waits for all non-daemon threads, of handlers and of the app.
    others = (each for each in threading.enumerate() if each is not threading.main_thread())
    return not still and all(each.daemon for each in others)


def summary(jobs: dict[str, int], left: dict[str, int]) -> str:
    """Return the last line of `--until-empty`: jobs by outcome, other attempts, remaining jobs.

    Attempts that did not end their job are counted separately, because a job can have several.
    """
    parts = [f"{jobs[what]:,} {what}" for what in OUTCOMES if jobs.get(what)]
    tried = [
        f"{count(jobs[what], 'attempt')} {text.format(were='was' if jobs[what] == 1 else 'were')}"
        for what, text in TRIED.items()
        if jobs.get(what)
    ]
    done = "; ".join([", ".join(parts), *tried] if parts else tried) or "nothing to do"
    stays = ", ".join(f"{number:,} {LEFT_WORDS[why]}" for why, number in left.items())
    return f"taskd: {done}" + (f"; left: {stays}" if stays else "; nothing is left")
