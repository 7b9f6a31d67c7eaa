"""Busy marks: while a worker polls a queue continuously, producers need not notify workers."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class OwnMark(NamedTuple):
    """The mark that this worker has set on a queue.

    Attributes:
        alone: whether no other worker has marked the queue.
        others: number of other live workers that serve the queue.
    """

    alone: bool
    others: int


async def set_busy_mark(
    on: Fetches, queue: str, worker_id: int, for_s: float, *, yields: bool = False
) -> OwnMark | None:
    """Set or renew this worker's mark on a queue, for `for_s` seconds, at most 60.

    Args:
        yields: set no mark if another worker's mark is in place.

    Returns:
        None if no mark was set. The reason is one of these: this worker yields to another mark, has
        no valid lease, or does not serve the queue; or marks of other queues occupy both sequences
        of this queue.
    """
    alone, others = (await on.fetch("set_busy_mark", queue, worker_id, for_s, yields))[0]
    return None if alone is None else OwnMark(alone, others)


async def clear_busy_mark(on: Fetches, queue: str, worker_id: int | None) -> None:
    """Clear this worker's mark on a queue; if `worker_id` is None, the mark of any worker."""
    await on.fetch("clear_busy_mark", queue, worker_id)


async def count_waiting_notifiers(on: Fetches) -> int:
    """Return how many transactions wait, at their commit, for PostgreSQL's lock for NOTIFY."""
    waiting: int = (await on.fetch("count_waiting_notifiers"))[0][0]
    return waiting


async def draw_xid(on: Fetches) -> str:
    """Draw a new transaction id, which is higher than all earlier ones, and return it."""
    xid: str = (await on.fetch("draw_xid"))[0][0]
    return xid


async def transactions_ended(on: Fetches, xid: str) -> bool:
    """Return whether all transactions whose ids are lower than `xid` have ended."""
    ended: bool = (await on.fetch("transactions_ended", xid))[0][0]
    return ended


async def wake_workers(on: Fetches, queue: str) -> None:
    """Notify all workers of the queue, even if the queue is marked as polled."""
    await on.fetch("wake_workers", queue)
