"""Strikes in a worker's own process, at a named point, without hooks in the product.

A point is a statement by its name, `listen`, `commit` (of a handler's transaction), or a moment of
a handler: `start`, `middle`, `returned`. The functions through which all of them pass are wrapped.
A strike first leaves a mark, so that it happens once, whatever follows.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
from asyncpg.transaction import Transaction as AsyncpgTransaction

from taskd import Context
from taskd.middleware import CallNext, middleware
from taskd.store.connections import callers_connection
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.connections.listening import Listening
from tests.system.recorder import Recorder

CUT = "connection was closed in the middle of operation"


class Strike(msgspec.Struct, frozen=True):
    """A strike.

    Attributes:
        point: its place.
        side: `before` the statement is sent, or `after` its reply; moments of handlers have no
        sides.
        way: `kill`: SIGKILL of this process. `cancel`: CancelledError for the task that waits
        there.
            `lost`: the connection is cut, before the statement reaches the server or before its
            reply
            returns. `held`: refused, as if a row were locked.
        passes: hits that pass before.
    """

    point: str
    side: str
    way: str
    passes: int = 0


class Plan(msgspec.Struct, frozen=True):
    """The plan of a worker.

    Attributes:
        strikes: in this order; each waits for the one before.
        marks: a directory; strike number n leaves the file n there.
        tuned: constants of taskd, by `module.NAME`, that make a rare point a common one.
        ticks: how many jobs each tick of the app's schedule makes; see points_list.Scene.
    """

    strikes: tuple[Strike, ...] = ()
    marks: str = ""
    tuned: dict[str, float] = {}
    ticks: int = 0


class Striker:
    """Counts hits, and strikes at the planned one. Any thread may call it."""

    def __init__(self, plan: Plan) -> None:
        self._strikes = list(plan.strikes)
        self._marks = Path(plan.marks)
        self._passed = self._struck = 0
        self._lock = threading.Lock()

    def meet(self, point: str, side: str, **seen: Any) -> str:
        """Pass a point: die here, or return the way to go on; "" is the usual one.

        Args:
            seen: for the mark.
        """
        with self._lock:
            if not self._strikes:
                return ""
            strike = self._strikes[0]
            if (strike.point, strike.side) != (point, side):
                return ""
            self._passed += 1
            if self._passed <= strike.passes:
                return ""
            del self._strikes[0]
            self._passed = 0
            mark = json.dumps({"pid": os.getpid(), **seen})
            (self._marks / str(self._struck)).write_text(mark, encoding="utf-8")
            self._struck += 1
            if strike.way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            return strike.way


# The task that waits for a statement of a lane is not the task that runs it.
waiting: ContextVar[asyncio.Task[Any] | None] = ContextVar("waiting", default=None)


def install(plan: Plan) -> None:
    """Wrap what statements and handlers go through; once in a process."""
    meet = _Meet(Striker(plan))
    _wrap_statements(meet)
    _wrap_handlers(meet)


class _Meet:
    def __init__(self, striker: Striker) -> None:
        self._striker = striker

    def statement(self, point: str, side: str, connection: Any, **seen: Any) -> None:
        """A statement is about to be sent, or was answered."""
        way = self._striker.meet(point, side, **seen)
        if way == "cancel":
            waiter = waiting.get() or asyncio.current_task()
            assert waiter is not None
            waiter.cancel()
        elif way == "lost":
            if connection is not None:
                connection.terminate()
            raise asyncpg.ConnectionDoesNotExistError(CUT)
        elif way == "held":
            raise asyncpg.LockNotAvailableError("canceling statement due to lock timeout")

    def moment(self, point: str) -> None:
        """A handler is there."""
        if self._striker.meet(point, "") == "cancel":
            raise asyncio.CancelledError


def _wrap_statements(meet: _Meet) -> None:
    fetch, run, on_their_own = Lane.fetch, Database.run, callers_connection._Asyncpg.fetch
    listen, end = Listening.open, AsyncpgTransaction.commit
    # Whose completion the transaction of a connection holds.
    completing: dict[Any, dict[str, Any]] = {}

    async def fetched(self: Lane, name: str, *args: Any) -> Any:
        token = waiting.set(asyncio.current_task())
        try:
            return await fetch(self, name, *args)
        finally:
            waiting.reset(token)

    async def ran(self: Database, connection: Any, name: str, args: Any, **settings: str) -> Any:
        meet.statement(name, "before", connection)
        rows = await run(self, connection, name, args, **settings)
        meet.statement(name, "after", connection)
        return rows

    async def ran_by_handler(self: Any, name: str, *args: Any) -> Any:
        seen = {"job": args[0], "fence": args[2]} if name == "complete_job" else {}
        completing[self._conn] = seen
        meet.statement(name, "before", self._conn, **seen)
        rows = await on_their_own(self, name, *args)
        meet.statement(name, "after", self._conn, **seen)
        return rows

    async def opened(self: Listening) -> None:
        meet.statement("listen", "before", None)
        await listen(self)
        meet.statement("listen", "after", self._connection)

    async def committed(self: AsyncpgTransaction) -> None:
        seen = completing.get(self._connection, {})
        meet.statement("commit", "before", self._connection, **seen)
        await end(self)
        meet.statement("commit", "after", self._connection, **seen)

    Lane.fetch = fetched  # type: ignore[method-assign]
    Database.run = ran  # type: ignore[method-assign]
    callers_connection._Asyncpg.fetch = ran_by_handler  # type: ignore[method-assign]
    Listening.open = opened  # type: ignore[method-assign]
    AsyncpgTransaction.commit = committed


def _wrap_handlers(meet: _Meet) -> None:
    write, now = Recorder.write, Recorder.now

    async def strikes(ctx: Context, call_next: CallNext) -> Any:
        meet.moment("start")
        result = await call_next()
        meet.moment("returned")
        return result

    middleware(strikes)

    async def written(self: Recorder, job: int, attempt: Any, fence: Any, phase: str) -> None:
        await write(self, job, attempt, fence, phase)
        if phase == "start":
            meet.moment("middle")

    def written_now(self: Recorder, job: int, attempt: Any, fence: Any, phase: str) -> None:
        now(self, job, attempt, fence, phase)
        if phase == "start":
            meet.moment("middle")

    Recorder.write, Recorder.now = written, written_now  # type: ignore[method-assign]
