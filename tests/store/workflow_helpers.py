"""Helpers of the tests of workflows: start one, and end a job in every way."""

from __future__ import annotations

from typing import Any

from taskd.core.jobs.job import Job, NewJob
from taskd.core.workflows.workflow import Node, OnFailed, plan
from taskd.store import workflows
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from tests.store.helpers import (
    CANCELLED,
    DONE,
    FAILED,
    RUNNING,
    bury,
    done,
    rescue,
    settle,
    state_of,
)

# Ways in which a job can end.
ENDS = [
    "done", "done with a result", "completed", "completed by hand",
    "failed", "cancelled", "by hand", "crashed",
]  # fmt: skip
GOOD = ENDS[:4]
# The state of a job by its policy and the outcome of its parent.
AFTERWARDS = {
    ("cancel", True): "queued",
    ("cancel", False): "cancelled",
    ("wait", True): "queued",
    ("wait", False): "blocked",
    ("continue", True): "queued",
    ("continue", False): "queued",
    ("only", True): "cancelled",
    ("only", False): "queued",
}

AFTER = "SELECT taskd.enqueue_after('t', '{}', $1::bigint[], queue => 'q', on_failed => $2)"
# A blocked job has as many open dependencies as it counts, and each parent will end or can be
# retried.
WRONG = """
SELECT job.id, job.state::text, job.waits_for, held.up, held.in_vain
FROM taskd.job AS job
CROSS JOIN LATERAL (
    SELECT count(*) AS up,
           count(*) FILTER (WHERE parent.state = 'done'
                               OR parent.state IN ('failed', 'cancelled') AND d.on_failed <> 'wait'
           ) AS in_vain
    FROM taskd.dependency AS d JOIN taskd.jobs AS parent ON parent.id = d.parent_id
    WHERE d.job_id = job.id AND NOT d.counted
) AS held
WHERE (job.state = 'blocked') <> (job.waits_for IS NOT NULL)
   OR job.state = 'blocked' AND (job.waits_for <> held.up OR held.up = 0 OR held.in_vain > 0)
"""


async def start(on: Any, *nodes: tuple[Any, ...], name: str = "flow") -> dict[str, int]:
    """Start a workflow of (name, after, on_failed); return the ids of its jobs by name."""
    made = plan(
        name,
        [
            Node(each[0], NewJob("t", queue="q"), tuple(each[1]), OnFailed((*each, "cancel")[2]))
            for each in nodes
        ],
    )
    _, *ids = await workflows.start(on, made, [node.job for node in made.nodes])
    return dict(zip([node.name for node in made.nodes], ids, strict=True))


async def claim(on: Any, me: int, count: int = 10) -> list[Job]:
    return sorted(await jobs.claim(on, me, "q", count), key=lambda job: job.id)


async def end(on: Any, me: int, job: Job, how: str) -> None:
    """End a claimed job."""
    match how:
        case "done":
            assert await done(on, job) == 1
        case "done with a result":
            await settle(on, job, DONE, result='{"a": 1}')
        case "completed":
            assert await on.fetch("complete_job", job.id, job.worker_id, job.fence, "1", None, None)
        case "completed by hand":
            assert await jobs.complete(on, [job.id], None, "odd") == {job.id: RUNNING}
        case "failed":
            await settle(on, job, FAILED, reason="no")
        case "expired":
            await settle(on, job, FAILED, reason="expired")
        case "cancelled":
            await settle(on, job, CANCELLED, reason="no")
        case "by hand":
            await jobs.cancel(on, [job.id], "by hand")
            await settle(on, job, CANCELLED, reason="cancel requested")
        case "crashed":
            await bury(on, me)
            await rescue(on)


async def states(sql: Any, ids: dict[str, int]) -> dict[str, str | None]:
    return {name: await state_of(sql, job_id) for name, job_id in ids.items()}


async def fail(lane: Lane, me: int, job_id: int) -> None:
    [job] = [each for each in await claim(lane, me) if each.id == job_id]
    await settle(lane, job, FAILED, reason="no")
