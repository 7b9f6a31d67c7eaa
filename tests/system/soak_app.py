"""The load of the soak, and the claim times that its workers report.

The product's own events are the source. The worker adds them to histograms and writes one line per
second, so that neither memory nor disk grows with the jobs.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from taskd import Context, Fixed, Limit, Unique, events, resource, task
from tests.system.soak_figures import bucket

SOON = Fixed(0.2, jitter=0.5)
EVERY_S = 1.0
ENDS = {"job.done", "job.retried", "job.failed", "job.cancelled", "job.snoozed"}


class Lines:
    """A file with a line of JSON per second; a line is one write."""

    def __init__(self, name: str) -> None:
        path = Path(os.environ["SOAK_DIR"], name)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, line: Mapping[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")


class Meter:
    """Counts what the worker's events say since the last line."""

    def __init__(self) -> None:
        self._lines = Lines(f"worker-{os.getpid()}.jsonl")
        self._claims: Counter[int] = Counter()
        self._waits: Counter[int] = Counter()
        self._ended: Counter[str] = Counter()

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        """One event."""
        if name in ENDS:
            self._ended[name] += 1
            self._waits[bucket(fields["wait_ms"])] += 1
        elif name == "queue.claimed":
            self._claims[bucket(fields["claim_ms"])] += 1

    def write(self) -> None:
        """What there was since the last time."""
        self._lines.write(
            {
                "at": time.time(),
                "tasks": len(asyncio.all_tasks()),
                "claims": dict(self._claims),
                "waits": dict(self._waits),
                "ended": dict(self._ended),
            }
        )
        for each in (self._claims, self._waits, self._ended):
            each.clear()

    async def write_on(self) -> None:
        """Once a second."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.write()


@resource
async def meter() -> AsyncIterator[Meter]:
    """One per worker, from before its first claim until after its last attempt."""
    made = Meter()
    forget = events.subscribe(made.hear)
    writing = asyncio.create_task(made.write_on(), name="soak meter")
    try:
        yield made
    finally:
        writing.cancel()
        with suppress(asyncio.CancelledError):
            await writing
        forget()
        made.write()


@task(name="soak.instant", queue="soak")
async def instant(number: int) -> None:
    """Nothing to do."""


@task(name="soak.waits", queue="soak")
async def waits(ms: int) -> None:
    """Waits for something else."""
    await asyncio.sleep(ms / 1000)


@task(name="soak.flaky", queue="soak", backoff=SOON)
async def flaky(ctx: Context, fails: int) -> None:
    """Fails some times, then succeeds."""
    if ctx.attempt <= fails:
        raise RuntimeError(f"attempt {ctx.attempt}")


@task(name="soak.hopeless", queue="soak", backoff=SOON, max_attempts=2)
async def hopeless() -> None:
    """Fails for good."""
    raise RuntimeError("never")


@task(name="soak.returns", queue="soak")
async def returns(number: int) -> dict[str, int]:
    """Has something to say."""
    return {"number": number}


@task(name="soak.keyed", queue="soak_keys", unique=Unique(by=("account",)))
async def keyed(account: int) -> None:
    """At most one of an account waits or runs."""
    await asyncio.sleep(0.002)


@task(
    name="soak.keyed_waiting",
    queue="soak_keys",
    unique=Unique(by=("account",), scope="waiting", on_conflict="replace"),
)
async def keyed_waiting(account: int) -> None:
    """At most one job of an account waits; the newest one decides."""


@task(name="soak.keyed_a_while", queue="soak_keys", unique=Unique(by=("number",), for_s=30))
async def keyed_a_while(number: int) -> None:
    """Each job has a key of its own, which is held for longer than the job runs."""


@task(name="soak.limited", queue="soak_limits", limit=Limit(concurrency=2, by="tenant"))
async def limited(tenant: int) -> None:
    """Two of a tenant at a time."""
    await asyncio.sleep(0.005)
