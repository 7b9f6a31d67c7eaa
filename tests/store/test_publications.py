"""Tables that are published for logical replication: every statement still works."""

from __future__ import annotations

from typing import Any

from taskd.core.jobs.limit import Limit
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, jobs, limits
from tests.store.helpers import FAILED, done, run_one, settle
from tests.store.limit_helpers import enqueue as enqueue_limited
from tests.store.limit_helpers import publish, states

PUBLISH = "CREATE PUBLICATION everything FOR ALL TABLES"
WITHOUT_IDENTITY = """
SELECT c.relname::text
FROM pg_class AS c
JOIN pg_namespace AS n ON n.oid = c.relnamespace AND n.nspname = 'taskd'
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT (
    c.relreplident = 'f'
    OR c.relreplident = 'd'
       AND EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary)
    OR c.relreplident = 'i'
)
ORDER BY 1
"""


async def test_every_table_has_an_identity_also_partitions_that_are_made_later(
    lane: Lane, sql: Any
) -> None:
    await history.make_partitions(lane)
    assert await sql.fetch(WITHOUT_IDENTITY) == []


async def test_limited_jobs_run_in_a_published_database(lane: Lane, sql: Any, me: int) -> None:
    await sql.execute(PUBLISH)
    task = await publish(lane, Limit(concurrency=1))
    await enqueue_limited(lane, task, "x", "x")
    for left in (1, 0):
        await limits.admit(lane, 100)
        [job] = await jobs.claim(lane, me, "q", 10)
        assert await done(lane, job)
        await limits.admit(lane, 100)
        assert sum((await states(sql)).values()) == left


async def test_a_failed_job_is_retried_in_a_published_database(
    lane: Lane, sql: Any, me: int
) -> None:
    await sql.execute(PUBLISH)
    job = await run_one(lane, me)
    await settle(lane, job, FAILED, reason="no")
    assert list(await jobs.retry(lane, [job.id])) == [job.id]
    [again] = await jobs.claim(lane, me, "q", 10)
    assert again.id == job.id


async def test_the_default_partition_is_pruned_in_a_published_database(
    lane: Lane, sql: Any, me: int
) -> None:
    await sql.execute(PUBLISH)
    job = await run_one(lane, me)
    assert await done(lane, job)
    old = "UPDATE taskd.job_history SET expires_at = now() - interval '40 days' WHERE id = $1"
    await sql.execute(old, job.id)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_history_default") == 1
    await history.prune_default(lane)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_history") == 0
