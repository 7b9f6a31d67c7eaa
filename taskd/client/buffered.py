"""A buffer for busy producers: it accepts jobs immediately, and writes them in batches later.

A batch is one transaction of up to a thousand jobs. If PostgreSQL cannot be reached, the buffer
retries the batch until it is written. After the end of the `async with` block, it retries for at
most `flush_s`. The end of the block reports jobs that were refused or could not be written.

If the connection breaks at a COMMIT, the buffer asks the server whether the transaction committed.
So no batch is written twice. The server knows the answer even after a crash. If a failover to a
standby has lost the transaction, the buffer writes the batch again. But the promoted standby can
give the id of the lost transaction to another transaction. If this other transaction has committed,
the buffer counts the batch as written, and the jobs of the batch are lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Self

from taskd.client import traces
from taskd.client.connecting.database_location import Target
from taskd.client.enqueueing import BATCH_CHARACTERS, BATCH_JOBS, BuiltIns, insert_jobs
from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import NewJob
from taskd.core.validation import check_int, check_seconds
from taskd.errors import BufferFull, EnqueueError, NotEnqueued, StoreUnavailable, TaskdError
from taskd.store.connections.checked_transactions import CheckedWriter, Unsure

RETRY_S, RETRY_S_MAX = 0.05, 2.0
ASK_AGAIN_S = 0.2
CLOSE_S = 2.0
JOBS_LIMIT = 10_000_000
BYTES_LIMIT = 2**40
WAIT_S_LIMIT = 3600.0

Receipt = asyncio.Future[Enqueued]


class Pending(NamedTuple):
    """A job that is not written yet, and the future that will receive its id."""

    job: NewJob
    receipt: Receipt


class Buffered:
    """A buffer that accepts jobs immediately and writes them soon: `async with client.buffered()`.

    The end of the block waits at most `flush_s` until the remaining jobs are written. If jobs were
    refused or could not be written, it raises NotEnqueued, which contains these jobs. If the block
    itself has raised an exception, that exception is raised, with a note about the jobs. When the
    process dies, the jobs in the buffer are lost.
    """

    def __init__(
        self,
        target: Callable[[], Awaitable[Target]],
        mine: Callable[[list[Enqueued]], list[Enqueued]],
        built_ins: BuiltIns,
        *,
        max_jobs: int,
        max_bytes: int,
        max_wait_s: float,
        flush_s: float,
    ) -> None:
        check_int("max_jobs", max_jobs, 1, JOBS_LIMIT)
        check_int("max_bytes", max_bytes, 1, BYTES_LIMIT)
        check_seconds("max_wait_s", max_wait_s, 0.0, WAIT_S_LIMIT)
        check_seconds("flush_s", flush_s, 0.0, WAIT_S_LIMIT)
        self._target, self._mine, self._built_ins = target, mine, built_ins
        self._max_jobs, self._max_bytes = max_jobs, max_bytes
        self._max_wait_s, self._flush_s = max_wait_s, flush_s
        self._waiting: deque[Pending] = deque()
        self._in_flight: list[Pending] = []
        # The current transaction contains the first `_batch_jobs` of the jobs in flight. If its
        # COMMIT got no reply, the transaction is in doubt until the server answers whether it
        # committed.
        self._batch_jobs = 0
        self._in_doubt = False
        self._refused: list[tuple[NewJob, Exception]] = []
        self._bytes = 0
        self._first_at = 0.0
        self._hurry = False
        self._wakeup = asyncio.Event()
        self._room = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._last_error: TaskdError | None = None

    async def __aenter__(self) -> Self:
        self._writer = CheckedWriter((await self._target()).database)
        self._writing = asyncio.create_task(self._write_loop(), name="taskd-buffer")
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        writing, self._writing = self._writing, None
        assert writing is not None
        self._room.set()
        self._wakeup.set()
        try:
            await asyncio.wait({writing}, timeout=self._flush_s)
        except BaseException as cut_short:
            error = cut_short
            raise
        finally:
            writing.cancel()
            await asyncio.wait({writing}, timeout=CLOSE_S)
            await self._writer.close()
            left = self._left()
            if left is not None and error is not None:
                error.add_note(str(left))
        if left is not None and error is None:
            raise left from self._last_error

    def __len__(self) -> int:
        """Return how many jobs are not written yet."""
        return len(self._waiting) + len(self._in_flight)

    def enqueue(self, job: NewJob) -> Receipt:
        """Accept a job; return a future of its id.

        Raises:
            BufferFull: the buffer is full; it did not accept the job.
            RuntimeError: called outside of the block.
        """
        if self._writing is None:
            raise RuntimeError("a buffer accepts jobs only inside `async with client.buffered()`")
        size = _size(job)
        if not self._fits(size):
            raise BufferFull(
                f"the buffer is full: it holds {len(self):,} jobs that are not written yet"
                + (f": {self._last_error}" if self._last_error else "")
            )
        receipt: Receipt = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._first_at = time.monotonic()
            self._wakeup.set()
        self._waiting.append(Pending(traces.with_own_span(job), receipt))
        self._bytes += size
        if len(self._waiting) == BATCH_JOBS:
            self._wakeup.set()
        return receipt

    async def enqueue_waiting(self, job: NewJob) -> Receipt:
        """Accept a job like enqueue(), but wait while the buffer is full.

        Raises:
            RuntimeError: called outside of the block, or the block ended during the wait.
        """
        while self._writing is not None and not self._fits(_size(job)):
            self._room.clear()
            await self._room.wait()
        return self.enqueue(job)

    async def flush(self) -> None:
        """Wait until every job that was accepted so far is written or refused."""
        receipts = [each.receipt for each in (*self._in_flight, *self._waiting)]
        self._hurry = True
        self._wakeup.set()
        if receipts:
            await asyncio.wait(receipts)

    def _fits(self, size: int) -> bool:
        # An empty buffer accepts a job of any size. Otherwise, a job above the limit would never
        # be accepted.
        return not len(self) or (
            len(self) < self._max_jobs and self._bytes + size <= self._max_bytes
        )

    # Writing.

    async def _write_loop(self) -> None:
        """Write batches until the block has ended and no job is left."""
        while True:
            self._wakeup.clear()
            if not self._waiting:
                self._hurry = False
                if self._writing is None:
                    return
                await self._wakeup.wait()
                continue
            wait_s = self._first_at + self._max_wait_s - time.monotonic()
            if wait_s > 0 and len(self._waiting) < BATCH_JOBS and not self._hurries():
                try:
                    async with asyncio.timeout(wait_s):
                        await self._wakeup.wait()
                except TimeoutError:
                    pass
                else:
                    continue
            self._take_batch()
            await self._write(list(self._in_flight))

    def _hurries(self) -> bool:
        return self._hurry or self._writing is None

    def _take_batch(self) -> None:
        """Move the jobs of the next batch from `_waiting` to `_in_flight`."""
        size = 0
        while self._waiting and len(self._in_flight) < BATCH_JOBS:
            size += len(self._waiting[0].job.args)
            if self._in_flight and size > BATCH_CHARACTERS:
                break
            self._in_flight.append(self._waiting.popleft())
        self._first_at = time.monotonic()

    async def _write(self, batch: list[Pending]) -> None:
        """Write a batch; if PostgreSQL refuses it, write each half, to find the refused jobs."""
        try:
            written = await self._persist([each.job for each in batch])
        except EnqueueError as error:
            if len(batch) == 1:
                self._end(batch[0], error)
                return
        else:
            for each, enqueued in zip(batch, written, strict=True):
                self._end(each, enqueued)
            return
        middle = len(batch) // 2
        await self._write(batch[:middle])
        await self._write(batch[middle:])

    async def _persist(self, jobs: list[NewJob]) -> list[Enqueued]:
        """Write jobs, with retries; return their ids.

        Raises:
            EnqueueError: PostgreSQL refused one of the jobs; none was written.
        """
        delay_s, self._batch_jobs = RETRY_S, len(jobs)
        while True:
            try:
                written = await self._writer.write(
                    lambda on: insert_jobs(on, jobs, self._built_ins)
                )
            except EnqueueError:
                raise
            except Unsure as error:
                self._last_error = error
                if await self._was_committed(error.xid):
                    return self._mine(error.made)
            except TaskdError as error:
                self._last_error = error
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, RETRY_S_MAX)
            else:
                self._last_error = None
                return self._mine(written)

    async def _was_committed(self, xid: str) -> bool:
        """Ask the server until it answers whether the transaction committed."""
        self._in_doubt = True  # remains True if the block ends before the server has answered
        while True:
            try:
                outcome = await self._writer.transaction_outcome(xid)
            except TaskdError as error:
                self._last_error = error
            else:
                if outcome in {"committed", "aborted"}:
                    self._in_doubt = False
                    return outcome == "committed"
                if outcome is None:
                    # The transaction is so old that the server no longer knows its status, for
                    # example after an outage of days.
                    self._last_error = StoreUnavailable(
                        "the server no longer knows whether a transaction committed"
                    )
            await asyncio.sleep(ASK_AGAIN_S)

    def _end(self, pending: Pending, result: Enqueued | Exception) -> None:
        self._in_flight.remove(pending)
        self._bytes -= _size(pending.job)
        self._room.set()
        if isinstance(result, Exception):
            self._refused.append((pending.job, result))
        if pending.receipt.done():
            return  # the caller that waits for the id was cancelled
        if isinstance(result, Exception):
            _refuse(pending.receipt, result)
        else:
            pending.receipt.set_result(result)

    def _left(self) -> NotEnqueued | None:
        """Return the error that contains the jobs that were refused or could not be written.

        The futures of jobs that could not be written get the same error. If there are no such jobs,
        return None.
        """
        batch = 0 if not (self._in_doubt or self._writer.committing) else self._batch_jobs
        in_doubt, unwritten = self._in_flight[:batch], [*self._in_flight[batch:], *self._waiting]
        if not (unwritten or in_doubt or self._refused):
            return None
        parts = [
            f"{len(unwritten):,} jobs were not written" if unwritten else "",
            f"{len(in_doubt):,} may or may not have been written" if in_doubt else "",
            f"{len(self._refused):,} were refused" if self._refused else "",
        ]
        why = self._last_error or (self._refused[0][1] if self._refused else None)
        text = ", ".join(filter(None, parts)) + (f": {why}" if why else "")
        error = NotEnqueued(
            text, [each.job for each in unwritten], self._refused, [each.job for each in in_doubt]
        )
        for each in (*unwritten, *in_doubt):
            if not each.receipt.done():
                _refuse(each.receipt, error)
        return error


def _size(job: NewJob) -> int:
    """Return the size of the arguments in bytes, as UTF-8."""
    return len(job.args) if job.args.isascii() else len(job.args.encode())


def _refuse(receipt: Receipt, error: Exception) -> None:
    receipt.set_exception(error)
    # Mark the exception as retrieved: asyncio must not warn if no caller awaits the future. The end
    # of the block reports the error.
    receipt.exception()
