"""Admission together with workflows, pipelines, changes by hand, pauses and deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.client.workflows import chain, pipeline, stage
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.job_changes import Change
from taskd.core.jobs.limit import Limit
from taskd.core.tasks.task import Task
from taskd.errors import QueueFull
from taskd.store import workflows
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, jobs, limits
from tests.store.helpers import DONE, FAILED, SCHEDULED, done, row, settle, state_of
from tests.store.limit_helpers import enqueue, publish, queued, states


async def start(on: Any, *several: NewJob) -> list[int]:
    """Enqueue a chain; return the ids of its jobs."""
    made = chain(*several)._plan()
    return (await workflows.start(on, made, [node.job for node in made.nodes]))[1:]


async def admit(lane: Lane, me: int) -> dict[int, Any]:
    """Run admission, and claim the admitted jobs."""
    await limits.admit(lane, 100)
    return {job.id: job for job in await jobs.claim(lane, me, "q", 10)}


async def test_a_limited_job_that_waits_for_another_goes_through_admission_after_it(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    first, child = await start(lane, task.job("x"), task.job("x"))
    [rival] = await enqueue(lane, task, "x")
    claimed = await admit(lane, me)
    assert list(claimed) == [first]
    assert [each["blocked"] for each in await limits.list_limits(lane)] == [1]  # the other worker
    assert (await jobs.next_due(lane)).gate_s is None
    assert await done(lane, claimed[first]) == 1
    assert await queued(sql) == [rival]
    assert await state_of(sql, child) == "blocked"
    claimed = await admit(lane, me)
    assert list(claimed) == [rival]
    assert await states(sql) == {"running": 1, "blocked:parked": 1}
    assert await done(lane, claimed[rival]) == 1
    assert await queued(sql) == [child]


@pytest.mark.parametrize("how", ["done", "settled"])
async def test_the_last_parent_gives_its_place_to_the_child_in_the_same_statement(
    lane: Lane, sql: Any, me: int, how: str
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    first, child = await start(lane, task.job("x"), task.job("x"))
    [parent] = (await admit(lane, me)).values()
    if how == "done":
        await done(lane, parent)
    else:
        await settle(lane, parent, DONE, result='{"a": 1}')
    assert await queued(sql) == [child]
    assert parent.id == first


async def test_the_next_stage_of_a_pipeline_has_the_limit_of_its_task(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    made = pipeline("p", stage("one", task), stage("two", task), registry=None)
    run = made._run(None, ("x",), {})
    await workflows.start(lane, run, [node.job for node in run.nodes])
    [first] = (await admit(lane, me)).values()
    await settle(lane, first, DONE, result='{"tenant": "y"}')
    assert await states(sql) == {"blocked": 1}
    [second] = (await admit(lane, me)).values()
    assert (await row(sql, second.id))["limit_key"] == "y"


async def test_a_job_that_comes_back_with_its_parent_comes_back_to_its_gate(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    first, child = await start(lane, task.job("x"), task.job("x"))
    [parent] = (await admit(lane, me)).values()
    await settle(lane, parent, FAILED, reason="no")
    assert await state_of(sql, child) == "cancelled"
    assert await jobs.retry(lane, [first]) == [first, child]
    assert await states(sql) == {"blocked": 2}
    claimed = await admit(lane, me)
    assert list(claimed) == [first]
    await done(lane, claimed[first])
    assert await queued(sql) == [child]


async def test_enqueue_after_counts_for_the_limit_of_the_task(
    lane: Lane, sql: Any, me: int
) -> None:
    task: Task[..., Any] = await publish(lane, Limit(concurrency=1, by="tenant"))
    [first] = await enqueue(lane, task, "x")
    after = await sql.fetchval(
        "SELECT taskd.enqueue_after('t', '{\"tenant\": \"x\"}', ARRAY[$1::bigint])", first
    )
    born = await row(sql, after)
    assert (born["limit_name"], born["limit_key"]) == ("t", "x")
    [parent] = (await admit(lane, me)).values()
    await done(lane, parent)
    assert await queued(sql) == [after]


async def test_another_time_gives_the_place_of_an_admitted_job_to_the_next(
    lane: Lane, sql: Any
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    first, second = await enqueue(lane, task, "x", "x")
    await limits.admit(lane, 100)
    assert await queued(sql) == [first]
    await changes.change(lane, [first], Change(delay_s=3600.0))
    assert await states(sql) == {"scheduled": 1, "blocked:parked": 1}
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]
    await changes.change(lane, [first], Change(delay_s=0.0))
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]
    assert await states(sql) == {"queued": 1, "blocked:parked": 1}


async def test_what_leaves_the_time_and_the_key_leaves_the_admission(lane: Lane, sql: Any) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    [first] = await enqueue(lane, task, "x")
    await limits.admit(lane, 100)
    await changes.change(lane, [first], Change(priority=5))
    assert await queued(sql) == [first]


async def test_new_arguments_make_a_new_key(lane: Lane, sql: Any) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    moved, other, rival = await enqueue(lane, task, "x", "x", "y")
    await limits.admit(lane, 100)
    assert await queued(sql) == [moved, rival]
    await changes.change(lane, [moved], Change(update_args={"tenant": "y"}), '{"tenant": "y"}')
    await limits.admit(lane, 100)
    assert await queued(sql) == [other, rival]
    assert (await row(sql, moved))["limit_key"] == "y"


@pytest.mark.parametrize("late", ["admitted", "parked"])
async def test_a_limited_job_expires_and_gives_its_place_back(
    lane: Lane, sql: Any, late: str
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    first, second = await enqueue(lane, task, "x", "x")
    await limits.admit(lane, 100)
    gone, stays = (first, second) if late == "admitted" else (second, first)
    await sql.execute("UPDATE taskd.job SET deadline = now() - interval '1 s' WHERE id = $1", gone)
    assert await changes.expire(lane, 10) == {"t": 1}
    assert await state_of(sql, gone) == "failed"
    assert await queued(sql) == [stays]


async def test_a_job_of_a_task_that_is_resumed_goes_through_admission(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    [first] = await enqueue(lane, task, "x")
    claimed = await admit(lane, me)
    await settle(lane, claimed[first], SCHEDULED, delay_s=60.0, parked=True)
    assert await changes.unpark(lane, me, ["t"], 10) == {"q": 1}
    assert await states(sql) == {"blocked": 1}


async def test_what_waits_for_others_does_not_fill_a_queue_and_what_does_not_may_not(
    lane: Lane,
) -> None:
    await limits.limit_queue(lane, "q", max_depth=1)
    await start(lane, *[NewJob("u", queue="q")] * 3)
    with pytest.raises(QueueFull):
        await start(lane, NewJob("u", queue="q"))
