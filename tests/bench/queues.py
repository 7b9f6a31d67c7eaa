"""Many queues: one process serves 50 of 1,000 queues, with one job per second on each of the 50.

The figure is the transactions per second of the whole database beyond the jobs' own four: the
enqueue, the listener's wake-up, the claim and the ack. The jobs come evenly, one every 20 ms, so
that no two share a transaction. A NOTIFY wakes every listening session of its database, on any
channel, and each of them counts a transaction: of these, one per job is the job's own. Autovacuum's
transactions are included, as they cannot be told apart. Sessions report their transactions seconds
late, so the run has to be long. Claims per job are reported besides (counted as in producers.py);
polls of idle queues count like claims, one for each sleeping queue, about once a second.
"""

from __future__ import annotations

import asyncio
import time

from tests.bench import harness

SERVED = 50
QUEUES = 1_000
JOBS_PER_S = 50
OWN_PER_JOB = 4
# A session reports its transactions at the latest ten seconds after them.
SETTLE_S = 12.0
NAMES = [f"q{number}" for number in range(QUEUES)]
ENQUEUE = """SELECT taskd.enqueue('noop', '{"i":1}', queue => $1)"""
XACTS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1"


def measure(results: harness.Results, reps: int, secs: float) -> None:
    asyncio.run(_measure(results, reps, secs))


async def _measure(results: harness.Results, reps: int, secs: float) -> None:
    for rep in range(reps):
        await harness.empty("taskd")
        observer = await harness.connect("postgres")
        producer = await harness.connect()
        try:
            await producer.execute(
                "INSERT INTO taskd.queue (name) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING",
                NAMES,
            )
            async with harness.worker("taskd", queues=NAMES[:SERVED]) as [worker]:
                enqueue = await producer.prepare(ENQUEUE)
                await _pace(enqueue, SETTLE_S)
                ran, xacts = worker.n, await observer.fetchval(XACTS, harness.DATABASE)
                claims = await harness.claims(producer)
                began = time.monotonic()
                jobs = await _pace(enqueue, secs)
                took_s = time.monotonic() - began
                xacts = await observer.fetchval(XACTS, harness.DATABASE) - xacts
                ran, claims = worker.n - ran, await harness.claims(producer) - claims
        finally:
            await producer.close()
            await observer.close()
        results.add(
            "queues", rep=rep, served=SERVED, queues=QUEUES, jobs_per_s=jobs / took_s,
            ran_per_s=ran / took_s, xacts_per_s=xacts / took_s,
            claims_per_job=claims / max(ran, 1), beyond_per_s=(xacts - OWN_PER_JOB * jobs) / took_s,
        )  # fmt: skip


async def _pace(enqueue: object, secs: float) -> int:
    """Enqueue a job every 20 ms, on one queue after the other; how many."""
    began = time.monotonic()
    count = int(secs * JOBS_PER_S)
    for number in range(count):
        await asyncio.sleep(max(0.0, began + number / JOBS_PER_S - time.monotonic()))
        await enqueue.fetch(NAMES[number % SERVED])  # type: ignore[attr-defined]
    await asyncio.sleep(max(0.0, began + count / JOBS_PER_S - time.monotonic()))
    return count
