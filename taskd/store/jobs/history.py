"""History upkeep: partitions ahead of time, expired partitions dropped. Idempotent.

Every step runs under a lock_timeout of 50 ms: a reader of the history may hold it up, and then it
is tried again later, but it never stands in front of an ack.
"""

from __future__ import annotations

from taskd.store.connections.statements import Fetches

LOCK_TIMEOUT_MS = 50
DAYS_AHEAD = 3
PRUNE_BATCH = 5000


async def make_partitions(on: Fetches) -> int:
    """Make the partitions of the days to come; how many were made.

    Raises:
        StoreUnavailable: the history is in use; try again later.
    """
    made: int = (await on.fetch("make_history_partitions", DAYS_AHEAD))[0][0]
    return made


async def drop_expired(on: Fetches) -> str | None:
    """Drop the oldest expired partition; its name, None when none is left to this worker.

    Raises:
        StoreUnavailable: it is in use; try again later.
    """
    leaf: str | None = (await on.fetch("truncate_expired_partition"))[0][0]
    if leaf is None or not (await on.fetch("drop_expired_partition", leaf))[0][0]:
        return None
    return leaf


async def prune_default(on: Fetches) -> int:
    """Delete the expired rows that had no partition of their own, in batches; how many there were.

    Raises:
        StoreUnavailable: not now; try again later.
    """
    return await _prune(on, "prune_default_partition")


async def prune_keys(on: Fetches) -> int:
    """Forget unique keys that nobody holds any more, in batches; how many there were.

    Raises:
        StoreUnavailable: not now; try again later.
    """
    return await _prune(on, "prune_keys")


async def _prune(on: Fetches, statement: str) -> int:
    total = 0
    while True:
        pruned: int = (await on.fetch(statement, PRUNE_BATCH))[0][0]
        total += pruned
        if pruned < PRUNE_BATCH:
            return total
