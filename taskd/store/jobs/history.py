"""Upkeep of the history: make partitions for the next days, and delete expired rows.

Each step can be repeated. The caller's connection waits at most LOCK_TIMEOUT_MS for a lock, and the
caller repeats a step that got no lock. So a transaction that reads the history can postpone a step.
Acks queue behind a step that waits for a lock, so acks are delayed by at most LOCK_TIMEOUT_MS.
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


async def drop_expired(on: Fetches) -> list[str]:
    """Empty all expired partitions, then drop them.

    Returns:
        The names of the partitions that this call has dropped. Other workers can drop some of the
        expired partitions.

    Raises:
        StoreUnavailable: the history is in use; try again later.
        StatementRefused: the database refuses DDL. All expired partitions are empty now.
    """
    expired: list[str] = []
    while leaf := (await on.fetch("truncate_expired_partition", expired[-1] if expired else ""))[0][
        0
    ]:
        expired.append(leaf)
    return [leaf for leaf in expired if (await on.fetch("drop_expired_partition", leaf))[0][0]]


async def prune_default(on: Fetches) -> int:
    """Delete expired rows of the default partition, in batches; return how many.

    Raises:
        StoreUnavailable: PostgreSQL cannot be reached or is busy; try again later.
    """
    return await _prune(on, "prune_default_partition")


async def prune_keys(on: Fetches) -> int:
    """Delete expired unique keys, in batches; return how many.

    Raises:
        StoreUnavailable: as prune_default().
    """
    return await _prune(on, "prune_keys")


async def prune_actions(on: Fetches) -> int:
    """Delete old records of what people did by hand, in batches; return how many.

    Raises:
        StoreUnavailable: as prune_default().
    """
    return await _prune(on, "prune_actions")


async def _prune(on: Fetches, statement: str) -> int:
    total = 0
    while True:
        pruned: int = (await on.fetch(statement, PRUNE_BATCH))[0][0]
        total += pruned
        if pruned < PRUNE_BATCH:
            return total
