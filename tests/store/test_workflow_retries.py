"""Retries of jobs that others wait for: which dependants are retried, which wait again, and for
which jobs that a running parent has added meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from taskd.core.jobs.job import Job, NewJob
from taskd.core.workflows.workflow import Node, plan
from taskd.store import workflows
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs
from tests.schema import fetches
from tests.store.helpers import (
    FAILED,
    Connect,
    Transaction,
    done,
    settle,
    state_of,
    waits_for_lock,
)
from tests.store.workflow_helpers import WRONG, claim, end, fail, start, states

WAITS = "SELECT state::text, waits_for FROM taskd.job WHERE id = $1"


async def test_with_a_parent_come_all_that_were_cancelled_because_of_it(sql, lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["b"]), ("d", ["b", "c"]))
    await fail(lane, me, ids["a"])
    assert set((await states(sql, ids)).values()) == {"failed", "cancelled"}
    assert await jobs.retry(lane, [ids["a"]]) == sorted(ids.values())
    assert await states(sql, ids) == {"a": "queued", "b": "blocked", "c": "blocked", "d": "blocked"}
    for name in "abcd":
        [job] = await claim(lane, me)
        assert job.id == ids[name]
        await done(lane, job)
    assert set((await states(sql, ids)).values()) == {"done"}


async def test_one_that_waits_goes_on_when_its_parent_is_retried_and_done(sql, lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"], "wait"))
    await fail(lane, me, ids["a"])
    assert await jobs.retry(lane, [ids["a"]]) == [ids["a"]]
    assert await states(sql, ids) == {"a": "queued", "b": "blocked"}
    await done(lane, *await claim(lane, me))
    assert await states(sql, ids) == {"a": "done", "b": "queued"}


@pytest.mark.parametrize("policy", ["continue", "only"])
async def test_one_that_went_on_is_not_run_again(sql, lane: Lane, me, policy: str) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"], policy))
    await fail(lane, me, ids["a"])
    await done(lane, *await claim(lane, me))
    assert await jobs.retry(lane, [ids["a"]]) == [ids["a"]]
    await done(lane, *await claim(lane, me))
    assert await states(sql, ids) == {"a": "done", "b": "done"}


async def test_a_job_comes_back_when_the_last_parent_that_failed_does(sql, lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", []), ("c", ["a", "b"]))
    for job in await claim(lane, me):
        await settle(lane, job, FAILED, reason="no")
    assert await jobs.retry(lane, [ids["a"]]) == [ids["a"]]
    assert await state_of(sql, ids["c"]) == "cancelled"
    await done(lane, *await claim(lane, me))
    assert await jobs.retry(lane, [ids["b"]]) == [ids["b"], ids["c"]]
    await done(lane, *await claim(lane, me))
    assert await state_of(sql, ids["c"]) == "queued"


async def test_a_job_whose_parent_stays_failed_stays_cancelled(sql, lane: Lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["b"]))
    await fail(lane, me, ids["a"])
    assert await jobs.retry(lane, [ids["b"], ids["c"]]) == []
    assert await jobs.retry(lane, list(ids.values())) == list(ids.values())
    assert (await states(sql, ids))["c"] == "blocked"


async def test_a_parent_that_fails_while_another_is_retried_is_seen(
    sql, lane: Lane, connect: Connect, me
) -> None:
    ids = await start(lane, ("a", []), ("b", []), ("c", ["a", "b"]))
    a, b = await claim(lane, me)
    await settle(lane, a, FAILED, reason="no")
    second = await connect()
    async with Transaction(await connect()) as retrying:
        assert await jobs.retry(fetches(retrying.connection), [a.id]) == [a.id, ids["c"]]
        late = asyncio.create_task(settle(fetches(second), b, FAILED, reason="no"))
        await waits_for_lock(sql, second)
        await retrying.commit()
        await late
    assert await states(sql, ids) == {"a": "queued", "b": "failed", "c": "cancelled"}


async def test_a_callback_that_failed_is_retried_while_others_still_run(
    sql, lane: Lane, me
) -> None:
    ids = await start(lane, ("a", []), ("b", []), ("alarm", ["a", "b"], "only"))
    first, second = await claim(lane, me)
    await end(lane, me, first, "failed")
    [alarm] = await claim(lane, me)
    await end(lane, me, alarm, "failed")
    assert await jobs.retry(lane, [ids["alarm"]]) == [ids["alarm"]]
    assert await state_of(sql, ids["alarm"]) == "queued"
    await end(lane, me, second, "done")
    assert await state_of(sql, ids["alarm"]) == "queued"


@pytest.mark.parametrize("at_once", [True, False])
async def test_callbacks_of_a_cancelled_workflow_wait_again_when_it_is_retried(
    sql, lane: Lane, me, at_once: bool
) -> None:
    ids = await start(
        lane, ("a", []), ("b", ["a"]), ("f", ["a", "b"], "only"), ("c", ["a", "b"], "continue")
    )
    await jobs.cancel(lane, list(ids.values()), "by hand")
    for batch in [list(ids.values())] if at_once else [[each] for each in ids.values()]:
        await jobs.retry(lane, batch)
    assert await states(sql, ids) == {"a": "queued", "b": "blocked", "f": "blocked", "c": "blocked"}
    for _ in range(2):
        await done(lane, *await claim(lane, me))
    assert await states(sql, ids) == {"a": "done", "b": "done", "f": "cancelled", "c": "queued"}


async def test_one_that_still_waits_for_others_waits_again_for_a_retried_parent(
    sql, lane: Lane, me
) -> None:
    ids = await start(lane, ("a", []), ("b", []), ("c", ["a", "b"], "continue"))
    a, b = await claim(lane, me)
    await settle(lane, a, FAILED, reason="no")
    assert tuple(await sql.fetchrow(WAITS, ids["c"])) == ("blocked", 1)
    assert await jobs.retry(lane, [ids["a"]]) == [ids["a"]]
    assert tuple(await sql.fetchrow(WAITS, ids["c"])) == ("blocked", 2)
    await done(lane, b)
    assert await state_of(sql, ids["c"]) == "blocked"
    await done(lane, *await claim(lane, me))
    assert await state_of(sql, ids["c"]) == "queued"


async def add(on: Fetches, adder: Job) -> int:
    """Let a running job add one job to its workflow; return its id."""
    new = NewJob("t", queue="q")
    added = await workflows.add(on, adder, plan("flow", [Node("added", new)]), [new])
    assert added is not None
    return added.jobs[0]


@pytest.mark.parametrize("when", ["cancelled before", "cancelled after", "gone on"])
async def test_a_retried_job_waits_for_what_its_running_parent_has_added(
    sql, lane: Lane, me, when: str
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"], "continue"))
    [a] = await claim(lane, me)
    if when == "gone on":
        await settle(lane, a, FAILED, reason="no")
        [b] = await claim(lane, me)
        await settle(lane, b, FAILED, reason="no")
        await jobs.retry(lane, [ids["a"]])
        [a] = await claim(lane, me)
    if when == "cancelled before":
        await jobs.cancel(lane, [ids["b"]], "by hand")
    added = await add(lane, a)
    if when == "cancelled after":
        await jobs.cancel(lane, [ids["b"]], "by hand")
    assert await jobs.retry(lane, [ids["b"]]) == [ids["b"]]
    assert tuple(await sql.fetchrow(WAITS, ids["b"])) == ("blocked", 2)
    await done(lane, a)
    [job] = await claim(lane, me)
    assert job.id == added
    await done(lane, job)
    assert await state_of(sql, ids["b"]) == "queued"


async def test_a_job_that_is_added_while_a_dependant_is_retried_ends_only_after_the_retry(
    sql, lane: Lane, connect: Connect, me
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]))
    [a] = await claim(lane, me)
    await jobs.cancel(lane, [ids["b"]], "by hand")
    async with Transaction(await connect()) as adding, Transaction(await connect()) as retrying:
        await add(fetches(adding.connection), a)
        retried = asyncio.create_task(jobs.retry(fetches(retrying.connection), [ids["b"]]))
        await waits_for_lock(sql, retrying.connection)
        await adding.commit()
        assert await retried == [ids["b"]]
        # Nobody can claim the added job, whose row the retry has locked.
        assert await claim(lane, me) == []
        await retrying.commit()
    await done(lane, *await claim(lane, me), a)
    assert await state_of(sql, ids["b"]) == "queued"
    assert await sql.fetch(WRONG) == []
