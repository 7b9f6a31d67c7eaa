"""Jobs that wait for others: what the end of one does to the next, whatever that end was."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest

from taskd.core.job import Job, NewJob
from taskd.core.workflow import Node, OnFailed, plan
from taskd.errors import StoreUnavailable
from taskd.store import control, jobs, workflows
from taskd.store.connections import fetches
from taskd.store.database import Lane
from taskd.store.translate import HeldUp
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    MAX_CRASHES,
    Connect,
    Ears,
    Transaction,
    bury,
    done,
    enqueue,
    new_worker,
    rescue,
    row,
    run_one,
    settle,
    state_of,
    steps_back,
    waits_for_lock,
)

# How a job can end, as a word for the tables below.
ENDS = ["done", "done with a result", "completed", "failed", "cancelled", "by hand", "crashed"]
GOOD = ENDS[:3]


async def start(on: Any, *nodes: tuple[Any, ...], name: str = "flow") -> dict[str, int]:
    """Start a workflow of (name, after, on_failed); the ids of its jobs by name."""
    made = plan(
        name,
        [
            Node(each[0], NewJob("t", queue="q"), tuple(each[1]), OnFailed((*each, "cancel")[2]))
            for each in nodes
        ],
    )
    _, *ids = await workflows.start(on, made, [node.job for node in made.nodes])
    return dict(zip([node.name for node in made.nodes], ids, strict=True))


async def claim(on: Any, me: int, count: int = 10) -> list[Job]:
    return sorted(await jobs.claim(on, me, "q", count), key=lambda job: job.id)


async def end(on: Any, me: int, job: Job, how: str) -> None:
    """End a claimed job."""
    match how:
        case "done":
            assert await done(on, job) == 1
        case "done with a result":
            await settle(on, job, DONE, result='{"a": 1}')
        case "completed":
            assert await on.fetch("complete_job", job.id, job.worker_id, job.fence, "1", None)
        case "failed":
            await settle(on, job, FAILED, reason="no")
        case "expired":
            await settle(on, job, FAILED, reason="expired")
        case "cancelled":
            await settle(on, job, CANCELLED, reason="no")
        case "by hand":
            await jobs.cancel(on, [job.id], "by hand")
            await settle(on, job, CANCELLED, reason="cancel asked")
        case "crashed":
            await bury(on, me)
            await rescue(on)


async def states(sql: Any, ids: dict[str, int]) -> dict[str, str | None]:
    return {name: await state_of(sql, job_id) for name, job_id in ids.items()}


AFTERWARDS = {
    ("cancel", True): "queued",
    ("cancel", False): "cancelled",
    ("wait", True): "queued",
    ("wait", False): "blocked",
    ("continue", True): "queued",
    ("continue", False): "queued",
    ("only", True): "cancelled",
    ("only", False): "queued",
}


@pytest.mark.parametrize("policy", list(OnFailed))
@pytest.mark.parametrize("how", [*ENDS, "expired"])
async def test_each_end_of_a_parent_does_what_the_policy_says(
    sql, lane: Lane, me, how: str, policy: str
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"], policy))
    assert await states(sql, ids) == {"a": "queued", "b": "blocked"}
    [parent] = await claim(lane, me)
    assert parent.id == ids["a"]
    if how == "crashed":
        await sql.execute(
            "UPDATE taskd.job SET crashes = $1 WHERE id = $2", MAX_CRASHES - 1, parent.id
        )
    ears = Ears(sql)
    await ears.listen("taskd_q")
    await end(lane, me, parent, how)
    child = await row(sql, ids["b"])
    assert child["state"] == AFTERWARDS[policy, how in GOOD]
    if child["state"] == "queued":
        assert "taskd_q" in await ears.so_far()
        [claimed] = await claim(lane, await new_worker(lane))
        assert claimed.id == ids["b"]
    if child["state"] == "cancelled":
        assert child["reason"] == ("nothing failed" if policy == "only" else "dependency")


async def test_a_waiting_parent_that_is_cancelled_takes_its_dependants_along(sql, lane) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["b"]), ("d", ["c"], "continue"))
    assert await jobs.cancel(lane, [ids["a"]], "by hand") == {ids["a"]: CANCELLED}
    assert await states(sql, ids) == {
        "a": "cancelled", "b": "cancelled", "c": "cancelled", "d": "queued"
    }  # fmt: skip
    assert [(await row(sql, ids[n]))["reason"] for n in "abc"] == [
        "by hand", "dependency", "dependency"
    ]  # fmt: skip


async def test_a_blocked_job_is_cancelled_by_hand_with_those_behind_it(sql, lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["b"]), ("d", ["a"]))
    assert await jobs.cancel(lane, [ids["b"]], "by hand") == {ids["b"]: CANCELLED}
    assert await states(sql, ids) == {
        "a": "queued", "b": "cancelled", "c": "cancelled", "d": "blocked"
    }  # fmt: skip
    [parent] = await claim(lane, me)
    await done(lane, parent)
    assert await state_of(sql, ids["d"]) == "queued"


async def test_a_diamond_begins_its_end_once_both_sides_are_done(sql, lane: Lane, me) -> None:
    ids = await start(
        lane, ("end", ["left", "right"]), ("left", ["begin"]), ("right", ["begin"]), ("begin", [])
    )
    await done(lane, *await claim(lane, me))
    left, right = await claim(lane, me)
    await done(lane, left)
    assert await state_of(sql, ids["end"]) == "blocked"
    await settle(lane, right, DONE, result="2")
    [last] = await claim(lane, me)
    assert last.id == ids["end"]


async def test_a_dependant_that_is_due_later_is_scheduled(sql, lane: Lane, me) -> None:
    made = plan("w", [
        Node("a", NewJob("t", queue="q")), Node("b", NewJob("t", queue="q", delay_s=60), ("a",)),
    ])  # fmt: skip
    _, _, later = await workflows.start(lane, made, [node.job for node in made.nodes])
    due = (await row(sql, later))["run_at"]
    await done(lane, *await claim(lane, me))
    assert (await row(sql, later))["state"] == "scheduled"
    assert (await row(sql, later))["run_at"] == due


async def test_what_was_held_up_is_due_when_it_is_free(sql, lane: Lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]))
    born = (await row(sql, ids["b"]))["run_at"]
    await done(lane, *await claim(lane, me))
    assert (await row(sql, ids["b"]))["run_at"] > born
    [job] = await claim(lane, me)
    assert job.wait_s < 5


# Fan-in.


async def test_two_workers_that_end_the_last_members_at_once_free_the_last_job_once(
    sql, lane: Lane, connect: Connect, me, other
) -> None:
    ids = await start(lane, ("a", []), ("b", []), ("c", ["a", "b"]))
    [a] = await claim(lane, me, 1)
    [b] = await claim(lane, other, 1)
    second = await connect()
    async with Transaction(await connect()) as first:
        assert await done(fetches(first.connection), a) == 1
        late = asyncio.create_task(done(fetches(second), b))
        await steps_back(sql, second)
        await first.commit()
        assert await late == 1
    assert await state_of(sql, ids["c"]) == "queued"
    assert len(await claim(lane, me)) == 1


async def test_an_ack_that_is_sent_twice_counts_once(sql, lane: Lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", []), ("c", ["a", "b"]))
    a, _ = await claim(lane, me)
    assert [await done(lane, a), await done(lane, a)] == [1, 0]
    assert await sql.fetchval("SELECT waits_for FROM taskd.job WHERE id = $1", ids["c"]) == 1


async def test_a_batch_counts_its_members_in_one_step(sql, lane: Lane, me) -> None:
    names = [f"m{n}" for n in range(1000)]
    ids = await start(lane, *((name, []) for name in names), ("end", names))
    await sql.execute("CREATE TABLE public.seen (n integer)")
    await sql.execute(
        "CREATE FUNCTION public.see() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN INSERT INTO public.seen VALUES (NEW.waits_for); RETURN NULL; END'"
    )
    await sql.execute(
        "CREATE TRIGGER see AFTER UPDATE ON taskd.job FOR EACH ROW "
        f"WHEN (NEW.id = {ids['end']}) EXECUTE FUNCTION public.see()"
    )
    claimed = await claim(lane, me, 1000)
    await done(lane, *claimed[:600])
    await done(lane, *claimed[600:])
    assert [each[0] for each in await sql.fetch("SELECT n FROM public.seen")] == [400, None]
    assert await state_of(sql, ids["end"]) == "queued"


# Retries.


async def fail(lane: Lane, me: int, job_id: int) -> None:
    [job] = [each for each in await claim(lane, me) if each.id == job_id]
    await settle(lane, job, FAILED, reason="no")


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


# The door for SQL, and jobs that are there already.

AFTER = "SELECT taskd.enqueue_after('t', '{}', $1::bigint[], queue => 'q', on_failed => $2)"


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


async def test_an_ack_waits_for_whoever_just_begins_to_wait(
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


async def test_whoever_begins_to_wait_for_a_job_that_just_ends_learns_how(
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


async def test_whoever_waits_for_a_job_that_is_just_retried_is_not_forgotten(
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


async def test_an_id_that_nobody_knows_is_told(sql, lane: Lane) -> None:
    [parent] = await enqueue(lane)
    with pytest.raises(Exception, match="no job has the id 987654321"):
        await sql.fetchval(AFTER, [parent, 987654321], "cancel")
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 1


async def test_a_job_without_a_history_can_have_dependants(sql, lane: Lane, me) -> None:
    await sql.execute("INSERT INTO taskd.queue VALUES ('q', NULL, NULL, NULL, 0, 0)")
    ids = await start(lane, ("a", []), ("b", ["a"]))
    [parent] = await claim(lane, me)
    await settle(lane, parent, DONE, result='{"x": 1}')
    assert await workflows.parent_results(lane, ids["b"], 1000) == ({"a": {"x": 1}}, 8)
    kept = "SELECT expires_at > now() + interval '23 h' FROM taskd.job_history WHERE id = $1"
    assert await sql.fetchval(kept, ids["a"])


async def test_workflows_are_forgotten_when_no_job_of_them_is_left(sql, lane: Lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]))
    later = "UPDATE taskd.workflow SET look_at = now()"
    await sql.execute(later)
    await workflows.prune(lane)
    await done(lane, *await claim(lane, me))
    await done(lane, *await claim(lane, me))
    await sql.execute(later)
    await workflows.prune(lane)
    assert await sql.fetchval("SELECT count(*) FROM taskd.dependency") == 1
    looks = await sql.fetchval("SELECT look_at - now() FROM taskd.workflow")
    assert 7 <= looks.days < 10
    await sql.execute("DELETE FROM taskd.job_history WHERE id = $1", ids["a"])
    await sql.execute(later)
    await workflows.prune(lane)
    assert await sql.fetchval("SELECT count(*) FROM taskd.workflow") == 1
    await sql.execute("DELETE FROM taskd.job_history")
    await sql.execute(later)
    await workflows.prune(lane)
    assert await sql.fetchval("SELECT count(*) FROM taskd.workflow") == 0
    assert await sql.fetchval("SELECT count(*) FROM taskd.dependency") == 0


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
        assert await control.expire(lane, 10) == {"t": 1}
        await keeping.commit()
    assert len(await rescue(lane)) == 1
    assert set((await states(sql, ids)).values()) == {"failed", "cancelled"}


async def test_who_can_only_wait_for_each_other_is_told(sql, lane: Lane, connect: Connect) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["a"]))
    patience = {"lock_timeout": "100ms"}
    async with (
        Transaction(await connect(**patience)) as one,
        Transaction(await connect(**patience)) as two,
    ):
        await one.connection.fetchval(AFTER, [ids["b"]], "cancel")
        await two.connection.fetchval(AFTER, [ids["c"]], "cancel")
        told = await asyncio.gather(
            one.connection.fetchval(AFTER, [ids["c"]], "cancel"),
            two.connection.fetchval(AFTER, [ids["b"]], "cancel"),
            return_exceptions=True,
        )
        assert any(isinstance(each, asyncpg.LockNotAvailableError) for each in told)


@pytest.mark.parametrize("how", ["added", "retried"])
async def test_an_end_in_an_older_snapshot_overlooks_nobody_who_has_begun_to_wait(
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


async def test_a_job_that_waits_for_others_expires_at_its_deadline(sql, lane: Lane, me) -> None:
    ids = await start(
        lane, ("a", []), ("b", ["a"]), ("c", ["b"]), ("d", ["b"], "continue"), ("e", ["b"], "only")
    )
    await sql.execute("UPDATE taskd.job SET deadline = now() WHERE id = $1", ids["b"])
    assert await control.expire(lane, 10) == {"t": 1}
    assert await states(sql, ids) == {
        "a": "queued", "b": "failed", "c": "cancelled", "d": "queued", "e": "queued",
    }  # fmt: skip
    await jobs.retry(lane, [ids["b"]])
    assert await state_of(sql, ids["c"]) == "blocked"
    for job in await claim(lane, me):
        await done(lane, job)
    assert await state_of(sql, ids["b"]) == "queued"


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
