"""Where claims begin to read: behind the last one, while a held snapshot makes them slow."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.job import Job, NewJob
from taskd.store.jobs import jobs as store
from taskd.store.jobs.jobs import ALL, Read
from taskd.worker.claiming.read_position import SLOW_IN_A_ROW, ReadPosition
from tests.worker.conftest import Desk

USUAL_S, SLOW_S = 0.002, 0.030


def claimed(job_id: int, priority: int = 100) -> list[Job]:
    return [Job(job_id, 1, "t", "{}", 1, None, None, priority, 0, 0.0, 1_800_000_000.123456, None)]


def warmed() -> ReadPosition:
    reading = ReadPosition()
    for n in range(5):
        reading.claimed(reading.next(float(n)), claimed(n), float(n), USUAL_S)
    return reading


def slowed() -> ReadPosition:
    reading = warmed()
    for _ in range(SLOW_IN_A_ROW):
        assert not reading.held
        reading.claimed(ALL, claimed(7), 5.0, SLOW_S)
    return reading


def test_a_usual_claim_reads_all() -> None:
    reading = warmed()
    assert reading.next(5.0) == ALL
    assert not reading.held


def test_a_slow_claim_makes_the_next_ones_begin_behind_it() -> None:
    reading = slowed()
    assert reading.held
    read = reading.next(5.1)
    assert read.only_urgent  # more urgent jobs are scanned first
    reading.claimed(read, [], 5.1, USUAL_S)
    due_at = datetime.fromtimestamp(1_800_000_000, UTC) + timedelta(microseconds=123456)
    assert reading.next(5.11) == Read(100, due_at, 7)
    reading.claimed(reading.next(5.11), claimed(9), 5.11, USUAL_S)
    assert reading.next(5.12).after_id == 9
    assert reading.next(5.16).only_urgent


def test_all_is_read_again_in_time_and_never_for_more_than_its_share() -> None:
    reading = slowed()
    assert reading.next(5.59) != ALL
    assert reading.at_most(10.0, 5.0) == pytest.approx(0.6)  # twenty times 30 ms
    assert reading.next(5.61) == ALL
    reading.claimed(ALL, claimed(8), 6.2, 0.2)
    reading.claimed(ALL, claimed(8), 8.2, 0.2)  # the longer it takes, the rarer it is
    assert reading.next(12.1) != ALL
    assert reading.next(12.3) == ALL


def test_no_scan_is_put_off_for_long_however_long_they_take() -> None:
    reading = slowed()
    for now in (6.0, 20.0):
        reading.claimed(ALL, claimed(8), now, 5.0)
    assert reading.next(30.1) == ALL


def test_one_claim_that_waited_for_the_network_puts_nothing_off() -> None:
    reading = slowed()
    reading.claimed(ALL, claimed(8), 6.0, 2.45)
    assert reading.next(7.1) == ALL


def test_a_full_scan_that_is_fast_again_ends_it() -> None:
    reading = slowed()
    reading.claimed(ALL, claimed(8), 6.0, USUAL_S)
    assert not reading.held
    assert reading.next(6.01) == ALL
    assert reading.at_most(3.0, 6.01) == 3.0


def test_a_machine_that_is_slow_for_long_is_no_held_snapshot() -> None:
    reading = warmed()
    now = 5.0
    for _ in range(60):
        reading.claimed(ALL, claimed(7), now, 0.004)  # twice as long as it used to be
        now += 10.0
    assert not reading.held


async def test_claims_part_a_queue_at_a_place_exactly(desk: Desk) -> None:
    await desk.other_worker(42)
    # All of one transaction are due at the same moment: only the id tells them apart.
    ids = await desk.enqueue(*(NewJob("t", queue="q") for _ in range(6)))
    urgent = await desk.enqueue(NewJob("t", queue="q", priority=1))
    first = await store.claim(desk.lane, 42, "q", 3)
    assert [job.id for job in first] == [*urgent, *ids[:2]]
    last = first[-1]
    late = await desk.enqueue(NewJob("t", queue="q", priority=5))
    assert await store.claim(desk.lane, 42, "q", 10, Read.urgent(last)) != []
    behind = await store.claim(desk.lane, 42, "q", 10, Read.after(last))
    assert [job.id for job in behind] == ids[2:]
    assert late


async def test_a_held_snapshot_does_not_make_claims_read_what_was_claimed_long_ago(
    desk: Desk,
) -> None:
    await desk.other_worker(42)
    held = await asyncpg.connect(desk.dsn)
    try:
        await desk.sql.execute(
            "INSERT INTO taskd.job (queue, task) SELECT 'q', 't' FROM generate_series(1, 8000)"
        )
        transaction = held.transaction(isolation="repeatable_read")
        await transaction.start()
        await held.fetchval("SELECT count(*) FROM taskd.job")
        jobs: list[Job] = []
        for _ in range(14):
            jobs = await store.claim(desk.lane, 42, "q", 500)
        everything = await buffers(desk, ALL)
        behind = await buffers(desk, Read.after(jobs[-1]))
        assert behind * 5 < everything
        await transaction.rollback()
    finally:
        await held.close()


async def buffers(desk: Desk, read: Read) -> int:
    """How many pages the search of a claim reads."""
    plan: Any = await desk.sql.fetchval(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON, TIMING OFF) SELECT ctid FROM taskd.job "
        "WHERE queue = 'q' AND state = 'queued' AND (priority, run_at, id) > "
        f"('{read.after_priority}'::integer, '{read.after_run_at.isoformat()}'::timestamptz, "
        f"{read.after_id}) ORDER BY priority, run_at, id LIMIT 10"
    )
    import json

    top = json.loads(plan)[0]["Plan"]
    return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])


def test_a_claim_after_days_of_silence_or_of_uptime_is_taken_in_like_any_other() -> None:
    reading = ReadPosition()
    for now in (3e5, 3e5 + 1, 2e6):  # seconds since the machine was started
        reading.claimed(reading.next(now), claimed(1), now, USUAL_S)
        assert not reading.held
    for n in range(SLOW_IN_A_ROW):
        reading.claimed(ALL, claimed(7), 2e6 + n, SLOW_S)
    assert reading.held
