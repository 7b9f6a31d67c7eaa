"""Unique keys in the database:

which job holds one, for how long, and what happens to the next job.
"""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import psycopg
import psycopg2
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine

from taskd import Client, NewJob, Unique, task
from taskd.core.jobs.job import JobState
from taskd.errors import KeyHeld, StoreUnavailable
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, jobs
from tests.client.conftest import ME, claim, end

ROWS = "SELECT * FROM taskd.job ORDER BY id"
TWICE = """
SELECT unique_key FROM taskd.job WHERE state = 'running' GROUP BY 1 HAVING count(*) > 1
"""
SOON = datetime.now(UTC) + timedelta(days=30)


def job(n: int = 0, unique: Unique | None = None, **options: Any) -> NewJob:
    key = Unique("k") if unique is None else unique
    return NewJob("sync", json.dumps({"n": n}), queue="sync", unique=key, **options)


async def test_a_second_job_of_a_key_is_skipped_and_shown_who_holds_it(
    client: Client, sql: Any
) -> None:
    first = await client.enqueue(job(1))
    second = await client.enqueue(job(2))
    assert (first.outcome, second.outcome, second) == ("enqueued", "skipped", first)
    [row] = await sql.fetch(ROWS)
    assert (row["unique_key"], row["key_scope"], row["args"]) == ("k", "live", '{"n": 1}')


async def test_keys_belong_to_their_task(client: Client, sql: Any) -> None:
    for name in ("sync", "mirror"):
        new = NewJob(name, queue="sync", unique=Unique("k"))
        assert (await client.enqueue(new)).outcome == "enqueued"
    assert len(await sql.fetch(ROWS)) == 2


async def test_a_live_key_is_held_through_runs_and_retries_until_the_end(
    client: Client, worker: Lane
) -> None:
    first = await client.enqueue(job())
    claimed = await claim(worker)
    assert await client.enqueue(job()) == first
    await end(worker, claimed, JobState.SCHEDULED, delay_s=60.0)
    assert await client.enqueue(job()) == first
    await client.cancel([first])
    assert (await client.enqueue(job())).outcome == "enqueued"


async def test_a_waiting_key_is_free_once_a_worker_has_claimed_its_job(
    client: Client, worker: Lane
) -> None:
    waiting = Unique("k", scope="waiting")
    first = await client.enqueue(job(1, waiting))
    assert await client.enqueue(job(2, waiting)) == first
    claimed = await claim(worker)
    await end(worker, claimed, JobState.SCHEDULED, delay_s=60.0)
    # While it waits for its retry, it holds its key again.
    assert await client.enqueue(job(3, waiting)) == first


@pytest.mark.parametrize("how", ["retry", "snooze", "release", "rescue", "interrupt"])
async def test_a_job_that_goes_back_to_waiting_gives_way_to_the_newer_one_that_waits(
    client: Client, worker: Lane, sql: Any, how: str
) -> None:
    waiting = Unique("k", scope="waiting")
    first = await client.enqueue(job(1, waiting))
    claimed = await claim(worker)
    second = await client.enqueue(job(2, waiting))
    if how == "rescue":
        await workers.declare_dead(worker, [ME], proved=True)
        [rescued] = (await jobs.rescue(worker, 10, 3, 3)).values()
        assert rescued.state is JobState.CANCELLED
    else:
        state = JobState.QUEUED if how == "release" else JobState.SCHEDULED
        await end(
            worker, claimed, state, delay_s=0.0 if how == "release" else 60.0,
            refund=how != "retry", interrupted=how == "interrupt",
        )  # fmt: skip
    assert [row["id"] for row in await sql.fetch(ROWS)] == [second]
    past = await sql.fetchrow("SELECT * FROM taskd.job_history")
    assert (past["id"], past["state"]) == (first, "cancelled")
    assert past["reason"] == f"superseded by job {second}"
    assert len(json.loads(past["errors"])) == (how == "rescue")
    assert await client.retry([first]) == []


