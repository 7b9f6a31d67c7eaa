"""Filters of jobs: which jobs each field selects, by which index, and with which rights."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from taskd.core.jobs.job import LIVE, Job, JobState, NewJob
from taskd.core.jobs.job_filter import JobFilter
from taskd.core.jobs.unique import Unique
from taskd.errors import PermissionDenied
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.reading import job_pages
from tests.logins import Logins
from tests.store.helpers import FAILED, done, enqueue, new_worker, run_one, running, settle

FLOW = """
INSERT INTO taskd.workflow (id, name, kind) OVERRIDING SYSTEM VALUE
VALUES (7, 'import', 'workflow'), (8, 'export', 'workflow')
"""
HOUR = timedelta(hours=1)


async def listed(on: Lane, limit: int = 50, **fields: Any) -> list[int]:
    """The ids of the jobs that match, sorted."""
    found = await job_pages.list_jobs(on, JobFilter(**fields).listed(), limit)
    return sorted(row["id"] for row in found)


async def one_of_each(lane: Lane, me: int, **options: Any) -> list[int]:
    """The ids of a queued, a running, a done and a failed job with these options."""
    started = [await run_one(lane, me, **options) for _ in range(3)]
    await done(lane, started[0])
    await settle(lane, started[1], FAILED, reason="x")
    return sorted([*await enqueue(lane, **options), *(job.id for job in started)])


async def test_tags_select_jobs_in_every_state(lane: Lane, me: int) -> None:
    tags = {"tenant": "acme", "tags": ["vip", "new"]}
    acme = await one_of_each(lane, me, metadata=tags | {"traceparent": "00-1"})
    await one_of_each(lane, me, metadata={"tenant": "other"})
    await one_of_each(lane, me)
    assert await listed(lane, metadata={"tenant": "acme"}) == acme
    assert await listed(lane, metadata={"tags": ["vip"]}) == acme
    assert await listed(lane, metadata={"traceparent": "00-1"}) == acme
    assert await listed(lane, metadata={"tenant": "acme", "tags": ["old"]}) == []


async def test_a_workflow_is_selected_by_id_or_name(sql: Any, lane: Lane, me: int) -> None:
    await sql.execute(FLOW)
    flow = await one_of_each(lane, me)
    await one_of_each(lane, me)
    for table in ("job", "job_history"):
        await sql.execute(f"UPDATE taskd.{table} SET workflow_id = 7 WHERE id = ANY ($1)", flow)
    assert await listed(lane, workflow=7) == await listed(lane, workflow="import") == flow
    assert await listed(lane, workflow=8) == await listed(lane, workflow="none") == []


async def test_a_schedule_selects_the_jobs_that_it_has_enqueued(
    sql: Any, lane: Lane, me: int
) -> None:
    nightly = await one_of_each(lane, me)
    await one_of_each(lane, me)
    for table in ("job", "job_history"):
        await sql.execute(
            f"UPDATE taskd.{table} SET schedule = $2 WHERE id = ANY ($1)", nightly, "it's \\ it"
        )
    assert await listed(lane, schedule="it's \\ it") == nightly
    assert await listed(lane, schedule="it") == []


async def keyed(lane: Lane, key: str, scope: str = "live") -> int:
    [job_id] = await jobs.enqueue(
        lane, [NewJob("t", queue="q", unique=Unique(key=key, scope=scope))]
    )
    return job_id


@pytest.mark.parametrize("scope", ["live", "waiting"])
async def test_a_key_selects_jobs_also_after_they_have_given_it_up(
    lane: Lane, me: int, scope: str
) -> None:
    ended, other = await keyed(lane, "a", scope), await keyed(lane, "b", scope)
    claimed = await jobs.claim(lane, me, "q", 2)
    # A job whose key is for the time until its claim runs without it.
    assert await listed(lane, unique_key="a", task="t") == [ended]
    await done(lane, *claimed)
    live = await keyed(lane, "a", scope)
    assert await listed(lane, unique_key="a") == [ended, live]
    assert await listed(lane, unique_key="a", task="t") == [ended, live]
    assert await listed(lane, unique_key="a", task="u") == []
    assert await listed(lane, unique_key="b", states=LIVE) == []
    assert other not in await listed(lane, unique_key="a")


async def test_a_key_of_values_is_compared_by_value(lane: Lane) -> None:
    job_id = await keyed(lane, '["X", "2026-01"]')
    assert await listed(lane, unique_key='["X","2026-01"]') == [job_id]
    assert await listed(lane, unique_key='[ "X",  "2026-01" ]', task="t") == [job_id]


async def test_a_worker_selects_what_it_runs_and_has_run(lane: Lane, me: int) -> None:
    other = await new_worker(lane)
    mine = [job.id for job in await running(lane, me, 2)]
    his = await running(lane, other, 2)
    await done(lane, his[0])
    assert await listed(lane, worker=me) == mine
    assert await listed(lane, worker=other) == [job.id for job in his]
    assert await listed(lane, worker=4711) == []


async def at(sql: Any, job: Job, **columns: Any) -> None:
    """Move times of a job into the past."""
    for table in ("job", "job_history"):
        for name, ago in columns.items():
            if table == "job_history" or name != "finished_at":
                await sql.execute(
                    f"UPDATE taskd.{table} SET {name} = now() - $2::interval WHERE id = $1",
                    job.id,
                    ago,
                )


async def test_how_long_a_job_runs_counts_from_its_claim(sql: Any, lane: Lane, me: int) -> None:
    fresh, hung, slow, quick = await running(lane, me, 4)
    for job in (fresh, hung, slow, quick):
        await at(sql, job, enqueued_at=10 * HOUR)
    await at(sql, hung, started_at=2 * HOUR)
    await settle(lane, slow, FAILED, reason="x")
    await settle(lane, quick, FAILED, reason="x")
    await at(sql, slow, started_at=5 * HOUR, finished_at=3 * HOUR)
    await at(sql, quick, started_at=5 * HOUR, finished_at=5 * HOUR)
    assert await listed(lane, running_for_s=3600.0) == [hung.id]
    assert await listed(lane, running_for_s=3600.0, states=JobState) == [hung.id, slow.id]
    # The age counts from the enqueue or from the end.
    assert await listed(lane, older_than_s=3600.0) == [fresh.id, hung.id, slow.id, quick.id]
    assert await listed(lane, older_than_s=4 * 3600.0, states=[FAILED]) == [quick.id]


async def test_texts_of_a_filter_are_texts_and_not_sql(lane: Lane, me: int) -> None:
    odd = """'); DROP TABLE taskd.job; -- $1 {} %s %L \\"""
    found = await one_of_each(lane, me, args='{"name": "it\'s \\\\ 100% {}"}', task=odd)
    assert await listed(lane, task=odd) == found
    assert await listed(lane, args={"name": "it's \\ 100% {}"}) == found
    assert await listed(lane, args_text="100% {}") == found
    for name in ("error", "args_text", "schedule", "unique_key", "workflow"):
        assert await listed(lane, **{name: odd}) == []
    assert await listed(lane, metadata={odd: odd}) == await listed(lane, args={odd: odd}) == []
    key = await keyed(lane, "it's {} %s")
    assert await listed(lane, task="t", unique_key="it's {} %s") == [key]
    assert await listed(lane, task=odd, unique_key=odd) == []


