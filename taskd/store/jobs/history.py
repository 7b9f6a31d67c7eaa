"""Upkeep of the history: make partitions ahead, drop expired ones. Every step is idempotent.

Each step runs under a lock_timeout of 50 ms: a reader of the history can delay it, and it is
retried later. It never makes an ack wait.
"""

from __future__ import annotations

from taskd.store.connections.statements import Fetches

LOCK_TIMEOUT_MS = 50
DAYS_AHEAD = 3
PRUNE_BATCH = 5000


async def make_partitions(on: Fetches) -> int:
    """Make the partitions of the next days; return how many were made.

    Raises:
        StoreUnavailable: the history is in use; try again later.
    """
    made: int = (await on.fetch("make_history_partitions", DAYS_AHEAD))[0][0]
    return made


async def drop_expired(on: Fetches) -> str | None:
    """Drop the oldest expired partition; return its name, or None if there is none for this worker.

    Raises:
        StoreUnavailable: it is in use; try again later.
    """
    leaf: str | None = (await on.fetch("truncate_expired_partition"))[0][0]
    if leaf is None or not (await on.fetch("drop_expired_partition", leaf))[0][0]:
        return None
    return leaf


async def prune_default(on: Fetches) -> int:
    """Delete expired rows of the default partition, in batches; return how many.

    Raises:
        StoreUnavailable: not possible now; try again later.
    """
    return await _prune(on, "prune_default_partition")


async def prune_keys(on: Fetches) -> int:
    """Delete expired unique keys, in batches; return how many.

    Raises:
        StoreUnavailable: not possible now; try again later.
    """
    return await _prune(on, "prune_keys")


async def _prune(on: Fetches, statement: str) -> int:
    total = 0
    while True:
        pruned: int = (await on.fetch(statement, PRUNE_BATCH))[0][0]
        total += pruned
        if pruned < PRUNE_BATCH:
            return total