@pytest.mark.parametrize("order", [1, -1])
async def test_of_two_that_go_back_to_waiting_the_newer_one_stays(
    client: Client, worker: Lane, sql: Any, order: int
) -> None:
    waiting = Unique("k", scope="waiting", on_conflict="replace")
    claimed = []
    for n in (1, 2):
        await client.enqueue(job(n, waiting))
        claimed.append(await claim(worker))
    for each in claimed[::order]:
        await end(worker, each, JobState.SCHEDULED, delay_s=60.0)
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["state"]) == ('{"n": 2}', "scheduled")
    assert (
        await sql.fetchval("SELECT reason FROM taskd.job_history")
        == f"superseded by job {row['id']}"
    )


async def test_replace_reaches_the_job_that_waits_for_its_retry(
    client: Client, worker: Lane, sql: Any
) -> None:
    waiting = Unique("k", scope="waiting", on_conflict="replace")
    first = await client.enqueue(job(1, waiting))
    await end(worker, await claim(worker), JobState.SCHEDULED, delay_s=60.0)
    second = await client.enqueue(job(2, waiting))
    assert (second.outcome, second > first) == ("replaced", True)
    [row] = await sql.fetch(ROWS)
    assert (row["id"], row["args"], row["state"]) == (second, '{"n": 2}', "scheduled")


async def test_replace_changes_a_job_that_waits(client: Client, sql: Any, listener: Any) -> None:
    first = await client.enqueue(job(1, run_at=SOON))
    replace = Unique("k", on_conflict="replace")
    changed = await client.enqueue(job(2, replace, priority=5, max_attempts=3, timeout_s=9.0))
    assert (changed, changed.outcome) == (first, "replaced")
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["priority"], row["state"]) == ('{"n": 2}', 5, "queued")
    assert (row["max_attempts"], row["timeout_s"]) == (3, 9.0)
    again = await client.enqueue(job(3, replace, run_at=SOON))
    assert again == first
    [row] = await sql.fetch(ROWS)
    assert (row["state"], row["run_at"], row["priority"]) == ("scheduled", SOON, 100)


async def test_replace_leaves_a_job_that_runs(client: Client, worker: Lane, sql: Any) -> None:
    first = await client.enqueue(job(1))
    await claim(worker)
    held = await client.enqueue(job(2, Unique("k", on_conflict="replace")))
    assert (held, held.outcome) == (first, "skipped")
    assert [row["args"] for row in await sql.fetch(ROWS)] == ['{"n": 1}']


async def test_a_suspect_that_is_replaced_stays_in_the_quarantine(
    client: Client, worker: Lane, sql: Any
) -> None:
    await client.enqueue(job(1))
    await claim(worker)
    await workers.declare_dead(worker, [ME], proved=True)
    await jobs.rescue(worker, 10, 3, 3)
    changed = await client.enqueue(job(2, Unique("k", on_conflict="replace")))
    assert changed.outcome == "replaced"
    [row] = await sql.fetch(ROWS)
    assert (row["state"], row["crashes"], row["args"]) == ("scheduled", 1, '{"n": 2}')


async def test_debounce_puts_the_time_off_up_to_a_maximum(client: Client, sql: Any) -> None:
    rule = Unique("k", on_conflict="debounce", debounce_max_s=100.0)
    first = await client.enqueue(job(1, rule, delay_s=60.0))
    off = await client.enqueue(job(2, rule, delay_s=90.0))
    assert (off, off.outcome) == (first, "debounced")
    [row] = await sql.fetch(ROWS)
    assert timedelta(seconds=90) <= row["run_at"] - row["enqueued_at"] < timedelta(seconds=100)
    assert row["args"] == '{"n": 2}'
    await client.enqueue(job(3, rule, delay_s=600.0))
    [row] = await sql.fetch(ROWS)
    assert row["run_at"] - row["enqueued_at"] == timedelta(seconds=100)


async def test_a_maximum_that_is_shorter_than_the_delay_does_not_bring_the_job_forward(
    client: Client, sql: Any
) -> None:
    rule = Unique("k", on_conflict="debounce", debounce_max_s=60.0)
    await client.enqueue(job(1, rule, delay_s=600.0))
    [before] = await sql.fetch(ROWS)
    assert (await client.enqueue(job(2, rule, delay_s=600.0))).outcome == "debounced"
    [row] = await sql.fetch(ROWS)
    assert (row["run_at"], row["args"]) == (before["run_at"], '{"n": 2}')


