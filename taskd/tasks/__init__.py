"""Built-in tasks, so that taskd is useful without writing Python.

They are ordinary tasks: a task of the app replaces the built-in task of the same name. This package
imports core, config and errors; it imports the libraries of extras at their first use. The command
line imports this package.
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
    """Return the tasks that these settings enable.

    An SMTP host enables `send_email`, allowed commands enable `run_command`, and allowed hosts
    enable `http_request`.

    Raises:
        ConfigError: a setting of these tasks cannot be used, or a library is missing.
    """
    made: list[Task[..., Any]] = []
    if settings.smtp_host is not None:
        send_email.check_installed()
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
    """Return all built-in tasks, enabled or not, for producers: their names, queues and arguments.

    They cannot run, because they have no mail server, no commands and no hosts.
    """
    return [
        send_email.Mailer(Settings(smtp_sender="taskd@localhost")).task(),
        run_command.task({}),
        http_request.Requester(Settings()).task(),
    ]


async def close() -> None:
    """Close the connections of the built-in tasks; a worker calls this when it has stopped."""
    while _closes:
        await _closes.pop()()
