"""Jobs that are enqueued to wait for existing jobs, by SQL, and the locks for that."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from taskd.core.workflows.workflow import OnFailed
from taskd.errors import StoreUnavailable
from taskd.store import workflows
from taskd.store.connections.error_translation import HeldUp
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, jobs
from tests.schema import fetches
from tests.store.helpers import (
    DONE,
    FAILED,
    MAX_CRASHES,
    Connect,
    Transaction,
    bury,
    done,
    enqueue,
    new_worker,
    rescue,
    run_one,
    settle,
    state_of,
    steps_back,
    waits_for_lock,
)
from tests.store.workflow_helpers import AFTER, AFTERWARDS, claim, end, start, states


async def test_a_job_can_wait_for_one_that_was_enqueued_alone(sql, lane: Lane, me) -> None:
    [parent] = await enqueue(lane)
    child = await sql.fetchval(AFTER, [parent], "cancel")
    grandchild = await sql.fetchval(AFTER, [child], "cancel")
    assert await state_of(sql, child) == "blocked"
    rows = await sql.fetch("SELECT DISTINCT workflow_id FROM taskd.job")
    assert len(rows) == 1
    assert rows[0][0] is not None
    await done(lane, *await claim(lane, me))
    await done(lane, *await claim(lane, me))
    assert await state_of(sql, grandchild) == "queued"


@pytest.mark.parametrize("policy", list(OnFailed))
@pytest.mark.parametrize("how", ["done", "failed", "cancelled"])
async def test_a_parent_may_have_ended_before(sql, lane: Lane, me, how: str, policy: str) -> None:
    parent = await run_one(lane, me)
    await end(lane, me, parent, how)
    child = await sql.fetchval(AFTER, [parent.id], policy)
    assert await state_of(sql, child) == AFTERWARDS[policy, how == "done"]
    if policy == "wait" and how != "done":
        await jobs.retry(lane, [parent.id])
        await done(lane, *await claim(lane, me))
        assert await state_of(sql, child) == "queued"


async def test_a_running_job_gets_a_dependant(sql, lane: Lane, me) -> None:
    parent = await run_one(lane, me)
    child = await sql.fetchval(AFTER, [parent.id], "cancel")
    await done(lane, parent)
    assert await state_of(sql, child) == "queued"


async def test_an_ack_waits_for_a_transaction_that_adds_a_dependant(
    sql, lane: Lane, connect: Connect, me
) -> None:
    parent = await run_one(lane, me)
    acking = await connect()
    async with Transaction(await connect()) as adding:
        child = await adding.connection.fetchval(AFTER, [parent.id], "cancel")
        late = asyncio.create_task(done(fetches(acking), parent))
        await waits_for_lock(sql, acking)
        await adding.commit()
        assert await late == 1
    assert await state_of(sql, child) == "queued"


async def test_a_new_dependant_of_a_job_that_just_ends_learns_its_outcome(
    sql, lane: Lane, connect: Connect, me
) -> None:
    parent = await run_one(lane, me)
    adding = await connect()
    async with Transaction(await connect()) as acking:
        await settle(fetches(acking.connection), parent, FAILED, reason="no")
        late = asyncio.create_task(adding.fetchval(AFTER, [parent.id], "continue"))
        await waits_for_lock(sql, adding)
        await acking.commit()
        child = await late
    assert await state_of(sql, child) == "queued"


async def test_a_new_dependant_of_a_job_that_is_just_retried_waits_for_it(
    sql, lane: Lane, connect: Connect, me
) -> None:
    parent = await run_one(lane, me)
    await settle(lane, parent, FAILED, reason="no")
    retrying = await connect()
    async with Transaction(await connect()) as adding:
        child = await adding.connection.fetchval(AFTER, [parent.id], "wait")
        late = asyncio.create_task(jobs.retry(fetches(retrying), [parent.id]))
        await waits_for_lock(sql, retrying)
        await adding.commit()
        assert await late == [parent.id]
    await done(lane, *await claim(lane, me))
    assert await state_of(sql, child) == "queued"


async def test_those_behind_a_job_that_comes_while_it_ends_go_with_it(
    sql, lane: Lane, connect: Connect, me
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]))
    [parent] = await claim(lane, me)
    acking = await connect()
    async with Transaction(await connect()) as adding:
        late_one = await adding.connection.fetchval(AFTER, [ids["b"]], "cancel")
        late = asyncio.create_task(settle(fetches(acking), parent, FAILED, reason="no"))
        await steps_back(sql, acking)
        await adding.commit()
        await late
    assert await state_of(sql, ids["b"]) == "cancelled"
    assert await state_of(sql, late_one) == "cancelled"


async def test_an_unknown_id_is_refused(sql, lane: Lane) -> None:
    [parent] = await enqueue(lane)
    with pytest.raises(Exception, match="no job has the id 987654321"):
        await sql.fetchval(AFTER, [parent, 987654321], "cancel")
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 1


async def test_a_job_without_a_history_can_have_dependants(sql, lane: Lane, me) -> None:
    await sql.execute(
        "INSERT INTO taskd.queue (name, keep_done_s, keep_failed_s) VALUES ('q', 0, 0)"
    )
    ids = await start(lane, ("a", []), ("b", ["a"]))
    [parent] = await claim(lane, me)
    await settle(lane, parent, DONE, result='{"x": 1}')
    [dependant] = await claim(lane, me)
    assert dependant.id == ids["b"]
    assert await workflows.parent_results(lane, ids["b"], 1000) == ({"a": {"x": 1}}, 8, [])
    kept = "SELECT expires_at > now() + interval '23 h' FROM taskd.job_history WHERE id = $1"
    assert await sql.fetchval(kept, ids["a"])


# Long transactions of users, and other isolation levels.


async def test_an_ack_gives_up_as_of_any_lock_when_somebody_keeps_a_dependant(
    sql, lane: Lane, connect: Connect, me
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", []))
    first, second = await claim(lane, me)
    acking = fetches(await connect(lock_timeout="50ms"))
    async with Transaction(await connect()) as keeping:
        await keeping.connection.fetchval(AFTER, [ids["b"]], "cancel")
        with pytest.raises(HeldUp, match="a job stays locked"):
            await done(acking, first, second)
        assert await jobs.locked(lane, [first.id, second.id]) == [first.id]
        await keeping.commit()
    assert await jobs.locked(lane, [first.id, second.id]) == []
    assert await done(acking, first, second) == 2


async def test_one_that_is_held_up_by_a_dependant_far_behind_it_keeps_nobody_else(
    sql, lane: Lane, connect: Connect, me
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["b"]), ("d", []), ("e", ["d"]))
    other = await new_worker(lane)
    await jobs.claim(lane, other, "q", 1)
    await sql.execute("UPDATE taskd.job SET crashes = $1 WHERE state = 'running'", MAX_CRASHES - 1)
    await sql.execute("UPDATE taskd.job SET deadline = now() WHERE id = $1", ids["d"])
    async with Transaction(await connect()) as keeping:
        await keeping.connection.fetchval(AFTER, [ids["c"]], "cancel")
        await bury(lane, other)
        assert await rescue(lane) == {}
        assert await changes.expire(lane, 10) == {"t": 1}
        await keeping.commit()
    assert len(await rescue(lane)) == 1
    assert set((await states(sql, ids)).values()) == {"failed", "cancelled"}


async def test_jobs_that_can_only_wait_for_each_other_are_refused(
    sql, lane: Lane, connect: Connect
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["a"]))
    patience = {"lock_timeout": "100ms"}
    async with (
        Transaction(await connect(**patience)) as one,
        Transaction(await connect(**patience)) as two,
    ):
        await one.connection.fetchval(AFTER, [ids["b"]], "cancel")
        await two.connection.fetchval(AFTER, [ids["c"]], "cancel")
        results = await asyncio.gather(
            one.connection.fetchval(AFTER, [ids["c"]], "cancel"),
            two.connection.fetchval(AFTER, [ids["b"]], "cancel"),
            return_exceptions=True,
        )
        assert any(isinstance(each, asyncpg.LockNotAvailableError) for each in results)


@pytest.mark.parametrize("how", ["added", "retried"])
async def test_an_end_in_an_older_snapshot_overlooks_no_new_dependant(
    sql, lane: Lane, connect: Connect, me, how: str
) -> None:
    ids = await start(lane, ("a", []), ("b", []), ("c", ["a", "b"]))
    first, second = await claim(lane, me)
    await settle(lane, second, FAILED, reason="no")
    ending = await connect()
    async with ending.transaction(isolation="repeatable_read"):
        await ending.fetchval("SELECT count(*) FROM taskd.job")
        if how == "added":
            late = await sql.fetchval(AFTER, [first.id], "cancel")
        else:
            late = ids["c"]
            await jobs.retry(lane, [second.id])
        with pytest.raises(StoreUnavailable, match="serialize"):
            await end(fetches(ending), me, first, "completed")
    await end(lane, me, first, "completed")
    if how == "retried":
        await done(lane, *await claim(lane, me))
    assert await state_of(sql, late) == "queued"