async def test_a_list_goes_on_until_it_is_full(
    sql: Any, lane: Lane, me: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_pages, "READ_MAX", 3)
    monkeypatch.setattr(job_pages, "LIST_READ_MAX", 3)
    old = await enqueue(lane, 3, task="rare")
    await enqueue(lane, 20)
    ended = await running(lane, me, 20, queue="other")
    for job in ended:
        await settle(lane, job, FAILED, reason="x")
    await sql.execute("UPDATE taskd.job_history SET task = 'rare' WHERE id = $1", ended[0].id)
    assert await listed(lane, task="rare") == [*old, ended[0].id]
    assert await listed(lane, 2, task="rare") == [old[2], ended[0].id]
    assert await listed(lane, states=["failed"], task="rare") == [ended[0].id]


async def test_a_list_shows_the_attempts_of_the_task_and_the_last_change(
    sql: Any, lane: Lane, me: int
) -> None:
    await sql.execute(
        "INSERT INTO taskd.task (name, app, signature, queue, max_attempts, args_schema) "
        "VALUES ('t', 'app', 'x', 'q', 5, '{}')"
    )
    job = await run_one(lane, me)
    await settle(lane, job, JobState.SCHEDULED, error='{"type": "E", "message": "m"}')
    [waiting] = await job_pages.list_jobs(lane, JobFilter(), 1)
    assert (waiting["attempt"], waiting["max_attempts"]) == (1, 5)
    assert waiting["updated_at"] > waiting["started_at"] > waiting["enqueued_at"]
    assert (waiting["error_type"], waiting["last_error"]) == ("E", "m")
    [shown] = await sql.fetch("SELECT updated_at FROM taskd.jobs")
    assert shown["updated_at"] == waiting["updated_at"]


@pytest.mark.parametrize(
    "ended", ["2026-02-31T25:00:00Z", "2026-02-31T00:00:00+00:00", "infinity", "", "5", "{}"]
)
async def test_a_time_that_is_none_breaks_no_list(sql: Any, lane: Lane, ended: str) -> None:
    [job_id] = await enqueue(lane)
    await sql.execute(
        "UPDATE taskd.job SET errors = jsonb_build_array(jsonb_build_object('ended', $1::text))",
        ended,
    )
    [found] = await job_pages.list_jobs(lane, JobFilter(), 1)
    assert found["id"] == job_id


async def test_the_stored_time_of_an_error_is_read_in_each_time_zone(sql: Any) -> None:
    text = await sql.fetchval("SELECT to_jsonb(timestamptz '2026-03-31 02:30:00.5+02') #>> '{}'")
    for zone in ("UTC", "Europe/Berlin", "America/New_York"):
        async with sql.transaction():
            await sql.execute(f"SET LOCAL TimeZone = '{zone}'")
            assert await sql.fetchval(
                "SELECT taskd.stored_time($1) = timestamptz '2026-03-31 02:30:00.5+02'", text
            )


async def test_observers_filter_by_all_that_they_can_see(logins: Logins, lane: Lane) -> None:
    await enqueue(lane, args='{"n": 1}', metadata={"tenant": "acme"})
    observer = Lane(Database({"dsn": logins.dsn("observer")}), "cli")
    try:
        seen = JobFilter(
            queue="q", task="t", states=LIVE, older_than_s=0.0, since_s=60.0, workflow="w"
        )
        assert await job_pages.list_jobs(observer, seen, 5) == []
        assert len(await job_pages.list_jobs(observer, JobFilter(queue="q"), 5)) == 1
        for hidden in (
            {"args": {"n": 1}}, {"args_text": "1"}, {"unique_key": "k"}, {"metadata": {"a": "b"}},
        ):  # fmt: skip
            with pytest.raises(PermissionDenied, match="only members of taskd_admin"):
                await job_pages.list_jobs(observer, JobFilter(**hidden), 5)
    finally:
        await observer.close()
