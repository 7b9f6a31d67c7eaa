"""The statement that a scrape of `/metrics` runs."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.connections.statements import Fetches

# How many blocks of live jobs a scrape reads at most: 2 MB with some 15,000 small jobs, in a few
# milliseconds.
BLOCKS_MAX = 256
# Of how many failed and cancelled jobs that ended last a scrape counts the failed ones: some 5 ms.
FAILED_MAX = 5000
# How many values a label has at most. The label of queues can have more, if more queues have live
# jobs.
ROWS_MAX = 1000


class Value(NamedTuple):
    """One value of a metric.

    Attributes:
        metric: the metric's name without `taskd_`.
        first, second: the values of the metric's labels, if it has labels.
    """

    metric: str
    first: str | None
    second: str | None
    value: float


async def read(on: Fetches) -> list[Value]:
    """Return the values of all metrics that come from the database."""
    return [Value(*row) for row in await on.fetch("read_metrics", BLOCKS_MAX, ROWS_MAX, FAILED_MAX)]
