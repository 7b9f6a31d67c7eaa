"""Statements of `taskd bench`: describe the database, and delete the rows of a benchmark."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from taskd.store.connections.statements import Fetches

# Matches the names of a benchmark's queue and task, and no name that a user would choose.
NAME = r"^taskd-bench-[0-9]+-[0-9a-f]{6}$"

LIVE_COUNTED_MAX = 10_000
CLEAR_BATCH = 10_000


class Environment(NamedTuple):
    """The database of a benchmark.

    Attributes:
        postgresql: the server's version.
        durable: whether a commit waits for the disk.
        owner: whether this user owns the schema, and so can delete the rows of the worker.
        live: number of live jobs; the count stops at LIVE_COUNTED_MAX.
    """

    postgresql: str
    durable: bool
    owner: bool
    live: int


async def read_environment(on: Fetches) -> Environment:
    """Describe the database of the benchmark."""
    return Environment(*(await on.fetch("bench_environment", LIVE_COUNTED_MAX))[0])


async def new_name(on: Fetches) -> str:
    """Return a name for a benchmark's queue and task.

    The name contains the last value of the sequence of job ids, from which clear() starts.
    """
    last_id = (await on.fetch("bench_last_id"))[0][0]
    return f"taskd-bench-{last_id}-{secrets.token_hex(3)}"


async def begin(on: Fetches, name: str) -> None:
    """Register the queue, so that a later run can clean up if this run is killed."""
    await on.fetch("declare_queues", [name])


async def round_trip(on: Fetches) -> None:
    """Run a query that does nothing."""
    await on.fetch("bench_round_trip")


async def commit(on: Fetches) -> None:
    """Commit a minimal transaction that waits for the disk."""
    await on.fetch("bench_commit")


async def live(on: Fetches, queue: str) -> int:
    """Return how many jobs of a queue are live."""
    count: int = (await on.fetch("bench_live", queue))[0][0]
    return count


async def left(on: Fetches) -> list[str]:
    """Return the names of benchmarks that were killed before they could clean up."""
    return [row[0] for row in await on.fetch("bench_left", NAME)]


async def clear(on: Fetches, name: str) -> None:
    """Delete the rows of a benchmark: its jobs, their history, its worker, its queue and task."""
    while (await on.fetch("bench_clear_jobs", name, CLEAR_BATCH))[0][0]:
        pass
    # Minus one, because the first job of the benchmark can have the id in the name. An unused
    # sequence has the last value 1, like a sequence from which 1 was drawn.
    after_id: int | None = int(name.split("-")[2]) - 1
    while after_id is not None:
        after_id = (await on.fetch("bench_clear_history", name, after_id, CLEAR_BATCH))[0][0]
    await on.fetch("bench_clear_workers", name)
    await on.fetch("bench_clear_names", name)
