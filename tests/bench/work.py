"""S1 with real work: handlers that wait 5 ms, at the default concurrency of 100.

The ideal is 100 / 5 ms = 20,000 jobs per second. Beside taskd run the harness's bare coroutines
over the same statements, with the same handler: what Python and this machine can do at all.
"""

from __future__ import annotations

import asyncio

from tests.bench import harness

SLEEP_S = 0.005
CONCURRENCY = 100
IDEAL = CONCURRENCY / SLEEP_S
PEERS = ("taskd", "raw_work")


def measure(results: harness.Results, reps: int, secs: float) -> None:
    asyncio.run(_measure(results, reps, secs))


async def _measure(results: harness.Results, reps: int, secs: float) -> None:
    count = int(IDEAL * secs)
    for rep in range(reps):
        for name in PEERS:
            row, _ = await harness.run().drain(
                name, limit=secs * 3, n=count, extra={"sleep": SLEEP_S}
            )
            results.add("work", **(row | {"rep": rep, "ideal": IDEAL}))
