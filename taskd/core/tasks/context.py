"""The type of a handler's parameter `ctx`: information about the attempt, and its methods."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class ProcessContext(Protocol):
    """The attempt of a handler with `process=True`, which runs outside of the worker."""

    @property
    def job_id(self) -> int:
        """The job's id."""

    @property
    def task(self) -> str:
        """The task's name."""

    @property
    def queue(self) -> str:
        """The queue that the job was claimed from."""

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""

    @property
    def max_attempts(self) -> int:
        """The most attempts that the job can have."""

    @property
    def fence(self) -> int:
        """The fencing token of this attempt, which is larger than the tokens of earlier attempts.

        A system to which the handler writes can refuse a token that is smaller than the largest
        token that it has seen.
        """

    @property
    def idempotency_key(self) -> str:
        """The same text in every attempt of the job, for services that ignore repeated requests."""

    @property
    def deadline(self) -> float | None:
        """When the timeout ends the attempt, by `time.monotonic()`; None if there is no timeout."""

    def remaining_s(self) -> float | None:
        """Return the seconds until `deadline`; None if there is no timeout."""

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Report the progress of the attempt.

        The worker writes the latest report at most once a second.

        Args:
            done: the amount that is done, in any unit.
            total: the total in the same unit, or None if it is unknown.
            note: a few words for people, at most 500 bytes.

        Raises:
            TypeError, ValueError: done or total is not a finite number.
        """


class Context(ProcessContext, Protocol):
    """The attempt that a handler runs in; the worker passes it as `ctx`."""

    @property
    def stopping(self) -> bool:
        """Whether this attempt should end: the worker is stopping or has cancelled the attempt.

        The worker cancels an attempt when its timeout has passed, when a cancellation was
        requested, when a stop has lasted for `drain_s`, and when the worker has lost its lease.
        """

    @property
    def resources(self) -> Mapping[str, Any]:
        """The resources of the app, by name."""

    async def results(self) -> dict[str, Any]:
        """Return the results of the jobs that this job waited for, by the names of their nodes.

        Only done jobs are included. They have the order in which they were added to the workflow;
        for a group, this is the order of its members.

        Raises:
            ResultNotStored: the result of one of the jobs could not be stored; the job fails.
            ResultsTooLarge: the results take over 8 MiB together.
            StoreUnavailable: the database does not answer.
        """

    def results_sync(self) -> dict[str, Any]:
        """Return the results as results() does, in a plain function.

        Raises:
            ResultNotStored, ResultsTooLarge, StoreUnavailable: for the same reasons as results().
        """

    async def complete(self, conn: Any, result: Any = None) -> None:
        """Complete the job in the transaction of `conn`, together with the handler's writes.

        Args:
            conn: a connection that `task.on(conn).enqueue` accepts.
            result: the result of the job; anything that has a JSON form.

        Raises:
            LeaseLost: the attempt no longer owns its job; roll the transaction back.
        """

    def complete_sync(self, conn: Any, result: Any = None) -> None:
        """Complete the job as complete() does, in a plain function.

        Args:
            conn: a connection that `task.on(conn).enqueue_sync` accepts.
            result: the result of the job; anything that has a JSON form.

        Raises:
            LeaseLost: the attempt no longer owns its job; roll the transaction back.
        """


class TransactionContext(Context, Protocol):
    """The attempt of a task with `transaction=`; taskd completes the job, so complete() raises."""

    @property
    def conn(self) -> Any:
        """An asyncpg connection with an open transaction, which commits with the completion."""
