"""The options that choose jobs: `jobs list` and all commands that act on many jobs take them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any

import click

from taskd.cli.shared.session import DURATION, QUEUE, SINCE
from taskd.core.jobs.job import FINISHED, LIVE, JobState
from taskd.core.jobs.job_filter import JobFilter
from taskd.errors import InvalidJob

PAIRS = "KEY=TEXT | KEY:=JSON"


def state_choice(*states: JobState) -> click.Choice[str]:
    """Return the type of an option for one of these states."""
    return click.Choice([state.value for state in JobState if state in states])


def filter_options(*states: JobState) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add the options that choose jobs, for a command about jobs in these states."""
    live, finished = bool(LIVE & {*states}), bool(FINISHED & {*states})
    moments = ["were enqueued"] * live + ["ended"] * finished
    each = " (live jobs) or ".join(moments) + " (finished jobs)" * (live and finished)
    since = "Jobs that {} after this time, or within this duration: 2026-12-01, 2h."
    options = [
        click.option("--task", help="Jobs of this task."),
        click.option("--queue", type=QUEUE, help="Jobs of this queue."),
        click.option(
            "--state",
            "states",
            type=state_choice(*states),
            multiple=True,
            help="Jobs in this state; repeatable.",
        ),
        click.option(
            "--error",
            help="Jobs whose last error or reason contains this text; *, # and … match any text.",
        ),
        click.option("--since", type=SINCE, help=since.format(each)),
        click.option(
            "--older-than",
            "older_than_s",
            type=DURATION,
            help=f"Jobs that {each} longer ago than this.",
        ),
        *_running_for(states),
        *_retrying(states),
        click.option(
            "--where-arg",
            "where_args",
            metavar=PAIRS,
            multiple=True,
            help="Jobs with this argument; repeatable.",
        ),
        click.option(
            "--metadata",
            metavar=PAIRS,
            multiple=True,
            help="Jobs with this value in their metadata, such as a tag; repeatable.",
        ),
        click.option(
            "--worker",
            metavar="NAME | ID",
            help="Jobs whose last attempt this worker, or a worker with this name, runs or ran.",
        ),
        click.option("--workflow", metavar="NAME | ID", help="Jobs of this workflow or pipeline."),
        click.option("--schedule", help="Jobs that this schedule has enqueued."),
        click.option(
            "--late",
            is_flag=True,
            help="Jobs of schedules that have not ended by their ends_by, or have expired.",
        ),
        click.option("--unique-key", metavar="KEY", help="Jobs with this unique key."),
    ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def _running_for(states: tuple[JobState, ...]) -> list[Callable[[Any], Any]]:
    running = JobState.RUNNING in states
    if not running and not FINISHED & {*states}:
        return []
    what = "Running jobs that were claimed longer ago than this"
    if not running:
        what = "Jobs whose last attempt took longer than this"
    elif FINISHED & {*states}:
        what += "; with --state, also finished jobs whose last attempt took longer"
    return [click.option("--running-for", "running_for_s", type=DURATION, help=f"{what}.")]


def _retrying(states: tuple[JobState, ...]) -> list[Callable[[Any], Any]]:
    if JobState.SCHEDULED not in states:
        return []
    what = "Jobs that wait for another attempt after a failed one; or all other jobs."
    return [click.option("--retrying/--not-retrying", default=None, help=what)]


def filter_of(options: dict[str, Any]) -> JobFilter:
    """Take the options of filter_options() out of `options`, and return the filter.

    Raises:
        UsageError: a value of an option is not allowed.
        InvalidArgs: a value is not JSON.
    """
    from taskd.cli.shared.arguments import arguments

    since = options.pop("since")
    given: dict[str, Any] = {
        "since" if isinstance(since, datetime) else "since_s": since,
        "args": arguments(options.pop("where_args"), None),
        "metadata": arguments(options.pop("metadata"), None),
    }
    for name in ("worker", "workflow"):
        value = options.pop(name)
        given[name] = int(value) if value and value.isdecimal() else value
    for name in (
        *("task", "queue", "states", "error", "older_than_s"),
        *("schedule", "late", "unique_key"),
    ):
        given[name] = options.pop(name)
    # Not all commands have these options.
    for name in ("running_for_s", "retrying"):
        given[name] = options.pop(name, None)
    try:
        return JobFilter(**given)
    except InvalidJob as error:
        raise click.UsageError(str(error)) from None
