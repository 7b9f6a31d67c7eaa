"""Stored JSON, which PostgreSQL takes with more levels and larger numbers than Python decodes.

A value that is only shown is not decoded: PostgreSQL's text is shown. A value of which parts are
needed is decoded with a substitute, so that no row makes a page or a report impossible.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypeVar

import msgspec

T = TypeVar("T")
# The longest value that is indented for people: 10,000 levels would need 200 MB of spaces.
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
    """Return JSON with line ends and indents, or as it is if it is long or deep."""
    if len(text) > INDENTED_CHARS_MAX:
        return text
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.MsgspecError, RecursionError):
        return text
