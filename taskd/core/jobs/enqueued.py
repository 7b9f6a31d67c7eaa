"""The id of an enqueued job, with which a producer can wait for the result."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    R_co = TypeVar("R_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    R_co = TypeVar("R_co", covariant=True)

RESULT_TIMEOUT_S = 60.0


class ReadsResults(Protocol):
    """The methods of a client that `Enqueued` uses."""

    async def result(self, job_id: int, timeout_s: float | None) -> Any:
        """Return the result of the job's handler.

        Args:
            job_id: an int, or an Enqueued. If two jobs have the same id, only an Enqueued says
                which of them is meant.
        """

    def result_sync(self, job_id: int, timeout_s: float | None) -> Any:
        """Return the result of the job's handler, in code without an event loop."""


class Enqueued(int, Generic[R_co]):
    """The id of the enqueued job, or of the job that holds its unique key.

    R_co is the type of the job's result. It is Any if the job was not enqueued by a method of its
    task.

    Attributes:
        outcome: `enqueued`, or what happened instead: `skipped`, `replaced` or `debounced`. If the
            job has a version, or the rule `latest`, the outcome can also be `follows`: the new job
            runs when the running attempt has ended. If the job has a version, the outcome can also
            be `ignored`: the version is not newer.
        enqueued_us: when the transaction that enqueued the job began, in microseconds since 1970,
            by the database's clock; None for a job that holds the key. The id and `enqueued_us`
            together name one job. The id alone is not enough after a switch-over by logical
            replication that has set the sequence of ids back.
        published: False if the job was enqueued by name and no worker has published its task. Then
            the arguments were not checked, and the job has no unique key and no limit of its task.
        client: the client that enqueued the job and can wait for its result; None in a copy.
        decode: decodes the JSON text of the result to R_co; with None, the result keeps JSON's
            types.
    """

    outcome: str = "enqueued"
    enqueued_us: int | None = None
    published: bool = True
    client: ReadsResults | None = None
    decode: Callable[[str], R_co] | None = None

    async def result(self, timeout_s: float | None = RESULT_TIMEOUT_S) -> R_co:
        """Wait until the job has ended; return the result of its handler.

        If a method of the task has enqueued the job, the result is decoded to the annotated return
        type of the handler. If taskd cannot decode this type, the result has the types of JSON.

        Args:
            timeout_s: seconds to wait; with None, the wait has no limit.

        Raises:
            InvalidResult: the result is not of the annotated type.
            JobFailed: the job has failed; see `reason` and `error` of the exception.
            JobCancelled: the job was cancelled; see `reason` of the exception.
            ResultNotStored: the job is done, but its result could not be stored.
            JobNotFound: the job's transaction was not committed, or the job is no longer stored.
            TimeoutError: the job has not ended within `timeout_s`. The job is not cancelled.
            RuntimeError: this value has no client, because it was copied or unpickled.
        """
        result: R_co = await self._client().result(self, timeout_s)
        return result

    def result_sync(self, timeout_s: float | None = RESULT_TIMEOUT_S) -> R_co:
        """Wait like result(), for code without an event loop.

        Raises:
            RuntimeError: an event loop runs in this thread, and the wait would block the loop; or
                this value has no client.
            InvalidResult, JobFailed, JobCancelled, ResultNotStored, JobNotFound, TimeoutError: as
                for result().
        """
        result: R_co = self._client().result_sync(self, timeout_s)
        return result

    def _client(self) -> ReadsResults:
        if self.client is None:
            raise RuntimeError(
                f"this copy of the id of job {int(self)} has no client: use client.result(id)"
            )
        return self.client

    def __reduce__(self) -> tuple[Any, ...]:
        # Copies and pickles contain neither the client, which has connections, nor the decoder.
        return (_unpickled, (type(self), int(self), self.outcome, self.enqueued_us))

    @classmethod
    def at(cls, job_id: int, enqueued_us: int) -> Self:
        """Return the id of a job that was enqueued at this time."""
        enqueued = cls(job_id)
        enqueued.enqueued_us = enqueued_us
        return enqueued

    @classmethod
    def instead(cls, job_id: int, outcome: str) -> Self:
        """Return the id of the job that holds the key, with this outcome."""
        enqueued = cls(job_id)
        enqueued.outcome = outcome
        return enqueued


def _unpickled(
    kind: type[Enqueued], job_id: int, outcome: str, enqueued_us: int | None
) -> Enqueued:
    enqueued = kind.instead(job_id, outcome)
    enqueued.enqueued_us = enqueued_us
    return enqueued
