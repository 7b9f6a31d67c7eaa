"""Tasks that come with taskd, so that it is useful without writing Python.

They are ordinary tasks: a task of the app that has the same name replaces one.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from taskd.config import Settings
from taskd.core.tasks.task import Task
from taskd.tasks import http_request, run_command, send_email

__all__ = ["built_in", "close", "signatures"]

_closes: list[Callable[[], Awaitable[None]]] = []


def built_in(settings: Settings) -> list[Task[..., Any]]:
    """The tasks that these settings turn on.

    `send_email` as soon as there is an SMTP host, `run_command` with commands that it may run,
    `http_request` with hosts that it may go to.

    Raises:
        ConfigError: a setting of theirs cannot be used, or a library is missing.
    """
    made: list[Task[..., Any]] = []
    if settings.smtp_host is not None:
        mailer = send_email.Mailer(settings)
        _closes.append(mailer.aclose)
        made.append(mailer.task())
    if settings.commands:
        made.append(run_command.task(run_command.allowed(settings)))
    if settings.http_hosts:
        http_request.check_installed()
        requester = http_request.Requester(settings)
        _closes.append(requester.aclose)
        made.append(requester.task())
    return made


def signatures() -> list[Task[..., Any]]:
    """Every built-in task, turned on or not: its name, queue and arguments, for producers.

    Not to be run: these know no mail server, no command and no host.
    """
    return [
        send_email.Mailer(Settings(smtp_sender="taskd@localhost")).task(),
        run_command.task({}),
        http_request.Requester(Settings()).task(),
    ]


async def close() -> None:
    """Let go of what the built-in tasks keep open; a worker calls it when it has stopped."""
    while _closes:
        await _closes.pop()()
