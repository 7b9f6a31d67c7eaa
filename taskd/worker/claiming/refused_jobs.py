"""Change all jobs except those that PostgreSQL refuses, for example because of a user's trigger.

A statement that changes many jobs fails as a whole if PostgreSQL refuses to change one of them. The
error does not name this job. So the range of ids is divided into halves, again and again, until a
range contains only the refused job. That job is left out for a minute. The jobs of all other ranges
are changed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from taskd import events
from taskd.errors import TaskdError
from taskd.store.connections.error_translation import may_concern_one_row
from taskd.store.jobs.jobs import ANY_JOB, Among

T = TypeVar("T")

# How long a refused job is left out.
ASIDE_S = 60.0
# If this many jobs are left out, the search ends, because it would take too long. Jobs in ranges
# that were not searched are changed by a later run.
ASIDE_MAX = 1000
# A range without jobs, because ids begin with 1. If the statement also fails for this range, no
# single job is the reason.
NO_JOB = Among(0, 0)


class RefusedJobs:
    """Runs one kind of statement on all jobs except those that PostgreSQL refuses.

    Args:
        action: what the statement does with a job, for the log.
    """

    def __init__(self, action: str) -> None:
        self._action = action
        self._until: dict[int, float] = {}
        self._logged: set[int] = set()

    def __bool__(self) -> bool:
        """Return whether jobs are left out."""
        return bool(self._until)

    async def run(self, change: Callable[[Among], Awaitable[T]]) -> list[T]:
        """Run the statement once or, if PostgreSQL refuses a job, on parts of the jobs.

        Args:
            change: runs the statement on the given range of jobs.

        Returns:
            The answers of all runs that succeeded.

        Raises:
            TaskdError: the statement failed for a reason other than a single job.
        """
        if self._until:
            now = time.monotonic()
            self._until = {job_id: at for job_id, at in self._until.items() if at > now}
        try:
            return [await change(self._among(ANY_JOB.after_id, ANY_JOB.up_to_id))]
        except TaskdError as error:
            if not may_concern_one_row(error):
                raise
            await change(NO_JOB)
            answers: list[T] = []
            await self._divide(change, ANY_JOB.after_id, ANY_JOB.up_to_id, error, answers)
            return answers

    async def batches(
        self, change: Callable[[Among], Awaitable[T]], is_full: Callable[[T], bool]
    ) -> AsyncIterator[T]:
        """Run the statement until it no longer changes a full batch; yield its answers.

        Args:
            change: runs the statement on at most one batch of jobs of the given range.
            is_full: returns whether an answer belongs to a full batch.

        Raises:
            TaskdError: for the same reason as run().
        """
        more = True
        while more:
            more = False
            for answer in await self.run(change):
                yield answer
                more = more or is_full(answer)

    def _among(self, after_id: int, up_to_id: int) -> Among:
        return Among(after_id, up_to_id, list(self._until))

    async def _divide(
        self,
        change: Callable[[Among], Awaitable[T]],
        after_id: int,
        up_to_id: int,
        error: TaskdError,
        answers: list[T],
    ) -> None:
        """Run the statement on both halves of a range, after it was refused for the whole range."""
        if len(self._until) >= ASIDE_MAX:
            return
        if up_to_id - after_id == 1:
            self._set_aside(up_to_id, error)
            return
        middle = (after_id + up_to_id) // 2
        for part in ((after_id, middle), (middle, up_to_id)):
            try:
                answers.append(await change(self._among(*part)))
            except TaskdError as refusal:
                if not may_concern_one_row(refusal):
                    raise
                await self._divide(change, *part, refusal, answers)

    def _set_aside(self, job_id: int, error: TaskdError) -> None:
        self._until[job_id] = time.monotonic() + ASIDE_S
        if job_id not in self._logged:
            if len(self._logged) >= ASIDE_MAX:
                self._logged.clear()
            self._logged.add(job_id)
            events.job_change_refused(job_id, self._action, str(error))