async def test_raise_says_who_holds_the_key_and_writes_nothing(client: Client, sql: Any) -> None:
    first = await client.enqueue(job(1))
    rule = Unique("k", on_conflict="raise")
    with pytest.raises(KeyHeld, match=f'job {first} of task "sync" holds the unique key "k"'):
        await client.enqueue_many([job(2, Unique("other")), job(3, rule)])
    assert len(await sql.fetch(ROWS)) == 1


async def test_a_window_outlives_the_job(client: Client, worker: Lane, sql: Any) -> None:
    rule = Unique("k", for_s=3600.0)
    first = await client.enqueue(job(1, rule))
    await end(worker, await claim(worker), JobState.DONE)
    held = await client.enqueue(job(2, rule))
    assert (held, held.outcome) == (first, "skipped")
    with pytest.raises(KeyHeld):
        await client.enqueue(job(2, Unique("k", on_conflict="raise")))
    assert not await sql.fetch(ROWS)
    await sql.execute("UPDATE taskd.job_key SET until = now()")
    second = await client.enqueue(job(3, rule))
    assert second.outcome == "enqueued"
    assert await sql.fetchval("SELECT job_id FROM taskd.job_key") == second


async def test_windows_that_are_over_are_forgotten(client: Client, worker: Lane, sql: Any) -> None:
    await client.enqueue_many(job(n, Unique(f"k{n}", for_s=3600.0)) for n in range(5))
    await sql.execute("UPDATE taskd.job_key SET until = now() WHERE unique_key <> 'k0'")
    assert await history.prune_keys(worker) == 4
    assert await sql.fetchval("SELECT unique_key FROM taskd.job_key") == "k0"


async def test_a_window_that_is_just_taken_anew_is_neither_forgotten_nor_waited_for(
    client: Client, worker: Lane, sql: Any, dsn: str
) -> None:
    rule = Unique("k", for_s=3600.0)
    await client.enqueue(job(1, rule))
    await end(worker, await claim(worker), JobState.DONE)
    await sql.execute("UPDATE taskd.job_key SET until = now()")
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        second = await client.enqueue(job(2, rule), conn=connection)
        assert await history.prune_keys(worker) == 0
    assert await history.prune_keys(worker) == 0
    assert await sql.fetchval("SELECT job_id FROM taskd.job_key") == second
    await connection.close()


async def test_windows_that_last_are_not_read_to_find_those_that_are_over(sql: Any) -> None:
    await sql.execute("SET enable_seqscan = off")
    text = await sql.fetchval("SELECT prosrc FROM pg_proc WHERE oid = 'taskd.prune_keys'::regproc")
    text = text.replace("batch", "1000")
    plan = "\n".join(row[0] for row in await sql.fetch(f"EXPLAIN (COSTS OFF) {text}"))
    assert "job_key_until" in plan
    assert "Seq Scan" not in plan


async def test_a_batch_answers_for_each_job_in_its_order(client: Client, sql: Any) -> None:
    held = await client.enqueue(job(0, Unique("b")))
    to_json_type = NewJob("sync", queue="sync")
    answers = await client.enqueue_many(
        [
            job(1, Unique("c")),
            to_json_type,
            job(2, Unique("b")),
            job(3, Unique("a")),
            job(4, Unique("c")),
        ]
    )
    outcomes = ["enqueued", "enqueued", "skipped", "enqueued", "skipped"]
    assert [each.outcome for each in answers] == outcomes
    assert answers[2] == held
    assert answers[4] == answers[0]
    assert len(await sql.fetch(ROWS)) == 4


async def test_a_rollback_takes_the_key_back(client: Client, dsn: str) -> None:
    connection = await asyncpg.connect(dsn)
    transaction = connection.transaction()
    await transaction.start()
    await client.enqueue(job(1, Unique("k", for_s=60.0)), conn=connection)
    waiting = asyncio.create_task(client.enqueue(job(2)))
    await asyncio.sleep(0.05)
    assert not waiting.done()  # the holder is not decided yet
    await transaction.rollback()
    assert (await waiting).outcome == "enqueued"
    await connection.close()


