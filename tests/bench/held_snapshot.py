"""S6: a REPEATABLE READ snapshot is held while jobs are enqueued and drained.

The snapshot keeps every dead row and index entry of the run, so a worker that reads its index from
the front reads through more of them with every job. The figure is the worker's rate in windows of
one second: the mean of the last ten against the mean of the first ten, after two of warm-up.

The producer is the peer's own bulk insert in processes of its own. It is called again whenever
100,000 of three million jobs were taken, so that it runs all the time, as the worker does: a worker
that drains 28,000 jobs per second more than are enqueued takes 1.7 million of them in the minute.
They share the machine, so the rates are lower than in S1. A row is `starved` when the worker had no
job for a moment: then its rate is the producer's, and the row counts as not measured.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import mean
from typing import Any

from tests.bench import harness

PEERS = ("taskd", "rawc_ctid_history", "graphile_batch", "pgqueuer_tuned")
WARM_UP_S = 2
SPAN_S = 10
BACKLOG_FEW = 2_900_000
BACKLOG_MANY = 3_000_000
# pgqueuer's driver inserts in such steps.
STEP = 10_000


def measure(
    results: harness.Results, reps: int, secs: float, peers: tuple[str, ...], control: bool
) -> None:
    """Run it; with `control` also without the snapshot."""
    asyncio.run(_measure(results, reps, secs, peers or PEERS, control))


async def _measure(
    results: harness.Results, reps: int, secs: float, peers: tuple[str, ...], control: bool
) -> None:
    for rep in range(reps):
        for name in harness.present(*peers):
            for hold in (True, False) if control else (True,):
                results.add("held", peer=name, hold=hold, rep=rep, **await _one(name, secs, hold))


async def _one(name: str, secs: float, hold: bool) -> dict[str, Any]:
    await harness.queued(name, BACKLOG_MANY)
    async with AsyncExitStack() as stack:
        if hold:
            holder = await harness.connect()
            stack.push_async_callback(holder.close)
            await holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            await holder.fetch("SELECT count(*) FROM pg_class")
        [worker] = await stack.enter_async_context(harness.worker(name))
        producer = Producer(name, worker)
        feeding = asyncio.create_task(producer.feed(secs), name="producer")
        try:
            while worker.first is None:
                await asyncio.sleep(0.01)
            ends = worker.first + secs
            while time.time() < ends:
                producer.look()
                await asyncio.sleep(0.02)
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
        rates = harness.run().windows([worker], 1, worker.first, ends)
    first, last = ends_of(rates)
    return {
        "secs": secs, "first": first, "last": last, "ratio": last / max(first, 1),
        "windows": rates, "fewest_queued": max(producer.fewest, 0), "starved": producer.fewest <= 0,
        "enqueued": producer.enqueued,
    }  # fmt: skip


def ends_of(rates: Sequence[float]) -> tuple[float, float]:
    """Mean rate of the first and of the last ten windows; of fewer when the run is short."""
    steady = list(rates[WARM_UP_S:])
    span = max(1, min(SPAN_S, len(steady) // 2))
    return mean(steady[:span]), mean(steady[-span:])


class Producer:
    """Keeps the worker's queue between few and many jobs.

    Attributes:
        enqueued: jobs that were committed so far.
        fewest: the smallest backlog so far.
    """

    def __init__(self, name: str, worker: Any) -> None:
        self.enqueued = BACKLOG_MANY
        self.fewest = BACKLOG_MANY
        self._name = name
        self._worker = worker

    def look(self) -> int:
        """Return the remaining jobs.

        The worker reports its count every 20 ms, so it is a little late.
        """
        left = self.enqueued - self._worker.n
        self.fewest = min(self.fewest, left)
        return left

    async def feed(self, secs: float) -> None:
        """Enqueue until cancelled; `secs` bounds one call."""
        notify = harness.NOTIFY_RAW if self._name.startswith("raw") else None
        connection = await harness.connect()
        try:
            while True:
                missing = BACKLOG_MANY - self.look()
                if missing <= BACKLOG_MANY - BACKLOG_FEW:
                    await asyncio.sleep(0.01)
                    continue
                count = min(missing // STEP * STEP, BACKLOG_MANY)
                await asyncio.to_thread(
                    harness.run().call, harness.peer(self._name), harness.DATABASE, "seed",
                    {"n": count}, secs + 60,
                )  # fmt: skip
                self.enqueued += count
                if notify:  # its bulk insert sends no NOTIFY
                    await connection.execute(notify)
        finally:
            await connection.close()
