"""enqueue.sql: jobs become queued or scheduled, in the caller's transaction, and notify once."""

from __future__ import annotations

import pytest

from taskd.core.jobs.job import NewJob
from taskd.store.connections.error_translation import ValueRefused
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.schema import fetches
from tests.store.helpers import Connect, Ears, Transaction, enqueue, row, state_of

ALL_COLUMNS = ("task", "queue", "args", "priority", "max_attempts", "timeout_s", "state")


async def test_a_job_is_stored_as_it_was_asked_for(sql, lane: Lane) -> None:
    asked = NewJob("t", '{"a": [1, "ü"]}', "q", priority=-7, max_attempts=3, timeout_s=1.5)
    [job_id] = await jobs.enqueue(lane, [asked])
    written = await row(sql, job_id)
    assert tuple(written[name] for name in ALL_COLUMNS) == (
        "t", "q", '{"a": [1, "ü"]}', -7, 3, 1.5, "queued",
    )  # fmt: skip
    assert (written["attempt"], written["fence"], written["worker_id"]) == (0, 0, None)
    assert written["errors"] == "[]"
    assert written["run_at"] == written["enqueued_at"]


async def test_what_is_not_given_stays_null_so_that_the_running_task_decides(sql, lane) -> None:
    [job_id] = await enqueue(lane)
    written = await row(sql, job_id)
    assert (written["max_attempts"], written["timeout_s"], written["priority"]) == (None, None, 100)


async def test_ids_come_in_the_order_of_the_jobs(sql, lane: Lane) -> None:
    ids = await jobs.enqueue(lane, [NewJob("t", queue="q", priority=n) for n in range(300)])
    stored = await sql.fetch("SELECT priority FROM taskd.job ORDER BY id")
    assert ids == sorted(ids)
    assert [each["priority"] for each in stored] == list(range(300))


async def test_jobs_that_are_alike_are_written_as_others_are_by_a_statement_of_their_own(
    sql, lane: Lane
) -> None:
    ears = Ears(sql)
    await ears.listen("taskd_q")
    texts = [f'{{"n": {n}}}' for n in range(300)]
    alike = [NewJob("t", text, "q", priority=7) for text in texts]
    ids = await jobs.enqueue(lane, alike)
    options = jobs.enqueue_args(alike)[4:]
    rows_of_many = await lane.fetch("enqueue_jobs", ["t"], ["q"], texts, [7], *options)
    others = sorted(rows_of_many[0]["ids"])
    assert ids == sorted(ids)
    assert await ears.so_far() == ["taskd_q"] * 2
    columns = (
        "to_jsonb(job) - 'id' - 'run_at' - 'enqueued_at' AS columns, run_at = enqueued_at AS due"
    )
    rows = await sql.fetch(f"SELECT id, args::text, {columns} FROM taskd.job ORDER BY id")
    assert [each["id"] for each in rows] == [*ids, *others]
    assert [each["args"] for each in rows] == texts * 2
    assert all(each["due"] for each in rows)
    written = [each["columns"] for each in rows]
    assert written[:300] == written[300:]


async def test_a_later_time_schedules_and_a_past_one_queues(sql, lane: Lane) -> None:
    later, now, past = [(await enqueue(lane, delay_s=delay))[0] for delay in (0.5, 0.0, None)]
    assert await state_of(sql, later) == "scheduled"
    assert await state_of(sql, now) == await state_of(sql, past) == "queued"
    moment = await sql.fetchval("SELECT now() - interval '1 day'")
    [old] = await enqueue(lane, run_at=moment)
    assert await state_of(sql, old) == "queued"
    assert (await row(sql, old))["run_at"] == moment


async def test_a_delay_counts_from_the_transactions_begin(sql, connect: Connect) -> None:
    async with Transaction(await connect()) as mine:
        began = await mine.connection.fetchval("SELECT now()")
        [job_id] = await enqueue(fetches(mine.connection), delay_s=60)
        await mine.commit()
    assert ((await row(sql, job_id))["run_at"] - began).total_seconds() == 60


async def test_a_rolled_back_transaction_leaves_no_jobs_and_no_notifications(
    sql, lane: Lane, connect: Connect
) -> None:
    ears = Ears(sql)
    await ears.listen("taskd_q")
    async with Transaction(await connect()) as mine:
        await enqueue(fetches(mine.connection), 3)
        await mine.rollback()
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0
    assert await ears.so_far() == []


async def test_each_queue_is_notified_once_per_statement_and_scheduled_jobs_notify_too(
    sql, lane: Lane
) -> None:
    ears = Ears(sql)
    await ears.listen("taskd_a", "taskd_b", "taskd_c")
    await jobs.enqueue(lane, [NewJob("t", queue="a"), NewJob("t", queue="b", delay_s=60)] * 5)
    assert sorted(await ears.so_far()) == ["taskd_a", "taskd_b"]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("queue", "Upper Case"),
        ("queue", "a" * 49),
        ("task", ""),
        ("task", "t" * 201),
        ("args", "[1]"),
        ("args", '{"a": "' + "x" * 262144 + '"}'),
        ("max_attempts", 0),
        ("max_attempts", 1001),
        ("timeout_s", 0.0),
        ("timeout_s", 2592001.0),
    ],
)
async def test_the_database_refuses_what_is_outside_its_limits_and_writes_nothing(
    sql, lane: Lane, column: str, value: object
) -> None:
    asked = NewJob("t", queue="q")
    object.__setattr__(asked, column, value)  # past the producer's own checks
    with pytest.raises(ValueRefused) as refused:
        await jobs.enqueue(lane, [NewJob("t", queue="q"), asked])
    assert "xxxx" not in str(refused.value)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0
