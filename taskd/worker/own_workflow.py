"""`ctx.workflow`: a running job adds jobs to its own workflow."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import replace
from typing import Any, TypeVar

from taskd.client.enqueueing import completed, no_built_ins
from taskd.client.workflows import Workflow
from taskd.core.jobs.job import Job, NewJob
from taskd.core.tasks.context import Nodes
from taskd.core.workflows.workflow import Node, OnFailed, node_name, plan
from taskd.errors import InvalidWorkflow, LeaseLost
from taskd.store import workflows
from taskd.store.connections import callers_connection
from taskd.store.connections.statements import Fetches
from taskd.worker.reads import Reads

T = TypeVar("T")


class OwnWorkflow:
    """The workflow of a running job; taskd.RunningWorkflow documents it for users.

    Args:
        job: the running job.
        reads: the connection over which jobs are added if the caller gives none.
    """

    def __init__(self, job: Job, reads: Reads) -> None:
        self._job, self._reads = job, reads
        self.id = job.workflow_id
        # The ids of the nodes that this attempt has added. None: the add has failed, or has not
        # ended yet.
        self._added: dict[str, int | None] = {}
        # The jobs whose add under a default name has failed, by that name.
        self._failed: dict[str, NewJob] = {}

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
        return await self._add_one(self._on(conn), job, name, after, on_failed)

    def add_sync(
        self,
        job: NewJob,
        *,
        name: str | None = None,
        after: Iterable[str | int] = (),
        on_failed: str = OnFailed.CANCEL,
        conn: Any = None,
    ) -> int:
        """Add one job as add() does, in a plain function; `conn` is a blocking connection.

        Raises:
            RuntimeError: `conn` is missing, and the handler runs on the event loop.
        """

        def work(on: Fetches) -> Coroutine[Any, Any, int]:
            return self._add_one(on, job, name, after, on_failed)

        return self._sync(work, conn, "ctx.workflow.add()")

    async def add_all(self, flow: Nodes, *, conn: Any = None) -> dict[str, int]:
        """Add all jobs of a workflow; return their ids by node.

        Raises:
            InvalidWorkflow, LeaseLost: see RunningWorkflow.
        """
        return await self._add(self._on(conn), flow)

    def add_all_sync(self, flow: Nodes, *, conn: Any = None) -> dict[str, int]:
        """Add all jobs of a workflow as add_all() does, in a plain function.

        Raises:
            RuntimeError: `conn` is missing, and the handler runs on the event loop.
        """
        return self._sync(lambda on: self._add(on, flow), conn, "ctx.workflow.add_all()")

    def _on(self, conn: Any) -> Fetches:
        if conn is None:
            return self._reads.lane
        return callers_connection.fetches(conn, self._reads.schema)

    def _sync(
        self, work: Callable[[Fetches], Coroutine[Any, Any, T]], conn: Any, instead: str
    ) -> T:
        if conn is None:
            return self._reads.wait(lambda: work(self._reads.lane), instead)
        on = callers_connection.fetches_sync(conn, self._reads.schema)
        return callers_connection.finished(work(on))

    async def _add_one(
        self,
        on: Fetches,
        job: NewJob,
        name: str | None,
        after: Iterable[str | int],
        on_failed: str,
    ) -> int:
        flow = Workflow(node_name(self._job.task))
        node = name or self._free(job)
        try:
            flow.add(job, name=node, after=after, on_failed=on_failed)
            return (await self._add(on, flow))[node]
        except BaseException:
            if name is None:
                self._failed[node] = job
            raise

    def _free(self, job: NewJob) -> str:
        """Return a free name; attempts that add jobs in the same order get the same names.

        An equal job whose add has failed gets the same name again. The failed statement may have
        added the job, which is then not added twice.
        """
        for name, failed in self._failed.items():
            if failed == job:
                del self._failed[name]
                return name
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
