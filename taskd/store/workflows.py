"""Workflows in the database: start, read, stop, prune."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import Job, NewJob
from taskd.core.jobs.unique import Unique
from taskd.core.workflows.stages import STAGES_MAX
from taskd.core.workflows.tree import parents_first
from taskd.core.workflows.workflow import Plan
from taskd.store.acting import actor
from taskd.store.connections.error_translation import refusals
from taskd.store.connections.statements import Fetches
from taskd.store.jobs.jobs import enqueue_args, metadata_text

Row = dict[str, Any]


class Results(NamedTuple):
    """The results of jobs.

    Attributes:
        by_node: the results by node, or by the id of a job without a node, as text; None if all
            results together are larger than the limit.
        size: total size of the results in bytes.
        unstored: the ids of jobs whose result could not be stored, each with the reason.
    """

    by_node: dict[str, Any] | None
    size: int
    unstored: Sequence[tuple[int, str]] = ()


async def start(on: Fetches, plan: Plan, jobs: Sequence[NewJob]) -> list[int]:
    """Insert a workflow and its jobs in one statement.

    Args:
        jobs: the jobs of the plan's nodes, each with its queue.

    Returns:
        The id of the workflow, then the ids of its jobs in the order of the plan.

    Raises:
        QueueFull: a queue has no room for the jobs without parents; nothing was written.
        JobNotFound: a job waits for an id that no stored job has; nothing was written.
        SequenceBehind: an id is taken; nothing was written.
    """
    with refusals():
        rows = await on.fetch(
            "enqueue_workflow",
            plan.name,
            plan.kind,
            plan.stages,
            *_plan_args(plan, jobs),
        )
    (workflow_id, *ids), enqueued_us = rows[0]
    return [workflow_id, *(Enqueued.at(job_id, enqueued_us) for job_id in ids)]


class Added(NamedTuple):
    """The result of add().

    Attributes:
        workflow_id: the workflow of the running job.
        jobs: the ids of the added jobs, in the order of the plan.
        refusal: why nothing was added; the ids are then missing.
    """

    workflow_id: int | None
    jobs: list[int]
    refusal: str | None = None


async def add(on: Fetches, adder: Job, plan: Plan, jobs: Sequence[NewJob]) -> Added | None:
    """Add jobs to the workflow of a running job, or to a new workflow if the job has none.

    A job that an earlier attempt has added under the same name is not added again.

    Args:
        adder: the running job.
        plan: the jobs to add. If a new workflow is made, it gets the plan's `name`.
        jobs: the jobs of the plan's nodes, each with its queue.

    Returns:
        The ids, or why nothing was added; None if the running job no longer belongs to its attempt.

    Raises:
        QueueFull: a queue has no room for the jobs without parents; nothing was written.
    """
    with refusals():
        rows = await on.fetch(
            "add_to_workflow",
            adder.id,
            adder.worker_id,
            adder.fence,
            plan.name,
            *_plan_args(plan, jobs),
        )
    ids, refusal = rows[0]
    if ids is None:
        return None if refusal is None else Added(None, [], refusal)
    return Added(ids[0], ids[1:])


def _plan_args(plan: Plan, jobs: Sequence[NewJob]) -> tuple[Any, ...]:
    return (
        *enqueue_args(jobs),
        [node.name for node in plan.nodes],
        plan.positions,
        plan.parent_positions,
        plan.parent_ids,
        plan.on_failed,
    )


async def parent_results(on: Fetches, job_id: int, bytes_max: int) -> Results:
    """Return the results of the done jobs that this job waited for, sorted by id."""
    rows = await on.fetch("parent_results", job_id, bytes_max)
    size = (rows[0][2] or 0) if rows else 0
    if size > bytes_max:
        return Results(None, size)
    read = {row[0]: None if row[1] is None else msgspec.json.decode(row[1]) for row in rows}
    return Results(read, size, [(row[3], row[4]) for row in rows if row[4] is not None])


async def list_workflows(on: Fetches, name: str | None, limit: int) -> list[Row]:
    """Return the newest workflows, each with the numbers of its jobs by state."""
    return [dict(row) for row in await on.fetch("list_workflows", name, limit)]


async def find(on: Fetches, workflow_id: int) -> Row | None:
    """Return one workflow; None if it does not exist.

    `stages` is the plan of a pipeline as JSON text. `plan` is a list of the names and tasks of its
    first STAGES_MAX stages. Both are None if the workflow is not a pipeline.
    """
    for row in await on.fetch("find_workflow", workflow_id, STAGES_MAX):
        return dict(row) | {"plan": row["plan"] and msgspec.json.decode(row["plan"])}
    return None


async def parts(on: Fetches, workflow_id: int, limit: int) -> list[Row]:
    """Return the parts of a workflow, each with the numbers of its jobs by state.

    The parts are sorted by their first jobs. But each part comes after the parts that it waits for.
    """
    rows = await on.fetch("workflow_parts", workflow_id, limit)
    decoded = [dict(row) | {"states": msgspec.json.decode(row["states"])} for row in rows]
    return parents_first(decoded)


async def stats(on: Fetches, name: str, limit: int) -> list[Row]:
    """Return the numbers of jobs by state, for each part of all workflows of this name."""
    return [dict(row) for row in await on.fetch("workflow_stats", name, limit)]


async def stop(on: Fetches, workflow_id: int, reason: str) -> bool:
    """Stop a workflow, so that no further stage starts; return whether the workflow exists."""
    return bool(await on.fetch("stop_workflow", workflow_id, reason, actor()))


class Restarted(NamedTuple):
    """What restart() did with a run of a pipeline.

    Attributes:
        job_id: the job with which the run continues; None if the run was refused.
        refusal: why the run was not started again, or None.
    """

    job_id: int | None
    refusal: str | None


async def restart(
    on: Fetches, ids: Sequence[int], stage: str | None, args: str | None, reason: str
) -> dict[int, Restarted]:
    """Start stopped and finished runs of pipelines again; return by id what happened.

    Args:
        stage: where the runs start. With None, each run starts at the stage at which it has ended.
        args: the arguments of the stage as JSON text. With None, each run uses the arguments of its
            last job of the stage. If the run has no job of the stage, it uses the result of the
            previous stage.
        reason: stored with the action.
    """
    rows = await on.fetch("restart_runs", list(ids), stage, args, reason, actor())
    return {row[0]: Restarted(row[2], row[3]) for row in rows}


async def start_keyed_run(
    on: Fetches, plan: Plan, unique: Unique, jobs: Sequence[NewJob]
) -> tuple[int | None, Enqueued, str]:
    """Start a run of a pipeline with a unique key; return the run, its job, and what happened.

    Args:
        plan: a plan with one job: that of the first stage.
        unique: a key, without `by`.

    Raises:
        KeyHeld: a run of the key is live, and on_conflict is `raise`; nothing was written.
        QueueFull: the queue has no room for the job; nothing was written.
    """
    [job] = jobs
    with refusals():
        rows = await on.fetch(
            "start_keyed_run",
            plan.name,
            plan.stages,
            job.args,
            job.queue,
            job.priority,
            unique.key,
            unique.version_number,
            str(unique.on_conflict),
            str(unique.newer_starts),
            metadata_text(job),
        )
    run_id, job_id, outcome = rows[0]
    return run_id, Enqueued.instead(job_id, outcome), outcome


async def start_at_stage(
    on: Fetches, pipeline: str, stage: str, args: str, metadata: str | None = None
) -> Enqueued:
    """Start a run of a published pipeline at a stage; return the id of its job.

    Raises:
        ValueRefused: there is no such pipeline or stage, or the arguments do not fit the stage.
        QueueFull: the queue has no room for the job; nothing was written.
    """
    with refusals():
        [row] = await on.fetch("start_at_stage", pipeline, stage, args, metadata)
    return Enqueued.at(row[0], row[1])


class RunFilter(NamedTuple):
    """A filter for ended runs of pipelines.

    Attributes:
        name: the name of the pipeline.
        states: the state of the last job: done, failed or cancelled.
        stage: the stage of the last job.
        older_than_s, since_s: bounds of the time since the start of the run.
    """

    name: str | None = None
    states: Sequence[str] = ("done", "failed", "cancelled")
    stage: str | None = None
    older_than_s: float | None = None
    since_s: float | None = None


async def find_runs(on: Fetches, chosen: RunFilter, after_id: int, limit: int) -> list[int]:
    """Return the ids of at most `limit` ended runs of pipelines, after an id, sorted."""
    name, states, *rest = chosen
    return [
        row[0] for row in await on.fetch("find_runs", name, list(states), *rest, after_id, limit)
    ]


async def jobs_to_cancel(on: Fetches, workflow_id: int) -> list[int]:
    """Return the ids of a workflow's live jobs, without jobs that were already asked to stop."""
    return [row[0] for row in await on.fetch("workflow_jobs_to_cancel", workflow_id)]


async def jobs_to_retry(on: Fetches, workflow_id: int) -> list[int]:
    """Return the ids of the failed and cancelled jobs of a workflow, sorted.

    Callbacks that were cancelled because nothing failed are left out.
    """
    return [row[0] for row in await on.fetch("workflow_jobs_to_retry", workflow_id)]


async def pending_parents(on: Fetches, job_id: int, limit: int) -> list[Row]:
    """Return at most `limit` of the jobs that a blocked job waits for, sorted by id.

    The column `parents` of each row is the number of all jobs that the blocked job waits for.
    """
    return [dict(row) for row in await on.fetch("pending_parents", job_id, limit)]


async def unblock_dependants(on: Fetches, batch: int) -> int:
    """Unblock or cancel a batch of the dependants of an ended job that has more than a thousand.

    Returns:
        How many dependencies were read; 0 if there is no such job, or if a dependant is locked.
    """
    return int((await on.fetch("unblock_dependants", batch))[0][0])


async def prune(on: Fetches) -> int:
    """Delete workflows without jobs, in batches.

    Returns:
        The number of checked workflows plus the number of deleted dependencies.
    """
    total = 0
    while pruned := (await on.fetch("prune_workflows"))[0][0]:
        total += pruned
    return total
