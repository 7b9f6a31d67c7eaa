"""Workflows under kill -9: each ends as its policies demand, and no job waits for ever."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from taskd import Client
from taskd.core.jobs.job import NewJob
from taskd.workflows import Workflow, group
from tests.store.workflow_helpers import WRONG
from tests.system.judge import Judge
from tests.system.shell import WITHIN_S, Shell
from tests.system.test_chaos import seed

APP = """
import asyncio
from taskd import Context, Fail, task
from taskd.handlers import TransactionContext

@task()
async def works() -> int:
    await asyncio.sleep(0.01)
    return 1

@task()
async def sums(ctx: Context) -> int:
    return sum((await ctx.results()).values())

@task()
async def fails() -> None:
    raise Fail("as it should")

@task(transaction=True)
async def commits(ctx: TransactionContext) -> int:
    return 1
"""
WORKS, SUMS, FAILS, COMMITS = (
    NewJob(name, queue="default") for name in ("works", "sums", "fails", "commits")
)
MEMBERS, FLOWS, WORKERS = 400, 30, 3
# How many jobs have ended when a worker is killed.
KILL_AT = (100, 250)

# The end of each node, and the results of the nodes that add up the results before them.
ENDS = {
    "begin": ("done", "1"), "good": ("done", "1"), "bad": ("failed", None),
    "both": ("cancelled", None), "behind": ("cancelled", None), "on": ("done", "1"),
    "sum": ("done", "2"), "on_failure": ("done", "1"), "on_success": ("cancelled", None),
    "on_completion": ("done", "5"),
}  # fmt: skip
SEEN = "SELECT node, state::text, result::text FROM taskd.job_history WHERE workflow_id = ANY ($1)"
TOO_EARLY = """
SELECT job.id, parent.id
FROM taskd.dependency AS d
JOIN taskd.job_history AS job ON job.id = d.job_id AND job.started_at IS NOT NULL
JOIN taskd.job_history AS parent ON parent.id = d.parent_id
WHERE d.on_failed <> 'only' AND job.started_at < parent.finished_at
"""


def flow() -> Workflow:
    made = Workflow("flow")
    made.add(WORKS, name="begin")
    made.add(COMMITS, name="good", after=["begin"])
    made.add(FAILS, name="bad", after=["begin"])
    made.add(WORKS, name="both", after=["good", "bad"])
    made.add(WORKS, name="behind", after=["both"])
    made.add(COMMITS, name="on", after=["good", "bad"], on_failed="continue")
    made.add(SUMS, name="sum", after=["on", "good"])
    made.on_failure(WORKS)
    made.on_success(WORKS)
    made.on_completion(SUMS)
    return made


@pytest.mark.timeout(120)
async def test_workflows_end_as_planned_whoever_is_killed(
    dsn: str, sql: Any, tmp_path: Path
) -> None:
    dice = random.Random(seed())
    judge = Judge(dsn)
    await judge.install()
    shell = Shell(tmp_path, dsn, sql)
    (tmp_path / "stop_app.py").write_text(APP)
    settings = {"lease_s": 4.0, "concurrency": 20}
    try:
        workers = [await shell.run(**settings) for _ in range(WORKERS)]
        async with Client(dsn) as client:
            big = await group([WORKS] * MEMBERS, then=SUMS, name="big").start(client=client)
            flows = [await flow().start(client=client) for _ in range(FLOWS)]
            for ended in KILL_AT:
                await reached(sql, ended)
                workers.pop(dice.randrange(len(workers))).kill()
            assert await client.result(big.jobs["sums"], timeout_s=WITHIN_S) == MEMBERS
            await shell.settled(MEMBERS + 1 + FLOWS * len(ENDS))
    finally:
        await shell.close()
    ends = await sql.fetch(SEEN, [one.id for one in flows])
    assert {tuple(row) for row in ends} == {(node, *end) for node, end in ENDS.items()}
    assert [tuple(row) for row in await sql.fetch(TOO_EARLY)] == []
    assert [tuple(row) for row in await sql.fetch(WRONG)] == []
    ids = [job_id for run in (big, *flows) for job_id in run.jobs.values()]
    (await judge.check(enqueued=ids, records=False)).require()


async def reached(sql: Any, ended: int) -> None:
    async with asyncio.timeout(WITHIN_S):
        while await sql.fetchval("SELECT count(*) FROM taskd.job_history") < ended:
            await asyncio.sleep(0.005)
