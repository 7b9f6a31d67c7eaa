"""Acks, cancels, rescues, retries and promotions of the same rows never wait for each other."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from taskd.core.jobs.job import Job, NewJob
from taskd.core.jobs.limit import Limit
from taskd.core.jobs.unique import Unique
from taskd.store import workers, workflows
from taskd.store.connections.error_translation import HeldUp
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, jobs, limits
from taskd.worker.assembly import PLANS
from tests.schema import fetches
from tests.store import limit_helpers
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
from tests.store.workflow_helpers import AFTER

JOBS = 60
PHASES = 10
ROUNDS = 20
LEAST_EACH = 10
# A deadlock becomes an error soon, but after the lock_timeout of claims. JIT is off because plans
# against PLANS have high costs (stage.py).
IMPATIENT = {"deadlock_timeout": "100ms", "jit": "off"}


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


# Statements that lock jobs in another order than that of their ids, with the change that makes
# waiting jobs the ones that a statement moves.
SKIPPING: dict[str, tuple[str, Callable[[Any, int], Coroutine[Any, Any, Any]]]] = {
    "claim": ("state = 'queued'", lambda on, me: jobs.claim(on, me, "q", 10)),
    "claim_limited": ("state = 'queued'", lambda on, me: limits.claim(on, me, "q", 10)),
    "claim_suspects": (
        "state = 'scheduled', crashes = 1",
        lambda on, me: jobs.claim_suspects(on, me, {"q": 5}, ["t"], 5, isolated=False, stride=1),
    ),
    "promote": ("state = 'scheduled'", lambda on, _: jobs.promote(on, 10)),
    "unpark": (
        "state = 'scheduled', parked = true, run_at = now() + interval '1 h'",
        lambda on, me: changes.unpark(on, me, ["t"], 10),
    ),
    "expire": ("deadline = now() - interval '1 s'", lambda on, _: changes.expire(on, 10)),
    "admit": (
        "state = 'blocked', limit_name = 't', limit_key = ''",
        lambda on, _: limits.admit(on, 10),
    ),
}
# SKIP LOCKED waits for a locked row only at a moment that no test can place: while the transaction
# that changed the row before ends. So a trigger waits instead.
WAIT_IN_TRIGGER = """
CREATE FUNCTION public.lock_first_job() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN PERFORM FROM taskd.job WHERE id = {first} FOR UPDATE; RETURN coalesce(new, old); END $$;
CREATE TRIGGER waits BEFORE UPDATE OR DELETE ON taskd.job
FOR EACH ROW WHEN (old.id = {second}) EXECUTE FUNCTION public.lock_first_job()
"""


@pytest.mark.parametrize("which", SKIPPING)
async def test_a_statement_that_skips_locked_rows_ends_when_it_waits_for_one_all_the_same(
    sql, lane: Lane, connect: Connect, me: int, which: str
) -> None:
    """Statements that lock rows in the order of their ids wait for its rows meanwhile."""
    change, run = SKIPPING[which]
    await limit_helpers.publish(lane, Limit(concurrency=5))
    first, second = await enqueue(lane, 2, task="u")
    await sql.execute(f"UPDATE taskd.job SET task = 't', {change}")
    await sql.execute(WAIT_IN_TRIGGER.format(first=first, second=second))
    locking, skipping = await connect(), await connect()
    await locking.execute("BEGIN")
    await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", first)
    waits = asyncio.ensure_future(run(fetches(skipping), me))
    while not waits.done() and not await sql.fetchval(
        "SELECT cardinality(pg_blocking_pids($1)) > 0", skipping.get_server_pid()
    ):
        await asyncio.sleep(0)
    await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", second)
    with pytest.raises(HeldUp):
        await waits
    await locking.execute("COMMIT")


async def test_an_ack_does_not_wait_for_the_next_job_of_its_limit(
    sql, lane: Lane, connect: Connect, me: int
) -> None:
    _, running, (_, first, second) = await limit_helpers.one_runs(lane, me, "a", "b", "a")
    await sql.execute(WAIT_IN_TRIGGER.format(first=first, second=second))
    locking = await connect()
    await locking.execute("BEGIN")
    await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", first)
    assert await done(lane, running) == 1
    assert await limit_helpers.queued(sql) == []
    await locking.execute("COMMIT")
    await limits.admit(lane, 10)
    assert await limit_helpers.queued(sql) == [first]


STAGES = [
    {"name": "a", "queue": "q", "task": "t", "priority": 100, "required": [], "accepted": []},
]
RUN = """
SELECT run_id, job_id FROM taskd.start_keyed_run(
    'docs', $1, '{}', NULL, NULL, now(), NULL, NULL, NULL, NULL, $2, NULL, 'skip')
"""
LOG = """
INSERT INTO taskd.job_log
    (job_id, fence, worker_id, expires_at, attempt, ended, first, left_out, lines)
