"""The judge finds nothing in what may lawfully happen to a job, and can stop what may not."""

from __future__ import annotations

import asyncpg
import pytest

from taskd.core.jobs.job import JobState, NewJob
from taskd.core.jobs.limit import Limit
from taskd.core.jobs.unique import Unique
from taskd.core.outcomes.attempt_ends import Interrupted
from taskd.core.workflows.workflow import Node, OnFailed, plan
from taskd.store import workflows
from taskd.store.jobs import changes, jobs, limits
from tests.store.limit_helpers import publish
from tests.system.judge_helpers import QUEUE, TASK, Open, one_job_done, two_in_a_chain


async def test_whole_life_is_lawful(scene: Open) -> None:
    """Due later, failed, crashed once too often, retried by hand, interrupted, done."""
    stage = await scene(strict=True)
    job_id = await stage.enqueue(delay_s=0.001, max_attempts=2)
    await stage.promote()
    first = await stage.a.claim()
    await stage.a.begins(first)
    await stage.a.fails(first)
    await stage.promote()
    await stage.a.begins(await stage.a.claim())
    await stage.blame(stage.a, job_id)
    await stage.bury(stage.a)
    assert await stage.rescue(max_crashes=1) == {job_id: JobState.FAILED}
    assert await jobs.retry(stage.house, [job_id]) == [job_id]
    again = await stage.b.claim()
    await stage.b.begins(again)
    await stage.b.settles(again, Interrupted())
    await stage.b.does(await stage.b.claim())

    verdict = await stage.judge.check(enqueued=[job_id], ledgers={TASK: [job_id]})

    verdict.require()
    assert (verdict.figures.claims, verdict.figures.starts, verdict.figures.rescues) == (4, 4, 1)
    assert verdict.figures.repeated == 2, "behind the rescue and behind the interrupt"
    assert "stale writes accepted" in str(verdict)


async def test_cancelled_and_forgotten_jobs_are_lawful(scene: Open) -> None:
    stage = await scene(strict=True)
    cancelled = await stage.enqueue()
    await jobs.cancel(stage.house, [cancelled], "not needed")
    await stage.house.fetch("keep_queue", QUEUE, 0, 0, None)
    forgotten = await one_job_done(stage)
    verdict = await stage.judge.check(enqueued=[cancelled, forgotten])
    verdict.require()
    assert (verdict.figures.cancelled, verdict.figures.forgotten) == (1, 1)


async def test_a_job_whose_deadline_is_over_fails_lawfully_wherever_it_waits(scene: Open) -> None:
    stage = await scene(strict=True)
    expired = [await stage.enqueue(deadline_s=0.0), await stage.enqueue(deadline_s=0, delay_s=60)]
    await changes.expire(stage.house, 10)
    verdict = await stage.judge.check(enqueued=expired)
    verdict.require()
    assert (verdict.figures.failed, verdict.figures.failed_unrun) == (2, 2)


async def test_keys_versions_and_dependencies_are_lawful(scene: Open) -> None:
    """A newer version follows; the next of a key comes after the first; a chain in its order."""
    stage = await scene(strict=True)
    enqueued = [await stage.enqueue(unique=Unique("k", version=1))]
    running = await stage.a.claim()
    enqueued.append(await stage.enqueue(unique=Unique("k", version=2)))
    await stage.a.does(running)
    await stage.a.does(await stage.a.claim())
    await stage.sql("INSERT INTO judge.worked VALUES ($1, 'k', 2)", TASK)
    for _ in range(2):
        enqueued.append(await stage.enqueue(unique=Unique("waits", scope="waiting")))
        enqueued.append(await stage.enqueue(unique=Unique("waits", scope="waiting")))
        await stage.a.does(await stage.a.claim())
    for scope in ("history", "forever"):
        enqueued.append(await stage.enqueue(unique=Unique(scope, scope=scope)))
        await stage.a.does(await stage.a.claim())
        enqueued.append(await stage.enqueue(unique=Unique(scope, scope=scope)))
    enqueued += await two_in_a_chain(stage)
    await stage.a.does(await stage.a.claim())
    await stage.a.does(await stage.a.claim())
    verdict = await stage.judge.check(enqueued=enqueued, newest=[(TASK, "k", 2)])
    verdict.require()
    assert verdict.figures.done == 8


