"""The gate of limits: who is admitted, who is parked, and who gives a place back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.core.job import Job, NewJob
from taskd.core.limit import Limit, LimitOf
from taskd.core.registry import Registry
from taskd.core.task import Task
from taskd.errors import InvalidJob
from taskd.store import connections, jobs, limits, tasks, workers
from taskd.store.database import Lane
from taskd.store.jobs import Fetches
from tests.store.helpers import (
    CANCELLED,
    FAILED,
    QUEUED,
    SCHEDULED,
    Connect,
    Transaction,
    bury,
    done,
    due_now,
    rescue,
    row,
    settle,
    waits_for_lock,
)

APP = "app"


async def publish(
    on: Fetches, limit: Limit, *, task: str = "t", queue: str = "q"
) -> Task[..., Any]:
    """A published task with a limit; its one argument makes the key."""

    async def handler(tenant: str = "main") -> None: ...

    registry = Registry()
    made: Task[..., Any] = Task(handler, name=task, queue=queue, limit=limit)
    registry.add(made)
    await workers.publish(on, APP, registry, [queue])
    await limits.publish(on, APP, registry)
    await limits.admit(on, 100)  # the opening that it has left
    return made


async def enqueue(on: Fetches, task: Task[..., Any], *tenants: str) -> list[int]:
    return list(await jobs.enqueue(on, [task.job(tenant) for tenant in tenants]))


async def lined_up(on: Fetches, limit: Limit, *tenants: str) -> tuple[Task[..., Any], list[int]]:
    """A published task with a limit, and jobs of it that somebody has looked at."""
    task = await publish(on, limit)
    born = await enqueue(on, task, *tenants)
    await limits.admit(on, 100)
    return task, born


async def one_runs(
    on: Fetches, worker: int, *tenants: str
) -> tuple[Task[..., Any], Job, list[int]]:
    """The same with a limit of one, and the job that this worker runs."""
    task, born = await lined_up(on, Limit(concurrency=1), *tenants)
    [job] = await jobs.claim(on, worker, "q", 10)
    return task, job, born


async def queued(sql: Any, key: str | None = None) -> list[int]:
    """Who is admitted and not claimed."""
    rows = await sql.fetch(
        "SELECT id FROM taskd.job WHERE state = 'queued' AND coalesce(limit_key = $1, true) "
        "ORDER BY id",
        key,
    )
    return [each[0] for each in rows]


async def states(sql: Any) -> dict[str, int]:
    rows = await sql.fetch(
        "SELECT state::text || coalesce(':' || gate::text, ''), count(*) FROM taskd.job GROUP BY 1"
    )
    return {each[0]: each[1] for each in rows}


async def test_a_limited_job_is_never_queued_before_it_is_admitted(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=2))
    born = await enqueue(lane, task, *["x"] * 5)
    assert await states(sql) == {"blocked": 5}
    assert await jobs.claim(lane, me, "q", 10) == []
    admitted = await limits.admit(lane, 100)
    assert admitted == (5, {"q": 2})
    assert await states(sql) == {"queued": 2, "blocked:parked": 3}
    assert await queued(sql) == born[:2]


async def test_what_is_parked_is_not_looked_at_again(lane: Lane, sql: Any) -> None:
    await lined_up(lane, Limit(concurrency=1), *["x"] * 5)
    assert (await jobs.next_due(lane)).gate_s is None
    assert await limits.admit(lane, 100) == (0, {})


async def test_the_end_of_one_admits_the_next_of_its_key_in_the_same_statement(
    lane: Lane, sql: Any, me: int
) -> None:
    _, [first, *others] = await lined_up(
        lane, Limit(concurrency=1, by="tenant"), "x", "x", "x", "y"
    )
    assert await queued(sql) == [first, others[2]]
    claimed = {job.id: job for job in await jobs.claim(lane, me, "q", 10)}
    assert await done(lane, claimed[first]) == 1
    assert await queued(sql) == [others[0]]
    assert (await jobs.next_due(lane)).gate_s is None


async def test_the_most_urgent_of_a_key_is_admitted_first(lane: Lane, sql: Any, me: int) -> None:
    task = await publish(lane, Limit(concurrency=1))
    first, _, urgent = [
        (await jobs.enqueue(lane, [NewJob("t", queue="q", priority=p, limit=task.limit_of("{}"))]))[
            0
        ]
        for p in (100, 100, 5)
    ]
    await limits.admit(lane, 1)
    assert await queued(sql) == [urgent]
    [job] = await jobs.claim(lane, me, "q", 10)
    await done(lane, job)
    assert await queued(sql) == [first]


ENDS = {
    "done": done,
    "failed": lambda lane, job: settle(lane, job, FAILED),
    "cancelled": lambda lane, job: settle(lane, job, CANCELLED),
    "retried": lambda lane, job: settle(lane, job, SCHEDULED, delay_s=60.0),
}


@pytest.mark.parametrize("end", ENDS)
async def test_every_way_out_of_running_gives_the_place_back(
    lane: Lane, sql: Any, me: int, end: str
) -> None:
    _, job, [_, second] = await one_runs(lane, me, "x", "x")
    await ENDS[end](lane, job)
    assert await queued(sql) == [second]


async def test_a_job_that_is_given_back_comes_to_the_gate_and_not_into_the_queue(
    lane: Lane, sql: Any, me: int
) -> None:
    _, job, [first, second] = await one_runs(lane, me, "x", "x")
    await sql.execute("UPDATE taskd.job SET priority = 1 WHERE id = $1", second)
    assert await settle(lane, job, QUEUED, refund=True) == "blocked"
    assert await queued(sql) == [second]
    assert (await limits.admit(lane, 100)).looked == 1
    assert (await row(sql, first))["state"] == "blocked"


async def test_a_retry_that_is_due_waits_for_a_place(lane: Lane, sql: Any, me: int) -> None:
    _, job, [first, second] = await one_runs(lane, me, "x", "x")
    await settle(lane, job, SCHEDULED, delay_s=60.0)
    await due_now(sql, first)
    assert await jobs.promote(lane, 10) == {"q": 1}
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]
    [job] = await jobs.claim(lane, me, "q", 10)
    await done(lane, job)
    assert await queued(sql) == [first]


@pytest.mark.parametrize("parked", [False, True])
async def test_cancelling_a_job_that_waits_frees_its_place_only_if_it_has_one(
    lane: Lane, sql: Any, parked: bool
) -> None:
    _, [first, second, third] = await lined_up(lane, Limit(concurrency=1), "x", "x", "x")
    assert await jobs.cancel(lane, [second if parked else first], "") != {}
    assert await queued(sql) == [first if parked else second]
    assert (await row(sql, third))["state"] == "blocked"


async def test_the_places_of_a_dead_worker_come_back_with_the_rescue(
    lane: Lane, sql: Any, me: int, other: int
) -> None:
    _, born = await lined_up(lane, Limit(concurrency=2), *["x"] * 4)
    await jobs.claim(lane, me, "q", 10)
    await bury(lane, me)
    assert await rescue(lane) == {born[0]: SCHEDULED, born[1]: SCHEDULED}
    assert await queued(sql) == born[2:]


async def test_a_suspect_is_claimed_when_it_has_a_place_and_not_before(
    lane: Lane, sql: Any, me: int, other: int
) -> None:
    task, [suspect, second] = await lined_up(lane, Limit(concurrency=1), "x", "x")
    await jobs.claim(lane, me, "q", 10)
    await bury(lane, me)
    await rescue(lane)
    assert await queued(sql) == [second]
    assert await jobs.claim_suspect(lane, other, ["q"], ["t"]) is None
    await limits.admit(lane, 100)
    assert (await row(sql, suspect))["state"] == "blocked"
    [job] = await jobs.claim(lane, other, "q", 10)
    await done(lane, job)
    claimed = await jobs.claim_suspect(lane, other, ["q"], ["t"])
    assert claimed is not None
    assert claimed.id == suspect
    third = await enqueue(lane, task, "x")
    await limits.admit(lane, 100)
    assert await queued(sql) == []
    await done(lane, claimed)
    assert await queued(sql) == third


async def test_in_all_counts_the_jobs_of_all_keys(lane: Lane, sql: Any, me: int) -> None:
    _, born = await lined_up(
        lane, Limit(concurrency=1, by="tenant", concurrency_in_all=2), "a", "a", "b", "b", "c", "d"
    )
    assert await queued(sql) == [born[0], born[2]]
    assert await states(sql) == {"queued": 2, "blocked:next": 2, "blocked:parked": 2}
    [first, _] = sorted(await jobs.claim(lane, me, "q", 10), key=lambda job: job.id)
    await done(lane, first)
    # The place of the key goes to the next of the key; the one in all to whoever came first.
    assert await queued(sql) == [born[1]]
    await sql.execute("DELETE FROM taskd.opening")
    assert await states(sql) == {"queued": 1, "running": 1, "blocked:next": 2, "blocked:parked": 1}


async def test_a_rate_admits_a_burst_and_then_as_tokens_come(lane: Lane, sql: Any, me: int) -> None:
    await lined_up(lane, Limit(rate=60, per_s=60, burst=3), *["x"] * 6)
    assert len(await queued(sql)) == 3
    due = await jobs.next_due(lane)
    assert due.gate_s is not None
    assert 0.5 < due.gate_s <= 1
    # No look before that: nothing is due, and so nothing is looked at.
    assert await limits.admit(lane, 100) == (0, {})
    await jobs.claim(lane, me, "q", 10)
    await sql.execute("UPDATE taskd.bucket SET filled_at = filled_at - interval '2 s'")
    await sql.execute("UPDATE taskd.opening SET at = at - interval '2 s'")
    assert (await limits.admit(lane, 100)).queues == {"q": 2}


async def test_no_more_than_a_burst_waits_in_the_queue_however_long_it_stalls(
    lane: Lane, sql: Any
) -> None:
    task = await publish(lane, Limit(rate=1, burst=2))
    await enqueue(lane, task, *["x"] * 9)
    for _ in range(4):
        await limits.admit(lane, 100)
        await sql.execute("UPDATE taskd.bucket SET filled_at = filled_at - interval '1 h'")
        await sql.execute("UPDATE taskd.opening SET at = at - interval '1 h'")
    assert len(await queued(sql)) == 2


async def test_a_limit_that_is_raised_lets_the_parked_ones_through(lane: Lane, sql: Any) -> None:
    await lined_up(lane, Limit(concurrency=1, by="tenant"), "x", "x", "x", "y", "y")
    assert await states(sql) == {"queued": 2, "blocked:parked": 3}
    await limits.set_limit(lane, "t", 2, None, None, None, [])
    assert (await limits.admit(lane, 100)).queues == {"q": 2}
    await limits.set_limit(lane, "t", None, None, None, None, ["concurrency"])
    assert (await limits.admit(lane, 100)).queues == {"q": 1}


async def test_an_operators_limit_survives_a_restart_and_goes_when_cleared(
    lane: Lane, sql: Any
) -> None:
    await publish(lane, Limit(concurrency=1))
    await limits.set_limit(lane, "t", 7, None, None, None, [])
    await publish(lane, Limit(concurrency=2))
    assert [each["concurrency"] for each in await limits.list_limits(lane)] == [7]
    assert await limits.clear(lane, ["t"]) == ["t"]
    assert [each["concurrency"] for each in await limits.list_limits(lane)] == [2]
    assert await limits.clear(lane, ["t"]) == []


async def test_a_limit_that_nobody_has_published_holds_its_jobs_until_it_is(
    lane: Lane, sql: Any
) -> None:
    early = [NewJob("t", queue="q", limit=LimitOf("t", '["x"]'))] * 3
    await jobs.enqueue(lane, early)
    assert (await limits.admit(lane, 100)).queues == {}
    assert await states(sql) == {"blocked:parked": 3}
    await publish(lane, Limit(concurrency=2, by="tenant"))
    assert len(await queued(sql)) == 2


async def test_whoever_parks_a_job_while_another_ends_leaves_nobody_behind(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    task, job, _ = await one_runs(lane, me, "x")
    [second] = await enqueue(lane, task, "x")
    ending = await connect()
    async with Transaction(ending) as transaction:
        # It has the lock of the limit and has not committed: others see the place taken.
        await ending.execute("DELETE FROM taskd.job WHERE id = $1", job.id)
        await ending.execute("SELECT taskd.free_slots('{t}', '{\"\"}')")
        assert (await limits.admit(lane, 100)).looked == 0
        await transaction.commit()
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]


async def test_the_end_of_a_job_sees_what_was_parked_while_it_waited_for_the_lock(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    task, job, _ = await one_runs(lane, me, "x")
    [second] = await enqueue(lane, task, "x")
    parking = await connect()
    async with Transaction(parking) as transaction:
        assert (await parking.fetchrow("SELECT * FROM taskd.admit_due(100)"))["looked"] == 1
        ending = await connect()
        ended = asyncio.create_task(
            ending.execute(
                "WITH gone AS (DELETE FROM taskd.job WHERE id = $1 RETURNING *) "
                "SELECT taskd.free_slots(array_agg(limit_name), array_agg(limit_key)) FROM gone",
                job.id,
            )
        )
        await waits_for_lock(sql, ending)
        await transaction.commit()
        await ended
    assert await queued(sql) == [second]


async def test_a_forgotten_transaction_holds_up_no_ack(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    _, job, [_, second] = await one_runs(lane, me, "x", "x")
    forgotten = await connect()
    async with Transaction(forgotten):
        await forgotten.execute("SELECT FROM taskd.job_limit FOR UPDATE")
        assert await done(lane, job) == 1
        assert await queued(sql) == []
    assert (await jobs.next_due(lane)).gate_s <= 0
    await limits.admit(lane, 100)
    assert await queued(sql) == [second]


async def test_a_handlers_own_transaction_keeps_no_lock_of_the_limit(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    _, born = await lined_up(lane, Limit(concurrency=2), *["x"] * 5)
    first, second = sorted(await jobs.claim(lane, me, "q", 10), key=lambda job: job.id)
    handlers = await connect()
    async with Transaction(handlers) as transaction:
        fetches = connections.fetches(handlers)
        assert await fetches.fetch("complete_job", first.id, me, first.fence, None, None)
        assert await done(lane, second) == 1
        assert await queued(sql) == [born[2]]
        await transaction.commit()
    assert (await limits.admit(lane, 100)).looked == 1
    assert await queued(sql) == born[2:4]


async def test_a_producer_takes_no_lock_of_the_limit(
    lane: Lane, sql: Any, connect: Connect, me: int
) -> None:
    _, job, [_, second] = await one_runs(lane, me, "x", "x")
    producer = await connect()
    async with Transaction(producer):
        await producer.execute("SELECT taskd.enqueue('t', '{}')")
        await producer.execute(
            "SELECT taskd.enqueue_unique('t', '{}', 'k', on_conflict => 'replace')"
        )
        await done(lane, job)
        assert await queued(sql) == [second]


async def test_sql_clients_and_programs_without_the_app_get_the_same_limit_and_key(
    lane: Lane, sql: Any
) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    await enqueue(lane, task, "acme", "main")
    for args in ('{"tenant": "acme"}', "{}"):
        await sql.execute("SELECT taskd.enqueue('t', $1::text::jsonb)", args)
        await sql.execute("SELECT taskd.enqueue_unique('t', $1::text::jsonb, 'k' || $1)", args)
        published = (await tasks.find(lane, ["t"]))["t"]
        await jobs.enqueue(lane, [NewJob("t", args, queue="q", limit=published.limit_of(args))])
    rows = await sql.fetch("SELECT limit_name, limit_key, count(*) FROM taskd.job GROUP BY 1, 2")
    assert {tuple(each) for each in rows} == {("t", "acme", 4), ("t", "main", 4)}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ("[]", ""),
        ('["acme"]', "acme"),
        ("[7]", "7"),
        ("[7.0]", "7"),
        ("[null]", "null"),
        ('["acme", 7]', '["acme",7]'),
        ('["acme", 7.0]', '["acme",7]'),
        ("[[7.0]]", "[7]"),
        ('["' + "x" * 300 + '"]', 64),
        ('["a\\u0007b"]', 64),
    ],
)
async def test_a_key_is_the_value_itself_or_a_hash_of_it(
    sql: Any, values: str, key: str | int
) -> None:
    told = await sql.fetchval("SELECT taskd.limit_key($1::text::jsonb)", values)
    assert told == key if isinstance(key, str) else len(told) == key


async def test_the_smallest_rate_says_when_to_look_again_and_a_smaller_one_is_refused(
    sql: Any, lane: Lane
) -> None:
    task = await publish(lane, Limit(rate=1e-9))
    await enqueue(lane, task, "x", "x")
    await limits.admit(lane, 100)
    due = await jobs.next_due(lane)
    assert len(await queued(sql)) == 1
    assert due.gate_s is not None
    assert due.gate_s < float("inf")
    for rate in (9e-10, 5e-324):
        with pytest.raises(InvalidJob, match="between 1e-9/s"):
            Limit(rate=rate)
        with pytest.raises(InvalidJob, match="limit_rate_is_bounded"):
            await limits.set_limit(lane, "t", None, None, rate, 1, ())


async def test_a_number_has_the_same_key_from_python_and_from_sql(sql: Any, lane: Lane) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    args = '{"tenant": 0.10000000000000000001}'
    await jobs.enqueue(lane, [NewJob("t", args, queue="q", limit=task.limit_of(args))])
    await sql.execute("SELECT taskd.enqueue('t', $1::text::jsonb)", args)
    keys = [row[0] for row in await sql.fetch("SELECT limit_key FROM taskd.job")]
    assert keys == ["0.10000000000000000001"] * 2


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300])
async def test_a_name_that_no_limit_can_have_keeps_no_other_job_at_its_gate(
    sql: Any, lane: Lane, name: str
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    # Producers may write these columns.
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, limit_name, limit_key) "
        "VALUES ('q', 't', 'blocked', $1, '')",
        name,
    )
    [job_id] = await enqueue(lane, task, "main")
    admitted = await limits.admit(lane, 100)
    assert (admitted.looked, await queued(sql)) == (2, [job_id])
    # It waits for a limit that nobody has set, and is not looked at again.
    assert (await limits.admit(lane, 100)).looked == 0
    assert name in [each["name"] for each in await limits.list_limits(lane)]


async def test_a_new_key_of_a_waiting_job_moves_it_to_another_line(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    replace = (
        "SELECT job_id FROM taskd.enqueue_unique('t', jsonb_build_object('tenant', $1::text), 'k', "
        "on_conflict => 'replace', delay_s => $2)"
    )
    holder = await sql.fetchval(replace, "x", None)
    _, second = await enqueue(lane, task, "y", "x")
    await limits.admit(lane, 100)
    assert holder in await queued(sql, "x")
    assert await sql.fetchval(replace, "y", None) == holder
    await limits.admit(lane, 100)
    assert await queued(sql, "x") == [second]
    assert (await row(sql, holder))["state"] == "blocked"
    assert await sql.fetchval(replace, "x", 60.0) == holder
    assert (await row(sql, holder))["state"] == "scheduled"


async def test_a_thousand_keys_drain_and_no_job_is_examined_twice(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    await jobs.enqueue(lane, [task.job(f"t{n % 100}") for n in range(2000)])
    looked, ended, claimed = 0, 0, [None]
    while (await jobs.next_due(lane)).gate_s is not None:
        looked += (await limits.admit(lane, 1000)).looked
    while claimed:
        claimed = sorted(await jobs.claim(lane, me, "q", 1000), key=lambda job: job.id)
        assert len(claimed) in {0, 100}
        if claimed:
            ended += await done(lane, *claimed)
    assert (looked, ended) == (2000, 2000)
    assert (await jobs.next_due(lane)).gate_s is None


async def test_the_jobs_of_a_schedule_come_to_the_gate_too(lane: Lane, sql: Any) -> None:
    await publish(lane, Limit(concurrency=1, by="tenant"))
    await sql.execute(
        "SELECT taskd.set_schedule('s', 't', '{\"tenant\": \"x\"}', every => '1 hour', "
        "overlap => 'cancel')"
    )
    for _ in range(2):
        await sql.execute("SELECT taskd.run_schedule('s')")
        await limits.admit(lane, 100)
    # The second one has cancelled the first, and has its place.
    assert len(await queued(sql, "x")) == 1
    assert await states(sql) == {"queued": 1}


async def test_jobs_of_a_limit_that_is_locked_hold_up_no_other_limit(
    lane: Lane, sql: Any, connect: Connect
) -> None:
    held = await publish(lane, Limit(concurrency=9), task="held")
    free = await publish(lane, Limit(concurrency=9), task="free")
    await enqueue(lane, held, *["x"] * 5)
    forgotten = await connect()
    async with Transaction(forgotten):
        await forgotten.execute("SELECT FROM taskd.job_limit WHERE name = 'held' FOR UPDATE")
        await sql.execute(
            "INSERT INTO taskd.opening (limit_name, limit_key) "
            "SELECT 'held', '' FROM generate_series(1, 5)"
        )
        [second] = await enqueue(lane, free, "x")
        await limits.admit(lane, 3)
        assert await queued(sql) == [second]
        await sql.execute(
            "UPDATE taskd.job SET state = 'blocked', gate = 'parked' WHERE id = $1", second
        )
        await sql.execute("INSERT INTO taskd.opening (limit_name, limit_key) VALUES ('free', '')")
        await limits.admit(lane, 3)
        assert await queued(sql) == [second]
