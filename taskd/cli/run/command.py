"""`taskd run`: the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from taskd.cli import EXIT_CODES, EXIT_INTERRUPTED
from taskd.cli.run.early_signals import EarlySignals, StoppedEarly
from taskd.cli.shared.output import count
from taskd.cli.shared.session import OfSetting, Session, pass_session
from taskd.cli.shared.windows import refuse_windows

if TYPE_CHECKING:
    from taskd.client import Target
    from taskd.config import Settings
    from taskd.core.tasks.registry import Registry
    from taskd.web.endpoint import Endpoint
    from taskd.worker import DrainReport, Notify, Processes, ProcessIndex, Worker

LEFT_WORDS = {
    "future": "scheduled for later",
    "paused": "in paused queues",
    "unknown": "of tasks that this worker does not know",
    "unfit": "with arguments that do not fit",
    "blocked": "waiting for other jobs",
    "later_retries": "due again in more than 60 s",
    "still_run": "whose abandoned attempts still run in this worker",
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
# Short options of the workers of other job queues, such as Celery.
OTHER_WORDS = {"-A": "--app", "-Q": "--queue", "-q": "--queue", "-c": "--concurrency"}
EXITS = "Exit codes: " + "; ".join(
    f"{code} {EXIT_CODES[code]}" for code in (0, 1, 2, 69, 75, 77, 78, EXIT_INTERRUPTED)
)


class RunCommand(click.Command):
    """A command that suggests its own option for an option of another job queue's worker."""

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
    callback=lambda ctx, option, given: OfSetting("queues").convert(list(given), option, ctx),
    metavar="NAME[:N]",
    help="A queue to serve, with its concurrency if given; or a pattern of queues, also of new "
    "ones: 'tenant-*'. Repeatable. By default all queues of the app.",
)
@click.option("--app", metavar="MODULE", help="The module whose @task functions run.")
@click.option(
    "--app-name",
    type=OfSetting("app_name"),
    metavar="NAME",
    help="The name of the app in the database; by default its project and the module, such as "
    "billing:worker.",
)
@click.option(
    "--name",
    type=OfSetting("name"),
    metavar="NAME",
    help="A name of the worker, shown beside its host and pid.",
)
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
    "--max-running",
    type=OfSetting("max_running"),
    metavar="N",
    help="Concurrent attempts of all queues together, per process.",
)
@click.option(
    "--threads",
    type=OfSetting("threads"),
    metavar="N",
    help="Threads for plain `def` handlers, per process.",
)
@click.option(
    "--max-lost-threads",
    type=OfSetting("max_lost_threads"),
    metavar="N",
    help="Drain, and end with exit code 75, when this many threads are lost to functions that "
    "ignore their timeout. The supervisor of the process starts it again.",
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
    help="For development: drain and restart when a .py file of the app, or below the current "
    "directory, changes.",
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
    refuse_windows("run")
    flags["queues"] = queues or None
    signals = EarlySignals()
    try:
        if reload:
            _reload_on_changes(session, flags, signals, until_empty=until_empty)
        else:
            signals.install()
        begun = _begin(session, flags)
        signals.end_watch()
        code = _to_its_end(_run(session, begun, signals, until_empty=until_empty), signals)
    except StoppedEarly:
        # Do not end the watch thread of `signals`: if a thread of the app prevents the exit, the
        # watch thread ends this process.
        _say_stopped(session, signals)
        code = 0
    except KeyboardInterrupt:
        raise  # and do not end the watch thread here either
    except BaseException:
        signals.end_watch()
        raise
    sys.exit(code)


def _reload_on_changes(
    session: Session, flags: dict[str, Any], signals: EarlySignals, *, until_empty: bool
) -> None:
    """Become the parent process, which restarts workers; return only in the worker processes."""
    from taskd.cli.run.reload import anew_on_changes

    settings = session.load(**flags).settings
    if until_empty or settings.processes > 1:
        raise click.UsageError("--reload works only with one process and without --until-empty")
    anew_on_changes(settings, session.echo, signals.install)


def _say_stopped(session: Session, signals: EarlySignals) -> None:
    session.echo(f"taskd: {signals.stopped_by} stopped the worker before it had claimed a job")


def _to_its_end(work: Coroutine[Any, Any, int], signals: EarlySignals) -> int:
    """Run the worker on its own event loop, and return the exit code.

    asyncio stops the loop if a task of a handler raises SystemExit, and code of the app can call
    loop.stop(). In both cases, this function runs the loop again.
    """
    import uvloop

    from taskd import events
    from taskd.errors import TaskdError
    from taskd.worker.services.own_tasks import OwnTask

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop = runner.get_loop()
        main = OwnTask(work, loop=loop, name="main")
        while not main.done():
            try:
                loop.run_until_complete(main)
            except SystemExit:
                continue
            except RuntimeError:
                if main.done():
                    raise
                # Code of the app has called loop.stop() outside of a handler.
                events.loop_stopped()
            except asyncio.CancelledError as error:
                if not signals.stopped_by:
                    raise TaskdError(
                        "code of the app has cancelled all asyncio tasks while the worker stopped"
                    ) from error
                return 0
            except KeyboardInterrupt:
                # Once the worker handles SIGINT itself, only the code of a job can have raised
                # KeyboardInterrupt.
                if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                    raise
        return main.result()


@dataclass(frozen=True, slots=True)
class _Begun:
    """The state of a worker process before its event loop starts.

    Attributes:
        registry: the tasks of the app; None in the parent of several processes.
    """

    settings: Settings
    process_index: ProcessIndex
    notify: Notify
    registry: Registry | None
    reload: Callable[[], Settings]


def _begin(session: Session, flags: dict[str, Any]) -> _Begun:
    """Read the settings, begin the log, and import the app.

    The app is imported while no event loop runs, so that it can use asyncio.run() and
    `enqueue_sync`, as in any other program.
    """
    from taskd import events
    from taskd.config.environment_block import hide_environment
    from taskd.worker import Notify, ParentWatch, ProcessIndex

    loaded = session.load(**flags)
    settings = loaded.settings
    if settings.commands:
        # The programs that run_command starts must not see the worker's variables.
        hide_environment()
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
    _check_http(settings)
    registry = _imported(settings) if settings.processes == 1 else None
    return _Begun(settings, process_index, notify, registry, lambda: session.load(**flags).settings)


def _imported(settings: Settings) -> Registry:
    """Return the tasks of the app and the built-in tasks, and check the setting `queues`."""
    from taskd import configure, tasks
    from taskd.core.tasks.registry import Registry
    from taskd.worker.starting.app_import import load_app, with_built_ins
    from taskd.worker.starting.served_queues import queue_limits

    # Handlers enqueue into this worker's database, even if only the command line names the
    # database.
    configure(settings=settings)
    registry = load_app(settings.app) if settings.app else Registry()
    with_built_ins(registry, tasks.built_in(settings))
    queue_limits(settings, registry)  # check the limits before the embedded PostgreSQL starts
    return registry


async def _run(session: Session, begun: _Begun, signals: EarlySignals, *, until_empty: bool) -> int:
    main = asyncio.current_task()
    assert main is not None
    signals.cancel_at_stop(main)
    try:
        if begun.registry is None:
            report, code = await _run_processes(begun)
        else:
            report, code = await _run_here(begun, begun.registry, until_empty)
    except asyncio.CancelledError:
        if signals.stopped_by:
            _say_stopped(session, signals)
        raise
    finally:
        begun.notify.close()
    if report.left is not None and begun.process_index.alone:
        session.echo(summary(report.jobs, report.left))
    if not await _nothing_is_left():
        for stream in (sys.stdout, sys.stderr):
            with suppress(AttributeError, OSError, ValueError):  # a pipe without a reader
                stream.flush()
        os._exit(code)
    return code


async def _run_here(
    begun: _Begun, registry: Registry, until_empty: bool
) -> tuple[DrainReport, int]:
    """Run one worker; return its report and exit code."""
    from taskd import aclose_default, tasks
    from taskd.client import open_target
    from taskd.core.tasks.registry import BUILT_IN_APP
    from taskd.worker import StatsServer, Worker
    from taskd.worker.starting.app_name import default_name

    settings, process_index = begun.settings, begun.process_index
    target = await open_target(settings)
    worker = Worker(
        settings,
        registry,
        target.database,
        app=(settings.app_name or default_name(settings.app)) if settings.app else BUILT_IN_APP,
        until_empty=until_empty,
        reload=begun.reload,
        on_close=[tasks.close],
        notify=begun.notify,
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
    """Before the embedded PostgreSQL starts, check that the web server of --http is installed."""
    if settings.http != "off":
        from taskd.web import check_installed

        check_installed("--http")
        # Import the endpoint now: a slow import would block the event loop of a running worker.
        import taskd.web.endpoint  # noqa: F401


def _endpoint(of: Worker | Processes, target: Target, settings: Settings) -> Endpoint:
    from taskd.web.endpoint import Endpoint

    return Endpoint(of, target.database, settings.http, settings)


async def _run_processes(begun: _Begun) -> tuple[DrainReport, int]:
    """Run the parent of several workers; return the sum of their reports and the exit code."""
    from taskd.client import open_target
    from taskd.worker import Processes

    settings = begun.settings
    # Each child runs this command with the same Python and options; --processes 1 overrides the
    # number of processes.
    command = [sys.executable, *sys.orig_argv[1:], "--processes", "1"]
    target = await open_target(settings)
    processes = Processes(settings, command, notify=begun.notify, reload=begun.reload)
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

    Attempts that did not end their job are counted separately, because a job can have several such
    attempts.
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
