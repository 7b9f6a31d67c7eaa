"""Handlers with transaction=: their work on `ctx.conn` and the completion commit together.

If the job no longer belongs to the attempt, the completion matches no row, and the transaction is
rolled back. If the connection breaks during the COMMIT, the acker writes a failed attempt. While
the transaction is undecided, this write waits for the lock of the job's row. If the transaction was
committed, the row has left taskd.job, and the write changes nothing. Otherwise the row is still
`running`, and the write changes it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any, NoReturn

from taskd.core.jobs.verdicts import Retry, Verdict
from taskd.core.tasks.task import Task
from taskd.errors import StoreUnavailable
from taskd.store.connections.transactions import Transaction, Transactions, is_conflict
from taskd.worker.attempt_context import AttemptContext
from taskd.worker.running.handler_call import HandlerCall
from taskd.worker.running.returned_awaitables import finished
from taskd.worker.services.own_tasks import own_task
from taskd.worker.services.service import Backoff

# The bounds of the random delay before a retry after a conflict with another transaction. With a
# fixed delay, the two transactions could conflict again.
CONFLICT_DELAY_S = (0.05, 0.5)


DO_NOT_COMPLETE = (
    "taskd completes the job of a handler with transaction= when the handler returns: do not call "
    "ctx.complete()"
)


class TransactionEnded(Exception):
    """The handler has ended the transaction that taskd should commit, or the connection broke."""


class TransactionAttemptContext(AttemptContext):
    """The `ctx` of a handler with transaction=; see taskd.TransactionContext."""

    NOT_COMMITTED = "the connection broke at the commit, and nothing was committed"

    __slots__ = ("conn",)
    conn: Any

    async def complete(self, conn: Any, result: Any = None) -> NoReturn:
        """Raise an error, because taskd completes the job when the handler has returned.

        Raises:
            TypeError: always.
        """
        raise TypeError(DO_NOT_COMPLETE)

    def complete_sync(self, conn: Any, result: Any = None) -> NoReturn:
        """Raise the same error as complete().

        Raises:
            TypeError: always.
        """
        raise TypeError(DO_NOT_COMPLETE)


class TransactionCall(HandlerCall):
    """An attempt in a transaction.

    Args:
        handle: the handler with its arguments.
    """

    def __init__(
        self,
        pool: Transactions,
        task: Task[..., Any],
        context: TransactionAttemptContext,
        handle: Callable[[], Any],
    ) -> None:
        super().__init__()
        self._pool, self._task, self._context = pool, task, context
        self._handle = handle

    async def run(self) -> Any:
        """Run the handler in a transaction, commit, and return the result of the handler.

        If the connection breaks during the COMMIT, `committed` of the context stays False.
        """
        self.wait()
        await asyncio.sleep(0)  # now the runner calls belongs_to(), which sets the attempt
        transaction = await self._begun()
        self._context.conn = transaction.conn
        self.begin()
        try:
            value = await finished(self._handle())
            if issubclass(type(value), Verdict):
                raise value  # noqa: TRY301 - a returned verdict also rolls back
        except BaseException as error:
            transaction.roll_back()
            self._raise_conflict(error)
            raise
        ending = own_task(self._end(transaction, value), "transaction-end")
        while not ending.done():
            # Not even a cancellation of the attempt ends this wait: the COMMIT may have been sent.
            # The statements have timeouts.
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError:
                continue
        try:
            ending.result()
        except Exception as error:
            self._raise_conflict(error)
            raise
        finally:
            del ending  # it refers to the error, whose traceback refers to this frame
        return value

    async def _begun(self) -> Transaction:
        """Wait for a free slot of the pool and for PostgreSQL, and begin a transaction."""
        assert self.attempt is not None
        backoff = Backoff()
        while True:
            opening = own_task(
                self._pool.begin(self._task.isolation, self.attempt.timeout_s), "transaction-begin"
            )
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                # If the transaction begins in spite of the cancellation, _not_needed rolls back.
                opening.end()
                opening.add_done_callback(_not_needed)
                raise
            except StoreUnavailable:
                # The attempt still waits for a slot. After SLOT_WAIT_S its job is released.
                await asyncio.sleep(backoff.next_s())

    async def _end(self, transaction: Transaction, value: Any) -> None:
        context = self._context
        try:
            _check_open(transaction)
            async with asyncio.timeout(self._pool.statement_timeout_s):
                await AttemptContext.complete(context, transaction.conn, value)
        except BaseException:
            transaction.roll_back()
            raise
        try:
            context.committed = await transaction.commit()
        except BaseException:
            context.completed = False
            transaction.roll_back()
            raise

    def _raise_conflict(self, error: BaseException) -> None:
        """Raise Retry if the error is a serialization failure or a deadlock.

        A rule in the task's `on_error` for the class of the error takes precedence.

        Raises:
            Retry: after a delay within CONFLICT_DELAY_S.
        """
        seen: BaseException | None = error
        while seen is not None and not is_conflict(seen):
            seen = seen.__cause__
        if seen is not None and not set(type(error).__mro__) & self._task.on_error.keys():
            raise Retry(random.uniform(*CONFLICT_DELAY_S), str(seen)) from error


def _check_open(transaction: Transaction) -> None:
    if not transaction.is_open:
        raise TransactionEnded(
            "the transaction of ctx.conn is over: the handler ended the transaction, or its "
            "connection broke. Do not commit or roll back on ctx.conn"
        )


def _not_needed(opening: asyncio.Task[Transaction]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().roll_back()
