"""Acks, cancels, rescues, retries and promotions of the same rows never wait for each other."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from taskd.core.jobs.job import Job, NewJob
from taskd.core.jobs.unique import Unique
from taskd.store import workers
from taskd.store.connections.database import Lane
from taskd.store.jobs import jobs
from taskd.worker.assembly import PLANS
from tests.schema import fetches
from tests.store.helpers import (
    DONE,
    FAILED,
    QUEUED,
    SCHEDULED,
    Connect,
    ack,
    claim_suspect,
    done,
    enqueue,
    new_worker,
    rescue,
    settle,
    steps_back,
    waits_for_lock,
)

JOBS = 60
PHASES = 10
ROUNDS = 20
LEAST_EACH = 10
# A deadlock becomes an error at once. JIT is off because plans against PLANS have high costs
# (stage.py).
IMPATIENT = {"deadlock_timeout": "50ms", "jit": "off"}


class Crowd:
    """Writers to jobs, over one set of rows, with counts of their effects."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.rng = random.Random(1)
        self.counts = dict.fromkeys(
            ("acked", "settled", "cancelled", "retried", "rescued", "promoted"), 0
        )

    async def work(self, claims: Any, acks: Any) -> None:
        """Claim and ack; every fifth time die first, and ack late."""
        me = await new_worker(claims)
        for turn in range(ROUNDS):
            batch = await jobs.claim(claims, me, "q", JOBS // 2)
            while suspect := await claim_suspect(claims, me, ["q"], ["t"]):
                batch.append(suspect)
            batch.sort(key=lambda job: job.id)
            if turn % 5 == 4:
                await workers.declare_dead(claims, [me], proved=True)
                me = await new_worker(claims)
            await self.ack(acks, batch)

    async def ack(self, acks: Any, batch: list[Job]) -> None:
        plain, others = batch[::2], batch[1::2]
        if plain:
            self.counts["acked"] += await done(acks, *plain)
        if others:
            states = self.rng.choices([DONE, FAILED, QUEUED, SCHEDULED], k=len(others))
            outcomes = [
                ack(job, state, delay_s=0.001) for job, state in zip(others, states, strict=True)
            ]
            moved = await jobs.ack_outcomes(acks, others[0].worker_id, outcomes)
            self.counts["settled"] += len(moved)

    async def meddle(self, on: Any) -> None:
        """Cancel and retry some jobs, in any order, as people name them."""
        for _ in range(ROUNDS):
            some, more = (self.rng.sample(self.ids, JOBS // 3) for _ in range(2))
            self.counts["cancelled"] += len(await jobs.cancel(on, some, "by hand"))
            self.counts["retried"] += len(await jobs.retry(on, more))

    async def keep_up(self, on: Any, others: asyncio.Future[Any]) -> None:
        """Rescue and promote while the others run."""
        while not others.done():
            self.counts["rescued"] += len(await rescue(on))
            self.counts["promoted"] += sum((await jobs.promote(on, JOBS)).values())


async def test_nobody_deadlocks_over_the_same_rows(sql, lane: Lane, connect: Connect) -> None:
    await enqueue(lane, JOBS)
    ids = [each[0] for each in await sql.fetch("SELECT id FROM taskd.job")]
    crowd = Crowd(ids)
    plain = [fetches(await connect(**IMPATIENT)) for _ in range(5)]
    acking = [fetches(await connect(**IMPATIENT, **PLANS)) for _ in range(2)]
    for _ in range(PHASES):
        # The victim of a deadlock, chosen by PostgreSQL, would raise it.
        others = asyncio.gather(
            crowd.work(plain[0], acking[0]),
            crowd.work(plain[1], acking[1]),
            crowd.meddle(plain[2]),
            crowd.meddle(plain[3]),
        )
        await crowd.keep_up(plain[4], others)
        await others
        # Completed jobs do not come back by themselves.
        await sql.execute("UPDATE taskd.job_history SET state = 'failed', attempt = 1")
    assert {what: n for what, n in crowd.counts.items() if n < LEAST_EACH} == {}, crowd.counts
    everywhere = await sql.fetch("SELECT id FROM taskd.jobs ORDER BY id")
    assert [each[0] for each in everywhere] == sorted(ids)  # none lost, none twice


async def test_a_batch_does_not_wait_for_a_holder_that_came_out_of_the_order(
    sql, lane: Lane, connect: Connect, me: int
) -> None:
    """Two batches that waited for each other's jobs in this way deadlocked."""

    def replacing(key: str) -> NewJob:
        return NewJob("t", queue="q", unique=Unique(key, on_conflict="replace"))

    batching, inserting, locking = [await connect() for _ in range(3)]
    await jobs.enqueue(lane, [replacing("b")])
    [b] = await jobs.claim(lane, me, "q", 1)
    await inserting.execute("BEGIN")
    [a] = await jobs.enqueue(fetches(inserting), [replacing("a")])
    # The one of b runs, so the batch does not lock it; it comes as far as the new one of a.
    batch = asyncio.create_task(jobs.enqueue(fetches(batching), [replacing("a"), replacing("b")]))
    await waits_for_lock(sql, batching)
    assert await settle(lane, b, QUEUED) is QUEUED
    await locking.execute("BEGIN")
    await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", b.id)
    await inserting.execute("COMMIT")
    # It holds a, and b is locked: it must release a for a transaction that holds b and wants a.
    await steps_back(sql, batching)
    await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", a)
    assert not batch.done()
    await locking.execute("COMMIT")
    made = await batch
    assert [each.outcome for each in made] == ["replaced", "replaced"]
    assert made[0] == a
    assert made[1] > b.id, "a job that was claimed before ends as superseded"


async def test_a_batch_lets_go_of_a_holder_while_somebody_else_takes_a_new_key(
    sql, lane: Lane, connect: Connect
) -> None:
    """A wait for a key is a wait for a transaction, which may want rows that the batch holds."""
    both = [NewJob("t", queue="q", unique=Unique(key, on_conflict="replace")) for key in "ab"]
    batching, inserting = await connect(), await connect()
    [a] = await jobs.enqueue(lane, both[:1])
    await inserting.execute("BEGIN")
    [b] = await jobs.enqueue(fetches(inserting), both[1:])
    batch = asyncio.create_task(jobs.enqueue(fetches(batching), both))
    await waits_for_lock(sql, batching)
    await inserting.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", a)
    assert not batch.done()
    await inserting.execute("COMMIT")
    assert [(each, each.outcome) for each in await batch] == [(a, "replaced"), (b, "replaced")]