VALUES ($1, 1, 1, now() + interval '1 day', 1, true, 0, 0, '[]')
"""
LOCK_KEY = "SELECT FROM taskd.job_key WHERE unique_key = $1 FOR UPDATE"


async def ended_run(sql: Any, lane: Lane, key: str) -> tuple[int, int]:
    """Start a run of a pipeline that has a key, and cancel its job; return the ids of both."""
    run, job = await sql.fetchrow(RUN, json.dumps(STAGES), key)
    assert await jobs.cancel(lane, [job], "no")
    return run, job


async def test_a_retry_locks_keys_of_runs_after_the_jobs_that_it_waits_for(
    sql, lane: Lane, connect: Connect
) -> None:
    """An ack holds its jobs, and then wants the key of a newer run that follows one of them."""
    _, past = await ended_run(sql, lane, "k")
    [parent] = await enqueue(lane)
    child = await sql.fetchval(AFTER, [parent], "cancel")
    await jobs.cancel(lane, [child], "no")
    locking, retrying = await connect(**IMPATIENT), await connect(**IMPATIENT)
    await locking.execute("BEGIN")
    await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", parent)
    retry = asyncio.create_task(jobs.retry(fetches(retrying), [past, child]))
    await waits_for_lock(sql, retrying)
    await locking.execute(LOCK_KEY, "k")
    await locking.execute("COMMIT")
    assert sorted(await retry) == [past, child]


async def test_runs_that_start_again_lock_their_jobs_before_their_keys(
    sql, lane: Lane, connect: Connect
) -> None:
    """A retry holds the jobs that have ended, and then wants the keys of their runs."""
    (first, _), (second, past) = [await ended_run(sql, lane, key) for key in "kl"]
    locking, restarting = await connect(**IMPATIENT), await connect(**IMPATIENT)
    await locking.execute("BEGIN")
    await locking.execute("SELECT FROM taskd.job_history WHERE id = $1 FOR UPDATE", past)
    restart = asyncio.create_task(
        workflows.restart(fetches(restarting), [first, second], None, None, "")
    )
    await waits_for_lock(sql, restarting)
    await locking.execute(LOCK_KEY, "k")
    await locking.execute("COMMIT")
    assert all(each.job_id for each in (await restart).values())


async def test_a_deletion_locks_a_job_that_ends_meanwhile_before_live_jobs(
    sql, lane: Lane, connect: Connect, me: int
) -> None:
    """A retry or another deletion holds finished jobs, and then wants live ones."""
    ends, lives = await enqueue(lane, 2)
    [run] = await jobs.claim(lane, me, "q", 1)
    assert run.id == ends
    await sql.execute(LOG, lives)
    acking, deleting, logging, locking = [await connect(**IMPATIENT) for _ in range(4)]
    await logging.execute("BEGIN")
    await logging.execute("SELECT FROM taskd.job_log FOR UPDATE")
    await acking.execute("BEGIN")
    assert await done(fetches(acking), run) == 1
    deletion = asyncio.create_task(jobs.delete(fetches(deleting), [ends, lives], "odd"))
    await waits_for_lock(sql, deleting)
    await acking.execute("COMMIT")
    # Now the deletion holds the live job, and waits for its log.
    while logging.get_server_pid() not in await sql.fetchval(
        "SELECT pg_blocking_pids($1)", deleting.get_server_pid()
    ):
        await asyncio.sleep(0.002)

    async def lock_both() -> None:
        async with locking.transaction():
            await locking.execute("SELECT FROM taskd.job_history WHERE id = $1 FOR UPDATE", ends)
            await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", lives)

    lock = asyncio.create_task(lock_both())
    await waits_for_lock(sql, locking)
    await logging.execute("COMMIT")
    assert set((await deletion).values()) == {"deleted"}
    await lock


async def test_a_completion_locks_the_jobs_that_it_retries_before_live_jobs(
    sql, lane: Lane, connect: Connect, me: int
) -> None:
    """A retry holds finished jobs, and then wants live ones."""
    fails, lives = await enqueue(lane, 2)
    child = await sql.fetchval(AFTER, [fails], "cancel")
    [run] = await jobs.claim(lane, me, "q", 1)
    await settle(lane, run, FAILED, reason="no")
    locking, completing = await connect(**IMPATIENT), await connect(**IMPATIENT)
    await locking.execute("BEGIN")
    await locking.execute("SELECT FROM taskd.job_history WHERE id = $1 FOR UPDATE", child)
    completion = asyncio.create_task(jobs.complete(fetches(completing), [fails, lives], None, "x"))
    await waits_for_lock(sql, completing)
    await locking.execute("SELECT FROM taskd.job WHERE id = $1 FOR UPDATE", lives)
    await locking.execute("COMMIT")
    assert await completion == {fails: FAILED, lives: QUEUED}
