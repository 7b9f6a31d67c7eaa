"""Completing, restarting, copying and deleting jobs by hand, and the workers that run them."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import msgspec
import pytest

from taskd import acting_as, pipeline, stage, task
from taskd.core.jobs.job import JobState, NewJob
from taskd.core.jobs.limit import LimitOf
from taskd.core.jobs.unique import Unique
from taskd.core.tasks.registry import Registry
from taskd.errors import TaskdError
from taskd.store import workers, workflows
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from tests.logins import Logins
from tests.store.helpers import (
    DONE,
    FAILED,
    QUEUED,
    RUNNING,
    SCHEDULED,
    Connect,
    Transaction,
    done,
    due_now,
    enqueue,
    fate,
    new_worker,
    rescue,
    row,
    run_one,
    running,
    settle,
    state_of,
)
from tests.store.workflow_helpers import claim, fail, start, states

KEYED = NewJob("t", queue="q", unique=Unique(key="k"))


def last_error(found: Any) -> dict[str, Any]:
    errors = msgspec.json.decode(found["errors"])
    return errors[-1]  # type: ignore[no-any-return]


# Completing.


async def test_a_waiting_a_running_and_a_failed_job_are_completed(
    sql: Any, lane: Lane, me: int
) -> None:
    failed = await run_one(lane, me)
    await settle(lane, failed, FAILED, reason="gave up", error='{"type": "E"}')
    run = await run_one(lane, me)
    [queued] = await enqueue(lane)
    [later] = await enqueue(lane, delay_s=60.0)
    before = await jobs.complete(
        lane, [failed.id, run.id, queued, later, 4711], '{"sent": true}', "sent by post"
    )
    assert before == {failed.id: FAILED, run.id: RUNNING, queued: QUEUED, later: SCHEDULED}
    for job_id in before:
        found = await row(sql, job_id)
        assert (found["state"], found["result"], found["reason"]) == (
            "done", '{"sent": true}', None,
        )  # fmt: skip
        assert found["worker_id"] is None
    assert await jobs.complete(lane, [run.id], None, "") == {}
    assert (await row(sql, run.id))["result"] == '{"sent": true}'


async def test_the_worker_of_a_job_that_was_completed_cannot_write_its_outcome(
    sql: Any, lane: Lane, me: int
) -> None:
    run = await run_one(lane, me)
    with acting_as("ada"):
        await jobs.complete(lane, [run.id], "1", "sent by post")
    assert await done(lane, run) == 0
    assert await settle(lane, run, FAILED, reason="late") is None
    assert await fate(lane, run) == "by hand"
    found = await row(sql, run.id)
    assert (found["state"], found["result"], found["attempt"]) == ("done", "1", 1)
    error = last_error(found)
    user = await sql.fetchval("SELECT session_user")
    assert error["type"] == "EndedByHand"
    assert error["message"] == f"completed by {user} (ada): sent by post"
    assert error["worker"] == str(me)


async def test_an_outcome_that_is_written_first_stays(
    sql: Any, lane: Lane, me: int, connect: Connect
) -> None:
    """The ack has locked the row: the completion waits for it, and finds a finished job."""
    run = await run_one(lane, me)
    other = await connect()
    async with Transaction(other) as transaction:
        await other.execute(
            "WITH ended AS (DELETE FROM taskd.job WHERE id = $1 RETURNING *) "
            "INSERT INTO taskd.job_history (id, enqueued_at, run_at, finished_at, expires_at, "
            "fence, state, priority, attempt, crashes, interrupts, queue, task, args, errors) "
            "SELECT id, enqueued_at, run_at, now(), now() + interval '1 day', fence, 'done', 1, 1, "
            "0, 0, queue, task, args, errors FROM ended",
            run.id,
        )
        completing = asyncio.create_task(jobs.complete(lane, [run.id], "2", "odd"))
        await asyncio.sleep(0.05)
        assert not completing.done()
        await transaction.commit()
        assert await completing == {}
    assert (await row(sql, run.id))["result"] is None


async def test_the_worker_of_a_completed_job_is_notified(sql: Any, lane: Lane, me: int) -> None:
    run = await run_one(lane, me)
    heard: list[str] = []
    await sql.add_listener("taskd", lambda *each: heard.append(each[-1]))
    await jobs.complete(lane, [run.id], None, "")
    async with asyncio.timeout(10):
        while not heard:
            await sql.execute("SELECT 1")
    assert heard == [str(me)]


async def test_a_completed_job_frees_its_key_and_its_limit(sql: Any, lane: Lane, me: int) -> None:
    await limits.set_limit(lane, "api", 1, None, None, None, [])
    limit = LimitOf("api", '["x"]')
    ids = await jobs.enqueue(lane, [NewJob("t", queue="q", limit=limit)] * 2)
    await limits.admit(lane, 10)
    assert [await state_of(sql, each) for each in ids] == ["queued", "blocked"]
    await jobs.complete(lane, [ids[0]], None, "")
    assert await state_of(sql, ids[1]) == "queued"
    [keyed] = await jobs.enqueue(lane, [KEYED])
    await jobs.complete(lane, [keyed], None, "")
    [again] = await jobs.enqueue(lane, [KEYED])
    assert again.outcome == "enqueued"


async def test_the_newer_version_behind_a_completed_job_is_enqueued(
    sql: Any, lane: Lane, me: int
) -> None:
    run = await run_one(lane, me, unique=Unique(key="k", version=1))
    [newer] = await enqueue(lane, unique=Unique(key="k", version=2))
    assert newer.outcome == "follows"  # type: ignore[attr-defined]
    await jobs.complete(lane, [run.id], None, "")
    versions = await sql.fetch("SELECT version, state::text FROM taskd.job")
    assert [tuple(each) for each in versions] == [(2, "queued")]


@pytest.mark.parametrize("policy", ["cancel", "wait", "continue"])
async def test_a_workflow_goes_on_after_a_failed_job_was_completed(
    sql: Any, lane: Lane, me: int, policy: str
) -> None:
    """The jobs that were cancelled because of it come back, and start with its result."""
    ids = await start(lane, ("a", []), ("b", ["a"], policy), ("c", ["b"]))
    await fail(lane, me, ids["a"])
    assert await jobs.complete(lane, [ids["a"]], '"by hand"', "") == {ids["a"]: FAILED}
    found = await states(sql, ids)
    assert (found["a"], found["b"]) == ("done", "queued")
    assert found["c"] == "blocked"
    [second] = await claim(lane, me)
    assert (await workflows.parent_results(lane, second.id, 1000)).by_node == {"a": "by hand"}
    await done(lane, second)
    assert (await states(sql, ids))["c"] == "queued"


@task(queue="q", registry=Registry())
async def load(source: str) -> dict[str, int]:
    return {}


@task(queue="q", registry=Registry())
async def report(rows: int) -> None: ...


RUN = pipeline("monthly", stage("load", load), stage("report", report))


@pytest.mark.parametrize("how", ["running", "failed", "cancelled"])
async def test_the_next_stage_begins_after_a_stage_was_completed(
    sql: Any, lane: Lane, me: int, how: str
) -> None:
    [_, first] = await begin(lane)
    [run] = await claim(lane, me)
    if how != "running":
        await settle(lane, run, JobState(how), reason="no")
    with pytest.raises(TaskdError, match="cannot be completed with this result: the stage"):
        await jobs.complete(lane, [first], '{"lines": 1}', "")
    assert await state_of(sql, first) == how
    assert await jobs.complete(lane, [first], '{"rows": 7}', "") == {first: how}
    [second] = await claim(lane, me)
    found = await row(sql, second.id)
    assert (found["node"], found["args"]) == ("report", '{"rows": 7}')
    assert await settle(lane, run, DONE, result='{"rows": 8}') is None
    assert await sql.fetchval("SELECT count(*) FROM taskd.jobs") == 2


async def begin(lane: Lane) -> list[int]:
    made = RUN._run(None, ("x",), {})
    return await workflows.start(lane, made, [node.job for node in made.nodes])


async def test_a_blocked_job_is_completed_before_its_parents_end(
    sql: Any, lane: Lane, me: int
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]), ("c", ["b"]))
    assert await jobs.complete(lane, [ids["b"]], None, "") == {ids["b"]: JobState.BLOCKED}
    assert await states(sql, ids) == {"a": "queued", "b": "done", "c": "queued"}
    [first, third] = await claim(lane, me)
    await settle(lane, first, FAILED, reason="no")
    assert await done(lane, third) == 1


async def test_a_result_above_the_limit_is_refused(sql: Any, lane: Lane) -> None:
    [job_id] = await enqueue(lane)
    with pytest.raises(TaskdError, match="the result takes 262146 bytes; the limit"):
        await jobs.complete(lane, [job_id], '"' + "x" * 262_144 + '"', "")
    assert await state_of(sql, job_id) == "queued"


# Restarting.


async def test_a_restart_ends_the_attempt_and_starts_the_job_again(
    sql: Any, lane: Lane, me: int
) -> None:
    run = await run_one(lane, me, max_attempts=1)
    with acting_as("ada"):
        assert await jobs.restart(lane, [run.id, 4711], "it hung") == {run.id: SCHEDULED}
    found = await row(sql, run.id)
    assert (found["attempt"], found["max_attempts"], found["worker_id"]) == (1, 2, None)
    wait_s = await sql.fetchval("SELECT date_part('epoch', run_at - now()) FROM taskd.job")
    assert 3 < wait_s <= 5
    user = await sql.fetchval("SELECT session_user")
    assert last_error(found)["message"] == f"restarted by {user} (ada): it hung"
    assert await fate(lane, run) == "by hand"
    assert await done(lane, run) == 0
    await due_now(sql, run.id)
    await jobs.promote(lane, 10)
    [again] = await claim(lane, me)
    assert (again.id, again.attempt, again.fence) == (run.id, 2, run.fence + 1)
    assert await done(lane, run) == 0
    assert await fate(lane, run) == "by hand"
    assert await done(lane, again) == 1


async def test_only_running_jobs_are_restarted(sql: Any, lane: Lane, me: int) -> None:
    [queued] = await enqueue(lane)
    [ended] = await running(lane, me, queue="x")
    await done(lane, ended)
    assert await jobs.restart(lane, [queued, ended.id], "odd") == {}
    assert await state_of(sql, queued) == "queued"
    assert await sql.fetchval("SELECT count(*) FROM taskd.action") == 0


async def test_a_restart_drops_a_requested_cancellation_and_a_deadline_that_has_passed(
    sql: Any, lane: Lane, me: int
) -> None:
    run = await run_one(lane, me, deadline_s=60.0)
    await jobs.cancel(lane, [run.id], "odd")
    await sql.execute("UPDATE taskd.job SET deadline = now()")
    await jobs.restart(lane, [run.id], "it hung", delay_s=0)
    found = await row(sql, run.id)
    assert (found["state"], found["cancel_requested"], found["deadline"]) == ("queued", False, None)


async def test_a_restarted_job_with_a_limit_goes_through_admission_again(
    sql: Any, lane: Lane, me: int
) -> None:
    await limits.set_limit(lane, "api", 1, None, None, None, [])
    limit = LimitOf("api", '["x"]')
    first, second = await jobs.enqueue(lane, [NewJob("t", queue="q", limit=limit)] * 2)
    await limits.admit(lane, 10)
    await claim(lane, me)
    assert await jobs.restart(lane, [first], "it hung", delay_s=0) == {first: JobState.BLOCKED}
    await limits.admit(lane, 10)
    assert sorted([await state_of(sql, first), await state_of(sql, second)]) == [  # type: ignore[type-var]
        "blocked", "queued",
    ]  # fmt: skip


async def test_a_job_whose_key_another_waiting_job_holds_is_not_restarted(
    sql: Any, lane: Lane, me: int
) -> None:
    unique = Unique(key="k", scope="waiting")
    run = await run_one(lane, me, unique=unique)
    [newer] = await enqueue(lane, unique=unique)
    assert await jobs.restart(lane, [run.id], "it hangs") == {}
    assert await state_of(sql, run.id) == "running"
    await jobs.cancel(lane, [newer], "odd")
    assert await jobs.restart(lane, [run.id], "it hangs", delay_s=0) == {run.id: QUEUED}
    [held] = await enqueue(lane, unique=unique)
    assert held == run.id


async def test_a_restarted_job_gives_way_to_its_newer_version(
    sql: Any, lane: Lane, me: int
) -> None:
    one, two = (
        NewJob("t", queue="q", unique=Unique(key="k", version=each, newer_starts="after_delay"))
        for each in (1, 2)
    )
    await jobs.enqueue(lane, [one])
    [run] = await jobs.claim(lane, me, "q", 10)
    [followed] = await jobs.enqueue(lane, [two])
    assert followed.outcome == "follows"
    assert await jobs.restart(lane, [run.id], "it hung", 60) == {run.id: JobState.CANCELLED}
    newer = await sql.fetchrow("SELECT * FROM taskd.job")
    assert (newer["version"], newer["state"], newer["follower"]) == (2, "scheduled", None)
    assert await sql.fetchval("SELECT run_at > now() + interval '50 s' FROM taskd.job")
    found = await row(sql, run.id)
    assert found["reason"] == f"superseded by version 2 (job {newer['id']})"
    assert last_error(found)["type"] == "EndedByHand"
    kept = await sql.fetchrow("SELECT job_id, retry_at FROM taskd.job_key")
    assert tuple(kept) == (newer["id"], newer["run_at"])
    assert await fate(lane, run) == "by hand"
    assert await done(lane, run) == 0


async def test_a_suspect_that_is_restarted_stays_in_quarantine(
    sql: Any, lane: Lane, me: int
) -> None:
    run = await run_one(lane, me)
    await sql.execute("UPDATE taskd.job SET crashes = 1")
    assert await jobs.restart(lane, [run.id], "it hung", delay_s=0) == {run.id: SCHEDULED}


# Copies.


async def test_a_done_job_runs_again_as_a_copy(sql: Any, lane: Lane, me: int) -> None:
    run = await run_one(lane, me, args='{"a": 1}', priority=7, timeout_s=3.0, max_attempts=2)
    await settle(lane, run, DONE, result='"r"')
    with acting_as("ada"):
        copies = await jobs.run_again(lane, [run.id, 4711], "it was wrong")
    [copy] = copies.values()
    assert list(copies) == [run.id]
    found, before = await row(sql, copy), await row(sql, run.id)
    for name in ("task", "queue", "args", "priority", "timeout_s", "max_attempts"):
        assert found[name] == before[name], name
    assert (found["state"], found["attempt"], found["fence"]) == ("queued", 0, 0)
    assert (before["state"], before["result"]) == ("done", '"r"')
    rows = await sql.fetch("SELECT action, target, detail::text FROM taskd.action ORDER BY at")
    assert [tuple(each) for each in rows] == [
        ("run again", f"job {run.id}", f'{{"copy": {copy}}}'),
        ("copy", f"job {copy}", f'{{"of": {run.id}}}'),
    ]


async def test_a_copy_takes_the_key_unless_another_job_holds_it(
    sql: Any, lane: Lane, me: int
) -> None:
    run = await run_one(lane, me, unique=Unique(key="k", for_s=3600.0))
    await done(lane, run)
    [copy] = (await jobs.run_again(lane, [run.id], "")).values()
    assert (await row(sql, copy))["unique_key"] == "k"
    assert await jobs.run_again(lane, [run.id], "") == {}
    [skipped] = await jobs.enqueue(lane, [NewJob("t", queue="q", unique=Unique(key="k"))])
    assert (skipped, skipped.outcome) == (copy, "skipped")


async def test_a_live_job_is_not_copied(lane: Lane, me: int) -> None:
    run = await run_one(lane, me)
    [queued] = await enqueue(lane)
    assert await jobs.run_again(lane, [run.id, queued], "") == {}


# Deleting.


async def test_waiting_and_finished_jobs_are_deleted_and_running_ones_are_not(
    sql: Any, lane: Lane, me: int
) -> None:
    ended = await run_one(lane, me)
    await done(lane, ended)
    run = await run_one(lane, me)
    [queued] = await enqueue(lane)
    outcomes = await jobs.delete(lane, [ended.id, run.id, queued, 4711], "test data")
    assert outcomes == {
        ended.id: "deleted", run.id: "running", queued: "deleted", 4711: "unknown",
    }  # fmt: skip
    assert await sql.fetchval("SELECT array_agg(id) FROM taskd.jobs") == [run.id]
    rows = await sql.fetch("SELECT action, target, reason FROM taskd.action ORDER BY target")
    assert [tuple(each) for each in rows] == [
        ("delete", f"job {each}", "test data") for each in sorted([ended.id, queued], key=str)
    ]


async def test_a_deleted_job_frees_its_key_its_limit_and_its_log(
    sql: Any, lane: Lane, me: int
) -> None:
    await limits.set_limit(lane, "api", 1, None, None, None, [])
    limit = LimitOf("api", '["x"]')
    first, second = await jobs.enqueue(lane, [NewJob("t", queue="q", limit=limit)] * 2)
    await limits.admit(lane, 10)
    await jobs.delete(lane, [first], "")
    assert await state_of(sql, second) == "queued"
    [keyed] = await jobs.enqueue(lane, [NewJob("t", queue="x", unique=Unique("k", for_s=60.0))])
    await sql.execute(
        "INSERT INTO taskd.job_log VALUES ($1, 1, 1, now(), now(), 1, true, 0, 0, '[]')", keyed
    )
    await jobs.delete(lane, [keyed], "")
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_log") == 0
    [again] = await jobs.enqueue(lane, [NewJob("t", queue="x", unique=Unique("k", for_s=60.0))])
    assert again.outcome == "enqueued"


async def test_jobs_of_a_live_workflow_are_deleted_only_together(
    sql: Any, lane: Lane, me: int
) -> None:
    ids = await start(lane, ("a", []), ("b", ["a"]))
    [first] = await claim(lane, me)
    await done(lane, first)
    assert await jobs.delete(lane, [ids["a"]], "") == {ids["a"]: "in a workflow"}
    assert await jobs.delete(lane, [ids["b"]], "") == {ids["b"]: "deleted"}
    assert await jobs.delete(lane, [ids["a"]], "") == {ids["a"]: "deleted"}
    ids = await start(lane, ("a", []), ("b", ["a"]))
    await claim(lane, me)
    both = list(ids.values())
    assert set((await jobs.delete(lane, both, "")).values()) == {"running", "in a workflow"}
    await sql.execute(
        "UPDATE taskd.job SET state = 'queued', worker_id = NULL WHERE id = $1", both[0]
    )
    assert set((await jobs.delete(lane, both, "")).values()) == {"deleted"}


# Rights.


@pytest.mark.parametrize("kind", ["producer", "worker", "observer"])
async def test_only_admins_act_by_hand(kind: str, logins: Logins) -> None:
    connection = await asyncpg.connect(logins.dsn(kind))
    try:
        for call in ("complete", "restart", "run_again", "delete"):
            with pytest.raises(asyncpg.InsufficientPrivilegeError):
                await connection.execute(f"SELECT taskd.{call}(ARRAY[1])")
        with pytest.raises(asyncpg.InsufficientPrivilegeError):
            await connection.execute("SELECT taskd.declare_dead(1)")
    finally:
        await connection.close()


async def test_an_admin_acts_by_hand_in_a_transaction_that_can_be_rolled_back(
    sql: Any, lane: Lane, me: int, logins: Logins
) -> None:
    run = await run_one(lane, me)
    admin = await asyncpg.connect(logins.dsn("admin"))
    try:
        async with Transaction(admin):
            rows = await admin.fetch("SELECT * FROM taskd.restart(ARRAY[$1::bigint])", run.id)
            assert [tuple(each) for each in rows] == [(run.id, "scheduled")]
        async with Transaction(admin):
            await admin.execute("SELECT taskd.complete(ARRAY[$1::bigint])", run.id)
        assert await state_of(sql, run.id) == "running"
        assert await sql.fetchval("SELECT count(*) FROM taskd.action") == 0
    finally:
        await admin.close()


# Declaring a worker dead.


async def test_a_worker_that_renews_its_lease_cannot_be_declared_dead(sql: Any, lane: Lane) -> None:
    me = await new_worker(lane, lease_s=30.0)
    run = await run_one(lane, me)
    assert await workers.declare_dead_by_hand(lane, me, "odd") == "lives"
    await sql.execute("UPDATE taskd.worker SET renewed_at = now() - interval '9 s'")
    assert await workers.declare_dead_by_hand(lane, me, "odd") == "lives"
    assert await workers.declare_dead_by_hand(lane, 4711, "odd") == "unknown"
    assert await done(lane, run) == 1


async def test_a_silent_worker_is_declared_dead_before_its_lease_expires(
    sql: Any, lane: Lane
) -> None:
    me = await new_worker(lane, lease_s=30.0)
    run = await run_one(lane, me)
    await sql.execute("UPDATE taskd.worker SET renewed_at = now() - interval '16 s'")
    assert await sql.fetchval("SELECT lease_until > now() FROM taskd.worker")
    with acting_as("ada"):
        assert await workers.declare_dead_by_hand(lane, me, "the host is off") == "dead"
    assert await workers.declare_dead_by_hand(lane, me, "odd") == "dead before"
    assert await rescue(lane) == {run.id: SCHEDULED}
    found = await row(sql, run.id)
    assert (found["attempt"], found["crashes"], found["interrupts"]) == (0, 0, 1)
    assert await workers.renew_lease(lane, me, 30.0, draining=False, status="{}") is None
    assert await done(lane, run) == 0
    rows = await sql.fetch("SELECT action, target, actor, reason FROM taskd.action")
    assert [tuple(each) for each in rows] == [
        ("declare dead", f"worker {me}", "ada", "the host is off")
    ]
