"""The rows that a scrape reads."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.connections.statements import Fetches

# 2 MB, some 15,000 small jobs: each scrape costs the server a few milliseconds.
BLOCKS_MAX = 256
# Per kind of label, except queues of live jobs.
ROWS_MAX = 1000


class Value(NamedTuple):
    """One number.

    Attributes:
        metric: its name without `taskd_`.
        first, second: the values of its labels, if it has any.
    """

    metric: str
    first: str | None
    second: str | None
    value: float


async def read(on: Fetches) -> list[Value]:
    """Return all numbers of the database."""
    return [Value(*row) for row in await on.fetch("read_metrics", BLOCKS_MAX, ROWS_MAX)]
