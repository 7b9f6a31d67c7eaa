"""Find the sequences that are behind the rows of the schema, and advance them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class Behind(NamedTuple):
    """A sequence whose last value is less than the value that the rows need.

    Attributes:
        name: the name of the sequence, without the schema.
        last: the last value that was drawn from the sequence.
        newest: of a sequence of ids, the largest id in the rows; of `needs`, 1.
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
        HeldUp: other transactions that write to the tables did not end in time; no sequence was
            changed.
    """
    return [Behind(*row) for row in await on.fetch("mend_sequences")]
