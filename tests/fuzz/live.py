"""A worker for all tests of a module: examples enqueue jobs and check how they ended."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import asyncpg
import uvloop

from taskd import events
from taskd.core.tasks.registry import Registry
from tests.canary import assert_unseen
from tests.worker.conftest import WITHIN_S, Desk, Emitted, Started

# Whatever handlers, rows and notifications do, these would be errors of taskd.
MISTAKES = {"service.crashed", "job.lost", "job.abandoned", "worker.fenced", "worker.stuck"}


class Live:
    """A database, and a worker of an app in this process, for code that is not async.

    Attributes:
        sql: a plain connection.
        complaints: asyncio's messages about tasks and callbacks, which must be empty.
    """

    def __init__(self, dsn: str, registry: Registry, **settings: Any) -> None:
        self.dsn = dsn
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.complaints: list[Any] = []
        self.run(self._begin(registry, settings))

    async def _begin(self, registry: Registry, settings: dict[str, Any]) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: self.complaints.append(context)
        )
        self.emitted = Emitted()
        self._unsubscribe = events.subscribe(self.emitted)
        self.sql: Any = await asyncpg.connect(self.dsn)
        self.desk = Desk(self.dsn, self.sql, self.emitted)
        self.desk.registry = registry
        self.started: Started = await self.desk.start(**settings)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def clear(self) -> None:
        """Forget the events so far."""
        self.emitted.all.clear()

    def unharmed(self) -> None:
        """No service of the worker has crashed, and it has lost nothing."""
        assert not self.started.task.done()
        assert not self.complaints, self.complaints
        said = [each for each in self.emitted.all if each[0] in MISTAKES]
        assert not said, said

    async def ended(self, ids: Iterable[int], within_s: float = WITHIN_S) -> dict[int, Any]:
        """Wait until these jobs are finished; their rows, by id."""
        rows = await self.desk.settled(*ids, within_s=within_s)
        return {row["id"]: row for row in rows}

    def close(self) -> None:
        self.run(self.desk.close())
        self.run(self.sql.close())
        self._unsubscribe()
        self.runner.close()
        assert not self.complaints, self.complaints
        assert_unseen(self.emitted.all)
