"""Sequences that are behind their rows, as after a switch-over by logical replication."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import asyncpg
import pytest

from taskd import Client, NewJob, Unique
from taskd.core.jobs.job import JobState
from taskd.errors import JobFailed, JobNotFound, SequenceBehind
from taskd.store.connections import error_translation
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, logs
from taskd.store.reading import doctor, reports
from taskd.store.schema import sequences
from taskd.workflows import chain
from tests.client.conftest import ME, claim, end

JOB = NewJob("sync", queue="sync")
RESTART = "ALTER SEQUENCE taskd.job_id_seq RESTART 1"
# Busy marks, one for each queue, say nothing about rows.
ALL = """
SELECT relname::text FROM pg_class
WHERE relnamespace = 'taskd'::regnamespace AND relkind = 'S' AND relname NOT LIKE 'mark\\_%'
"""


async def run(worker: Lane, result: str) -> int:
    """Run the only job; return its id."""
    claimed = await claim(worker)
    ack = jobs.Ack(claimed.id, ME, claimed.fence, JobState.DONE, result=result)
    assert await jobs.ack_outcomes(worker, ME, [ack])
    return int(claimed.id)


@pytest.fixture
async def old(client: Client, worker: Lane, sql: Any) -> Any:
    """A job that has ended, and whose id the next job gets as well."""
    made = await client.enqueue(JOB)
    await run(worker, '"old"')
    await sql.execute(RESTART)
    return made


async def test_each_job_of_an_id_has_its_own_result(
    client: Client, worker: Lane, sql: Any, old: Any
) -> None:
    [new] = await client.enqueue_many([JOB])
    assert new == old
    assert await client.result(old, 5.0) == "old"  # while the new one waits
    waits = asyncio.create_task(new.result(10.0))
    as_number = asyncio.create_task(client.result(int(new), 10.0))
    await asyncio.sleep(0.1)
    assert not waits.done()
    assert not as_number.done()
    await run(worker, '"new"')
    assert (await waits, await as_number) == ("new", "new")
    assert await old.result(5.0) == "old"
    assert await client.result(pickle.loads(pickle.dumps(old)), 5.0) == "old"


async def test_a_job_that_is_not_kept_has_no_result_although_an_older_one_of_its_id_has(
    client: Client, worker: Lane, sql: Any, old: Any
) -> None:
    await sql.execute("INSERT INTO taskd.queue (name, keep_done_s) VALUES ('sync', 0)")
    new = await client.enqueue(JOB)
    await run(worker, '"new"')
    with pytest.raises(JobNotFound):
        await new.result(5.0)


@pytest.mark.parametrize("how", ["alone", "many", "different", "unique", "workflow", "transaction"])
async def test_every_way_to_enqueue_tells_which_job_it_was(
    client: Client, worker: Lane, sql: Any, old: Any, how: str
) -> None:
    if how == "alone":
        new = await client.enqueue(NewJob("sync", queue="sync", priority=1, max_attempts=3))
    elif how == "many":
        [new] = await client.enqueue_many([JOB])
    elif how == "different":
        new, _ = await client.enqueue_many([JOB, NewJob("other", queue="other")])
    elif how == "unique":
        new = await client.enqueue(NewJob("sync", queue="sync", unique=Unique("k")))
    elif how == "workflow":
        new = (await chain(JOB).start(client=client)).jobs["sync"]
    else:
        async with sql.transaction():
            await asyncio.sleep(0.01)
            new = await client.enqueue(JOB, conn=sql)
    assert new == old
    stored = (
        "SELECT (extract(epoch FROM enqueued_at) * 1000000)::bigint FROM taskd.job WHERE id = $1"
    )
    assert new.enqueued_us == await sql.fetchval(stored, int(new))
    await run(worker, '"new"')
    assert (await client.result(new, 5.0), await client.result(old, 5.0)) == ("new", "old")


async def test_reports_show_the_live_job_of_an_id_and_then_the_newest(
    client: Client, worker: Lane, lane: Lane, sql: Any, old: Any
) -> None:
    await sql.execute(
        "INSERT INTO taskd.job_log (job_id, fence, worker_id, expires_at, attempt, ended, first, "
        "left_out, lines) VALUES ($1, 1, 99, now() + interval '1 day', 1, true, 0, 0, '[]')",
        int(old),
    )
    new = await client.enqueue(JOB)
    for state in ("queued", "done"):
        shown = await reports.show_job(lane, new)
        why = await reports.why_job(lane, new)
        assert shown is not None
        assert why is not None
        assert (shown["state"], why.state) == (state, state)
        assert await reports.job_states(lane, [new]) == {new: state}
        assert await logs.of_job(lane, new) == []  # those are the old one's
        if state == "queued":
            await run(worker, '"new"')
    assert shown["result"] == '"new"'


async def test_a_retry_brings_back_the_newest_job_of_an_id_and_none_while_one_is_live(
    client: Client, worker: Lane, sql: Any
) -> None:
    for reason in ("first", "second"):
        await sql.execute(RESTART)
        made = await client.enqueue(JOB)
        await end(worker, await claim(worker), JobState.FAILED, reason=reason)
    with pytest.raises(JobFailed, match="second"):
        await client.result(made, 5.0)
    assert await jobs.retry(worker, [made]) == [made]
    assert await jobs.retry(worker, [made]) == []
    [(reason,)] = await sql.fetch("SELECT reason FROM taskd.job_history")
    assert reason == "first"


async def test_a_written_ack_is_found_although_an_older_job_has_the_id(
    client: Client, worker: Lane, sql: Any, old: Any
) -> None:
    await client.enqueue(JOB)
    claimed = await claim(worker)
    await end(worker, claimed, JobState.DONE)
    found = await jobs.check_acks(worker, ME, [claimed.id], [claimed.fence])
    assert found == {claimed.id: "done"}


async def test_an_id_that_a_live_job_has_is_refused_with_a_remedy(
    client: Client, sql: Any, psycopg_sync: Any
) -> None:
    await client.enqueue(JOB)
    for on in (None, sql, psycopg_sync):
        await sql.execute(RESTART)
        with pytest.raises(SequenceBehind, match=r"nothing was written.*db check --mend"):
            if on is psycopg_sync:
                client.enqueue_sync(JOB, conn=on)
            else:
                await client.enqueue(JOB, conn=on)
        psycopg_sync.rollback()
    await sql.execute(RESTART)
    with pytest.raises(SequenceBehind):
        await chain(JOB).start(client=client)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 1


async def test_the_key_of_a_users_table_is_no_key_of_taskd(sql: Any) -> None:
    await sql.execute("CREATE TABLE public.job (id int CONSTRAINT job_pkey PRIMARY KEY)")
    await sql.execute("INSERT INTO public.job VALUES (1)")
    with pytest.raises(asyncpg.UniqueViolationError) as raised:
        await sql.execute("INSERT INTO public.job VALUES (1)")
    assert not isinstance(error_translation.translate(raised.value), SequenceBehind)


async def test_every_sequence_of_the_schema_is_found_behind_and_advanced(
    client: Client, worker: Lane, lane: Lane, sql: Any
) -> None:
    for _ in range(3):
        await chain(JOB, JOB).start(client=client)
    names = {row[0] for row in await sql.fetch(ALL)}
    assert names == {"job_id_seq", "workflow_id_seq", "needs"}
    await sql.execute(
        "SELECT setval('taskd.job_id_seq', 1, false), setval('taskd.workflow_id_seq', 2), "
        "setval('taskd.needs', 0)"
    )
    behind = await sequences.find_behind(lane)
    assert {each.name: each.newest for each in behind} == {
        "job_id_seq": 6, "workflow_id_seq": 3, "needs": 1
    }  # fmt: skip
    found = await doctor.read(lane, ["doctor_sequences"])
    assert len(found.rows["doctor_sequences"]) == 3
    assert await sequences.mend(lane) == behind
    assert await sequences.find_behind(lane) == []
    assert await sequences.mend(lane) == []
    assert await client.enqueue(JOB) == 7


async def test_a_sequence_that_is_ahead_stays_where_it_is(
    client: Client, lane: Lane, sql: Any, old: Any
) -> None:
    await sql.execute("ALTER SEQUENCE taskd.job_id_seq RESTART 1000")  # it has given no value yet
    assert await sequences.find_behind(lane) == []
    assert await sequences.mend(lane) == []
    assert await client.enqueue(JOB) == 1000


async def test_an_open_transaction_that_draws_ids_keeps_a_sequence_from_being_set_back(
    client: Client, lane: Lane, sql: Any, other: Any, old: Any
) -> None:
    async with other.transaction():
        await client.enqueue(NewJob("sync", queue="sync"), conn=other)
        await sql.execute("SELECT setval('taskd.job_id_seq', 1, false)")
        with pytest.raises(error_translation.HeldUp):
            await sequences.mend(lane)
    assert [each.name for each in await sequences.mend(lane)] == ["job_id_seq"]
