"""Connections for handlers with transaction=: each is lent to one attempt, in an open transaction.

These connections are separate from taskd's own, because a handler can hold its connection for long.
The sessions have the settings of the DSN's user, and not taskd's search path and timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import asyncpg

from taskd.core.tasks.handler_kind import Isolation
from taskd.store.connections.database import Database, close
from taskd.store.connections.error_translation import is_gone, translated
from taskd.store.connections.lanes import IDLE_S

# The server's timeouts in the transaction are this much longer than the attempt's timeout, so that
# the attempt's timeout applies first.
MARGIN_S = 2.0
CLEAN_S = 2.0
CLOSE_S = 2.0
# Serialization failure and deadlock: the same transaction can succeed if it is repeated.
CONFLICTS = frozenset({"40001", "40P01"})


def is_conflict(error: BaseException) -> bool:
    """Return whether a concurrent transaction caused the error."""
    return getattr(error, "sqlstate", None) in CONFLICTS


class Transaction:
    """An open transaction on a connection of its own.

    Attributes:
        conn: the asyncpg connection.
    """

    def __init__(self, owner: Transactions, conn: asyncpg.Connection, inner: Any) -> None:
        self.conn = conn
        self._owner, self._inner = owner, inner
        self._ending = False

    @property
    def is_open(self) -> bool:
        """Return whether the transaction is still open."""
        return not self.conn.is_closed() and bool(self.conn.is_in_transaction())

    async def commit(self) -> bool:
        """Commit; return False if there was no reply, so that the outcome is unknown.

        Raises:
            Exception: PostgreSQL refused the COMMIT and rolled the transaction back. The caller
                must call roll_back(), which takes the connection back.
        """
        self._ending = True
        try:
            async with asyncio.timeout(self._owner.statement_timeout_s):
                await self._inner.commit()
        except Exception as error:
            if not is_gone(error):
                raise
            self.conn.terminate()
            self._owner.take_back(self)
            return False
        self._owner.take_back(self)
        return True

    def roll_back(self) -> None:
        """Roll back in the background; a connection that takes too long is dropped."""
        self._owner.take_back(self)

    async def clean(self, *, pooled: bool) -> None:
        """Roll back what is open, and reset the session for the next attempt."""
        if self.is_open:
            await self._inner.rollback()
        elif not self._ending:
            # The handler itself has ended the transaction, and may have changed the session.
            self.conn.terminate()
        # Through a pooler, another client can have the session by now.
        if not pooled and not self.conn.is_closed():
            await self.conn.reset()


class Transactions:
    """A pool of connections for handlers with transaction=; belongs to one event loop.

    Args:
        size: maximum number of concurrent transactions.
    """

    def __init__(self, database: Database, size: int) -> None:
        self.statement_timeout_s = database.statement_timeout_s + 2.0
        self._database = database
        self._slots = asyncio.Semaphore(size)
        # Connections with the time.monotonic() of their last use. The connection that was used last
        # is used next.
        self._idle: list[tuple[asyncpg.Connection, float]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._all: set[asyncpg.Connection] = set()
        self._cleaning: set[asyncio.Task[None]] = set()

    async def begin(self, isolation: Isolation, timeout_s: float | None) -> Transaction:
        """Wait for a free slot, and begin a transaction.

        Args:
            timeout_s: timeout of the attempt in seconds; None if it has no timeout.

        Raises:
            TaskdError: as Database.connect_plain(), or the transaction could not be begun.
        """
        await self._slots.acquire()
        try:
            # A connection that broke while idle has begun nothing: try the next one.
            while self._idle:
                conn, _ = self._idle.pop()
                with contextlib.suppress(Exception):
                    return await self._begun(conn, isolation, timeout_s)
            conn = await self._database.connect_plain("transaction")
            self._all.add(conn)
            with translated():
                return await self._begun(conn, isolation, timeout_s)
        except BaseException:
            self._slots.release()
            raise

    async def _begun(
        self, conn: asyncpg.Connection, isolation: Isolation, timeout_s: float | None
    ) -> Transaction:
        limit_ms = 0 if timeout_s is None else int((timeout_s + MARGIN_S) * 1000)
        inner = conn.transaction(isolation=isolation.value)
        try:
            async with asyncio.timeout(self.statement_timeout_s):
                await inner.start()
                await conn.execute(
                    f"SET LOCAL statement_timeout = {limit_ms};"
                    f" SET LOCAL idle_in_transaction_session_timeout = {limit_ms}"
                )
        except BaseException:
            conn.terminate()
            self._all.discard(conn)
            raise
        return Transaction(self, conn, inner)

    def take_back(self, transaction: Transaction) -> None:
        """Clean a connection in the background, or drop it; then free its slot."""
        loop = asyncio.get_running_loop()
        # Do not use the loop's task factory, which would count this task as a task of the handler.
        cleaning = asyncio.Task(self._clean(transaction), loop=loop, name="transaction-clean")
        self._cleaning.add(cleaning)
        cleaning.add_done_callback(self._cleaning.discard)

    async def _clean(self, transaction: Transaction) -> None:
        conn = transaction.conn
        try:
            async with asyncio.timeout(CLEAN_S):
                await transaction.clean(pooled=bool(self._database.pooled))
        except Exception:  # noqa: BLE001 - whatever the reason, do not lend it again
            conn.terminate()
        if conn.is_closed():
            self._all.discard(conn)
        else:
            self._keep(conn)
        self._slots.release()

    def _keep(self, conn: asyncpg.Connection) -> None:
        self._idle.append((conn, time.monotonic()))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    def _close_idle(self) -> None:
        """Close the connections that have been idle for IDLE_S."""
        self._timer = None
        longest = time.monotonic() - IDLE_S
        while self._idle and self._idle[0][1] <= longest:
            conn, _ = self._idle.pop(0)
            self._all.discard(conn)
            closing = asyncio.create_task(close(conn), name="transaction-close")
            self._cleaning.add(closing)
            closing.add_done_callback(self._cleaning.discard)
        if self._idle:
            self._timer = asyncio.get_running_loop().call_later(
                self._idle[0][1] - longest, self._close_idle
            )

    async def close(self) -> None:
        """Close all connections; the server rolls open transactions back."""
        if self._timer is not None:
            self._timer.cancel()
        if self._cleaning:
            await asyncio.wait(self._cleaning, timeout=CLEAN_S)
        closing = [
            asyncio.create_task(close(each), name="transaction-close") for each, _ in self._idle
        ]
        if closing:
            await asyncio.wait(closing, timeout=CLOSE_S)
        for conn in self._all:
            conn.terminate()
        self._all.clear()
