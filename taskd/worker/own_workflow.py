"""`ctx.workflow`: a running job adds jobs to its own workflow."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from taskd.client.enqueueing import completed, no_built_ins
from taskd.client.workflows import Workflow
from taskd.core.jobs.job import Job, NewJob
from taskd.core.tasks.context import Nodes
from taskd.core.workflows.workflow import Node, OnFailed, node_name, plan
from taskd.errors import InvalidWorkflow, LeaseLost
from taskd.store import workflows
from taskd.store.connections import callers_connection
from taskd.store.connections.statements import Fetches


class OwnWorkflow:
    """The workflow of a running job; taskd.RunningWorkflow documents it for users.

    Args:
        job: the running job.
        lane: the connection over which jobs are added if the caller gives none.
        loop: the event loop of the lane, for handlers in threads.
    """

    def __init__(self, job: Job, lane: Fetches, loop: asyncio.AbstractEventLoop) -> None:
        self._job, self._lane, self._loop = job, lane, loop
        self.id = job.workflow_id
        # The ids of the nodes that this attempt has added. None: the statement has not ended yet.
        self._added: dict[str, int | None] = {}

    async def add(
        self,
        job: NewJob,
        *,
        name: str | None = None,
        after: Iterable[str | int] = (),
        on_failed: str = OnFailed.CANCEL,
        conn: Any = None,
    ) -> int:
        """Add one job; return its id.

        Raises:
            InvalidWorkflow, LeaseLost: see RunningWorkflow.
        """
        flow = self._one(job, name, after, on_failed)
        return next(iter((await self.add_all(flow, conn=conn)).values()))

    def add_sync(
        self,
        job: NewJob,
        *,
        name: str | None = None,
        after: Iterable[str | int] = (),
        on_failed: str = OnFailed.CANCEL,
        conn: Any = None,
    ) -> int:
        """Add one job as add() does, in a plain function; `conn` is a blocking connection."""
        flow = self._one(job, name, after, on_failed)
        return next(iter(self.add_all_sync(flow, conn=conn).values()))

    async def add_all(self, flow: Nodes, *, conn: Any = None) -> dict[str, int]:
        """Add all jobs of a workflow; return their ids by node.

        Raises:
            InvalidWorkflow, LeaseLost: see RunningWorkflow.
        """
        on = self._lane if conn is None else callers_connection.fetches(conn)
        return await self._add(on, flow)

    def add_all_sync(self, flow: Nodes, *, conn: Any = None) -> dict[str, int]:
        """Add all jobs of a workflow as add_all() does, in a plain function."""
        if conn is not None:
            on = callers_connection.fetches_sync(conn)
            return callers_connection.finished(self._add(on, flow))
        return asyncio.run_coroutine_threadsafe(self.add_all(flow), self._loop).result()

    def _one(
        self, job: NewJob, name: str | None, after: Iterable[str | int], on_failed: str
    ) -> Workflow:
        flow = Workflow(node_name(self._job.task))
        flow.add(job, name=name or self._free(job), after=after, on_failed=on_failed)
        return flow

    def _free(self, job: NewJob) -> str:
        """Return a free name; attempts that add jobs in the same order get the same names."""
        base = name = node_name(job.task)
        number = 1
        while name in self._added:
            number += 1
            name = f"{base}-{number}"
        self._added[name] = None
        return name

    async def _add(self, on: Fetches, flow: Nodes) -> dict[str, int]:
        nodes = flow.nodes()
        names = {node.name for node in nodes}
        made = plan(flow.name, [self._resolved(node, names) for node in nodes])
        self._added |= dict.fromkeys(names - self._added.keys())
        jobs = [node.job for node in made.nodes]
        without_key = [job if job.checked else replace(job, no_key=True) for job in jobs]
        complete = await completed(on, without_key, no_built_ins)
        added = await workflows.add(on, self._job, made, complete)
        if added is None:
            raise LeaseLost(
                f"job {self._job.id} no longer belongs to this attempt; nothing was added"
            )
        if added.refusal is not None:
            raise InvalidWorkflow(f"nothing was added: {added.refusal}")
        self.id = added.workflow_id
        ids = dict(zip([node.name for node in made.nodes], added.jobs, strict=True))
        self._added |= ids
        return ids

    def _resolved(self, node: Node, names: set[str]) -> Node:
        """Return the node with ids in place of the names of jobs that were added before."""
        return replace(
            node, after=tuple(self._id(each) if each not in names else each for each in node.after)
        )

    def _id(self, parent: str | int) -> str | int:
        known = self._added.get(parent) if isinstance(parent, str) else None
        return parent if known is None else known
