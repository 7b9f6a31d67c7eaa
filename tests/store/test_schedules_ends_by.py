"""By when the jobs of a schedule should have ended: what is late, and what expired."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.job_filter import JobFilter
from taskd.core.schedule import Cron
from taskd.errors import InvalidJob, InvalidSchedule
from taskd.store import schedules
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.schedule_helpers import fire_due, late, made, make, nightly, row


async def pass_by(sql: Any) -> None:
    """Let the times by which the live jobs have to end pass by."""
    await sql.execute("UPDATE taskd.job SET ends_by = now() - interval '1 s'")


async def listed(lane: Lane) -> tuple[int, int, int]:
    [row] = await schedules.list_(lane)
    return row["late"], row["ended_late"], row["expired"]


async def test_a_job_ends_by_a_time_of_day_in_the_zone_or_seconds_after_its_tick(
    sql: Any, lane: Lane
) -> None:
    cron = Cron("1 0 * * *", "America/New_York")
    await make(lane, nightly(when=cron, ends_by="08:00"), nightly("sooner", ends_by_s=90.0))
    await sql.execute("UPDATE taskd.schedule SET next_at = now() - interval '1 day'")
    await fire_due(lane)
    [job] = await made(sql)
    zone = ZoneInfo("America/New_York")
    assert job["ends_by"].astimezone(zone).strftime("%H:%M") == "08:00"
    assert job["ends_by"].astimezone(zone).date() == job["tick"].astimezone(zone).date()
    [job] = await made(sql, "sooner")
    assert job["ends_by"] == job["tick"] + timedelta(seconds=90)
    stored = await row(sql)
    assert (str(stored["ends_by"]), stored["ends_by_s"]) == ("08:00:00", None)
    assert await make(lane, nightly(when=cron, ends_by="08:00")) == {"s": "unchanged"}


async def test_the_row_of_a_query_can_say_when_its_job_ends(sql: Any, lane: Lane) -> None:
    query = "SELECT 1 AS a, '2099-01-01T08:00Z' AS \"job.ends_by\" UNION ALL SELECT 2, NULL"
    await make(lane, nightly(query=query, job=NewJob("t", queue="q"), ends_by_s=60.0))
    tick = await late(sql, 1.0)
    await fire_due(lane)
    first, second = await made(sql)
    assert (first["ends_by"].year, second["ends_by"]) == (2099, tick + timedelta(minutes=1))
    await make(
        lane, nightly(query=query, job=NewJob("t", queue="q"), ends_by_s=60.0, overlap="wait")
    )
    ids = (await schedules.run(lane, "s")).ids or []
    ends = [each["ends_by"] for each in await made(sql) if each["id"] in ids]
    assert sorted(end.year for end in ends)[1] == 2099


async def test_late_jobs_are_counted_while_they_live_and_after_they_have_ended(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(ends_by_s=3600.0))
    for _ in range(2):
        await late(sql, 1.0)
        await fire_due(lane)
    assert await listed(lane) == (0, 0, 0)
    await pass_by(sql)
    assert await listed(lane) == (2, 0, 0)
    [job] = await jobs.claim(lane, me, "q", 1)
    assert await listed(lane) == (2, 0, 0)
    await jobs.ack_done(lane, me, [job.id], [job.fence])
    assert await listed(lane) == (1, 1, 0)
    await sql.execute("UPDATE taskd.job_history SET finished_at = now() - interval '25 h'")
    assert await listed(lane) == (1, 0, 0)


async def test_expired_jobs_are_counted(sql: Any, lane: Lane) -> None:
    await make(lane, nightly(deadline_s=60.0))
    await late(sql, 1.0)
    await fire_due(lane)
    await sql.execute("UPDATE taskd.job SET deadline = now() - interval '1 s'")
    await lane.fetch("expire_jobs", 10, 0, 2**62, [])
    assert await listed(lane) == (0, 0, 1)


async def test_metrics_count_late_and_expired_jobs(sql: Any, lane: Lane, me: int) -> None:
    await make(lane, nightly(ends_by_s=3600.0), nightly("other"))
    for _ in range(2):
        await late(sql, 1.0)
        await fire_due(lane)
    await pass_by(sql)
    [job] = await jobs.claim(lane, me, "q", 1)
    await jobs.ack_done(lane, me, [job.id], [job.fence])
    found = {
        (row[0], row[1]): row[3]
        for row in await lane.fetch("read_metrics", 100.0, 100, 100)
        if row[0] in ("schedule_late_jobs", "schedule_ended_late_jobs", "schedule_expired_jobs")
    }
    assert found.pop(("schedule_late_jobs", "s")) == 1
    assert found.pop(("schedule_ended_late_jobs", "s")) == 1
    assert len(found) == 4
    assert set(found.values()) == {0}


async def test_a_filter_finds_late_and_expired_jobs(sql: Any, lane: Lane, me: int) -> None:
    await make(lane, nightly(ends_by_s=3600.0, deadline_s=7200.0))
    ids = []
    for _ in range(4):
        await late(sql, 1.0)
        await fire_due(lane)
        ids.append((await made(sql))[-1]["id"])
    for _ in range(2):
        [job] = await jobs.claim(lane, me, "q", 1)
        if job.id == ids[1]:
            await sql.execute("UPDATE taskd.job SET ends_by = now() WHERE id = $1", job.id)
        await jobs.ack_done(lane, me, [job.id], [job.fence])
    await sql.execute("UPDATE taskd.job SET ends_by = now() WHERE id = $1", ids[2])
    for live, expected in ((True, [ids[2]]), (False, [ids[1]])):
        document = JobFilter(late=True, schedule="s").document()
        found = await sql.fetchval(
            "SELECT ids FROM taskd.find_jobs($1::text::jsonb, $2, false, false, NULL, NULL, 100)",
            document,
            live,
        )
        assert found == expected
    with pytest.raises(InvalidJob, match="is not True or False"):
        JobFilter(late="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ends_by": "8"}, "not a time of day, such as '08:00'"),
        ({"ends_by": "25:00"}, "not a time of day"),
        ({"ends_by": 8}, "not a time of day"),
        ({"ends_by_s": 0}, "ends_by_s 0 is not 1 to"),
        ({"ends_by": "08:00", "ends_by_s": 60}, "give either ends_by or ends_by_s"),
    ],
)
def test_what_is_no_end_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSchedule, match=said):
        nightly(**options)


async def test_a_retried_job_keeps_the_time_by_which_it_should_have_ended(
    sql: Any, lane: Lane, me: int
) -> None:
    await make(lane, nightly(ends_by_s=3600.0))
    await late(sql, 1.0)
    await fire_due(lane)
    [job] = await made(sql)
    await sql.execute("SELECT taskd.cancel($1)", [job["id"]])
    await sql.execute("SELECT taskd.retry($1)", [job["id"]])
    assert [each["ends_by"] for each in await made(sql)] == [job["ends_by"]]
