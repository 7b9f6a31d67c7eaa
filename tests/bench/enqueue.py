"""S2, also with a busy worker: how many jobs one program can enqueue per second.

Each way of enqueueing (one client, 10 clients, 1,000 per call) is measured on a quiet server, and
while a worker drains the enqueued jobs. The floors are plain inserts without NOTIFY: `plain`
inserts the same rows into taskd's own table, `raw` of the harness into its own smaller one. A busy
worker also gets one job or notification every 5 ms (see harness.notifications), so that all ways
are measured beside a worker that works.
"""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from tests.bench import harness

MODES = ("single", "conc", "bulk")
RAW = "rawc_ctid_history"
PEERS = ("graphile_batch", "pgqueuer_tuned", "absurd_tuned", "chancy_tuned")


def measure(results: harness.Results, reps: int, secs: float, peers: tuple[str, ...]) -> None:
    asyncio.run(_measure(results, reps, secs, peers or PEERS))


async def _measure(
    results: harness.Results, reps: int, secs: float, peers: tuple[str, ...]
) -> None:
    ways: list[tuple[str, dict[str, Any]]] = [
        ("taskd", {}),
        ("plain", {"notify": False}),
        (RAW, {"notify": False}),
        (RAW, {"notify": True}),
        *((name, {}) for name in harness.present(*peers)),
    ]
    for rep in range(reps):
        for busy in (False, True):
            for mode in MODES:
                for name, options in harness.in_turns(ways, rep):
                    rate, drained = await _one(name, mode, secs, busy, options)
                    results.add(
                        "enqueue", peer=name, mode=mode, busy=busy, rep=rep, rate=rate,
                        drained_per_s=drained, notify=options.get("notify", True),
                    )  # fmt: skip


async def _one(
    name: str, mode: str, secs: float, busy: bool, options: dict[str, Any]
) -> tuple[float, float]:
    """Jobs enqueued per second, and jobs that the worker ran per second meanwhile."""
    await harness.empty(name)
    asked = {"mode": mode, "secs": secs, **options}
    async with AsyncExitStack() as stack:
        workers = []
        if busy:
            workers = await stack.enter_async_context(harness.worker(name))
            if name in {"taskd", "plain"}:
                await stack.enter_async_context(harness.notifications(harness.NOTIFY_TASKD))
            elif not options.get("notify", True):
                await stack.enter_async_context(harness.notifications(harness.NOTIFY_RAW))
        lines = await asyncio.to_thread(
            harness.run().call, harness.peer(name), harness.DATABASE, "enqueue", asked, 60
        )
        ran = sum(each.n for each in workers)
    return lines[-1]["rate"], ran / lines[-1]["secs"]
