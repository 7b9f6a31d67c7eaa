"""S3 and S5 with one producer for all: from the commit to the handler's start.

The shared harness has each queue enqueue by its own client, and takes the time when that has
returned. What a client still does behind the commit is then missing in its queue's wait: handlers
of graphile-worker have begun up to 10 ms "before" their jobs were enqueued. Here the same lines of
Python enqueue for all, one statement that commits itself, by the function that each offers to SQL.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import asyncpg

from tests.bench import harness

RAW = "rawc_ctid_history"
ENQUEUE = {
    "taskd": "SELECT taskd.enqueue('noop', jsonb_build_object('i', $1::int), queue => 'bench')",
    "graphile_batch": "SELECT graphile_worker.add_job('noop', json_build_object('i', $1::int))",
    RAW: """
        WITH born AS (
            INSERT INTO jobs (queue, task, args)
            VALUES ('default', 'noop', jsonb_build_object('i', $1::int)) RETURNING id
        )
        SELECT pg_notify('jobs', 'default') FROM born
    """,
}
# How many jobs, how far apart, over how many connections: as in the shared harness.
PACES = {"s3": (200, 0.05, 1), "s5": (10_000, 0.002, 10)}
SETTLE_S = 1.5


def measure(results: harness.Results, reps: int, peers: tuple[str, ...]) -> None:
    asyncio.run(_measure(results, reps, peers or tuple(ENQUEUE)))


async def _measure(results: harness.Results, reps: int, peers: tuple[str, ...]) -> None:
    for rep in range(reps):
        for pace in PACES:
            await measure_pace(results, rep, pace, peers)


async def measure_pace(
    results: harness.Results, rep: int, pace: str, peers: tuple[str, ...] = tuple(ENQUEUE)
) -> None:
    """One repetition of S3 or S5, each queue after the other."""
    for name in harness.present(*peers):
        waits_ms = await _waits_ms(name, pace)
        waits = {f"p{q}": harness.run().pct(waits_ms, q / 100) for q in (50, 95, 99)}
        waits["max"] = max(waits_ms)
        results.add(f"waits-{pace}", peer=name, rep=rep, got=len(waits_ms), **waits)


async def _waits_ms(name: str, pace: str) -> list[float]:
    await harness.empty(name)
    # As the shared harness runs it at this pace.
    options: dict[str, Any] = {"conc": 10} if (name, pace) == ("graphile_batch", "s5") else {}
    async with harness.worker(name, lat=True, **options) as (worker,):
        await asyncio.sleep(SETTLE_S)
        sent = await produce(ENQUEUE[name], *PACES[pace])
        await asyncio.sleep(SETTLE_S)
        waits_ms: list[float] = harness.run().lats(sent, await worker.dump())
    return waits_ms


async def produce(sql: str, count: int, every_s: float, clients: int) -> list[float]:
    """Enqueue them, in the rhythm; when each commit was answered, by the clock on the wall."""
    connections = [await harness.connect() for _ in range(clients)]
    sent = [0.0] * count
    begins = time.time() + 0.1

    async def one(connection: asyncpg.Connection, first: int) -> None:
        enqueue = await connection.prepare(sql)
        for i in range(first, count, clients):
            await asyncio.sleep(begins + i * every_s - time.time())
            await enqueue.fetch(i)
            sent[i] = time.time()

    await asyncio.gather(*(one(each, n) for n, each in enumerate(connections)))
    for each in connections:
        await each.close()
    return sent
