"""What `taskd bench` asks the database, and how it takes away what it made."""

from __future__ import annotations

import secrets
from typing import NamedTuple

from taskd.store.connections.statements import Fetches

# No queue of somebody else's is named like this by chance.
NAME = r"^taskd-bench-[0-9]+-[0-9a-f]{6}$"

LIVE_COUNTED_MAX = 10_000
CLEAR_BATCH = 10_000


class Place(NamedTuple):
    """Where a benchmark would run.

    Attributes:
        postgresql: the server's version.
        durable: a commit waits for the disk.
        owner: this user owns the schema, and so may remove whatever a worker leaves.
        live: how many jobs are live, counted up to LIVE_COUNTED_MAX.
    """

    postgresql: str
    durable: bool
    owner: bool
    live: int


async def look(on: Fetches) -> Place:
    """Where a benchmark would run."""
    return Place(*(await on.fetch("bench_environment", LIVE_COUNTED_MAX))[0])


async def new_name(on: Fetches) -> str:
    """A name for a benchmark's queue and task; its jobs get higher ids than the one in it."""
    last_id = (await on.fetch("bench_last_id"))[0][0]
    return f"taskd-bench-{last_id}-{secrets.token_hex(3)}"


async def begin(on: Fetches, name: str) -> None:
    """Make the queue known, so that a later run finds what this one leaves if it is killed."""
    await on.fetch("declare_queues", [name])


async def round_trip(on: Fetches) -> None:
    """Ask, and wait for the answer."""
    await on.fetch("bench_round_trip")


async def commit(on: Fetches) -> None:
    """Commit the smallest transaction that waits for the disk."""
    await on.fetch("bench_commit")


async def live(on: Fetches, queue: str) -> int:
    """How many jobs of a queue are live."""
    count: int = (await on.fetch("bench_live", queue))[0][0]
    return count


async def left(on: Fetches) -> list[str]:
    """The names of benchmarks that ended before they could clean up."""
    return [row[0] for row in await on.fetch("bench_left", NAME)]


async def clear(on: Fetches, name: str) -> None:
    """Remove a benchmark's jobs, their history, its worker, and what that published."""
    while (await on.fetch("bench_clear_jobs", name, CLEAR_BATCH))[0][0]:
        pass
    # A sequence that nobody has drawn from says 1, too.
    after_id: int | None = int(name.split("-")[2]) - 1
    while after_id is not None:
        after_id = (await on.fetch("bench_clear_history", name, after_id, CLEAR_BATCH))[0][0]
    await on.fetch("bench_clear_workers", name)
    await on.fetch("bench_clear_names", name)