async def test_a_holder_begins_after_the_transaction_that_found_it_waiting(
    client: Client, worker: Lane, dsn: str, sql: Any
) -> None:
    """So that it sees what the transaction has written, for which no notification will come."""
    waiting = Unique("k", scope="waiting")
    first = await client.enqueue(job(1, waiting))
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        assert await client.enqueue(job(2, waiting), conn=connection) == first
        assert not await jobs.claim(worker, ME, "sync", 10)
    assert [each.id for each in await jobs.claim(worker, ME, "sync", 10)] == [first]
    await connection.close()


async def test_the_queue_is_notified_when_a_claim_may_have_passed_over_the_holder(
    client: Client, worker: Lane, listener: Any, dsn: str
) -> None:
    await listener.listen("sync")
    await client.enqueue(job(1))
    assert await listener.notified() == ["sync"]
    connection = await asyncpg.connect(dsn)
    await client.enqueue(job(2), conn=connection)
    assert await listener.notified() == ["sync"]
    await connection.close()
    # Alone it has locked nothing, so no claim has skipped it.
    await client.enqueue(job(2))
    assert await listener.notified() == []


@pytest.mark.parametrize("scope", ["waiting", "live"])
async def test_fifty_at_once_make_one_job(client: Client, sql: Any, dsn: str, scope: str) -> None:
    answers = await asyncio.gather(
        *(client.enqueue(job(n, Unique("k", scope=scope))) for n in range(50))
    )
    assert len(set(answers)) == 1
    assert sorted(each.outcome for each in answers) == ["enqueued"] + ["skipped"] * 49
    assert len(await sql.fetch(ROWS)) == 1


async def test_producers_and_a_worker_never_run_a_live_key_twice_at_once(
    client: Client, worker: Lane, sql: Any
) -> None:
    enough = asyncio.Event()

    async def produce(n: int) -> None:
        unique = Unique(f"k{n % 3}", on_conflict="replace" if n % 2 else "skip", for_s=0.001)
        while not enough.is_set():
            await client.enqueue(job(n, unique))

    producers = [asyncio.create_task(produce(n)) for n in range(6)]
    ran = 0
    while ran < 200:
        claimed = await jobs.claim(worker, ME, "sync", 10)
        assert not await sql.fetch(TWICE)
        ran += len(claimed)
        ended = sorted((each.id, each.fence) for each in claimed)
        await jobs.ack_done(worker, ME, [each[0] for each in ended], [each[1] for each in ended])
    enough.set()
    await asyncio.gather(*producers)


async def test_two_batches_in_opposite_orders_do_not_wait_for_each_other(client: Client) -> None:
    keys = [Unique(f"k{n}", on_conflict="replace") for n in range(40)]
    for _ in range(10):
        there = client.enqueue_many([job(1, key) for key in keys])
        back = client.enqueue_many([job(2, key) for key in reversed(keys)])
        await asyncio.gather(there, back)


async def test_above_read_committed_a_conflict_is_an_error_to_try_again(
    client: Client, dsn: str
) -> None:
    connection = await asyncpg.connect(dsn)
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    await connection.fetchval("SELECT 1")
    await client.enqueue(job(1))
    with pytest.raises(StoreUnavailable):
        await client.enqueue(job(2), conn=connection)
    await transaction.rollback()
    await connection.close()


# Retrying by hand.


async def test_a_retried_job_holds_its_key_again(client: Client, sql: Any) -> None:
    first = await client.enqueue(job(1))
    await client.cancel([first])
    assert await client.retry([first]) == [first]
    assert await client.enqueue(job(2)) == first


async def test_a_job_whose_key_has_gone_to_another_is_not_retried(client: Client) -> None:
    first = await client.enqueue(job(1))
    await client.cancel([first])
    second = await client.enqueue(job(2))
    assert await client.retry([first]) == []
    await client.cancel([second])
    # Of several with one key the last one comes back.
    assert await client.retry([first, second]) == [second]


