"""The statement that a scrape of `/metrics` runs."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.connections.statements import Fetches

# Maximum number of blocks of live jobs that a scrape reads. These are 2 MB with some 15,000 small
# jobs, and the read takes a few milliseconds.
BLOCKS_MAX = 256
# A scrape reads this number of the failed and cancelled jobs that ended last, and counts the failed
# jobs among them. This takes some 5 ms.
FAILED_MAX = 5000
# Maximum number of values of a label. The label of queues has more values if more queues have live
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
