"""Metrics: what a scrape reads of the database."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.jobs import Fetches

# 32 MB, which hold 230,000 small jobs.
BLOCKS_MAX = 4096
# Of each kind of labels but queues of live jobs.
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
    """All numbers of the database."""
    return [Value(*row) for row in await on.fetch("read_metrics", BLOCKS_MAX, ROWS_MAX)]
