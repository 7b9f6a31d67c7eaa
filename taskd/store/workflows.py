"""Workflows in the database: start, read, stop, forget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.job import NewJob
from taskd.core.workflows.workflow import Plan
from taskd.store.connections.error_translation import refusals
from taskd.store.connections.statements import Fetches
from taskd.store.jobs.jobs import enqueue_args

Row = dict[str, Any]


class Results(NamedTuple):
    """What jobs have returned, by node; None in place of all of it when it is too much."""

    by_node: dict[str, Any] | None
    size: int


async def start(on: Fetches, plan: Plan, jobs: Sequence[NewJob]) -> list[int]:
    """Write a workflow, all or nothing; its id, and then those of its jobs in the plan's order.

    Args:
        jobs: those of the plan's nodes, each with its queue.

    Raises:
        QueueFull: a queue has no room for those that wait for no other; nothing was written.
    """
    with refusals():
        rows = await on.fetch(
            "enqueue_workflow",
            plan.name,
            plan.kind,
            plan.stages,
            *enqueue_args(jobs),
            [node.name for node in plan.nodes],
            plan.places,
            plan.parent_places,
            plan.parent_ids,
            plan.on_failed,
        )
    return list(rows[0][0])


async def parent_results(on: Fetches, job_id: int, bytes_max: int) -> Results:
    """What the jobs that this one waited for have returned, those that are done, oldest first."""
    rows = await on.fetch("parent_results", job_id, bytes_max)
    size = (rows[0][2] or 0) if rows else 0
    if size > bytes_max:
        return Results(None, size)
    read = {row[0]: None if row[1] is None else msgspec.json.decode(row[1]) for row in rows}
    return Results(read, size)


async def list_workflows(on: Fetches, name: str | None, limit: int) -> list[Row]:
    """The newest workflows, with how their jobs stand."""
    return [dict(row) for row in await on.fetch("list_workflows", name, limit)]


async def find(on: Fetches, workflow_id: int) -> Row | None:
    """One workflow, the plan of its stages decoded; None when nobody knows it."""
    for row in await on.fetch("find_workflow", workflow_id):
        stages = row["stages"] and msgspec.json.decode(row["stages"])
        return dict(row) | {"stages": stages}
    return None


async def parts(on: Fetches, workflow_id: int, limit: int) -> list[Row]:
    """The parts of a workflow with how their jobs stand, those that come first before others."""
    rows = await on.fetch("workflow_parts", workflow_id, limit)
    return [dict(row) | {"states": msgspec.json.decode(row["states"])} for row in rows]


async def stats(on: Fetches, name: str, limit: int) -> list[Row]:
    """How the jobs of all runs of this name stand, by part."""
    return [dict(row) for row in await on.fetch("workflow_stats", name, limit)]


async def stop(on: Fetches, workflow_id: int) -> bool:
    """Let no further stage begin; whether there is such a workflow."""
    return bool(await on.fetch("stop_workflow", workflow_id))


async def jobs_to_cancel(on: Fetches, workflow_id: int) -> list[int]:
    """The live jobs of a workflow that nobody has asked to cancel."""
    return [row[0] for row in await on.fetch("workflow_jobs_to_cancel", workflow_id)]


async def jobs_to_retry(on: Fetches, workflow_id: int) -> list[int]:
    """The failed and cancelled jobs of a workflow, the oldest first; not those nobody needed."""
    return [row[0] for row in await on.fetch("workflow_jobs_to_retry", workflow_id)]


async def held_up_by(on: Fetches, job_id: int, limit: int) -> list[Row]:
    """The jobs that hold up a blocked one, the oldest first; each row says how many there are."""
    return [dict(row) for row in await on.fetch("pending_parents", job_id, limit)]


async def prune(on: Fetches) -> int:
    """Forget workflows of which no job is left, in batches; how many rows were looked at."""
    total = 0
    while pruned := (await on.fetch("prune_workflows"))[0][0]:
        total += pruned
    return total
