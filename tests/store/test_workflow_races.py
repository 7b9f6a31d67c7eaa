"""Acks, cancels, retries, rescues and additions to one workflow: correct in any order, without a
deadlock."""

from __future__ import annotations

import asyncio
import random
from typing import Any

from taskd.core.jobs.job import Job, NewJob
from taskd.core.workflows.workflow import Node, OnFailed, plan
from taskd.store import workers, workflows
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.worker.assembly import PLANS
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    QUEUED,
    Connect,
    ack,
    claim_suspect,
    done,
    enqueue,
    new_worker,
    rescue,
)
from tests.store.workflow_helpers import AFTER, WRONG, start

ROUNDS = 50
LEAST_EACH = 5
# As in test_deadlocks.py.
IMPATIENT = {"deadlock_timeout": "100ms", "jit": "off"}
POLICIES = ["cancel", "cancel", "wait", "continue", "only"]


NEW = NewJob("t", queue="q")
# A job with a parent that has added others, which are not its parents.
UNAWAITED = """
SELECT count(*)
FROM taskd.dependency AS d
JOIN taskd.dependency AS below ON below.parent_id = d.parent_id AND below.job_id < d.job_id
WHERE d.added_by = d.parent_id AND below.on_failed IS NOT NULL
  AND below.added_by IS DISTINCT FROM d.parent_id
  AND NOT EXISTS (SELECT FROM taskd.dependency AS e
                  WHERE e.parent_id = d.job_id AND e.job_id = below.job_id)
"""


class Crowd:
    """Writers to jobs of workflows, with counts of their effects."""

    def __init__(self, ids: list[int]) -> None:
        self.ids = ids
        self.rng = random.Random(7)
        names = ("done", "settled", "cancelled", "retried", "rescued", "added", "grown")
        self.counts = dict.fromkeys(names, 0)

    async def work(self, claims: Any, acks: Any, others: asyncio.Future[Any]) -> None:
        me = await new_worker(claims)
        batches = 0
        while not others.done():
            batch = await jobs.claim(claims, me, "q", 15)
            while suspect := await claim_suspect(claims, me, ["q"], ["t"]):
                batch.append(suspect)
            batch.sort(key=lambda job: job.id)
            batches += bool(batch)
            for job in batch[:2]:
                await self.grow(claims, job)
            if batch and batches % 7 == 3:
                await workers.declare_dead(claims, [me], proved=True)
                me = await new_worker(claims)
            await self.ack(acks, batch)

    async def grow(self, on: Any, job: Job) -> None:
        """A running job adds jobs to its workflow, one of which waits for the other."""
        one, two = f"one-{job.id}-{job.fence}", f"two-{job.id}-{job.fence}"
        nodes = [Node(one, NEW), Node(two, NEW, (one,), OnFailed(self.rng.choice(POLICIES)))]
        added = await workflows.add(on, job, plan("grown", nodes), [NEW, NEW])
        if added is not None and added.refusal is None:
            self.ids += added.jobs
            self.counts["grown"] += 1

    async def ack(self, acks: Any, batch: list[Job]) -> None:
        plain, others = batch[::2], batch[1::2]
        if plain:
            self.counts["done"] += await done(acks, *plain)
        if others:
            states = self.rng.choices([DONE, FAILED, CANCELLED, QUEUED], k=len(others))
            outcomes = [ack(job, state) for job, state in zip(others, states, strict=True)]
            moved = await jobs.ack_outcomes(acks, others[0].worker_id, outcomes)
            self.counts["settled"] += len(moved)

    async def meddle(self, on: Any) -> None:
        for _ in range(ROUNDS):
            some = self.rng.sample(self.ids, 8)
            self.counts["cancelled"] += len(await jobs.cancel(on, some, "by hand"))
            more = self.rng.sample(self.ids, min(60, len(self.ids)))
            self.counts["retried"] += len(await jobs.retry(on, more))

    async def add(self, connection: Any) -> None:
        for _ in range(2 * ROUNDS):
            parents = self.rng.sample(self.ids, self.rng.randint(1, 5))
            policy = self.rng.choice(POLICIES)
            self.ids.append(await connection.fetchval(AFTER, parents, policy))
            self.counts["added"] += 1

    async def keep_up(self, on: Any, others: asyncio.Future[Any]) -> None:
        while not others.done():
            self.counts["rescued"] += len(await rescue(on))
            await jobs.promote(on, 100)


async def test_nobody_is_lost_and_nobody_waits_in_vain(sql, lane: Lane, connect: Connect) -> None:
    ids = [int(each) for each in await enqueue(lane, 10)]
    for _ in range(4):
        flow = await start(
            lane, ("a", []), ("b", ["a"]), ("c", ["a"], "wait"), ("d", ["b", "c"], "continue"),
            ("e", ["b", "d"]), ("f", ["a", "b", "c"], "only"), ("g", ["e"]), ("h", ["g", "a"]),
        )  # fmt: skip
        ids += flow.values()
    crowd = Crowd(ids)
    plain = [await connect(**IMPATIENT) for _ in range(7)]
    acking = [fetches(await connect(**IMPATIENT, **PLANS)) for _ in range(2)]
    others = asyncio.gather(
        crowd.meddle(fetches(plain[2])),
        crowd.meddle(fetches(plain[3])),
        crowd.add(plain[4]),
        crowd.add(plain[5]),
    )
    await asyncio.gather(
        crowd.work(fetches(plain[0]), acking[0], others),
        crowd.work(fetches(plain[1]), acking[1], others),
        crowd.keep_up(fetches(plain[6]), others),
    )
    await others
    assert {what: n for what, n in crowd.counts.items() if n < LEAST_EACH} == {}, crowd.counts
    assert [tuple(each) for each in await sql.fetch(WRONG)] == []
    assert await sql.fetchval(UNAWAITED) == 0
    everywhere = [each[0] for each in await sql.fetch("SELECT id FROM taskd.jobs ORDER BY id")]
    assert everywhere == sorted(set(crowd.ids))
