"""`taskd run`: the worker."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import click

from taskd.cli.session import DURATION, Session, pass_session
from taskd.core.job import check_queue
from taskd.errors import ConfigError, InvalidJob

LEFT_WORDS = {
    "future": "scheduled for later",
    "paused": "in paused queues",
    "unknown": "of tasks that this worker does not know",
    "later_retries": "retried in more than 60 s",
}


def _check_queues(
    _ctx: click.Context, _option: click.Parameter, queues: tuple[str, ...]
) -> tuple[str, ...]:
    for queue in queues:
        try:
            check_queue(queue.partition(":")[0])
        except InvalidJob as error:
            raise click.BadParameter(str(error)) from None
    return queues


@click.command()
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
    "--concurrency", type=int, metavar="N", help="Attempts that run at the same time, per queue."
)
@click.option("--threads", type=int, metavar="N", help="Threads for plain `def` handlers.")
@click.option(
    "--drain",
    "drain_s",
    type=DURATION,
    metavar="TIME",
    help="How long a stop lets running attempts end.",
)
@click.option(
    "--until-empty",
    is_flag=True,
    help="End when the queues hold nothing to run soon: 0 if no job failed, else 1.",
)
@click.option("--log-format", type=click.Choice(["auto", "console", "json"]), default=None)
@pass_session
def run(session: Session, /, queues: tuple[str, ...], until_empty: bool, **flags: Any) -> None:
    r"""Run jobs until stopped.

    SIGTERM or Ctrl-C drains: nothing new is claimed, running attempts may end, unstarted jobs go
    back. A second one cancels what runs, a third abandons it. SIGQUIT dumps the stacks and
    leaves. SIGHUP reads the settings again. SIGTSTP and SIGCONT stop and resume claiming. SIGUSR2
    dumps the stacks.

    \b
    Exit codes: 0 drained; 1 a job failed (--until-empty); 69 database unreachable;
    75 attempts were abandoned; 77 not permitted; 78 bad configuration or schema.
    """
    flags["queues"] = queues or None
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
    from taskd import aclose_default, configure, events, tasks
    from taskd.client import open_target
    from taskd.core.registry import Registry
    from taskd.worker import Worker
    from taskd.worker.app import BUILT_IN_APP, load_app, with_built_ins

    settings = session.load(**flags).settings
    events.configure(
        settings.log_format, settings.log_level, job_lines_per_s=settings.job_lines_per_s
    )
    # Handlers that enqueue mean this worker's database, also when a flag named it.
    configure(settings=settings)
    registry = load_app(settings.app) if settings.app else Registry()
    with_built_ins(registry, tasks.built_in(settings))
    if not len(registry):
        raise ConfigError(
            "there are no tasks to run: name your module with --app (or TASKD_APP), or set "
            "TASKD_SMTP_HOST to turn the built-in send_email on"
        )
    target = await open_target(settings)
    worker = Worker(
        settings,
        registry,
        target.database,
        app=settings.app or BUILT_IN_APP,
        until_empty=until_empty,
        reload=lambda: session.load(**flags).settings,
        on_close=[tasks.close],
    )
    try:
        code = await worker.run()
    finally:
        await aclose_default()
        # As process 1 of a container our end kills the server: let it stop cleanly first.
        target.close(wait_s=5.0 if os.getpid() == 1 else 0.0)
    if worker.report.left is not None:
        session.say(summary(worker.report.jobs, worker.report.left))
    if not await _nothing_is_left():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader may have left
                stream.flush()
        os._exit(code)
    return code


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
    threads = any(thread.name.startswith("taskd-job") for thread in threading.enumerate())
    return not still and not threads


def summary(jobs: dict[str, int], left: dict[str, int]) -> str:
    """The last line of `--until-empty`: what was done, what stays and why."""
    done = (
        ", ".join(f"{count:,} {what}" for what, count in jobs.items() if count) or "nothing to do"
    )
    stays = ", ".join(f"{count:,} {LEFT_WORDS[why]}" for why, count in left.items())
    return f"taskd: {done}" + (f"; left: {stays}" if stays else "; nothing is left")
