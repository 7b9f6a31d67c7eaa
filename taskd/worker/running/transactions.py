"""Handlers with transaction=: their work on `ctx.conn` and the completion commit together.

If the lease was lost or the job has another fence, the completion finds no row, and nothing
commits. If the connection breaks at the commit, the acker's write of the outcome shows what
happened: while the transaction is undecided it locks the row; after its commit the row is gone;
otherwise the job is still running.
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
from taskd.worker.service import Backoff

# After a conflict with another transaction, at random so that the two do not meet again.
CONFLICT_DELAY_S = (0.05, 0.5)


class TransactionEnded(Exception):
    """The handler has ended the transaction that taskd should commit, or the connection broke."""


class TransactionAttemptContext(AttemptContext):
    """The `ctx` of a handler with transaction=; see taskd.handlers.TransactionContext."""

    NOT_COMMITTED = "the connection broke at the commit, and nothing was committed"

    __slots__ = ("conn",)
    conn: Any

    async def complete(self, conn: Any, result: Any = None) -> NoReturn:
        """Raise an error: taskd completes the job when the handler has returned.

        Raises:
            TypeError: always.
        """
        raise TypeError("with transaction= the job is completed when its handler returns")

    def complete_sync(self, conn: Any, result: Any = None) -> NoReturn:
        """Raise an error, as complete() does.

        Raises:
            TypeError: always.
        """
        raise TypeError("with transaction= the job is completed when its handler returns")


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
        """Run it; return its committed result."""
        self.wait()
        await asyncio.sleep(0)  # until it belongs to its attempt
        transaction = await self._begun()
        self._context.conn = transaction.conn
        self.begin()
        try:
            value = await self._handle()
            if issubclass(type(value), Verdict):
                raise value  # noqa: TRY301 - what it decides is not done, and rolls back
        except BaseException as error:
            transaction.roll_back()
            self._raise_conflict(error)
            raise
        ending = _own(self._end(transaction, value), "transaction-end")
        while not ending.done():
            # A COMMIT that was sent is awaited even if the attempt is cancelled; the statement has
            # a timeout.
            try:
                await asyncio.wait({ending})
            except asyncio.CancelledError:
                continue
        try:
            ending.result()
        except Exception as error:
            self._raise_conflict(error)
            raise
        return value

    async def _begun(self) -> Transaction:
        """Begin a transaction, as soon as there is a slot and a database."""
        assert self.attempt is not None
        backoff = Backoff()
        while True:
            opening = _own(
                self._pool.begin(self._task.isolation, self.attempt.timeout_s), "transaction-begin"
            )
            try:
                return await asyncio.shield(opening)
            except asyncio.CancelledError:
                # No caller waits for this connection, which can take its time.
                opening.cancel()
                opening.add_done_callback(_not_needed)
                raise
            except StoreUnavailable:
                # It has not begun: after a while its job is released to another worker.
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
        """Retry soon if other transactions changed the same rows, unless the task has a rule.

        Raises:
            Retry: it is such a failure.
        """
        seen: BaseException | None = error
        while seen is not None and not is_conflict(seen):
            seen = seen.__cause__
        if seen is not None and not set(type(error).__mro__) & self._task.on_error.keys():
            raise Retry(random.uniform(*CONFLICT_DELAY_S), str(seen)) from error


def _check_open(transaction: Transaction) -> None:
    if not transaction.is_open:
        raise TransactionEnded(
            "the transaction of ctx.conn is over: the handler has ended it, or its connection broke"
        )


def _own(coroutine: Any, name: str) -> asyncio.Task[Any]:
    # Not through the loop's task factory: it is no task of the handler.
    return asyncio.Task(coroutine, loop=asyncio.get_running_loop(), name=name)


def _not_needed(opening: asyncio.Task[Transaction]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().roll_back()