async def test_a_waiting_key_that_another_job_holds_keeps_a_job_from_its_retry(
    client: Client, worker: Lane
) -> None:
    waiting = Unique("k", scope="waiting")
    first = await client.enqueue(job(1, waiting))
    await end(worker, await claim(worker), JobState.FAILED, reason="x")
    second = await client.enqueue(job(2, waiting))
    assert await client.retry([first]) == []
    await claim(worker)
    assert await client.retry([first]) == [first]
    assert await client.enqueue(job(3, waiting)) == first != second


async def test_a_key_that_is_held_by_a_window_is_not_taken_by_a_retry(
    client: Client, worker: Lane
) -> None:
    first = await client.enqueue(job(1))
    await client.cancel([first])
    second = await client.enqueue(job(2, Unique("k", for_s=3600.0)))
    await end(worker, await claim(worker), JobState.FAILED, reason="x")
    assert await client.retry([first]) == []
    assert await client.retry([second]) == [second]


async def test_a_retry_and_a_batch_do_not_wait_for_each_other_s_keys(
    client: Client, sql: Any, dsn: str
) -> None:
    ids = [await client.enqueue(job(1, Unique(key))) for key in ("b", "a")]
    await client.cancel(ids)
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        await client.enqueue(job(2, Unique("a")), conn=connection)
        retrying = asyncio.create_task(client.retry(ids))
        while not await sql.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.005)
        second = await client.enqueue(job(2, Unique("b")), conn=connection)
    assert second.outcome == "enqueued"
    assert await retrying == []
    await connection.close()


async def test_a_task_s_own_key_is_made_of_its_arguments(client: Client, registry: Any) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("account",)))
    async def sync(account: int, full: bool = False) -> None: ...

    first = await client.enqueue(sync.job(1))
    assert await client.enqueue(sync.job(1, full=True)) == first
    assert (await client.enqueue(sync.job(2))).outcome == "enqueued"
    other = sync.options(unique=Unique("mine")).job(1)
    assert (await client.enqueue(other)).outcome == "enqueued"
    assert (await client.enqueue_named("sync", queue="sync", unique=Unique("mine"))).outcome == (
        "skipped"
    )


def test_the_same_without_a_loop(dsn: str) -> None:
    client = Client(dsn)
    first = client.enqueue_sync(job(1))
    assert client.enqueue_many_sync([job(2), job(3)])[1] == first
    with psycopg.connect(dsn) as connection:
        replaced = client.enqueue_sync(job(4, Unique("k", on_conflict="replace")), conn=connection)
    assert (replaced, replaced.outcome) == (first, "replaced")
    with pytest.raises(KeyHeld):
        client.enqueue_sync(job(4, Unique("k", on_conflict="raise")))
    with psycopg.connect(dsn) as connection, pytest.raises(KeyHeld):
        client.enqueue_sync(job(4, Unique("k", on_conflict="raise")), conn=connection)
    client.close_sync()


# From SQL.


async def test_the_same_from_sql(sql: Any) -> None:
    ask = "SELECT * FROM taskd.enqueue_unique('sync', $1, 'k', queue => 'sync', on_conflict => $2)"
    first = await sql.fetchrow(ask, '{"n": 1}', "skip")
    assert first["outcome"] == "enqueued"
    assert tuple(await sql.fetchrow(ask, '{"n": 2}', "replace")) == (first["job_id"], "replaced")
    with pytest.raises(asyncpg.UniqueViolationError, match="holds the unique key"):
        await sql.fetchrow(ask, '{"n": 3}', "raise")


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("'sync', '{}', NULL, queue => 'q'", "needs a unique key"),
        ("'sync', '{}', '', queue => 'q'", "unique_key must be printable"),
        ("'sync', '{}', 'k', queue => 'q', on_conflict => 'ignore'", "skip, replace"),
        ("'sync', '{}', 'k', queue => 'q', on_conflict => NULL", "skip, replace"),
        ("'sync', '{}', 'k', queue => 'q', key_scope => 'ever'", "history or forever"),
        ("'sync', '{}', 'k', queue => 'q', key_scope => NULL", "history or forever"),
        ("'sync', '{}', 'k', queue => 'q', for_s => 'NaN'", "up to a year"),
        ("'sync', '{}', 'k', queue => 'q', for_s => 0", "up to a year"),
        ("'sync', '{}', 'k', queue => 'q', for_s => 60, key_scope => 'forever'", "excludes for_s"),
        ("'sync', '[]', 'k', queue => 'q'", "must be a JSON object"),
        ("'sync', '{}', 'k'", "no worker has published"),
    ],
)
async def test_nonsense_from_sql_is_refused(sql: Any, said: str, why: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match=why):
        await sql.fetch(f"SELECT * FROM taskd.enqueue_unique({said})")
    assert not await sql.fetch(ROWS)


