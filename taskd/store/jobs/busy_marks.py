"""Busy marks in the database: they tell producers that a queue is polled and needs no NOTIFY."""

from __future__ import annotations

from typing import NamedTuple

from taskd.store.connections.statements import Fetches


class Attended(NamedTuple):
    """A queue that this worker attends.

    Attributes:
        alone: nobody else's mark was out.
        others: how many others serve it.
    """

    alone: bool
    others: int


async def attend(
    on: Fetches, queue: str, worker_id: int, for_s: float, *, gives_way: bool = False
) -> Attended | None:
    """Say, or say again, that this worker attends the queue.

    Args:
        gives_way: not if another one does.

    Returns:
        None: it does not, for another one does, or it was buried.
    """
    alone, others = (await on.fetch("set_busy_mark", queue, worker_id, for_s, gives_way))[0]
    return None if alone is None else Attended(alone, others)


async def withdraw(on: Fetches, queue: str, worker_id: int | None) -> None:
    """Take the mark of this worker back; None: whosever it is."""
    await on.fetch("clear_busy_mark", queue, worker_id)


async def producers_held_up(on: Fetches) -> int:
    """How many transactions wait at their commit for another one that rings."""
    waiting: int = (await on.fetch("count_waiting_notifiers"))[0][0]
    return waiting


async def draw_xid(on: Fetches) -> str:
    """A new transaction id: above that of every transaction that has one by now."""
    xid: str = (await on.fetch("draw_xid"))[0][0]
    return xid


async def have_ended(on: Fetches, xid: str) -> bool:
    """Whether all transactions with a lower id have ended."""
    ended: bool = (await on.fetch("transactions_ended", xid))[0][0]
    return ended


async def call(on: Fetches, queue: str) -> None:
    """Wake all workers of the queue."""
    await on.fetch("wake_workers", queue)
