"""The context that a handler receives as `ctx`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, ClassVar

from taskd.core.jobs.job import Job
from taskd.core.jobs.pipeline_steps import Next, Stop
from taskd.core.outcomes.results import result_of
from taskd.core.workflows.workflow import RESULTS_BYTES_MAX
from taskd.errors import LeaseLost, ResultNotStored, ResultsTooLarge
from taskd.store import workflows
from taskd.store.connections import callers_connection
from taskd.store.connections.statements import Fetches
from taskd.worker.own_workflow import OwnWorkflow
from taskd.worker.reads import Reads

# Called with the job, `done`, `total`, the note, and the function that redacts the note.
ReportsProgress = Callable[[Job, float, float | None, str, Callable[[str], str]], None]


class AttemptContext:
    """The context that a handler receives as `ctx`; taskd.Context documents it for users.

    Attributes:
        completed: a transaction has written the completion of the job, and may have committed.
        committed: this transaction is known to have committed.
        hide: removes the redacted arguments of this job, or of all jobs of its batch, from a text.
        unstored: why the completion was written without the result of the handler; None if the
            result was written, or if the handler has no result.
    """

    NOT_COMMITTED: ClassVar = "ctx.complete() was called, but its transaction was not committed"

    __slots__ = (
        "_job",
        "_progress",
        "_reads",
        "_workflow",
        "committed",
        "completed",
        "deadline",
        "hide",
        "idempotency_key",
        "max_attempts",
        "resources",
        "stopping",
        "unstored",
    )

    def __init__(
        self,
        job: Job,
        idempotency_key: str,
        max_attempts: int,
        deadline: float | None,
        resources: Mapping[str, Any],
        reads: Reads,
        progress: ReportsProgress,
        hide: Callable[[str], str],
    ) -> None:
        self._job = job
        self._reads = reads
        self._progress = progress
        self.hide = hide
        self.idempotency_key = idempotency_key
        self.max_attempts = max_attempts
        self.deadline = deadline
        self.resources = resources
        self.stopping = False
        self.completed = self.committed = False
        self._workflow: OwnWorkflow | None = None
        self.unstored: str | None = None

    @property
    def job(self) -> Job:
        """The claimed job; for use by taskd itself."""
        return self._job

    @property
    def job_id(self) -> int:
        """The job's id."""
        return self._job.id

    @property
    def task(self) -> str:
        """The task's name."""
        return self._job.task

    @property
    def queue(self) -> str:
        """The queue from which the job was claimed."""
        return self._job.queue

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._job.attempt

    @property
    def crashes(self) -> int:
        """The number of crashes that are charged to the job."""
        return self._job.crashes

    @property
    def metadata(self) -> Mapping[str, Any]:
        """The metadata of the job."""
        return self._job.read_metadata()

    @property
    def schedule(self) -> str | None:
        """The schedule that enqueued the job, or None."""
        return self._job.read_firing().schedule

    @property
    def tick(self) -> datetime | None:
        """The tick for which the schedule enqueued the job, or None."""
        return self._job.read_firing().tick

    @property
    def fence(self) -> int:
        """The fencing token of this attempt: it grows with every claim of the job."""
        return self._job.fence

    @property
    def workflow(self) -> OwnWorkflow:
        """The workflow of the job, to which the handler can add jobs."""
        if self._workflow is None:
            self._workflow = OwnWorkflow(self._job, self._reads)
        return self._workflow

    def remaining_s(self) -> float | None:
        """Return the seconds until the deadline; None if there is no deadline."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    async def results(self) -> dict[str, Any]:
        """Return the results of the jobs for which this job waited, by the names of their nodes.

        Raises:
            ResultsTooLarge: the results take more than 8 MiB.
            ResultNotStored: the result of one of the jobs could not be stored.
            StoreUnavailable: the database does not answer.
        """
        read = await workflows.parent_results(self._reads.lane, self._job.id, RESULTS_BYTES_MAX)
        if read.by_node is None:
            raise ResultsTooLarge(
                f"job {self._job.id}: the results of its parent jobs take {read.size:,} bytes; "
                f"the limit is {RESULTS_BYTES_MAX:,}. Return references to the data instead."
            )
        for job_id, reason in read.unstored:
            raise ResultNotStored(job_id, reason)
        return read.by_node

    def results_sync(self) -> dict[str, Any]:
        """Return the same results as results(), in a plain function.

        Raises:
            ResultsTooLarge, ResultNotStored, StoreUnavailable: see results().
            RuntimeError: the handler runs on the event loop, which the call would block.
        """
        return self._reads.wait(self.results, "ctx.results()")

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report the progress of this attempt.

        Raises:
            TypeError: `done` or `total` is neither a number nor a string.
            ValueError: `done` or `total` is not finite, or is a string that float() cannot parse.
        """
        self._progress(self._job, done, total, note, self.hide)

    async def complete(self, conn: Any, result: Any = None) -> None:
        """Complete the job inside the transaction that is open on `conn`.

        The handler's changes and the completion then commit together, or both are rolled back.

        Raises:
            LeaseLost: the job no longer belongs to this attempt. Let this exception leave the
                transaction, so that the transaction is rolled back.
        """
        await self._complete(callers_connection.fetches(conn, self._reads.schema), result)

    def complete_sync(self, conn: Any, result: Any = None) -> None:
        """Complete the job in a plain function; `conn` is a blocking connection.

        Raises:
            LeaseLost: see complete().
        """
        on = callers_connection.fetches_sync(conn, self._reads.schema)
        callers_connection.finished(self._complete(on, result))

    async def _complete(self, on: Fetches, result: Any) -> None:
        step = result.to_json() if isinstance(result, Next | Stop) else None
        value = result.result if isinstance(result, Stop) else None if step else result
        text, self.unstored = result_of(value)
        job = self._job
        rows = await on.fetch(
            "complete_job", job.id, job.worker_id, job.fence, text, step, self.unstored
        )
        if not rows:
            raise LeaseLost(f"job {job.id} no longer belongs to this attempt; roll back")
        self.completed = True
