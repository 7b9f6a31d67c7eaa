"""A login that is only a worker chooses the arguments of no job of another login's tasks."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.workflows.workflow import Node, plan
from taskd.errors import PermissionDenied
from taskd.store import workflows
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.logins import Logins
from tests.schema import fetches
from tests.security.worker_logins import second_worker  # noqa: F401
from tests.store.helpers import DONE, ack, new_worker
from tests.store.schedule_helpers import late, make, nightly, row

EVIL = '{"to": "mallory"}'
REFUSED = asyncpg.InsufficientPrivilegeError
FOLLOWER = {
    "queue": "q", "args": json.loads(EVIL), "priority": 1, "run_at": "2020-01-01", "version": 9,
}  # fmt: skip
STAGES = [
    {"name": name, "queue": "q", "task": "pay", "priority": 100, "required": [], "accepted": ["to"]}
    for name in ("first", "second")
]
PUBLISH = (
    "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
    "VALUES ($1, 'app', 'x', 'q', 1, '{\"properties\": {\"a\": {}, \"to\": {}}}')"
)


@pytest.fixture
async def victim(logins: Logins) -> AsyncIterator[Lane]:
    """The first worker login, which has published the task `pay`."""
    lane = Lane(Database({"dsn": logins.dsn("worker")}), "victim")
    connection = await asyncpg.connect(logins.dsn("worker"))
    await connection.execute(PUBLISH, "pay")
    await connection.close()
    yield lane
    await lane.close()


@pytest.fixture
async def attacker(victim: Lane, second_worker: str) -> AsyncIterator[Any]:  # noqa: F811
    """A plain connection of the second worker login, which has published the task `own`."""
    connection = await asyncpg.connect(second_worker)
    await connection.execute(PUBLISH, "own")
    yield connection
    await connection.close()


async def count(sql: Any) -> int:
    return int(await sql.fetchval("SELECT count(*) FROM taskd.jobs"))


async def start_pipeline(sql: Any) -> int:
    """Start a pipeline of two stages; return the id of the first job."""
    ids = await sql.fetchval(
        "SELECT taskd.enqueue_workflow('p', 'pipeline', $1, '{pay}', '{q}', ARRAY['{}'], '{100}', "
        "'{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', '{NULL}', "
        "'{first}', '{}', '{}', '{}', '{}')",
        json.dumps(STAGES),
    )
    return int(ids[1])


def step(name: str) -> str:
    return json.dumps({"stage": {**STAGES[0], "name": name, "task": "other"}, "args": {"to": "x"}})


async def test_a_follower_that_no_producer_has_enqueued_is_not_inserted(
    sql: Any, victim: Lane, attacker: Any
) -> None:
    call = "SELECT taskd.enqueue_follower('pay', 'k', $1)"
    assert await attacker.fetchval(call, json.dumps(FOLLOWER)) is None
    # Nor while a genuine one waits, whose content the attacker reads in the row of the job.
    enqueue = "SELECT outcome FROM taskd.enqueue_unique('pay', $1, 'k', version => $2::bigint)"
    await sql.execute(enqueue, '{"to": "ada"}', 1)
    worker = await new_worker(victim)
    [job] = await jobs.claim(victim, worker, "q", 1)
    assert await sql.fetchval(enqueue, '{"to": "eve"}', 2) == "follows"
    genuine = await attacker.fetchval("SELECT follower FROM taskd.job")
    forged = json.dumps({**json.loads(genuine), "args": json.loads(EVIL)})
    assert await attacker.fetchval(call, forged) is None
    with pytest.raises(asyncpg.UniqueViolationError):
        await attacker.fetchval(call, genuine)
    assert await count(sql) == 1
    # The end of the job enqueues it once, and then nobody.
    assert await jobs.ack_done(victim, worker, [job.id], [job.fence]) == 1
    [follower] = await jobs.claim(victim, worker, "q", 5)
    assert follower.args == '{"to": "eve"}'
    assert await jobs.ack_done(victim, worker, [follower.id], [follower.fence]) == 1
    assert await attacker.fetchval(call, genuine) is None
    assert await count(sql) == 2


@pytest.mark.parametrize(
    "attempt",
    ["UPDATE taskd.job_key SET follower = '{}'", "DELETE FROM taskd.job_key",
     "UPDATE taskd.job_key SET until = now()", "SELECT unique_key FROM taskd.job_key",
     "INSERT INTO taskd.job_key (task, unique_key, job_id, until) VALUES ('t', 'k', 1, now())"],
)  # fmt: skip
async def test_a_worker_neither_reads_nor_writes_unique_keys(attacker: Any, attempt: str) -> None:
    with pytest.raises(REFUSED):
        await attacker.execute(attempt)


async def test_expired_keys_are_pruned_but_not_those_with_the_follower_of_a_live_job(
    sql: Any, victim: Lane
) -> None:
    enqueue = "SELECT taskd.enqueue_unique('pay', '{}', $1, version => $2::bigint)"
    await sql.execute(enqueue, "follows", 1)
    worker = await new_worker(victim)
    [job] = await jobs.claim(victim, worker, "q", 1)
    await sql.execute(enqueue, "follows", 2)
    await sql.execute(enqueue, "alone", 1)
    await sql.execute("UPDATE taskd.job_key SET until = now() - interval '1 s'")
    assert (await victim.fetch("prune_keys", 10))[0][0] == 1
    assert await sql.fetchval("SELECT unique_key FROM taskd.job_key") == "follows"
    assert await jobs.ack_done(victim, worker, [job.id], [job.fence]) == 1
    assert await sql.fetchval("SELECT version FROM taskd.job WHERE unique_key = 'follows'") == 2
    assert (await victim.fetch("prune_keys", 10))[0][0] == 1


async def test_a_stage_begins_only_at_the_end_of_a_job_that_the_login_runs(
    sql: Any, victim: Lane, attacker: Any
) -> None:
    call = "SELECT taskd.enqueue_next_stage($1, $2)"
    first = await start_pipeline(sql)
    with pytest.raises(REFUSED):
        await attacker.fetchval(call, first, step("second"))
    worker = await new_worker(victim)
    [job] = await jobs.claim(victim, worker, "q", 1)
    with pytest.raises(REFUSED):
        await attacker.fetchval(call, first, step("second"))
    assert await count(sql) == 1
    moved = await jobs.ack_outcomes(victim, worker, [ack(job, DONE, result='{"to": "ada"}')])
    assert moved == {first: DONE}
    made = await sql.fetchrow("SELECT id, task, node, args, args::text AS text FROM taskd.job")
    assert (made["task"], made["node"], json.loads(made["text"])) == (
        "pay",
        "second",
        {"to": "ada"},
    )
    # The job has ended, and the worker of the next one has begun no stage.
    for parent in (first, made["id"]):
        with pytest.raises(REFUSED):
            await attacker.fetchval(call, parent, step("second"))
    assert await count(sql) == 2


async def test_a_worker_begins_one_stage_per_job_and_only_one_of_the_plan(
    sql: Any, victim: Lane, logins: Logins
) -> None:
    call = "SELECT taskd.enqueue_next_stage($1, $2)"
    first = await start_pipeline(sql)
    await jobs.claim(victim, await new_worker(victim), "q", 1)
    holder = await asyncpg.connect(logins.dsn("worker"))
    assert await holder.fetchval(call, first, step("invented")) is None
    made = await holder.fetchval(call, first, step("second"))
    # All but the arguments is taken from the plan.
    assert await sql.fetchval("SELECT task::text FROM taskd.job WHERE id = $1", made) == "pay"
    with pytest.raises(REFUSED, match="has begun one"):
        await holder.fetchval(call, first, step("second"))
    await holder.close()
    assert await count(sql) == 2


async def test_results_are_for_the_login_whose_job_has_waited_for_them(
    sql: Any, victim: Lane, attacker: Any
) -> None:
    read = "SELECT result FROM taskd.parent_results($1, 1000)"
    first = await start_pipeline(sql)
    worker = await new_worker(victim)
    [job] = await jobs.claim(victim, worker, "q", 1)
    await jobs.ack_outcomes(victim, worker, [ack(job, DONE, result='{"to": "ada"}')])
    second = await sql.fetchval("SELECT id FROM taskd.job")
    assert await attacker.fetch(read, second) == []
    await jobs.claim(victim, worker, "q", 1)
    assert await attacker.fetch(read, second) == []
    assert first != second
    assert (await workflows.parent_results(victim, second, 1000))[0] == {"first": {"to": "ada"}}


async def test_a_worker_schedules_the_tasks_that_its_own_login_has_published(
    sql: Any, victim: Lane, attacker: Any, logins: Logins
) -> None:
    theirs = "SELECT taskd.set_schedule('s', 'pay', $1, queue => 'q', every => '1 min')"
    unknown = "SELECT taskd.set_schedule('s', 'nobodys', queue => 'q', every => '1 min')"
    own = "SELECT taskd.set_schedule($1, 'own', queue => 'q', every => '1 min')"
    for call, args in ((theirs, [EVIL]), (unknown, [])):
        with pytest.raises(REFUSED, match="has not published"):
            await attacker.execute(call, *args)
    # Publishing the task again does not make it the attacker's, nor can it say so.
    await attacker.execute("UPDATE taskd.task SET app = 'own', published_at = now()")
    with pytest.raises(REFUSED, match="has not published"):
        await attacker.execute(theirs, EVIL)
    assert await attacker.fetchval(own, "mine") == "created"
    # A schedule of another login cannot be changed into one for the attacker's task.
    await make(victim, nightly(job=NewJob("pay", EVIL, queue="q")))
    with pytest.raises(REFUSED, match="has not published"):
        await attacker.fetchval(own, "s")
    assert (await row(sql))["task"] == "pay"
    # A login that is allowed to enqueue may schedule any task.
    producing = f"{logins.role('worker')}_second"
    await sql.execute(f"GRANT EXECUTE ON FUNCTION taskd.enqueue TO {producing}")
    assert await attacker.fetchval(theirs, '{"to": "bob"}') == "changed"


async def test_a_worker_makes_no_jobs_of_a_schedule_beside_its_ticks(
    sql: Any, victim: Lane, attacker: Any
) -> None:
    await make(victim, nightly(job=NewJob("pay", EVIL, queue="q")))
    call = "SELECT taskd.make_scheduled_jobs('s', clock_timestamp(), $1, $2)"
    for argses, at_once in ((None, True), (None, False), ([EVIL], False)):
        with pytest.raises(REFUSED, match="makes no such jobs"):
            await attacker.fetchval(call, argses, at_once)
    with pytest.raises(REFUSED, match="makes no such jobs"):
        await attacker.fetchval("SELECT taskd.apply_overlap('s', clock_timestamp(), false)")
    await late(sql, 1.0)
    await sql.execute("UPDATE taskd.schedule SET paused_at = now()")
    with pytest.raises(REFUSED, match="makes no such jobs"):
        await attacker.fetchval(call, None, False)
    assert await count(sql) == 0


@pytest.mark.parametrize(
    "forged",
    [
        "INSERT INTO taskd.worker (id, login) VALUES (1, 'other')",
        "INSERT INTO taskd.task (name, login) VALUES ('x', 'other')",
        "UPDATE taskd.worker SET login = session_user",
        "UPDATE taskd.task SET login = session_user",
    ],
)
async def test_no_worker_gives_itself_another_login(attacker: Any, forged: str) -> None:
    with pytest.raises(REFUSED):
        await attacker.execute(forged)


async def test_a_worker_that_is_refused_a_schedule_says_what_to_grant(
    victim: Lane,
    second_worker: str,  # noqa: F811
) -> None:
    lane = Lane(Database({"dsn": second_worker}), "second")
    with pytest.raises(PermissionDenied, match="grant it taskd_producer"):
        await make(lane, nightly(job=NewJob("pay", queue="q")), app="second")
    await lane.close()


async def test_a_worker_publishes_no_pipeline_of_foreign_tasks(
    victim: Lane, attacker: Any, sql: Any
) -> None:
    stages = [
        {"name": "a", "task": "own", "queue": "q"},
        {"name": "b", "task": "pay", "queue": "q"},
    ]
    one = {
        "name": "line", "signature": "x", "queue": "q", "max_attempts": 1, "args_schema": {},
        "args_version": 1, "redact": [], "stages": stages,
    }  # fmt: skip
    publish = "SELECT * FROM taskd.publish_pipelines('app', NULL, '', $1)"
    with pytest.raises(REFUSED, match='the pipeline "line" enqueues jobs of the task "pay"'):
        await attacker.fetch(publish, json.dumps([one]))
    assert await attacker.fetch(publish, json.dumps([one | {"stages": stages[:1]}])) == []
    with pytest.raises(REFUSED):
        await attacker.execute("UPDATE taskd.task SET stages = '[]' WHERE name = 'line'")
    job_id = await sql.fetchval("SELECT taskd.enqueue('line')")
    assert await sql.fetchval("SELECT task FROM taskd.job WHERE id = $1", job_id) == "own"


async def test_a_worker_adds_no_foreign_jobs_and_none_to_foreign_workflows(
    victim: Lane, attacker: Any, sql: Any
) -> None:
    me = await new_worker(victim)
    [job_id] = await jobs.enqueue(fetches(sql), [NewJob("own", queue="q")])
    [job] = await jobs.claim(victim, me, "q", 1)
    assert job.id == job_id
    made = plan("flow", [Node("a", NewJob("own", queue="q"))])
    new = [node.job for node in made.nodes]
    with pytest.raises(PermissionDenied, match="cannot add jobs: no worker of"):
        await workflows.add(fetches(attacker), job, made, new)
    with pytest.raises(PermissionDenied, match="has not published"):
        await workflows.add(victim, job, made, new)  # the task is that of the attacker
    mine = plan("flow", [Node("a", NewJob("pay", queue="q"))])
    added = await workflows.add(victim, job, mine, [node.job for node in mine.nodes])
    assert added is not None
    assert len(added.jobs) == 1


async def test_a_worker_lets_no_job_wait_for_foreign_jobs_whose_results_it_would_read(
    victim: Lane, attacker: Any, sql: Any
) -> None:
    [secret, own] = await jobs.enqueue(
        fetches(sql), [NewJob("pay", queue="q"), NewJob("own", queue="mine")]
    )
    me = await new_worker(fetches(attacker), queues=["mine"])
    [job] = await jobs.claim(fetches(attacker), me, "mine", 1)
    assert job.id == own
    for parent, refusal in ((secret, 'that wait for jobs of the task "pay"'), (own, None)):
        made = plan("flow", [Node("a", NewJob("own", queue="mine"), (parent,))])
        adding = workflows.add(fetches(attacker), job, made, [node.job for node in made.nodes])
        if refusal is None:
            assert (await adding) is not None
        else:
            with pytest.raises(PermissionDenied, match=refusal):
                await adding
    # Nor does a tick of a schedule that it has set.
    await attacker.execute(
        "SELECT taskd.set_schedule('s', 'own', queue => 'mine', every => '1 min')"
    )
    await late(sql, 1.0)
    fire = (
        "SELECT taskd.make_scheduled_jobs('s', next_at, NULL, false, NULL, $1) FROM taskd.schedule"
    )
    with pytest.raises(REFUSED, match="makes no such jobs"):
        await attacker.fetchval(fire, [secret])
    assert len(await attacker.fetchval(fire, [])) == 1