async def test_a_job_that_waits_for_its_limit_need_not_wait_for_what_a_retried_parent_adds(
    scene: Open,
) -> None:
    stage = await scene(strict=True)
    task = await publish(stage.house, Limit(concurrency=1), queue=QUEUE)
    new, limited = NewJob(TASK, queue=QUEUE), task.job()
    nodes = [Node("first", new), Node("second", limited, ("first",), OnFailed.CONTINUE)]
    _, first, second = await workflows.start(stage.house, plan("flow", nodes), [new, limited])
    await jobs.cancel(stage.house, [first], "not now")
    await jobs.retry(stage.house, [first])
    growing = await stage.a.claim()
    later = NewJob(TASK, queue=QUEUE, delay_s=0.001)
    made = plan("flow", [Node("added", later)])
    added = await workflows.add(stage.a.hand, growing, made, [later])
    assert added is not None
    assert await stage.sql("SELECT state::text FROM taskd.job WHERE id = $1", second) == "blocked"
    await limits.admit(stage.house, 10)
    await stage.b.does(await stage.b.claim())
    await stage.a.does(growing)
    await stage.promote()
    await stage.a.does(await stage.a.claim())
    verdict = await stage.judge.check(enqueued=[first, second, *added.jobs])
    verdict.require()


async def test_jobs_meant_to_wait_are_not_stuck(scene: Open) -> None:
    stage = await scene()
    job_id = await stage.enqueue(delay_s=3600)
    assert (await stage.judge.check()).stuck == 1
    (await stage.judge.check(waiting=[job_id])).require()


async def test_a_failure_that_nobody_tried_is_counted(scene: Open) -> None:
    stage = await scene()
    await stage.blame(stage.a, await stage.enqueue())
    await stage.a.claim()
    await stage.bury(stage.a)
    await jobs.rescue(stage.house, 100, 1, 1)
    verdict = await stage.judge.check()
    verdict.require()
    assert (verdict.figures.failed, verdict.figures.failed_unrun) == (1, 1)


async def test_a_wait_after_a_declared_death_counts_from_when_the_job_was_due(scene: Open) -> None:
    stage = await scene()
    await stage.enqueue()
    await stage.a.begins(await stage.a.claim())
    await stage.bury(stage.a)
    # As if the rescue had come an hour later, when the job became due.
    died = "UPDATE judge.worker SET died_at = died_at - interval '1 h' WHERE id = $1"
    await stage.sql(died, stage.a.id)
    await stage.rescue()
    await stage.b.claim_suspect()
    figures = (await stage.judge.check()).figures
    assert figures.death_declared_to_rescue_s > 3600
    assert 0 <= figures.death_declared_to_claim_s < 60


async def test_without_records_the_history_alone_is_judged(scene: Open) -> None:
    stage = await scene()
    await stage.enqueue()
    job = await stage.a.claim()
    await jobs.ack_done(stage.house, stage.a.id, [job.id], [job.fence])
    assert (await stage.judge.check()).failed_checks == {"I2"}
    (await stage.judge.check(records=False)).require()


async def test_strict_judge_stops_the_statement(scene: Open) -> None:
    stage = await scene(strict=True)
    job_id = await stage.enqueue()
    with pytest.raises(asyncpg.RaiseError, match="the judge objects: I4 fence"):
        await stage.sql("UPDATE taskd.job SET fence = 7 WHERE id = $1", job_id)
    assert await stage.sql("SELECT fence FROM taskd.job WHERE id = $1", job_id) == 0
