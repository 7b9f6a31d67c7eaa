"""history.sql: retention, and its upkeep, which blocks no ack."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from taskd import events
from taskd.errors import StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, jobs
from taskd.store.reading import reports
from taskd.worker.upkeep.pruner import STEPS, Pruner
from tests.schema import fetches
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    MAX_CRASHES,
    REFUSE_DDL,
    Connect,
    Transaction,
    done,
    enqueue,
    row,
    run_one,
    running,
    settle,
    take_over,
)

DAY_S = 86400
DATED = "c.relname ~ '^job_history_[0-9]{8}$'"
AHEAD = range(history.DAYS_AHEAD + 1)


@pytest.fixture
async def upkeep(database: Database) -> AsyncIterator[Lane]:
    """The connection that the pruner uses."""
    made = Lane(database, "history", lock_timeout=str(history.LOCK_TIMEOUT_MS))
    yield made
    await made.close()


async def leaves(sql) -> set[str]:
    rows = await sql.fetch(
        "SELECT c.relname::text FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
        f"WHERE i.inhparent = 'taskd.job_history'::regclass AND {DATED}"
    )
    return {each[0] for each in rows}


async def leaf_of(sql, days: int) -> str:
    """The name of the partition for rows that expire in this number of days."""
    day = await sql.fetchval(
        "SELECT to_char((now() AT TIME ZONE 'UTC')::date + $1::integer, 'YYYYMMDD')", days
    )
    return f"job_history_{day}"


async def make_leaf(sql, days: int) -> str:
    leaf = await leaf_of(sql, days)
    await sql.execute(
        f"CREATE TABLE taskd.{leaf} (LIKE taskd.job_history INCLUDING ALL);"
        f"ALTER TABLE taskd.job_history ATTACH PARTITION taskd.{leaf} FOR VALUES"
        f" FROM ('{leaf[-8:]} 00:00Z') TO ('{leaf[-8:]} 24:00Z')"
    )
    return leaf


async def drop_dated(sql) -> None:
    """Make the history look as if no upkeep had run for a long time."""
    for leaf in await leaves(sql):
        await sql.execute(f"DROP TABLE taskd.{leaf}")


async def in_default(sql) -> int:
    return await sql.fetchval("SELECT count(*) FROM ONLY taskd.job_history_default")


async def keep_house(lane: Lane) -> list[str]:
    """Run the pruner once; return the partitions that it dropped."""
    await history.make_partitions(lane)
    dropped = await history.drop_expired(lane)
    await history.prune_default(lane)
    return dropped


# Retention.


async def test_finished_jobs_expire_by_their_queue_and_outcome(sql, lane, me, other) -> None:
    await reports.keep_queue(lane, "q", 100, 200)
    acked, settled, failed, cancelled, completed = await running(lane, me, 5)
    await done(lane, acked)
    await settle(lane, settled, DONE, result="1")
    await settle(lane, failed, FAILED)
    await settle(lane, cancelled, CANCELLED)
    await lane.fetch("complete_job", completed.id, me, completed.fence, None, None, None)
    [by_hand] = await enqueue(lane)
    await jobs.cancel(lane, [by_hand], "by hand")
    crashed = await run_one(lane, other)
    await sql.execute("UPDATE taskd.job SET crashes = $1", MAX_CRASHES - 1)
    await take_over(lane, crashed)
    kept = {
        each["id"]: round(each["kept_s"])
        for each in await sql.fetch(
            "SELECT id, extract(epoch FROM expires_at - finished_at)::float8 AS kept_s "
            "FROM taskd.job_history"
        )
    }
    assert kept == {
        acked.id: 100, settled.id: 100, completed.id: 100,
        failed.id: 200, cancelled.id: 200, by_hand: 200, crashed.id: 200,
    }  # fmt: skip


async def test_a_queue_without_a_row_keeps_a_week_and_thirty_days(sql, lane: Lane, me) -> None:
    plain, failed = await running(lane, me, 2)
    await done(lane, plain)
    await settle(lane, failed, FAILED)
    rows = await sql.fetch(
        "SELECT round(extract(epoch FROM expires_at - finished_at) / 86400)::int AS days, "
        "(SELECT relname::text FROM pg_class WHERE oid = h.tableoid) AS leaf "
        "FROM taskd.job_history AS h ORDER BY id"
    )
    assert [each["days"] for each in rows] == [7, 30]
    assert [each["leaf"] for each in rows] == [await leaf_of(sql, days) for days in (7, 30)]


async def test_a_retention_of_nothing_leaves_no_row_and_acks_count_as_written(
    sql, lane: Lane, me
) -> None:
    await reports.keep_queue(lane, "q", 0, 0)
    plain, settled, failed, completed = await running(lane, me, 4)
    assert await done(lane, plain) == 1
    assert await settle(lane, settled, DONE, result="1") == DONE
    assert await settle(lane, failed, FAILED) == FAILED
    assert await lane.fetch("complete_job", completed.id, me, completed.fence, None, None, None)
    assert await sql.fetchval("SELECT count(*) FROM taskd.jobs") == 0


async def test_the_two_retentions_of_a_queue_are_independent(sql, lane: Lane, me) -> None:
    await reports.keep_queue(lane, "q", 0, 100)
    plain, failed = await running(lane, me, 2)
    await done(lane, plain)
    await settle(lane, failed, FAILED)
    assert await row(sql, plain.id) is None
    assert (await row(sql, failed.id))["state"] == "failed"


# Partitions.


async def test_partitions_are_made_ahead_for_every_retention_in_use(sql, lane, upkeep) -> None:
    before = {await leaf_of(sql, keep + ahead) for keep in (7, 30) for ahead in AHEAD}
    assert await leaves(sql) == before  # the migration's
    await reports.keep_queue(lane, "q", DAY_S // 2, 90 * DAY_S)
    await reports.keep_queue(lane, "r", 0, 365 * DAY_S)
    await history.make_partitions(upkeep)
    added = {await leaf_of(sql, keep + ahead) for keep in (0, 1, 90, 365) for ahead in AHEAD}
    assert await leaves(sql) == before | added
    assert await history.make_partitions(upkeep) == 0


async def test_a_retention_of_nothing_needs_partitions_for_workflows_only(
    sql, lane: Lane, upkeep
) -> None:
    before = await leaves(sql)
    await reports.keep_queue(lane, "q", 0, 0)
    assert await history.make_partitions(upkeep) == len(AHEAD)
    assert await leaves(sql) == before | {await leaf_of(sql, 1 + ahead) for ahead in AHEAD}


async def test_every_partition_has_what_its_parent_has(sql, lane: Lane, upkeep) -> None:
    await reports.keep_queue(lane, "q", 2 * DAY_S, None)
    await history.make_partitions(upkeep)
    indexed = await sql.fetch(
        "SELECT c.relname::text, array_agg(pg_get_indexdef(x.indexrelid)) AS indexes "
        "FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid "
        "LEFT JOIN pg_index AS x ON x.indrelid = c.oid AND x.indisvalid "
        "WHERE i.inhparent = 'taskd.job_history'::regclass GROUP BY 1"
    )
    assert len(indexed) == len(await leaves(sql)) + 1
    for each in indexed:
        assert any(text.endswith("(id, expires_at)") for text in each["indexes"]), each["relname"]
        assert any("(finished_at) WHERE" in text for text in each["indexes"]), each["relname"]
    valid = await sql.fetch(
        "SELECT indisvalid FROM pg_index WHERE indrelid = 'taskd.job_history'::regclass"
    )
    assert all(each[0] for each in valid)


@pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago"])
async def test_days_are_utc_whatever_the_session_thinks(
    sql, connect: Connect, lane: Lane, me, zone: str
) -> None:
    await drop_dated(sql)
    mine = fetches(await connect(timezone=zone))
    assert await history.make_partitions(mine) == 2 * len(AHEAD)
    assert await leaves(sql) == {await leaf_of(sql, keep + n) for keep in (7, 30) for n in AHEAD}
    job = await run_one(mine, me)
    await done(mine, job)
    assert await in_default(sql) == 0
    expired, today = await make_leaf(sql, -1), await make_leaf(sql, 0)
    assert await history.drop_expired(mine) == [expired]
    assert await history.drop_expired(mine) == []
    assert today in await leaves(sql)


async def test_expired_partitions_go_with_what_they_hold_and_others_stay(
    sql, lane: Lane, me, upkeep
) -> None:
    old = [await make_leaf(sql, days) for days in (-60, -2, -1)]
    today = await make_leaf(sql, 0)
    batch = await running(lane, me, 4)
    await done(lane, *batch)
    for job, days in zip(batch, (-60, -1, 0, 7), strict=True):
        await sql.execute(
            "UPDATE taskd.job_history SET expires_at = now() + make_interval(days => $2) "
            "WHERE id = $1",
            job.id,
            days,
        )
    before = await leaves(sql)
    assert await keep_house(upkeep) == old
    assert await leaves(sql) == before - set(old)
    assert today in before
    assert [await row(sql, job.id) is not None for job in batch] == [False, False, True, True]


async def test_a_partition_that_has_not_expired_cannot_be_dropped(sql, lane: Lane) -> None:
    before = await leaves(sql)
    for leaf in (await leaf_of(sql, 7), "job_history_default", "job", "job_history_20200101; --"):
        with pytest.raises(Exception, match="has not expired"):
            await lane.fetch("drop_expired_partition", leaf)
    assert await leaves(sql) == before


async def test_a_partition_that_somebody_else_has_dropped_is_no_error(lane: Lane) -> None:
    [dropped] = await lane.fetch("drop_expired_partition", "job_history_20200101")
    assert dropped[0] is False


# Readers and acks.


async def test_acks_go_on_while_a_reader_holds_the_history_and_upkeep_waits_for_another_day(
    sql, lane: Lane, connect: Connect, me, upkeep
) -> None:
    old = await make_leaf(sql, -1)
    await sql.execute(f"DROP TABLE taskd.{await leaf_of(sql, 7)}")  # there is something to make
    batch = await running(lane, me, 40)
    plain, failed = batch[:20], batch[20:]
    postponed = 0
    async with Transaction(await connect()) as reading:
        await reading.connection.fetch("SELECT count(*) FROM taskd.job_history")

        async def ack_all() -> None:
            for one, two in zip(plain, failed, strict=True):
                assert await done(lane, one) == 1
                assert await settle(lane, two, FAILED) == FAILED
                assert (await jobs.check_acks(lane, me, [one.id], [1])) == {one.id: "done"}

        acking = asyncio.create_task(ack_all())
        while not acking.done():
            for step in (history.make_partitions, history.drop_expired):
                with pytest.raises(StoreUnavailable, match="lock timeout"):
                    await step(upkeep)
                postponed += 1
        await acking
        assert old in await leaves(sql)
        await reading.rollback()
    assert postponed >= 2
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_history") == 40
    assert await keep_house(upkeep) == [old]


async def test_the_pruner_reports_that_it_was_blocked_and_tries_again_sooner(
    sql, database: Database, connect: Connect
) -> None:
    old = await make_leaf(sql, -1)
    pruner = Pruner(database)
    usual_s = pruner.every_s
    async with Transaction(await connect()) as reading:
        await reading.connection.fetch("SELECT count(*) FROM taskd.job_history")
        await pruner.tick()
        assert pruner.every_s < usual_s
    await pruner.tick()
    assert old not in await leaves(sql)
    assert pruner.every_s == usual_s


async def test_without_ddl_the_pruner_empties_partitions_and_goes_on_with_its_other_duties(
    sql, lane: Lane, database: Database, me
) -> None:
    await sql.execute(f"DROP TABLE taskd.{await leaf_of(sql, 7)}")  # there is something to make
    old = [await make_leaf(sql, days) for days in (-3, -2)]
    for job, days in zip(await running(lane, me, 2), (-3, -2), strict=True):
        await settle(lane, job, FAILED)
        await sql.execute(
            "UPDATE taskd.job_history SET expires_at = now() + make_interval(days => $2) "
            "WHERE id = $1",
            job.id,
            days,
        )
    await sql.execute("INSERT INTO taskd.job_key VALUES ('t', 'k', 1, NULL, now())")
    await sql.execute(REFUSE_DDL)
    emitted: list[tuple[str, Any]] = []
    end = events.subscribe(lambda name, fields: emitted.append((name, fields)))
    pruner = Pruner(database)
    usual_s = pruner.every_s
    await pruner.tick()
    end()
    failed = [fields for name, fields in emitted if name == "upkeep.failed"]
    assert [each["what"] for each in failed] == list(STEPS)[1:3]
    assert "raised by public.refuse_ddl()" in failed[0]["error"]
    assert set(old) <= await leaves(sql)
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_history") == 0
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_key") == 0
    assert pruner.every_s < usual_s
    # Acks go on, into the default partition.
    await done(lane, await run_one(lane, me))
    assert await in_default(sql) == 1


async def test_after_sixty_days_without_upkeep_acks_still_succeed(
    sql, lane: Lane, me, upkeep
) -> None:
    await drop_dated(sql)
    plain, failed = await running(lane, me, 2)
    assert await done(lane, plain) == 1
    assert await settle(lane, failed, FAILED) == FAILED
    assert await in_default(sql) == 2
    # The days that the default partition holds rows for stay there; the others are made.
    await keep_house(upkeep)
    made = {await leaf_of(sql, keep + ahead) for keep in (7, 30) for ahead in AHEAD}
    assert await leaves(sql) == made - {await leaf_of(sql, 7), await leaf_of(sql, 30)}
    assert await in_default(sql) == 2
    assert await row(sql, plain.id) is not None
    # Their day is over: they are pruned, and partitions for later days are made.
    await sql.execute("UPDATE taskd.job_history_default SET expires_at = now() - interval '1 s'")
    await keep_house(upkeep)
    assert await in_default(sql) == 0
    await keep_house(upkeep)
    assert await leaves(sql) == made


async def test_all_that_has_expired_in_the_default_partition_is_pruned_and_no_more(
    sql, upkeep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "PRUNE_BATCH", 10)
    await sql.execute(
        "INSERT INTO taskd.job_history_default (id, enqueued_at, run_at, finished_at, expires_at, "
        "fence, state, priority, attempt, crashes, interrupts, queue, task, args, errors) "
        "SELECT n, now(), now(), now(), now() + make_interval(secs => CASE WHEN n <= 25 "
        "THEN -1 ELSE 3600 * 24 * 200 END), 1, 'done', 1, 1, 0, 0, 'q', 't', '{}', '[]' "
        "FROM generate_series(1, 30) AS n"
    )
    assert await history.prune_default(upkeep) == 25
    assert await history.prune_default(upkeep) == 0
    assert await in_default(sql) == 5


async def test_a_default_partition_in_use_is_pruned_around_what_others_hold(
    sql, lane: Lane, connect: Connect, me, upkeep
) -> None:
    await drop_dated(sql)
    one, two = await running(lane, me, 2)
    await settle(lane, one, FAILED)
    await settle(lane, two, FAILED)
    await sql.execute("UPDATE taskd.job_history SET expires_at = now() - interval '1 s'")
    async with Transaction(await connect()) as retrying:
        assert await jobs.retry(fetches(retrying.connection), [one.id]) == [one.id]
        assert await history.prune_default(upkeep) == 1
        await retrying.commit()
    assert (await row(sql, one.id))["state"] == "queued"
    assert await row(sql, two.id) is None


# Several workers do the upkeep at once.


async def test_four_workers_keep_house_at_once_and_none_of_them_stumbles(
    sql, database: Database, lane: Lane, connect: Connect, me
) -> None:
    await enqueue(lane, 2000)
    stop = asyncio.Event()
    written = 0

    async def work(on: Any) -> None:
        nonlocal written
        while not stop.is_set():
            batch = await jobs.claim(on, me, "q", 2)
            written += await done(on, *sorted(batch, key=lambda job: job.id))

    async def keep(number: int) -> None:
        mine = Lane(database, f"history {number}", lock_timeout=str(history.LOCK_TIMEOUT_MS))
        try:
            for _ in range(3):
                try:
                    await keep_house(mine)
                except StoreUnavailable:
                    continue
        finally:
            await mine.close()

    working = asyncio.create_task(work(fetches(await connect())))
    expected = {await leaf_of(sql, keep + ahead) for keep in (7, 30) for ahead in AHEAD}
    for _ in range(5):
        for days in (-3, -2, -1):
            await make_leaf(sql, days)
        for leaf in expected - {await leaf_of(sql, 7)}:
            await sql.execute(f"DROP TABLE IF EXISTS taskd.{leaf}")
        await asyncio.gather(*(keep(number) for number in range(4)))
        async with asyncio.timeout(20):
            while await leaves(sql) != expected:
                await keep(0)
    stop.set()
    await working
    assert written > 0
    assert await sql.fetchval("SELECT count(*) FROM taskd.job_history") == written