# Other drivers.

RAISE = Unique("k", on_conflict="raise")


@pytest.mark.parametrize("driver", [psycopg, psycopg2])
def test_a_key_that_is_held_is_reported_alike_by_all_drivers(dsn: str, driver: Any) -> None:
    connection = driver.connect(dsn)
    client = Client(dsn)
    first = client.enqueue_sync(job(1), conn=connection)
    with pytest.raises(KeyHeld, match=f'^job {first} of task "sync" holds the unique key "k"$'):
        client.enqueue_sync(job(2, RAISE), conn=connection)
    connection.close()


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_a_key_that_is_held_is_reported_alike_through_sqlalchemy(dsn: str, driver: str) -> None:
    engine = sqlalchemy.create_engine(dsn.replace("postgresql:", f"postgresql+{driver}:"))
    client = Client(dsn)
    with engine.connect() as connection:
        first = client.enqueue_sync(job(1), conn=connection)
        with pytest.raises(KeyHeld, match=f'^job {first} of task "sync" holds the unique key "k"$'):
            client.enqueue_sync(job(2, RAISE), conn=connection)
    engine.dispose()


async def test_a_key_that_is_held_is_reported_alike_through_sqlalchemy_s_asyncpg(
    client: Client, dsn: str
) -> None:
    dsn = dsn.replace("postgresql:", "postgresql+asyncpg:").replace("sslmode=", "ssl=")
    engine = create_async_engine(dsn)
    async with engine.connect() as connection:
        first = await client.enqueue(job(1), conn=connection)
        with pytest.raises(KeyHeld, match=f'^job {first} of task "sync" holds the unique key "k"$'):
            await client.enqueue(job(2, RAISE), conn=connection)
    await engine.dispose()


async def test_one_statement_alone_that_skips_locks_nothing(client: Client, sql: Any) -> None:
    """So producers that skip all the time do not keep the job from its worker."""
    await client.enqueue(job(1))
    async with sql.transaction(), asyncio.timeout(30):
        await sql.fetch("SELECT id FROM taskd.job FOR UPDATE")
        assert (await client.enqueue(job(2))).outcome == "skipped"


async def test_the_time_of_a_retry_is_not_brought_forward(
    client: Client, worker: Lane, sql: Any
) -> None:
    await client.enqueue(job(1))
    await end(worker, await claim(worker), JobState.SCHEDULED, delay_s=3000.0)
    [before] = await sql.fetch(ROWS)
    for rule in ("replace", "debounce"):
        await client.enqueue(job(2, Unique("k", on_conflict=rule)))
    [row] = await sql.fetch(ROWS)
    assert (row["run_at"], row["state"]) == (before["run_at"], "scheduled")
    assert row["args"] == '{"n": 2}'


async def test_batches_acks_and_cancels_of_the_same_rows_do_not_deadlock(
    client: Client, worker: Lane
) -> None:
    for round_ in range(8):
        # Ids in one order, keys in the other.
        keys = [f"{round_}-{n:03}" for n in range(60)]
        await client.enqueue_many(job(0, Unique(key)) for key in reversed(keys))
        claimed = await jobs.claim(worker, ME, "sync", 30)
        ids = sorted(row.id for row in claimed)
        await asyncio.gather(
            jobs.ack_done(worker, ME, ids, [1] * len(ids)),
            client.enqueue_many([job(1, Unique(key, on_conflict="replace")) for key in keys]),
            client.enqueue_many([job(2, Unique(key, version=2)) for key in keys]),
            client.cancel(ids),
        )
        await client.cancel(range(ids[0], ids[0] + 1000))
