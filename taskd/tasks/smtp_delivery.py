"""Deliver mails over SMTP; needs the extra `mail`. send_email.py says how replies are treated."""

from __future__ import annotations

import asyncio

import aiosmtplib

from taskd.config import Settings
from taskd.core.jobs.verdicts import Fail
from taskd.tasks.mail_message import Mail, MailDeferred
from taskd.tasks.smtp_pool import Connection, Pool

# Long, because a server that replies late has often accepted the mail, and a retry sends it twice.
CONTENT_TIMEOUT_S = 120.0
# 5xx replies that concern login or encryption, and not the mail; any command can get them.
_ABOUT_US = frozenset({530, 534, 535, 538})


class Delivery:
    """Sends mails over a pool of connections."""

    def __init__(self, settings: Settings) -> None:
        self._pool = Pool(settings)

    async def send(self, mail: Mail, *, last: bool) -> dict[str, str]:
        """Send a mail; return the recipients that the server did not accept, with its replies.

        Args:
            last: whether this is the last attempt of the job.

        Raises:
            Fail, MailDeferred: the server did not accept the mail.
            aiosmtplib.SMTPException, OSError: the server cannot be reached or used, or it is
                unknown whether it accepted the mail.
        """
        async with self._pool.connection() as connection:
            refused = await _deliver(connection, mail, last=last)
        if refused is None:
            async with self._pool.connection(fresh=True) as connection:
                refused = await _deliver(connection, mail, last=last)
        return refused or {}

    async def aclose(self) -> None:
        """Close the open connections."""
        await self._pool.aclose()


async def _deliver(connection: Connection, mail: Mail, *, last: bool) -> dict[str, str] | None:
    """Send a mail over a connection.

    Returns:
        The recipients that the server did not accept, with its replies. None if the first command
        failed on a reused connection, which is often broken. The content was then not sent, so the
        caller tries again over a new connection, within the same attempt.

    Raises:
        Fail, MailDeferred: the server did not accept the mail.
        aiosmtplib.SMTPException: the connection failed. If this happened after the content was
            sent, it is unknown whether the server accepted the mail.
    """
    connection.clean = False
    smtp = connection.smtp
    try:
        await smtp.mail(mail.sender)
    except aiosmtplib.SMTPException as error:
        if connection.reused:
            return None
        if isinstance(error, aiosmtplib.SMTPSenderRefused):
            await _call_off(connection)
            raise _error_of(error, f"the sender {mail.sender}") from error
        raise
    try:
        refused = await _name_recipients(smtp, mail, last=last)
        _heed_cancellation()
        await smtp.data(mail.content, timeout=CONTENT_TIMEOUT_S)
    except aiosmtplib.SMTPDataError as error:
        await _call_off(connection)
        raise _error_of(error, "the mail") from error
    except (MailDeferred, Fail):
        await _call_off(connection)
        raise
    connection.clean = True
    return refused


def _heed_cancellation() -> None:
    """Before the content is sent, raise a cancellation that asyncio.wait_for() has dropped.

    Before Python 3.12, wait_for() drops a cancellation that arrives while its future ends, and
    aiosmtplib calls it at every step.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _name_recipients(smtp: aiosmtplib.SMTP, mail: Mail, *, last: bool) -> dict[str, str]:
    """Name the recipients to the server; return those that it did not accept, with its replies.

    Raises:
        Fail: the server refused every recipient permanently.
        MailDeferred: the server deferred a recipient. In the last attempt, this is raised only if
            the server accepted no recipient.
    """
    failed: dict[str, str] = {}
    deferred: dict[str, str] = {}
    for recipient in mail.recipients:
        try:
            await smtp.rcpt(recipient)
        except aiosmtplib.SMTPRecipientRefused as error:
            where = failed if _is_final(error.code) else deferred
            where[recipient] = f"{error.code} {error.message}"
    nobody = len(failed) + len(deferred) == len(mail.recipients)
    if deferred and (nobody or not last):
        others = "" if nobody else "; no recipient has got the mail yet"
        raise MailDeferred(f"the server defers {_listed(deferred)}{others}")
    if nobody:
        raise Fail(f"the server refuses {_listed(failed)}")
    return failed | deferred


async def _call_off(connection: Connection) -> None:
    """Abort the mail, so that the connection can be used for another mail."""
    try:
        await connection.smtp.rset()
    except aiosmtplib.SMTPException:
        return
    connection.clean = True


def _error_of(error: aiosmtplib.SMTPResponseException, what: str) -> Exception:
    """Return the exception for a reply: Fail if it is permanent, else MailDeferred."""
    answer = f"{what}: {error.code} {error.message}"
    if _is_final(error.code):
        return Fail(f"the server refuses {answer}")
    return MailDeferred(f"the server defers {answer}")


def _is_final(code: int) -> bool:
    return 500 <= code <= 599 and code not in _ABOUT_US


def _listed(answers: dict[str, str]) -> str:
    return "; ".join(f"{address}: {answer}" for address, answer in answers.items())
