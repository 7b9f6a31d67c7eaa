"""Group enqueue: jobs that coroutines of one loop enqueue at the same time share a transaction.

As a server has commits share a flush. Ten coroutines that enqueue one job each, again and again,
each in a transaction of its own, came to 0.60 of plain inserts on two cores, and so to 0.98
(`python -m tests.bench enqueue --peers plain`, 3 runs).

A job goes out at once while fewer than two statements are under way, or more where a commit takes
long. Else it waits until one of them has ended, for 2 ms at most while a connection is free, and
goes with all that wait for its queue by then. Each of them is written or refused as if it had gone
alone: when the server refuses a statement nothing of it was written, and its halves are tried.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.unique import Enqueued
from taskd.errors import EnqueueError

# With one, each job would wait for a flush that is half done; with ten nobody would meet.
ABREAST = 2
# But while a statement waits, for a slow flush or for a server far away, two cores have time for
# others, and the server has their commits share a flush. So much of a statement's time is work, and
# one may be under way for each such part of it. Ten coroutines came with commits of 2.5 ms to 3,605
# jobs per second by two abreast and to 3,658 by ten (medians of four); with commits of 0.3 ms to
# 15,017 by two and to 8,734 by ten.
WORK_S = 0.0002
# The shortest of the last statements says how long one takes that waits for no others; it is
# forgotten by so much with each.
FORGETS = 1.02
# Where the server is far away, others' statements take long: nobody waits longer for them.
WAIT_S = 0.002
JOBS_MAX = 1000
CHARACTERS_MAX = 8 * 1024 * 1024
# Who is cancelled waits so long for a statement that has his job.
CANCEL_S = 1.0

Insert = Callable[[Sequence[NewJob]], Awaitable[list[Enqueued]]]


@dataclass(slots=True, eq=False)
class _Taken:
    """A job that waits, and who waits for its id."""

    job: NewJob
    receipt: asyncio.Future[Enqueued]
    statement: asyncio.Task[None] | None = None

    def end(self, how: Enqueued | Exception) -> None:
        if self.receipt.done():
            return  # who waited was cancelled
        if isinstance(how, Exception):
            self.receipt.set_exception(how)
        else:
            self.receipt.set_result(how)


class Group:
    """Of one pool of connections, and so of one event loop.

    Args:
        insert: writes jobs in one statement; their ids, in the order of the jobs.
        statements_max: how many can be under way, by the connections there are.
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
        """Begin a statement for one job, if its turn is now: when, for ended(). Else None."""
        if self._under_way >= ABREAST and self._under_way >= self._abreast():
            return None
        self._under_way += 1
        return time.monotonic()

    def _abreast(self) -> int:
        """How many single statements may be under way."""
        if self._shortest_s == math.inf:
            return ABREAST  # nothing has been measured yet
        return int(min(self._shortest_s / WORK_S, self._statements_max))

    def ended(self, began: float | None = None) -> None:
        """A statement has ended: those that wait go out.

        Args:
            began: what begin() said of it; None: it was for several jobs.
        """
        self._under_way -= 1
        if began is not None:
            self._shortest_s = min(self._shortest_s * FORGETS, time.monotonic() - began)
        if self._waiting:
            self._go()

    async def enqueue(self, job: NewJob) -> Enqueued:
        """Write a job with others, when its turn comes; its id.

        Raises:
            EnqueueError: it was refused, and not written.
            StoreUnavailable: as for a statement of its own: it may have been written.
        """
        taken = _Taken(job, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(job.queue, []).append(taken)
        if self._goes is None:
            self._goes = asyncio.get_running_loop().call_later(WAIT_S, self._waited)
        try:
            return await taken.receipt
        except asyncio.CancelledError:
            # Who goes on from here may count on its not being written any more.
            if taken.statement is not None:
                await asyncio.wait({taken.statement}, timeout=CANCEL_S)
            raise

    def _waited(self) -> None:
        if self._under_way < self._statements_max:
            self._go()  # else with the next that ends, and with whoever has come by then

    def _go(self) -> None:
        """Send off all that wait, a statement for each queue: one that is slow holds up its own."""
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
        """Have each job written or refused; a refused one is found by halving."""
        try:
            told = await self._insert([each.job for each in batch])
        except EnqueueError as error:
            if len(batch) == 1:
                batch[0].end(error)
                return
            middle = len(batch) // 2
            await self._write(batch[:middle])
            await self._write(batch[middle:])
        except Exception as error:  # noqa: BLE001 - it is told to whoever waits
            for each in batch:
                each.end(_own(error))
        except BaseException:
            for each in batch:
                each.receipt.cancel()
            raise
        else:
            for each, enqueued in zip(batch, told, strict=True):
                each.end(enqueued)


def _own(error: Exception) -> Exception:
    """An error for one of several who hear of it: each adds to its traceback."""
    mine = copy.copy(error)
    mine.__cause__ = error
    return mine


def _batches(waiting: list[_Taken]) -> list[list[_Taken]]:
    """In the order of their coming, each no larger than a statement may be."""
    batches: list[list[_Taken]] = []
    characters = 0
    for each in waiting:
        characters += len(each.job.args)
        if not batches or len(batches[-1]) == JOBS_MAX or characters > CHARACTERS_MAX:
            batches.append([])
            characters = len(each.job.args)
        batches[-1].append(each)
    return batches
