"""Decode stored JSON. PostgreSQL accepts deeper nesting and larger numbers than Python can decode.

taskd does not decode a value that it only shows, but shows PostgreSQL's text. If taskd needs parts
of a value, it calls `decoded()`, which returns a default if the value cannot be decoded. So a
single unreadable row never breaks a page or a report.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeVar

import msgspec

T = TypeVar("T")
# Longer JSON is shown without indentation. Already 20,000 brackets can nest 10,000 levels deep, and
# their indentation takes 200 MB of spaces.
INDENTED_CHARS_MAX = 20_000


class PastError(msgspec.Struct, omit_defaults=True):
    """The stored error of an attempt; fields that an older version did not store are None."""

    attempt: int | None = None
    started: datetime | None = None
    ended: datetime | None = None
    type: str | None = None
    message: str | None = None
    worker: str | None = None
    traceback: str | None = None

    def text(self) -> str:
        """Return the type and the first line of the message."""
        lines = (self.message or "").splitlines()
        return ": ".join(filter(None, (self.type, lines[0] if lines else "")))


def decoded(text: str | None, kind: type[T], otherwise: T) -> T:
    """Decode a value whose form taskd has written; return `otherwise` for any other form."""
    try:
        return otherwise if text is None else msgspec.json.decode(text, type=kind, strict=False)
    except (msgspec.MsgspecError, RecursionError):
        return otherwise


def errors_of(text: str | None) -> list[PastError]:
    """Return the stored errors of a job, oldest first, with their times in UTC."""
    unreadable = [PastError(type="errors in an unknown form", message=text)]
    errors = decoded(text, list[PastError], [] if text is None else unreadable)
    for each in errors:
        each.started = each.started and each.started.astimezone(UTC)
        each.ended = each.ended and each.ended.astimezone(UTC)
    return errors


def indented(text: str) -> str:
    """Return JSON indented for people, or unchanged if it is too long or cannot be formatted."""
    if len(text) > INDENTED_CHARS_MAX:
        return text
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.MsgspecError, RecursionError):
        return text
