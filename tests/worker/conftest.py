"""Workers in this process, on a real database, and the events that they emit."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import pytest
import uvloop

from taskd import events
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.connections import database as store
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.worker import Worker
from taskd.worker.lease.process_identity import new_incarnation, process_started
from tests.canary import assert_unseen

WITHIN_S = 60.0
# Timeouts of statements and connections for tests that are about neither.
PATIENT_S = 60.0
ENDED = {"job.done", "job.retried", "job.failed", "job.cancelled", "job.snoozed"}


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Any]:
    """The event loop that `taskd run` uses; tests of blocked loops use asyncio's as well."""
    loops: dict[str, Any] = {"uvloop": uvloop.new_event_loop}
    both = item.path.name in {"test_hostile.py", "test_hazards.py", "test_own_task.py"}
    if both and "100_000" not in item.name:
        loops["asyncio"] = asyncio.SelectorEventLoop
    return loops


async def until(true: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
    """Wait for a condition, awaited if it is a coroutine; return its value."""
    deadline = time.monotonic() + within_s
    while True:
        found = true()
        if inspect.isawaitable(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < deadline, (
            f"not within {within_s:.0f} s: {inspect.getsource(true)}"
        )
        await asyncio.sleep(0.01)


class Emitted:
    """The events that were emitted, in their order."""

    def __init__(self) -> None:
        self.all: list[tuple[str, dict[str, Any]]] = []
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def __call__(self, name: str, fields: Any) -> None:
        self.all.append((name, dict(fields)))
        self._loop.call_soon_threadsafe(self._changed.set)

    def of(self, name: str, **fields: Any) -> list[dict[str, Any]]:
        wanted = fields.items()
        return [had for each, had in list(self.all) if each == name and wanted <= had.items()]

    def ends(self, job_id: int) -> list[str]:
        """How the attempts of a job ended."""
        return [name for name, had in self.all if name in ENDED and had["job_id"] == job_id]

    async def wait(
        self, name: str, count: int = 1, /, within_s: float = WITHIN_S, **fields: Any
    ) -> list[dict[str, Any]]:
        """Wait until an event was emitted that many times; return the fields of each."""
        async with asyncio.timeout(within_s):
            while len(found := self.of(name, **fields)) < count:
                self._changed.clear()
                await self._changed.wait()
        return found


class Started:
    """A worker that runs as a task of the test's loop."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.task = asyncio.create_task(worker.run(), name="worker")

    async def ready(self) -> Started:
        waiting = asyncio.create_task(self.worker.ready.wait())
        await asyncio.wait({self.task, waiting}, return_when="FIRST_COMPLETED", timeout=WITHIN_S)
        waiting.cancel()
        if self.task.done():
            self.task.result()
        return self

    async def end(self) -> int:
        """Wait until it ends by itself; its exit code."""
        async with asyncio.timeout(WITHIN_S):
            return await asyncio.shield(self.task)

    async def stop(self, times: int = 1) -> int:
        for _ in range(times):
            self.worker.stop()
        return await self.end()


class Desk:
    """Creates tasks, workers and jobs, and reads rows."""

    def __init__(self, dsn: str, sql: Any, emitted: Emitted) -> None:
        self.dsn, self.sql, self.emitted = dsn, sql, emitted
        self.database = Database({"dsn": dsn})
        self.lane = Lane(self.database, "desk")
        self.registry = Registry()
        self.started: list[Started] = []
        self.settings: dict[str, Any] = {}

    def task(self, **options: Any) -> Callable[[Callable[..., Any]], Task[..., Any]]:
        def make(handler: Callable[..., Any]) -> Task[..., Any]:
            made = Task(handler, **options)
            self.registry.add(made)
            return made

        return make

    def worker(
        self,
        registry: Registry | None = None,
        *,
        app: str = "app",
        until_empty: bool = False,
        **settings: Any,
    ) -> Started:
        """A worker, started and not yet ready."""
        merged = {"dsn": self.dsn, "drain_s": 1.0, "cancel_s": 1.0, "concurrency": 20}
        made = Settings(**merged | self.settings | settings)
        database = Database({"dsn": self.dsn}, statement_timeout_s=made.statement_timeout_s)
        worker = Worker(
            made,
            self.registry if registry is None else registry,
            database,
            app=app,
            until_empty=until_empty,
        )
        self.started.append(Started(worker))
        return self.started[-1]

    async def start(self, registry: Registry | None = None, **settings: Any) -> Started:
        return await self.worker(registry, **settings).ready()

    async def enqueue(self, *new: Any) -> list[int]:
        return await jobs.enqueue(self.lane, new)

    async def row(self, job_id: int) -> Any:
        return await self.sql.fetchrow("SELECT * FROM taskd.jobs WHERE id = $1", job_id)

    async def states(self) -> dict[str, int]:
        rows = await self.sql.fetch("SELECT state, count(*) FROM taskd.jobs GROUP BY state")
        return {row[0]: row[1] for row in rows}

    async def settled(self, *job_ids: int, within_s: float = WITHIN_S) -> list[Any]:
        """Wait until these jobs are finished; their rows."""
        wanted = list(set(job_ids))
        count = "SELECT count(*) = $2 FROM taskd.job_history WHERE id = ANY ($1)"
        deadline = time.monotonic() + within_s
        while not await self.sql.fetchval(count, wanted, len(wanted)):
            if time.monotonic() > deadline:
                live = "SELECT id, task, args, state, attempt, run_at - now() FROM taskd.job"
                raise AssertionError([tuple(row) for row in await self.sql.fetch(live)])
            await asyncio.sleep(0.01)
        rows = "SELECT * FROM taskd.job_history WHERE id = ANY ($1) ORDER BY id"
        found: list[Any] = await self.sql.fetch(rows, wanted)
        return found

    async def state(self, job_id: int, *states: str) -> Any:
        """Wait until a job is in one of these states; its row."""

        async def there() -> Any:
            row = await self.row(job_id)
            return row if row["state"] in states else None

        return await until(there)

    async def other_worker(
        self, worker_id: int, *, pid: int | None = None, lease_s: float = 60
    ) -> None:
        """The row of another worker: elsewhere, or with a pid on this machine."""
        me = new_incarnation("other")._replace(id=worker_id)
        if pid is None:
            me = me._replace(host="elsewhere")
        else:
            me = me._replace(pid=pid, pid_started=process_started(pid) or me.pid_started)
        await workers.register(self.lane, me, lease_s, ["default"], {})

    async def close(self) -> None:
        for each in self.started:
            if not each.task.done():
                await each.stop(3)
        await self.lane.close()


@pytest.fixture
async def emitted() -> AsyncIterator[Emitted]:
    made = Emitted()
    end = events.subscribe(made)
    yield made
    end()
    assert_unseen(made.all)


@pytest.fixture
async def silent_loop() -> AsyncIterator[list[Any]]:
    """Collect asyncio's complaints; a test must end without any."""
    complaints: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    yield complaints
    assert not complaints


@pytest.fixture
async def desk(dsn: str, sql: Any, emitted: Emitted, silent_loop: list[Any]) -> AsyncIterator[Desk]:
    made = Desk(dsn, sql, emitted)
    yield made
    await made.close()


@pytest.fixture
def patient(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long limits on answers, so that a busy machine does not count as an outage."""
    monkeypatch.setattr(store, "CONNECT_TIMEOUT_S", PATIENT_S)
    desk.database.statement_timeout_s = PATIENT_S
    desk.settings["statement_timeout_s"] = PATIENT_S


@pytest.fixture
async def other(dsn: str) -> AsyncIterator[Any]:
    """A second plain connection."""
    connection = await asyncpg.connect(dsn)
    yield connection
    await connection.close()
