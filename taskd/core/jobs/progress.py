"""The progress that a handler reports."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from taskd.core.jobs.failure import clean

NOTE_BYTES_MAX = 500


class Report(msgspec.Struct, frozen=True, gc=False):
    """The progress of an attempt.

    Attributes:
        done: the amount that is done, in any unit.
        total: the total in the same unit, or None if it is unknown.
        note: a few words for people.
    """

    done: float
    total: float | None
    note: str

    @classmethod
    def of(
        cls, done: float, total: float | None, note: str, hide: Callable[[str], str] = str
    ) -> Report:
        """Check these values, redact and shorten the note, and return the report.

        Args:
            hide: redacts the note.

        Raises:
            TypeError: `done` or `total` is neither a number nor a string.
            ValueError: `done` or `total` is not finite, or is a string that float() cannot parse.
        """
        whole = None if total is None else _number("total", total)
        return cls(_number("done", done), whole, note_of(str(note), hide) if note else "")


def note_of(text: str, hide: Callable[[str], str]) -> str:
    """Return the text redacted by `hide`, and then shortened: a cut secret would not be found."""
    return clean(hide(text), NOTE_BYTES_MAX)


def _number(name: str, value: float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"progress: {name} {value!r} is not a finite number")
    return number
