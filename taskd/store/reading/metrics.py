"""Metrics: what a scrape reads of the database."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.connections.statements import Fetches

# 2 MB, some 15,000 small jobs: a scrape costs each of many servers a few milliseconds.
BLOCKS_MAX = 256
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
