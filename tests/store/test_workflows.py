"""Jobs that wait for others: the effect of each outcome on the dependants."""

from __future__ import annotations

import asyncio

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.workflows.workflow import Node, OnFailed, plan
from taskd.store import workflows
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import changes, jobs
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    DONE,
    MAX_CRASHES,
    Connect,
    Ears,
    Transaction,
    done,
    new_worker,
    row,
    settle,
    state_of,
    steps_back,
)
from tests.store.workflow_helpers import AFTERWARDS, ENDS, GOOD, claim, end, start, states


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


async def test_workflows_are_forgotten_when_no_job_of_them_is_left(sql, lane: Lane, me) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]))
    later = "UPDATE taskd.workflow SET check_at = now()"
    await sql.execute(later)
    await workflows.prune(lane)
    await done(lane, *await claim(lane, me))
    await done(lane, *await claim(lane, me))
    await sql.execute(later)
    await workflows.prune(lane)
    assert await sql.fetchval("SELECT count(*) FROM taskd.dependency") == 1
    looks = await sql.fetchval("SELECT check_at - now() FROM taskd.workflow")
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


async def test_a_job_that_waits_for_others_expires_at_its_deadline(sql, lane: Lane, me) -> None:
    ids = await start(
        lane, ("a", []), ("b", ["a"]), ("c", ["b"]), ("d", ["b"], "continue"), ("e", ["b"], "only")
    )
    await sql.execute("UPDATE taskd.job SET deadline = now() WHERE id = $1", ids["b"])
    assert await changes.expire(lane, 10) == {"t": 1}
    assert await states(sql, ids) == {
        "a": "queued", "b": "failed", "c": "cancelled", "d": "queued", "e": "queued",
    }  # fmt: skip
    await jobs.retry(lane, [ids["b"]])
    assert await state_of(sql, ids["c"]) == "blocked"
    for job in await claim(lane, me):
        await done(lane, job)
    assert await state_of(sql, ids["b"]) == "queued"
