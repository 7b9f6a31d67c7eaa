"""Helpers of the tests of schedules: create them, let ticks come, fire."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from taskd.core.jobs.job import NewJob
from taskd.core.schedule import Every, Schedule
from taskd.store import schedules, workers
from taskd.store.connections.lanes import Lane
from taskd.worker.upkeep.schedule_runner import fire
from tests.store.helpers import incarnation

JOB = NewJob("t", '{"a": 1}', queue="q")


def nightly(name: str = "s", when: Any = None, job: NewJob = JOB, **options: Any) -> Schedule:
    return Schedule(name, job, when or Every(60.0), **options)


async def make(on: Any, *made: Schedule, app: str | None = None) -> dict[str, str]:
    return await schedules.set_(on, made, app)


async def late(sql: Any, by_s: float, name: str = "s") -> datetime:
    """Move the next tick into the past; return its time."""
    return await sql.fetchval(
        "UPDATE taskd.schedule SET next_at = clock_timestamp() - make_interval(secs => $1), "
        "starts_at = clock_timestamp() - make_interval(secs => $1) "
        "WHERE name = $2 RETURNING next_at",
        by_s,
        name,
    )


async def fire_due(lane: Lane) -> int:
    """Fire due schedules, as a worker does; return how many were fired."""
    due = [await schedules.due(lane, 100, with_query=each) for each in (False, True)]
    return sum([await fire(lane, each) for each in (*due[0], *due[1])])


async def made(sql: Any, name: str = "s") -> list[Any]:
    return await sql.fetch("SELECT * FROM taskd.jobs WHERE schedule = $1 ORDER BY id", name)


async def row(sql: Any, name: str = "s") -> Any:
    return await sql.fetchrow("SELECT * FROM taskd.schedule WHERE name = $1", name)


async def register(
    on: Any, worker_id: int, app: str, *declared: str, tasks: tuple[str, ...] = (), code: str = ""
) -> None:
    """Register a live worker of an app whose code declares these schedules."""
    me = incarnation(worker_id)._replace(app=app)
    await workers.register(on, me, 60.0, ["q"], dict.fromkeys(tasks, 1), declared, code)
