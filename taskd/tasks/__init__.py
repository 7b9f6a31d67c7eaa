"""Tasks that come with taskd, so that it is useful without writing Python.

They are ordinary tasks: a task of the app that has the same name replaces one.
"""

from __future__ import annotations

from typing import Any

from taskd.config import Settings
from taskd.core.task import Task
from taskd.tasks import send_email

__all__ = ["built_in", "close", "signatures"]

_mailers: list[send_email.Mailer] = []


def built_in(settings: Settings) -> list[Task[..., Any]]:
    """The tasks that these settings turn on: `send_email` as soon as there is an SMTP host.

    Raises:
        ConfigError: the sender's address is wrong.
    """
    if settings.smtp_host is None:
        return []
    mailer = send_email.Mailer(settings)
    _mailers.append(mailer)
    return [mailer.task()]


def signatures() -> list[Task[..., Any]]:
    """Every built-in task, turned on or not: its name, queue and arguments, for producers.

    Not to be run: these know no mail server.
    """
    return [send_email.Mailer(Settings(smtp_sender="taskd@localhost")).task()]


async def close() -> None:
    """Let go of what the built-in tasks keep open; a worker calls it when it has stopped."""
    while _mailers:
        await _mailers.pop().aclose()
