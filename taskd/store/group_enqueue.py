"""Group enqueue: jobs that coroutines of one loop enqueue at the same time share a transaction.

PostgreSQL's group commit works in the same way: concurrent commits share a flush. Without group
enqueue, ten coroutines that enqueue single jobs reach about 0.6 of the rate of plain inserts. With
group enqueue, they reach nearly the same rate (`python -m tests.bench enqueue --peers plain`).

A job is sent immediately if fewer than two statements are running. This limit is higher if
statements are slow. Otherwise the job waits until a statement has ended, but at most 2 ms if a
connection is free. Then all waiting jobs of a queue are sent in one statement, or in several if
there are many. Each job is written or refused as if it had been sent alone. If the server refuses a
statement, it writes nothing, and taskd sends each half of the statement's jobs again.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from taskd.core.jobs.enqueued import Enqueued
from taskd.core.jobs.job import NewJob
from taskd.errors import EnqueueError

# The number of concurrent statements for single jobs if statements are fast. With one statement,
# each job would wait for a flush in progress; with ten, jobs would hardly share statements.
ABREAST = 2
# The CPU time of a statement. While a statement waits for a slow flush or a distant server, the CPU
# can work for other statements. So `duration / WORK_S` statements can run at a time.
WORK_S = 0.0002
# The shortest recent duration of a statement for one job is taken as the duration without waits.
# Each statement for one job multiplies the stored minimum by this factor, so that an old minimum
# expires.
FORGETS = 1.02
# The longest wait of a job for a running statement, if a connection is free.
WAIT_S = 0.002
JOBS_MAX = 1000
CHARACTERS_MAX = 8 * 1024 * 1024
# How long a cancelled caller waits for the statement with its job.
CANCEL_S = 1.0

Insert = Callable[[Sequence[NewJob]], Awaitable[list[Enqueued]]]


@dataclass(slots=True, eq=False)
class _Taken:
    """A waiting job, and the future of its id."""

    job: NewJob
    receipt: asyncio.Future[Enqueued]
    statement: asyncio.Task[None] | None = None

    def end(self, how: Enqueued | Exception) -> None:
        if self.receipt.done():
            return  # the caller was cancelled
        if isinstance(how, Exception):
            self.receipt.set_exception(how)
        else:
            self.receipt.set_result(how)


class Group:
    """Groups the single jobs that are enqueued over one pool, which belongs to one event loop.

    Args:
        insert: inserts jobs in one statement and returns their ids.
        statements_max: maximum number of connections of the pool.
    """

    def __init__(self, insert: Insert, statements_max: int) -> None:
        self._insert = insert
        self._statements_max = statements_max
        self._under_way = 0
        self._shortest_s = math.inf
        self._waiting: dict[str | None, list[_Taken]] = {}
        self._goes: asyncio.TimerHandle | None = None
        self._statements: set[asyncio.Task[None]] = set()

    def begin(self) -> float | None:
        """Count a statement for one job as running, if it can be sent now.

        Returns:
            The time.monotonic() of its start. With None, the caller must use enqueue().
        """
        if self._under_way >= ABREAST and self._under_way >= self._abreast():
            return None
        self._under_way += 1
        return time.monotonic()

    def _abreast(self) -> int:
        """Return how many single statements can run at a time."""
        if self._shortest_s == math.inf:
            return ABREAST  # nothing is measured yet
        return int(min(self._shortest_s / WORK_S, self._statements_max))

    def ended(self, began: float | None = None) -> None:
        """Record that a statement has ended, and send waiting jobs.

        Args:
            began: result of begin(); None if the statement had several jobs.
        """
        self._under_way -= 1
        if began is not None:
            self._shortest_s = min(self._shortest_s * FORGETS, time.monotonic() - began)
        if self._waiting:
            self._go()

    async def enqueue(self, job: NewJob) -> Enqueued:
        """Enqueue a job together with others; return its id.

        Raises:
            EnqueueError: the job was refused, and not written.
            StoreUnavailable: PostgreSQL cannot be reached. If the connection broke before the
                reply, the job may have been written.
        """
        taken = _Taken(job, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(job.queue, []).append(taken)
        if self._goes is None:
            self._goes = asyncio.get_running_loop().call_later(WAIT_S, self._waited)
        try:
            return await taken.receipt
        except asyncio.CancelledError:
            # The job should not be written after the caller continues. So wait for the end of the
            # statement, but at most CANCEL_S. The statement is not cancelled, because it also
            # writes the jobs of other callers.
            if taken.statement is not None:
                await asyncio.wait({taken.statement}, timeout=CANCEL_S)
            raise

    def _waited(self) -> None:
        if self._under_way < self._statements_max:
            self._go()  # otherwise ended() sends the waiting jobs

    def _go(self) -> None:
        """Send all waiting jobs; no statement has jobs of several queues.

        So a statement that waits for the lock of a queue delays only jobs of that queue.
        """
        if self._goes is not None:
            self._goes.cancel()
            self._goes = None
        waiting, self._waiting = self._waiting, {}
        for all_taken in waiting.values():
            for batch in _batches([each for each in all_taken if not each.receipt.done()]):
                self._under_way += 1
                task = asyncio.create_task(self._write(batch), name="enqueue-group")
                self._statements.add(task)
                task.add_done_callback(self._written)
                for each in batch:
                    each.statement = task

    def _written(self, task: asyncio.Task[None]) -> None:
        self._statements.discard(task)
        self.ended()

    async def _write(self, batch: list[_Taken]) -> None:
        """Insert jobs; if the server refuses the statement, insert each half of the jobs."""
        try:
            results = await self._insert([each.job for each in batch])
        except EnqueueError as error:
            if len(batch) == 1:
                batch[0].end(error)
                return
            middle = len(batch) // 2
            await self._write(batch[:middle])
            await self._write(batch[middle:])
        except Exception as error:  # noqa: BLE001 - the waiting callers get it
            for each in batch:
                each.end(_own(error))
        except BaseException:
            for each in batch:
                each.receipt.cancel()
            raise
        else:
            for each, enqueued in zip(batch, results, strict=True):
                each.end(enqueued)


def _own(error: Exception) -> Exception:
    """Return a copy of the error for one caller: each caller adds to the traceback."""
    mine = copy.copy(error)
    mine.__cause__ = error
    return mine


def _batches(waiting: list[_Taken]) -> list[list[_Taken]]:
    """Return the jobs in their order, in batches that fit into a statement."""
    batches: list[list[_Taken]] = []
    characters = 0
    for each in waiting:
        characters += len(each.job.args)
        if not batches or len(batches[-1]) == JOBS_MAX or characters > CHARACTERS_MAX:
            batches.append([])
            characters = len(each.job.args)
        batches[-1].append(each)
    return batches
