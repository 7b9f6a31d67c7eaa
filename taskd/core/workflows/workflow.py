"""Workflows: plans of jobs and their dependencies. A plan is checked before it is enqueued."""

from __future__ import annotations

import graphlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from taskd.core.jobs.job import NewJob
from taskd.errors import InvalidWorkflow

# One statement inserts a whole workflow, so that no workflow is written in part. These limits keep
# that statement short.
JOBS_MAX = 20_000
DEPENDENCIES_MAX = 100_000
ARGS_CHARACTERS_MAX = 16 * 1024 * 1024
# A job can read at most this many bytes of results from its parents.
RESULTS_BYTES_MAX = 8 * 1024 * 1024
NAME_BYTES_MAX = 100
# Brackets are reserved for the members of groups: `send[17]`.
NODE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,80}")


class OnFailed(StrEnum):
    """What happens to a job when one of its parents has failed or was cancelled."""

    # The job is cancelled, too, with the reason `dependency`.
    CANCEL = "cancel"
    # The job waits until the parent is retried and done.
    WAIT = "wait"
    # The job continues as if the parent were done.
    CONTINUE = "continue"
    # The job starts only if a parent has failed or was cancelled. If all parents are done, the job
    # is cancelled.
    ONLY = "only"


@dataclass(frozen=True, slots=True)
class Node:
    """A job of a workflow.

    Attributes:
        after: names of the nodes, or ids of existing jobs, that the job waits for: its parents.
        on_failed: what happens to the job if a parent fails.
    """

    name: str
    job: NewJob
    after: tuple[str | int, ...] = ()
    on_failed: OnFailed = OnFailed.CANCEL


@dataclass(frozen=True, slots=True)
class Plan:
    """A workflow that is ready to be written.

    Attributes:
        nodes: the jobs, each after the jobs that it waits for.
        positions: for each dependency, the position of the waiting job in `nodes`; the first is 1.
        parent_positions: for each dependency, the position of the parent in `nodes`, from 1; None
            if the parent is an existing job.
        parent_ids: for each dependency, the id of the parent if the parent is an existing job, or
            None.
        on_failed: for each dependency, what happens to the waiting job when the parent fails.
        stages: JSON text of a pipeline's stages; None if the plan is not of a pipeline.
    """

    name: str
    kind: str
    nodes: Sequence[Node]
    positions: list[int] = field(default_factory=list)
    parent_positions: list[int | None] = field(default_factory=list)
    parent_ids: list[int | None] = field(default_factory=list)
    on_failed: list[str] = field(default_factory=list)
    stages: str | None = None


def plan(name: str, nodes: Sequence[Node]) -> Plan:
    """Check the nodes of a workflow, and return its plan.

    Raises:
        InvalidWorkflow: the name is not valid, or the workflow is empty or too large. A job waits
            for an unknown name, jobs wait for each other in a circle, or a job has a unique key.
    """
    check_name(name)
    _check_size(name, nodes)
    ordered = _ordered(name, nodes)
    position = {node.name: n for n, node in enumerate(ordered, 1)}
    made = Plan(name, "workflow", ordered)
    for node in ordered:
        for parent in node.after:
            made.positions.append(position[node.name])
            made.parent_positions.append(position[parent] if isinstance(parent, str) else None)
            made.parent_ids.append(parent if isinstance(parent, int) else None)
            made.on_failed.append(node.on_failed.value)
    if len(made.positions) > DEPENDENCIES_MAX:
        raise InvalidWorkflow(
            f"workflow {name}: {len(made.positions):,} dependencies; at most {DEPENDENCIES_MAX:,}. "
            "If each job of a set waits for each job of another set, put one job between the sets."
        )
    return made


def _check_size(name: str, nodes: Sequence[Node]) -> None:
    if not nodes:
        raise InvalidWorkflow(f"workflow {name}: it has no job")
    if len(nodes) > JOBS_MAX:
        raise InvalidWorkflow(
            f"workflow {name}: {len(nodes):,} jobs; at most {JOBS_MAX:,}. Let each job do more."
        )
    size = sum(len(node.job.args) for node in nodes)
    if size > ARGS_CHARACTERS_MAX:
        raise InvalidWorkflow(
            f"workflow {name}: the arguments of its jobs take {size:,} characters; at most "
            f"{ARGS_CHARACTERS_MAX:,}. Store the data elsewhere and pass references to it."
        )
    for node in nodes:
        if node.job.unique is not None:
            raise InvalidWorkflow(
                f"workflow {name}: the job {node.name} of the task {node.job.task} has a unique "
                "key. If another job held the key, the workflow would lack this job. Give "
                "task.options(no_key=True).job(...)."
            )


def _ordered(name: str, nodes: Sequence[Node]) -> list[Node]:
    by_name = {node.name: node for node in nodes}
    for node in nodes:
        for parent in node.after:
            if isinstance(parent, str) and parent not in by_name:
                raise InvalidWorkflow(
                    f"workflow {name}: {node.name} waits for {parent!r}, which is not a node of "
                    "the workflow"
                )
    sorter = graphlib.TopologicalSorter(
        {node.name: [one for one in node.after if isinstance(one, str)] for node in nodes}
    )
    try:
        # As far as the dependencies allow, nodes stay in the order in which they were added. The
        # ids of their jobs have the same order.
        return [by_name[each] for each in sorter.static_order()]
    except graphlib.CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise InvalidWorkflow(f"workflow {name}: jobs wait for each other: {circle}") from None


def check_name(name: object) -> str:
    """Check the name of a workflow, and return it.

    Raises:
        InvalidWorkflow: the name is no text, has no or more than 100 bytes, or is not printable.
    """
    fits = isinstance(name, str) and name.isprintable()
    if not fits or not 1 <= len(str(name).encode(errors="replace")) <= NAME_BYTES_MAX:
        raise InvalidWorkflow(
            f"workflow {name!r}: use printable characters, 1 to {NAME_BYTES_MAX} bytes in UTF-8"
        )
    return str(name)


def check_node(name: object) -> str:
    """Check the name of a node or a stage, and return it.

    Raises:
        InvalidWorkflow: the name is not 1 to 80 of the characters A-Z a-z 0-9 _ . -
    """
    if not isinstance(name, str) or not NODE_NAME.fullmatch(name):
        raise InvalidWorkflow(f"the name {name!r}: use 1 to 80 of the characters A-Z a-z 0-9 _ . -")
    return name


def numbered(names: Iterable[str]) -> list[str]:
    """Return the names, with a number appended to each repeated one: `send`, `send-2`."""
    seen: set[str] = set()
    found: list[str] = []
    for name in names:
        number, one = 1, name
        while one in seen:
            number += 1
            one = f"{name}-{number}"
        seen.add(one)
        found.append(one)
    return found


def node_name(task: str) -> str:
    """Return a name for a job of this task that check_node() accepts."""
    return re.sub(r"[^A-Za-z0-9_.-]", "-", task)[:60] or "job"
