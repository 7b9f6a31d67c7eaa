"""Statements of `taskd bench`: read facts about the database, and remove its own rows."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from taskd.store.connections.statements import Fetches

# Names of the benchmark's queues and tasks; an ordinary queue does not have such a name.
NAME = r"^taskd-bench-[0-9]+-[0-9a-f]{6}$"

LIVE_COUNTED_MAX = 10_000
CLEAR_BATCH = 10_000


class Environment(NamedTuple):
    """The database of a benchmark.

    Attributes:
        postgresql: the server's version.
        durable: whether a commit waits for the disk.
        owner: whether this user owns the schema, and so can remove what a worker leaves.
        live: number of live jobs, counted up to LIVE_COUNTED_MAX.
    """

    postgresql: str
    durable: bool
    owner: bool
    live: int


async def read_environment(on: Fetches) -> Environment:
    """Return the facts about the database."""
    return Environment(*(await on.fetch("bench_environment", LIVE_COUNTED_MAX))[0])


async def new_name(on: Fetches) -> str:
    """Return a name for a benchmark's queue and task; it contains an id below those of its jobs."""
    last_id = (await on.fetch("bench_last_id"))[0][0]
    return f"taskd-bench-{last_id}-{secrets.token_hex(3)}"


async def begin(on: Fetches, name: str) -> None:
    """Register the queue, so that a later run finds what this one leaves if it is killed."""
    await on.fetch("declare_queues", [name])


async def round_trip(on: Fetches) -> None:
    """Send a query and wait for the answer."""
    await on.fetch("bench_round_trip")


async def commit(on: Fetches) -> None:
    """Commit the smallest transaction that waits for the disk."""
    await on.fetch("bench_commit")


async def live(on: Fetches, queue: str) -> int:
    """Return how many jobs of a queue are live."""
    count: int = (await on.fetch("bench_live", queue))[0][0]
    return count


async def left(on: Fetches) -> list[str]:
    """Return the names of benchmarks that ended before they could clean up."""
    return [row[0] for row in await on.fetch("bench_left", NAME)]


async def clear(on: Fetches, name: str) -> None:
    """Remove a benchmark's jobs, their history, its worker, and what it published."""
    while (await on.fetch("bench_clear_jobs", name, CLEAR_BATCH))[0][0]:
        pass
    # An unused sequence also says 1.
    after_id: int | None = int(name.split("-")[2]) - 1
    while after_id is not None:
        after_id = (await on.fetch("bench_clear_history", name, after_id, CLEAR_BATCH))[0][0]
    await on.fetch("bench_clear_workers", name)
    await on.fetch("bench_clear_names", name)
