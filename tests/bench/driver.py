"""taskd in the side-by-side harness: `driver.py CMD JSON`; setup, seed, worker, enqueue or paced.

It uses the harness's `common.py` (its folder in BENCH_COMMON) and the database in BENCH_DSN.
Nothing is switched off that a user has on by default; logs at info go to stderr.
"""

from __future__ import annotations

import asyncio
import os
import sys

sys.path.insert(0, os.environ["BENCH_COMMON"])

import common  # type: ignore[import-not-found]

from taskd import Client, events
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from taskd.worker import Worker

QUEUE = "bench"


async def noop(i: int) -> None:
    common.hit(i)
    if common.Rec.sleep:
        await asyncio.sleep(common.Rec.sleep)


async def carry(i: int, text: str) -> None:
    """A job with a payload worth its name."""
    assert text
    await noop(i)


async def unnoted(i: int) -> None:
    """A job whose start is not recorded."""


TASK: Task[..., None] = Task(noop, name="noop", queue=QUEUE)
CARRY: Task[..., None] = Task(carry, name="carry", queue=QUEUE)
UNNOTED: Task[..., None] = Task(unnoted, name="unnoted", queue=QUEUE)


def database() -> Database:
    return Database({"dsn": common.DSN})


async def setup(_options: dict) -> None:
    await migrations.migrate(database())


async def seed(options: dict) -> None:
    async with Client(common.DSN) as client:
        await client.enqueue_many(TASK.job(i) for i in range(options["n"]))


async def worker(options: dict) -> None:
    """Run a worker until killed; `sleep` is what handlers wait for, in seconds."""
    common.Rec.sleep = options.get("sleep", 0.0)
    events.configure()
    registry = Registry()
    registry.add(TASK)
    registry.add(CARRY)
    registry.add(UNNOTED)
    queues = tuple(options.get("queues", [QUEUE]))
    settings = (
        Settings(queues=queues, concurrency=options["concurrency"])
        if "concurrency" in options
        else Settings(queues=queues)
    )
    made = Worker(settings, registry, database(), app="bench", last=True)
    running = asyncio.create_task(made.run(), name="worker")
    await asyncio.wait(
        {running, asyncio.create_task(made.ready.wait())}, return_when="FIRST_COMPLETED"
    )
    common.emit(ev="ready")
    await running


async def enqueue(options: dict) -> None:
    async with Client(common.DSN, pool_max=10) as client:
        job = TASK.job(1)

        async def one(_client: int, _number: int) -> None:
            await client.enqueue(job)

        async def bulk(count: int) -> None:
            await client.enqueue_many([job] * count)

        await common.timed_enqueue(options, one, bulk)


async def paced(options: dict) -> None:
    async with Client(common.DSN, pool_max=10) as client:

        async def one(_client: int, number: int) -> None:
            await client.enqueue(TASK.job(number))

        await common.paced(options, one)


if __name__ == "__main__":
    common.main(setup=setup, seed=seed, worker=worker, enqueue=enqueue, paced=paced)
