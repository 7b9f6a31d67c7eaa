"""Transactions whose status can be looked up after a COMMIT got no reply."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import asyncpg

from taskd.errors import StoreUnavailable
from taskd.store.connections import transaction_status
from taskd.store.connections.database import Database, close
from taskd.store.connections.error_translation import is_gone, translated
from taskd.store.connections.statements import Fetches, statement

T = TypeVar("T")


class Unsure(StoreUnavailable, Generic[T]):
    """A COMMIT was sent and got no reply, so the transaction may have been committed.

    Attributes:
        xid: id of the transaction, for transaction_outcome().
        made: result of the transaction, valid if the transaction was committed.
    """

    def __init__(self, message: str, xid: str, made: T) -> None:
        super().__init__(message)
        self.xid = xid
        self.made = made


class CheckedWriter:
    """Runs transactions on one connection, for one coroutine; connects when it is first used.

    Attributes:
        committing: whether a COMMIT was sent and its reply not read yet; stays True if the
            coroutine is cancelled meanwhile.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._connection: asyncpg.Connection | None = None
        self.committing = False

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        """Run the named statement in the open transaction.

        Raises:
            TaskdError: as Lane.fetch().
        """
        assert self._connection is not None
        with translated(statement(name).roles):
            rows: list[Any] = await self._connection.fetch(
                statement(name, self._database.schema).text, *args
            )
            return rows

    async def write(self, work: Callable[[Fetches], Awaitable[T]]) -> T:
        """Run statements in a transaction; return their result.

        Raises:
            Unsure: the transaction may have been committed; see transaction_outcome().
            TaskdError: any other error; nothing was written.
        """
        connection = await self._ready()
        try:
            with translated():
                await self._database.begin(connection)
            xid = await transaction_status.draw_xid(self)
            made = await work(self)
        except BaseException as error:
            await self._back_out(error)
            raise
        self.committing = True
        try:
            with translated():
                await self._database.commit(connection)
        except StoreUnavailable as error:
            self.drop()
            self.committing = False
            raise Unsure(str(error), xid, made) from error
        except Exception:
            self.drop()
            self.committing = False
            raise
        self.committing = False
        return made

    async def transaction_outcome(self, xid: str) -> str | None:
        """Return `committed`, `aborted` or `in progress`, or None if the server no longer knows.

        Raises:
            TaskdError: the status could not be read; the caller can try again.
        """
        await self._ready()
        try:
            return await transaction_status.status(self, xid)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Drop the connection without waiting."""
        if self._connection is not None:
            self._connection.terminate()
            self._connection = None

    async def close(self) -> None:
        """Close the connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await close(connection)

    async def _ready(self) -> asyncpg.Connection:
        if self._connection is None or self._connection.is_closed():
            self._connection = await self._database.connect("buffer")
        return self._connection

    async def _back_out(self, error: BaseException) -> None:
        """Roll the transaction back; drop the connection if it broke, or after a cancellation."""
        cause = error.__cause__ or error
        connection = self._connection
        if not isinstance(cause, Exception) or is_gone(cause) or connection is None:
            self.drop()
            return
        try:
            await self._database.roll_back(connection)
        except Exception:  # noqa: BLE001 - the transaction also ends with its connection
            self.drop()
