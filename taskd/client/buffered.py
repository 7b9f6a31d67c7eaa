"""A buffer for busy producers: jobs are taken at once and written in batches behind their back.

A batch is one transaction of up to a thousand jobs. What cannot be written is tried again until it
can, or the buffer ends: nothing is ever dropped without a word. When the connection breaks at a
COMMIT, the server is asked what became of that transaction, so that no batch is written twice. A
server that crashes keeps its answer; a standby that takes over without having got the transaction
says that it has never heard of it, which is then true, and the batch is written there.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Self

from taskd.client import traces
from taskd.client.database_location import Target
from taskd.client.enqueueing import BATCH_CHARACTERS, BATCH_JOBS, BuiltIns, produce
from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import Enqueued
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


class Taken(NamedTuple):
    """A job that is not written yet, and who wants to know of it."""

    job: NewJob
    receipt: Receipt


class Buffered:
    """Takes jobs at once and writes them soon; made by `client.buffered()`, used by `async with`.

    At the end of the block all is written that can be within `flush_s`; what cannot is raised as
    NotEnqueued. What it holds is lost when the process dies.
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
        self._waiting: deque[Taken] = deque()
        self._in_flight: list[Taken] = []
        # How many of the first in flight one transaction writes, and whether it may be committed.
        self._batch_jobs = 0
        self._asks = False
        self._refused: list[tuple[NewJob, Exception]] = []
        self._bytes = 0
        self._first_at = 0.0
        self._hurry = False
        self._wakeup = asyncio.Event()
        self._room = asyncio.Event()
        self._writing: asyncio.Task[None] | None = None
        self._trouble: TaskdError | None = None

    async def __aenter__(self) -> Self:
        self._writer = CheckedWriter((await self._target()).database)
        self._writing = asyncio.create_task(self._write_on(), name="taskd-buffer")
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
            raise left from self._trouble

    def __len__(self) -> int:
        """How many jobs are not written yet."""
        return len(self._waiting) + len(self._in_flight)

    def enqueue(self, job: NewJob) -> Receipt:
        """Take a job, at once; whoever awaits what this returns gets the job's id.

        Raises:
            BufferFull: there is no room; the job was not taken.
            RuntimeError: used outside of its block.
        """
        if self._writing is None:
            raise RuntimeError("a buffer takes jobs inside of `async with client.buffered()`")
        size = len(job.args)
        if not self._fits(size):
            raise BufferFull(
                f"the buffer holds {len(self):,} jobs that are not written yet, and takes no more"
                + (f": {self._trouble}" if self._trouble else "")
            )
        receipt: Receipt = asyncio.get_running_loop().create_future()
        if not self._waiting:
            self._first_at = time.monotonic()
            self._wakeup.set()
        self._waiting.append(Taken(traces.taken(job), receipt))
        self._bytes += size
        if len(self._waiting) == BATCH_JOBS:
            self._wakeup.set()
        return receipt

    async def enqueue_waiting(self, job: NewJob) -> Receipt:
        """As enqueue(), but waits until there is room.

        Raises:
            RuntimeError: used outside of its block, or the block ended meanwhile.
        """
        while self._writing is not None and not self._fits(len(job.args)):
            self._room.clear()
            await self._room.wait()
        return self.enqueue(job)

    async def flush(self) -> None:
        """Wait until all that was taken so far is written, or refused."""
        receipts = [each.receipt for each in (*self._in_flight, *self._waiting)]
        self._hurry = True
        self._wakeup.set()
        if receipts:
            await asyncio.wait(receipts)

    def _fits(self, size: int) -> bool:
        # One job always fits into an empty buffer, or it never would.
        return not len(self) or (
            len(self) < self._max_jobs and self._bytes + size <= self._max_bytes
        )

    # Writing.

    async def _write_on(self) -> None:
        """Write what comes, until the block has ended and nothing is left."""
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
            self._take()
            await self._settle(list(self._in_flight))

    def _hurries(self) -> bool:
        return self._hurry or self._writing is None

    def _take(self) -> None:
        """Move the next batch into flight."""
        size = 0
        while self._waiting and len(self._in_flight) < BATCH_JOBS:
            size += len(self._waiting[0].job.args)
            if self._in_flight and size > BATCH_CHARACTERS:
                break
            self._in_flight.append(self._waiting.popleft())
        self._first_at = time.monotonic()

    async def _settle(self, batch: list[Taken]) -> None:
        """Have each job of a batch written or refused; a refused one is found by halving."""
        try:
            told = await self._persist([each.job for each in batch])
        except EnqueueError as error:
            if len(batch) == 1:
                self._end(batch[0], error)
                return
        else:
            for each, enqueued in zip(batch, told, strict=True):
                self._end(each, enqueued)
            return
        middle = len(batch) // 2
        await self._settle(batch[:middle])
        await self._settle(batch[middle:])

    async def _persist(self, jobs: list[NewJob]) -> list[Enqueued]:
        """Write jobs, as often as it takes; their ids.

        Raises:
            EnqueueError: one of them is refused; nothing was written.
        """
        delay_s, self._batch_jobs = RETRY_S, len(jobs)
        while True:
            try:
                told = await self._writer.write(lambda on: produce(on, jobs, self._built_ins))
            except EnqueueError:
                raise
            except Unsure as error:
                self._trouble = error
                if await self._was_committed(error.xid):
                    return self._mine(error.made)
            except TaskdError as error:
                self._trouble = error
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, RETRY_S_MAX)
            else:
                self._trouble = None
                return self._mine(told)

    async def _was_committed(self, xid: str) -> bool:
        """Ask until the server knows."""
        self._asks = True  # should the end of the block come first, nobody knows
        while True:
            try:
                fate = await self._writer.fate(xid)
            except TaskdError as error:
                self._trouble = error
            else:
                if fate in {"committed", "aborted"}:
                    self._asks = False
                    return fate == "committed"
                if fate is None:
                    # The server has forgotten it: an outage of days, or billions of transactions.
                    self._trouble = StoreUnavailable("nobody knows what became of a transaction")
            await asyncio.sleep(ASK_AGAIN_S)

    def _end(self, taken: Taken, how: Enqueued | Exception) -> None:
        self._in_flight.remove(taken)
        self._bytes -= len(taken.job.args)
        self._room.set()
        if isinstance(how, Exception):
            self._refused.append((taken.job, how))
        if taken.receipt.done():
            return  # who wanted to know was cancelled
        if isinstance(how, Exception):
            _refuse(taken.receipt, how)
        else:
            taken.receipt.set_result(how)

    def _left(self) -> NotEnqueued | None:
        """What could not be written, told to whoever waits for it."""
        known = 0 if not (self._asks or self._writer.committing) else self._batch_jobs
        unsure, sure = self._in_flight[:known], [*self._in_flight[known:], *self._waiting]
        if not (sure or unsure or self._refused):
            return None
        parts = [
            f"{len(sure):,} jobs were not written" if sure else "",
            f"{len(unsure):,} may or may not have been written" if unsure else "",
            f"{len(self._refused):,} were refused" if self._refused else "",
        ]
        why = self._trouble or (self._refused[0][1] if self._refused else None)
        text = ", ".join(filter(None, parts)) + (f": {why}" if why else "")
        told = NotEnqueued(
            text, [each.job for each in sure], self._refused, [each.job for each in unsure]
        )
        for each in (*sure, *unsure):
            if not each.receipt.done():
                _refuse(each.receipt, told)
        return told


def _refuse(receipt: Receipt, error: Exception) -> None:
    receipt.set_exception(error)
    receipt.exception()  # told at the end of the block as well: nobody need await it
