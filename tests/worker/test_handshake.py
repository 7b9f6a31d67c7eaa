"""A worker and a schema that has gone on without it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd.core.migration import Migration
from taskd.errors import SchemaOutdated, SchemaTooNew
from taskd.store import workers
from taskd.store.schema import migrations
from taskd.store.schema.migrations import all_migrations
from taskd.worker.finishing.drain_report import DrainReport
from tests.worker.conftest import WITHIN_S, Desk, until

NEWEST = all_migrations()[-1].number
ADD = "INSERT INTO taskd.migration VALUES ($1, 'later', '', $2, $3)"
# `Within one lease renewal`: a sixth of the lease, and a fifth more.
LEASE_S = 3.0


def idle_task(desk: Desk) -> None:
    @desk.task()
    async def idle() -> None: ...


async def test_a_worker_says_which_schemas_it_works_with(desk: Desk) -> None:
    idle_task(desk)
    await desk.start()
    said = await desk.sql.fetchrow("SELECT schema_oldest, schema_newest FROM taskd.worker")
    assert tuple(said) == migrations.of_this_code()


@pytest.mark.parametrize("announced", [True, False])
async def test_a_worker_that_the_schema_outgrows_drains_and_is_not_to_be_started_again(
    desk: Desk, announced: bool
) -> None:
    begun, restore_trace_context = asyncio.Event(), asyncio.Event()

    @desk.task()
    async def slow() -> None:
        begun.set()
        await restore_trace_context.wait()

    worker = await desk.start(lease_s=LEASE_S, drain_s=WITHIN_S)
    [running] = await desk.enqueue(slow.job())
    await begun.wait()
    # An expand does not stop the worker: it renews its lease.
    await desk.sql.execute(ADD, NEWEST + 1, NEWEST, None)
    beat = await desk.sql.fetchval("SELECT renewed_at FROM taskd.worker")
    await until(lambda: _beaten_since(desk, beat))
    assert not desk.emitted.of("worker.outgrown")

    await desk.sql.execute(
        "INSERT INTO taskd.migration VALUES ($1, 'later', '', $2, CASE WHEN $3 THEN now() END)",
        NEWEST + 2, NEWEST + 1, not announced,
    )  # fmt: skip
    [said] = await desk.emitted.wait("worker.outgrown")
    assert said == {"knows": NEWEST, "works_with": NEWEST + 1}
    await desk.emitted.wait("worker.draining")
    [left] = await desk.enqueue(slow.job())
    restore_trace_context.set()
    assert await worker.end() == 78
    assert worker.worker.report.outgrown
    assert f"{NEWEST + 1:04d} and later" in worker.worker.report.why
    assert (await desk.row(running))["state"] == "done"
    assert (await desk.row(left))["state"] == "queued"
    [stopped] = desk.emitted.of("worker.stopped")
    assert stopped["outgrown"] is True
    with pytest.raises(SchemaTooNew):
        await desk.start()


async def test_a_ledger_that_was_emptied_buries_nobody(desk: Desk) -> None:
    idle_task(desk)
    await desk.start()
    await desk.sql.execute("DELETE FROM taskd.migration")
    worker_id = await desk.sql.fetchval("SELECT id FROM taskd.worker")
    assert await workers.renew_lease(desk.lane, worker_id, LEASE_S, draining=False) == 0
    assert await workers.renew_lease(desk.lane, worker_id + 1, LEASE_S, draining=False) is None


async def _beaten_since(desk: Desk, moment: Any) -> bool:
    count = "SELECT count(*) FROM taskd.worker WHERE renewed_at > $1"
    return bool(await desk.sql.fetchval(count, moment))


async def test_a_worker_that_needs_a_newer_schema_does_not_start(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    idle_task(desk)
    newer = Migration(NEWEST + 1, "keys", "-- step: expand\n-- works with: >= 1\nSELECT 1;")
    known = (*all_migrations(), newer)
    monkeypatch.setattr(migrations, "all_migrations", lambda: known)
    with pytest.raises(SchemaOutdated, match=f"needs {NEWEST + 1:04d}.*taskd db migrate") as error:
        await desk.start()
    assert error.value.exit_code == 78


def test_of_several_processes_one_that_is_outgrown_counts() -> None:
    whole = DrainReport(abandoned=1)
    whole.add(DrainReport(outgrown=True))
    assert whole.exit_code == 78
