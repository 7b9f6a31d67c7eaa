"""What a handler may know about the attempt that runs it: the type of its first parameter `ctx`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Context(Protocol):
    """The attempt, as its handler sees it; the worker makes it."""

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
        """How many attempts the job has in all."""

    @property
    def fence(self) -> int:
        """This attempt's token: grows with every claim, so a resource can refuse older ones."""

    @property
    def idempotency_key(self) -> str:
        """The same text at every attempt of the job: for services that refuse a second request."""

    @property
    def deadline(self) -> float | None:
        """When the attempt must end, on the clock of `time.monotonic()`; None: no limit."""

    @property
    def stopping(self) -> bool:
        """Whether the worker is stopping: a long handler ends early, at a point of its choice."""

    @property
    def resources(self) -> Mapping[str, Any]:
        """What the app made when the worker started, by name."""

    def remaining_s(self) -> float | None:
        """Seconds until the deadline; None: no limit."""

    async def results(self) -> dict[str, Any]:
        """What the jobs that this one waited for have returned, by the names of their nodes.

        Those that are done are there, in the order in which they were added: of a group, in the
        order of its members.

        Raises:
            ResultsTooLarge: it takes over 8 MiB.
            StoreUnavailable: the database does not answer.
        """

    def results_sync(self) -> dict[str, Any]:
        """The same for plain functions.

        Raises:
            ResultsTooLarge, StoreUnavailable: as results().
        """

    def progress(self, done: float, total: float | None = None, note: str = "") -> None:
        """Say how far the attempt is, as often as you like: the last word is written each second.

        Args:
            done: how much is done, in any unit.
            total: of how much; None: nobody knows.
            note: a few words for people, 500 bytes at most.

        Raises:
            TypeError, ValueError: done or total is no number, or not a finite one.
        """

    async def complete(self, conn: Any, result: Any = None) -> None:
        """Complete the job in the transaction of `conn`: its effects and `done` commit together.

        Args:
            conn: what `enqueue` takes as `conn`.
            result: kept as the job's result; anything that has a JSON form.

        Raises:
            LeaseLost: the attempt no longer owns its job; roll the transaction back.
        """

    def complete_sync(self, conn: Any, result: Any = None) -> None:
        """The same for plain functions; `conn` is what `enqueue_sync` takes.

        Raises:
            LeaseLost: the attempt no longer owns its job; roll the transaction back.
        """


class TransactionContext(Context, Protocol):
    """The attempt of a task with `transaction=`; its completion is taskd's, not `complete()`'s."""

    @property
    def conn(self) -> Any:
        """An asyncpg connection with an open transaction, which commits with the completion."""
