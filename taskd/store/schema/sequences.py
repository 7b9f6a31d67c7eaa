"""Sequences of ids: find those that are behind their rows, and advance them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class Behind(NamedTuple):
    """A sequence whose last value is less than the newest value in the rows.

    Attributes:
        name: its name, without the schema.
        last: the last value that was drawn from it.
        newest: the largest value in the rows.
    """

    name: str
    last: int
    newest: int

    def __str__(self) -> str:
        return f"taskd.{self.name} is at {self.last}, and the newest row has {self.newest}"


async def find_behind(on: Fetches) -> Sequence[Behind]:
    """Return the sequences that are behind their rows."""
    return [Behind(*row) for row in await on.fetch("doctor_sequences")]


async def mend(on: Fetches) -> Sequence[Behind]:
    """Advance the sequences that are behind their rows; return their state before that.

    Raises:
        HeldUp: transactions that enqueue jobs are still open; no sequence was changed.
    """
    return [Behind(*row) for row in await on.fetch("mend_sequences")]
