"""Helpers of the tests of limits: published limits, and the states of jobs."""

from __future__ import annotations

from typing import Any

from taskd.core.jobs.job import Job
from taskd.core.jobs.limit import Limit
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs, limits

APP = "app"


async def publish(
    on: Fetches, limit: Limit, *, task: str = "t", queue: str = "q"
) -> Task[..., Any]:
    """Publish a task with a limit; its one argument is the key."""

    async def handler(tenant: str | float = "main") -> None: ...

    registry = Registry()
    made: Task[..., Any] = Task(handler, name=task, queue=queue, limit=limit)
    registry.add(made)
    await workers.publish(on, APP, registry, [queue])
    await limits.publish(on, APP, registry)
    await limits.admit(on, 100)  # the opening that it has inserted
    return made


async def enqueue(on: Fetches, task: Task[..., Any], *tenants: str) -> list[int]:
    return list(await jobs.enqueue(on, [task.job(tenant) for tenant in tenants]))


async def lined_up(on: Fetches, limit: Limit, *tenants: str) -> tuple[Task[..., Any], list[int]]:
    """Publish a task with a limit, and enqueue jobs of it that are checked for admission."""
    task = await publish(on, limit)
    born = await enqueue(on, task, *tenants)
    await limits.admit(on, 100)
    return task, born


async def one_runs(
    on: Fetches, worker: int, *tenants: str
) -> tuple[Task[..., Any], Job, list[int]]:
    """Do the same with a limit of one, and run the admitted job."""
    task, born = await lined_up(on, Limit(concurrency=1), *tenants)
    [job] = await jobs.claim(on, worker, "q", 10)
    return task, job, born


async def queued(sql: Any, key: str | None = None) -> list[int]:
    """Return the jobs that are admitted and not claimed."""
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
