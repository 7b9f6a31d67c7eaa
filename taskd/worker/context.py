"""What a handler gets as `ctx`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from taskd.core.job import Job
from taskd.core.unique import plain
from taskd.errors import LeaseLost
from taskd.store import connections
from taskd.store.jobs import Fetches


class AttemptContext:
    """What a handler gets as `ctx`; the promises are in taskd.Context."""

    __slots__ = (
        "_job",
        "_progress",
        "completed",
        "deadline",
        "idempotency_key",
        "max_attempts",
        "resources",
        "stopping",
    )

    def __init__(
        self,
        job: Job,
        idempotency_key: str,
        max_attempts: int,
        deadline: float | None,
        resources: Mapping[str, Any],
        progress: Callable[[Job, float, float | None, str], None],
    ) -> None:
        self._job = job
        self._progress = progress
        self.idempotency_key = idempotency_key
        self.max_attempts = max_attempts
        self.deadline = deadline
        self.resources = resources
        self.stopping = False
        self.completed = False

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
        """The queue it came from."""
        return self._job.queue

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""
        return self._job.attempt

    @property
    def fence(self) -> int:
        """This attempt's token: grows with every claim of the job."""
        return self._job.fence

    def remaining_s(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Say how far this attempt is.

        Raises:
            TypeError, ValueError: done or total is no number, or not a finite one.
        """
        self._progress(self._job, done, total, note)

    async def complete(self, conn: Any, result: Any = None) -> None:
        """Complete the job inside the transaction that is open on `conn`.

        Its effects and the completion then commit together, or neither does.

        Raises:
            LeaseLost: the job was taken over; leave the transaction by an exception, so that it
                rolls back.
        """
        await self._complete(connections.fetches(conn), result)

    def complete_sync(self, conn: Any, result: Any = None) -> None:
        """The same for plain functions, whose connections block.

        Raises:
            LeaseLost: as complete().
        """
        connections.finished(self._complete(connections.fetches_sync(conn), result))

    async def _complete(self, on: Fetches, result: Any) -> None:
        text = None if result is None else msgspec.json.encode(result, enc_hook=plain).decode()
        job = self._job
        rows = await on.fetch("complete_job", job.id, job.worker_id, job.fence, text)
        if not rows:
            raise LeaseLost(f"job {job.id} no longer belongs to this attempt; roll back")
        self.completed = True
