"""The built-in task `send_email`: one mail over SMTP.

If the server accepts the mail, the job is done. A 5xx reply about the mail fails the job. After a
4xx reply, a broken connection or no reply, the job is retried by the task's backoff. Replies about
the connection (greeting, STARTTLS, login) are always retried: the settings can be corrected before
the last attempt.

A mail for several recipients is sent to all of them at once. If the server refuses some of them
(5xx), the others get the mail, and the result names the refused recipients. If the server defers
one recipient (4xx), no recipient gets the mail: the attempt ends before the content is sent. The
whole mail is retried, so that no recipient gets the mail twice. In the job's last attempt, the mail
is sent to the recipients that the server accepts, and the result names all others. To treat
recipients separately, enqueue one job for each recipient.

Delivery is at least once: if the connection breaks after the content was sent, it is unknown
whether the server accepted the mail. The Message-ID is the same in all attempts of a job, so that
mail servers and readers can recognise duplicates.
"""

from __future__ import annotations

import hashlib
import socket
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any

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
    Mailbox,
    compose,
    parse_mailbox,
)

if TYPE_CHECKING:
    from taskd.tasks.smtp_delivery import Delivery

QUEUE = "email"
MAX_ATTEMPTS = MAX_ATTEMPTS_DEFAULT
TIMEOUT_S = 300.0

Addresses = (
    Annotated[str, Meta(max_length=1000)]
    | Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=RECIPIENTS_MAX)]
)
Subject = Annotated[str, Meta(max_length=SUBJECT_CHARS_MAX)]
Text = Annotated[str, Meta(max_length=PAYLOAD_BYTES_MAX)]


def check_installed() -> None:
    """Check that aiosmtplib is installed.

    Raises:
        ConfigError: it is not installed.
    """
    if find_spec("aiosmtplib") is None:
        raise ConfigError(
            "send_email needs aiosmtplib: pip install 'pgtaskd[mail]', or unset TASKD_SMTP_HOST"
        )


class Mailer:
    """Makes the task, and keeps its SMTP connections open.

    Producers make the task without the extra `mail`: only the first mail imports aiosmtplib.

    Raises:
        ConfigError: the sender's address is wrong.
    """

    def __init__(self, settings: Settings) -> None:
        self._sender = _sender(settings)
        self._settings = settings

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
            refused = await self._delivery.send(mail, last=ctx.attempt >= ctx.max_attempts)
            return {"message_id": mail.message_id, "refused": refused}

        return Task(
            send_email,
            queue=QUEUE,
            max_attempts=MAX_ATTEMPTS,
            timeout_s=TIMEOUT_S,
            backoff=backoff,
        )

    @cached_property
    def _delivery(self) -> Delivery:
        from taskd.tasks.smtp_delivery import Delivery

        return Delivery(self._settings)

    async def aclose(self) -> None:
        """Close the open connections."""
        if "_delivery" in vars(self):
            await self._delivery.aclose()

    def _message_id(self, ctx: Context, *content: str | list[str]) -> str:
        # Databases that were restored from one dump use the same idempotency keys, so the content
        # of the mail is hashed as well.
        made_of = repr((ctx.idempotency_key, *content)).encode("utf-8", "backslashreplace")
        digest = hashlib.sha256(made_of).hexdigest()[:32]
        return f"<{digest}@{self._sender.address.rpartition('@')[2]}>"


def _sender(settings: Settings) -> Mailbox:
    text = settings.smtp_sender or f"taskd@{socket.gethostname()}"
    try:
        return parse_mailbox(text, "smtp_sender")
    except Fail as error:
        raise ConfigError(f"{error.reason}; set TASKD_SMTP_SENDER to an address") from None
