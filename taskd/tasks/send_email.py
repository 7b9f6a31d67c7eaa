"""The built-in task `send_email`: one mail over SMTP.

The server's reply about the mail decides: if it accepts the mail, the job is done; 5xx fails the
job; 4xx, a broken connection or no reply is retried by the task's backoff. Replies about the
connection (greeting, STARTTLS, login) are always retried: the settings can be corrected before the
last attempt.

A mail for several recipients is sent to all of them at once. While the server defers one of them
(4xx), the mail is sent to none: it is aborted before its content, and retried as a whole, so that
no recipient gets it twice. In the job's last attempt, the mail is sent to the recipients that the
server accepts, and the result names the others. To treat recipients separately, enqueue a job for
each.

Delivery is at least once: if the connection breaks after the content was sent, it is unknown
whether the server accepted it. The Message-ID is the same in all attempts of a job, so that mail
servers and readers can recognise duplicates.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
from typing import Annotated, Any

import aiosmtplib
from msgspec import Meta

from taskd.config import Settings
from taskd.core.jobs import backoff as backoffs
from taskd.core.jobs.job import PAYLOAD_BYTES_MAX
from taskd.core.jobs.verdicts import Fail
from taskd.core.tasks.context import Context
from taskd.core.tasks.task import MAX_ATTEMPTS_DEFAULT, Task
from taskd.errors import ConfigError
from taskd.tasks.mail_message import (
    RECIPIENTS_MAX,
    SUBJECT_CHARS_MAX,
    Mail,
    Mailbox,
    compose,
    parse_mailbox,
)
from taskd.tasks.smtp_pool import Connection, Pool

QUEUE = "email"
MAX_ATTEMPTS = MAX_ATTEMPTS_DEFAULT
TIMEOUT_S = 300.0
# Long, because a server that replies late has often accepted the mail, and a retry sends it twice.
CONTENT_TIMEOUT_S = 120.0
# 5xx replies that concern login or encryption, and not the mail; any command can get them.
_ABOUT_US = frozenset({530, 534, 535, 538})

Addresses = (
    Annotated[str, Meta(max_length=1000)]
    | Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=RECIPIENTS_MAX)]
)
Subject = Annotated[str, Meta(max_length=SUBJECT_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=PAYLOAD_BYTES_MAX)]


class MailDeferred(Exception):
    """The server deferred the mail; a later attempt can succeed."""


class Mailer:
    """Makes the task, and keeps its SMTP connections open.

    Raises:
        ConfigError: the sender's address is wrong.
    """

    def __init__(self, settings: Settings) -> None:
        self._sender = _sender(settings)
        self._pool = Pool(settings)

    def task(self, *, backoff: backoffs.Backoff = backoffs.DEFAULT) -> Task[..., Any]:
        """Return the task with this backoff."""

        async def send_email(
            ctx: Context,
            to: Addresses,
            subject: Subject,
            body: Text,
            html: Text | None = None,
            cc: Addresses | None = None,
            bcc: Addresses | None = None,
            reply_to: str | None = None,
            headers: dict[str, str] | None = None,
        ) -> dict[str, Any]:
            """Send one mail.

            Args:
                ctx: the attempt.
                to: one address (`ada@example.org`, `Ada Lovelace <ada@example.org>`) or a list.
                subject: at most 998 characters.
                body: the text.
                html: the text as HTML, for mail programs that show it.
                cc: further recipients, whom the mail names.
                bcc: further recipients, whom the mail does not name.
                reply_to: address for replies.
                headers: further headers by name.

            Returns:
                `message_id`, and `refused`: the server's answer by address, for recipients that it
                    did not accept.

            Raises:
                Fail: the mail cannot be sent, or the server refused it permanently.
                MailDeferred, aiosmtplib.SMTPException, OSError: a retry can succeed.
            """
            mail = compose(
                sender=self._sender,
                message_id=self._message_id(ctx, to, subject, body),
                to=to,
                subject=subject,
                body=body,
                html=html,
                cc=cc,
                bcc=bcc,
                reply_to=reply_to,
                headers=headers,
            )
            refused = await self._send(mail, last=ctx.attempt >= ctx.max_attempts)
            return {"message_id": mail.message_id, "refused": refused}

        return Task(
            send_email,
            queue=QUEUE,
            max_attempts=MAX_ATTEMPTS,
            timeout_s=TIMEOUT_S,
            backoff=backoff,
        )

    async def aclose(self) -> None:
        """Close the open connections."""
        await self._pool.aclose()

    async def _send(self, mail: Mail, *, last: bool) -> dict[str, str]:
        async with self._pool.connection() as connection:
            refused = await _deliver(connection, mail, last=last)
        if refused is None:
            async with self._pool.connection(fresh=True) as connection:
                refused = await _deliver(connection, mail, last=last)
        return refused or {}

    def _message_id(self, ctx: Context, *content: str | list[str]) -> str:
        # Databases that were restored from one dump use the same idempotency keys, so the content
        # of the mail is hashed as well.
        made_of = repr((ctx.idempotency_key, *content)).encode("utf-8", "backslashreplace")
        digest = hashlib.sha256(made_of).hexdigest()[:32]
        return f"<{digest}@{self._sender.address.rpartition('@')[2]}>"


async def _deliver(connection: Connection, mail: Mail, *, last: bool) -> dict[str, str] | None:
    """Send a mail over a connection.

    Returns:
        The refused recipients, with the replies. None if an idle connection turned out to be broken
        at its first command: nothing was sent, so the caller tries again within the same attempt.

    Raises:
        Fail, MailDeferred, aiosmtplib.SMTPException: the mail was not accepted.
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
    """Raise a cancellation that asyncio.wait_for() has dropped, before the content is sent.

    Before Python 3.12, wait_for() drops a cancellation that arrives while its future ends, and
    aiosmtplib calls it at every step.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _name_recipients(smtp: aiosmtplib.SMTP, mail: Mail, *, last: bool) -> dict[str, str]:
    """Name the recipients to the server; return the refused recipients, with the replies.

    Raises:
        Fail: the server refused all recipients.
        MailDeferred: the server deferred a recipient, and this is not the last attempt; or it
            accepted no recipient.
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


def _sender(settings: Settings) -> Mailbox:
    text = settings.smtp_sender or f"taskd@{socket.gethostname()}"
    try:
        return parse_mailbox(text, "smtp_sender")
    except Fail as error:
        raise ConfigError(f"{error.reason}; set TASKD_SMTP_SENDER to an address") from None
