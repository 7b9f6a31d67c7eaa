"""Find the sequences that are behind the rows of the schema, and advance them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class Behind(NamedTuple):
    """A sequence whose last value is less than the value that the rows need.

    Attributes:
        name: the name of the sequence, without the schema.
        last: the last value of the sequence.
        newest: the value that the rows need: the largest id, for a sequence of ids. The sequence
            `needs` is a flag, which must be 1 if a worker lives or a queue has a depth limit.
    """

    name: str
    last: int
    newest: int

    def __str__(self) -> str:
        return f"taskd.{self.name} is at {self.last}, and the rows need {self.newest}"


async def find_behind(on: Fetches) -> Sequence[Behind]:
    """Return the sequences that are behind their rows."""
    return [Behind(*row) for row in await on.fetch("doctor_sequences")]


async def mend(on: Fetches) -> Sequence[Behind]:
    """Advance the sequences that are behind their rows; return their state before that.

    Raises:
        HeldUp: other transactions that write to the tables did not end in time; no sequence was
            changed.
    """
    return [Behind(*row) for row in await on.fetch("mend_sequences")]
