"""A mail as a value: check addresses and headers, write the message. Nothing is sent here.

This module uses the older classes of Python's email package. The newer classes parse every header
that they are given, which takes seven times as long.
"""

from __future__ import annotations

import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.header import Header
from email.message import Message
from email.mime.multipart import MIMEMultipart
from email.mime.nonmultipart import MIMENonMultipart
from email.policy import compat32
from email.utils import format_datetime, formataddr
from typing import Any

from taskd.core.jobs.verdicts import Fail

RECIPIENTS_MAX = 100  # every server must accept this many (RFC 5321)
SUBJECT_CHARS_MAX = 998
HEADER_VALUE_CHARS_MAX = 4096
HEADERS_MAX = 50
NAME_CHARS_MAX = 200

# Characters that end the line of a header, or that a program could read as the end. A tab does not
# end a line.
_CONTROL = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029]")
_NAMED = re.compile(r"(?P<name>[^<>]*)<(?P<address>[^<>]*)>")
_LOCAL_PART = re.compile(r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+(\.[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+)*")
_DOMAIN = re.compile(
    r"([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*"
    r"|\[[0-9.]+\]|\[IPv6:[0-9A-Fa-f:.]+\]"
)
_HEADER_NAME = re.compile(r"[!-9;-~]{1,76}")
_OWN_HEADERS = frozenset(
    {"from", "sender", "to", "cc", "bcc", "subject", "date", "message-id", "reply-to"}
)
# Quoted-printable text never contains "=_", so it never contains this boundary.
_BOUNDARY = "=_part_of_a_mail_by_taskd"
_WIRE = compat32.clone(linesep="\r\n", mangle_from_=False)


class MailDeferred(Exception):
    """The server deferred the mail; a later attempt can succeed."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """A mail address, and the name that mail programs show with it."""

    name: str
    address: str

    def header(self) -> str:
        """Return the text for a header, in which names beyond ASCII become encoded words."""
        if _charset(self.name) == "us-ascii":
            return formataddr((self.name, self.address))
        # Encoded words of 65 characters leave room for the name of the header before the first
        # word. Readers ignore white space between two encoded words.
        words = Header(self.name, "utf-8", maxlinelen=65).encode(linesep="")
        return f"{words} <{self.address}>"


@dataclass(frozen=True, slots=True)
class Mail:
    """A mail that is ready to be sent: the envelope, and the bytes of the message."""

    sender: str
    recipients: tuple[str, ...]
    message_id: str
    content: bytes


def parse_mailbox(text: str, field: str) -> Mailbox:
    """Return the mailbox of `ada@example.org` or `Ada Lovelace <ada@example.org>`.

    Raises:
        Fail: the text has neither form; the reason names `field`.
    """
    _check_line(text, field)
    named = _NAMED.fullmatch(text.strip())
    name, address = (named["name"].strip(), named["address"]) if named else ("", text.strip())
    if len(name) > NAME_CHARS_MAX:
        raise Fail(f"{field}: the name at the address is longer than {NAME_CHARS_MAX} characters")
    if len(name) > 1 and name[0] == name[-1] == '"':
        name = re.sub(r"\\(.)", r"\1", name[1:-1])
    return Mailbox(name, _check_address(address, text, field))


def _check_address(address: str, text: str, field: str) -> str:
    """Return the address in ASCII, with its domain in the form of DNS (`xn--`).

    Raises:
        Fail: it is not an address.
    """
    local, at, domain = address.rpartition("@")
    if not domain.isascii():
        try:
            domain = domain.encode("idna").decode()
        except UnicodeError:
            raise Fail(f"{field}: {text!r}: no such domain can exist") from None
    if local and not local.isascii():
        raise Fail(f"{field}: {text!r}: before the @ only ASCII is supported")
    if not (at and len(local) <= 64 and len(domain) <= 255) or not (
        _LOCAL_PART.fullmatch(local) and _DOMAIN.fullmatch(domain)
    ):
        several = "; give several addresses as a list" if re.search("[,;]", text) else ""
        raise Fail(f"{field}: {text[:200]!r} is not a mail address{several}")
    return f"{local}@{domain}"


def compose(
    *,
    sender: Mailbox,
    message_id: str,
    to: str | Sequence[str],
    subject: str,
    body: str,
    html: str | None = None,
    cc: str | Sequence[str] | None = None,
    bcc: str | Sequence[str] | None = None,
    reply_to: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Mail:
    """Write a mail.

    Raises:
        Fail: an address, the subject or a header cannot be sent.
    """
    quoted = {"To": _mailboxes(to, "to"), "Cc": _mailboxes(cc, "cc")}
    hidden = _mailboxes(bcc, "bcc")
    everyone = [box.address for boxes in (*quoted.values(), hidden) for box in boxes]
    recipients = tuple(dict.fromkeys(everyone))
    if not quoted["To"]:
        raise Fail("to: there is no recipient")
    if len(recipients) > RECIPIENTS_MAX:
        raise Fail(f"{len(recipients)} recipients; the limit of one mail is {RECIPIENTS_MAX}")
    message = _body(body, html)
    message["From"] = sender.header()
    for name, boxes in quoted.items():
        if boxes:
            message[name] = ", ".join(box.header() for box in boxes)
    if reply_to is not None:
        message["Reply-To"] = parse_mailbox(reply_to, "reply_to").header()
    _check_line(subject, "subject", SUBJECT_CHARS_MAX)
    message["Subject"] = Header(subject, _charset(subject), header_name="Subject")
    message["Date"] = format_datetime(datetime.now(UTC))
    message["Message-ID"] = message_id
    _check_headers(headers or {})
    for name, value in (headers or {}).items():
        message[name] = Header(value, _charset(value), header_name=name)
    return Mail(sender.address, recipients, message_id, message.as_bytes(policy=_WIRE))


def _mailboxes(given: str | Sequence[str] | None, field: str) -> list[Mailbox]:
    texts = [given] if isinstance(given, str) else given or []
    return [parse_mailbox(text, field) for text in texts]


def _check_line(text: str, field: str, chars_max: int = HEADER_VALUE_CHARS_MAX) -> str:
    """Return the text if it can be the value of a header; a line break could begin another header.

    Raises:
        Fail: the text contains a line break or another control character, or is too long.
    """
    if _CONTROL.search(text):
        raise Fail(f"{field}: {text[:100]!r} contains a line break or another control character")
    if len(text) > chars_max:
        raise Fail(f"{field}: it is longer than {chars_max} characters")
    return text


def _check_headers(headers: Mapping[str, str]) -> None:
    if len(headers) > HEADERS_MAX:
        raise Fail(f"headers: there are {len(headers)}; the limit is {HEADERS_MAX}")
    for name, value in headers.items():
        if not _HEADER_NAME.fullmatch(name):
            raise Fail(f"headers: {name[:100]!r} is not a header's name")
        if name.lower() in _OWN_HEADERS or name.lower().startswith(("content-", "mime-")):
            raise Fail(f"headers: {name} is written by send_email itself")
        _check_line(value, f"header {name}")


def _charset(text: str) -> str:
    # Text that looks like an encoded word must be encoded: otherwise readers would decode it.
    return "us-ascii" if text.isascii() and "=?" not in text else "utf-8"


def _body(body: str, html: str | None) -> Message[Any, Any]:
    if html is None:
        return _part("plain", body)
    both = MIMEMultipart("alternative", boundary=_BOUNDARY)
    both.attach(_part("plain", body))
    both.attach(_part("html", html))
    return both


def _part(subtype: str, text: str) -> Message[Any, Any]:
    # Servers without 8BITMIME accept quoted-printable, which allows lines of any length.
    part = MIMENonMultipart("text", subtype, charset="utf-8")
    part["Content-Transfer-Encoding"] = "quoted-printable"
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    if not lines.endswith("\n"):
        lines += "\n"
    part.set_payload(binascii.b2a_qp(lines.encode()).decode("ascii"))
    return part
