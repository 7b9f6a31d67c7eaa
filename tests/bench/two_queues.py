"""A queue beside another one: how long a single job waits while its worker drains a backlog.

One worker serves both queues. A job of the one comes every 50 ms, as in S3, first while the other
is empty, then while hundreds of thousands of no-op jobs are drained from it.
"""

from __future__ import annotations

import asyncio

from tests.bench import harness, waits

BACKLOG, QUEUE = "backlog", "bench"
JOBS = 600_000
FILL = """
INSERT INTO taskd.job (queue, task, args)
SELECT $1::text, 'unnoted', '{"i": 1}' FROM generate_series(1, $2::int)
"""
LEFT = "SELECT count(*) FROM taskd.job WHERE queue = $1"
COUNT, EVERY_S = 80, 0.05


def measure(results: harness.Results, reps: int) -> None:
    asyncio.run(_measure(results, reps))


async def _measure(results: harness.Results, reps: int) -> None:
    for rep in range(reps):
        for jobs in (0, JOBS):
            waits_ms, drained_per_s = await _beside(jobs)
            waits = {f"p{q}": harness.run().pct(waits_ms, q / 100) for q in (50, 95, 99)}
            waits["max"] = max(waits_ms)
            results.add("beside", rep=rep, jobs=jobs, drained_per_s=drained_per_s, **waits)


async def _beside(jobs: int) -> tuple[list[float], float]:
    """How long each waited, in ms, and how many of the others were drained per second meanwhile."""
    await harness.empty("taskd")
    producer = await harness.connect()
    try:
        await producer.execute(FILL, BACKLOG, jobs)
        async with harness.worker("taskd", lat=True, queues=[BACKLOG, QUEUE]) as (worker,):
            await asyncio.sleep(waits.SETTLE_S)
            before = await producer.fetchval(LEFT, BACKLOG)
            sent = await waits.produce(waits.ENQUEUE["taskd"], COUNT, EVERY_S, 1)
            left = await producer.fetchval(LEFT, BACKLOG)
            if jobs and not left:
                raise RuntimeError(f"the backlog of {jobs:,} jobs was drained before the end")
            await asyncio.sleep(waits.SETTLE_S)
            waits_ms: list[float] = harness.run().lats(sent, await worker.dump())
    finally:
        await producer.close()
    return waits_ms, (before - left) / (COUNT * EVERY_S)
