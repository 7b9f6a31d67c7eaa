"""Find sequences whose last value is lower than the rows require, and advance them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class Behind(NamedTuple):
    """A sequence whose last value is lower than the rows require.

    Attributes:
        name: the name of the sequence, without the schema.
        last: the last value of the sequence.
        newest: the lowest value that the rows allow. For a sequence of ids, this is the highest id.
            The sequence `needs` is a flag, which must be 1 if a worker is live or a queue has a
            depth limit.
    """

    name: str
    last: int
    newest: int

    def __str__(self) -> str:
        return f"taskd.{self.name} is at {self.last}, but the rows require at least {self.newest}"


async def find_behind(on: Fetches) -> Sequence[Behind]:
    """Return the sequences whose last value is lower than the rows require."""
    return [Behind(*row) for row in await on.fetch("doctor_sequences")]


async def mend(on: Fetches) -> Sequence[Behind]:
    """Advance the sequences of find_behind(); return the values that they had before.

    Raises:
        HeldUp: other transactions that write to the tables did not end in time; no sequence was
            changed.
    """
    return [Behind(*row) for row in await on.fetch("mend_sequences")]
