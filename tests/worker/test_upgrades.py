"""Migrations are applied while jobs run without an error; the longest stall is printed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest

from taskd import Client
from taskd.core.migration import Migration
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from taskd.store.schema.migrations import all_migrations
from tests.worker.conftest import Desk, until

NEWEST = all_migrations()[-1].number
BACKLOG = 5_000
TROUBLE = ("service.crashed", "claims.delayed", "acks.delayed", "job.retried", "job.failed")

EXPAND = """\
-- A column.
--
-- step: expand
-- works with: >= 1
-- locks: job access exclusive, job_history access exclusive

ALTER TABLE taskd.job ADD COLUMN colour text NOT NULL DEFAULT 'blue';
ALTER TABLE taskd.job_history ADD COLUMN colour text;
"""
INDEX = """\
-- An index of it.
--
-- step: expand
-- works with: >= 1
-- no transaction

CREATE INDEX CONCURRENTLY IF NOT EXISTS job_colour ON taskd.job (colour) WHERE colour <> 'blue';
"""
CONTRACT = f"""\
-- Without it.
--
-- step: contract
-- works with: >= {NEWEST + 1}
-- locks: job access exclusive, job_history access exclusive

ALTER TABLE taskd.job DROP COLUMN colour;
ALTER TABLE taskd.job_history DROP COLUMN colour;
"""


class Load:
    """Repeats an action, and records how long the slowest one took."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self.longest_s = 0.0
        self._began: dict[asyncio.Task[None], float] = {}
        self._stopping = False

    @asynccontextmanager
    async def of(self, **acts: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
        self.counts = dict.fromkeys(acts, 0)
        async with asyncio.TaskGroup() as group:
            for name, act in acts.items():
                group.create_task(self._repeat(name, act), name=name)
            try:
                yield
            finally:
                self._stopping = True

    async def _repeat(self, name: str, act: Callable[[], Awaitable[object]]) -> None:
        while not self._stopping:
            began = time.monotonic()
            await act()
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.counts[name] += 1
            await asyncio.sleep(0.001)

    async def goes_on(self) -> None:
        """Wait until everybody has done some more."""
        before = dict(self.counts)
        await until(
            lambda: all(self.counts[name] > before.get(name, 0) + 5 for name in self.counts)
        )

    def stall_s(self) -> float:
        longest, self.longest_s = self.longest_s, 0.0
        return longest


# A worker's statements, in a form that every version of the schema accepts, as no older code
# exists.
ENQUEUE = "INSERT INTO taskd.job (queue, task, args) VALUES ('q', 't', '{}')"
CLAIM = """
UPDATE taskd.job
SET state = 'running', worker_id = 1, fence = fence + 1, attempt = attempt + 1, started_at = now()
WHERE id IN (SELECT id FROM taskd.job WHERE state = 'queued' AND queue = 'q'
             ORDER BY priority, run_at, id LIMIT 5 FOR UPDATE SKIP LOCKED)
RETURNING id
"""
ACK = """
WITH ended AS (DELETE FROM taskd.job WHERE id = ANY ($1) AND state = 'running' RETURNING *)
INSERT INTO taskd.job_history (id, enqueued_at, run_at, started_at, finished_at, expires_at, fence,
    state, priority, attempt, crashes, interrupts, queue, task, args, errors)
SELECT id, enqueued_at, run_at, started_at, now(), now() + interval '1 day', fence, 'done',
    priority, attempt, crashes, interrupts, queue, task, args, errors
FROM ended
"""


async def test_each_migration_is_applied_under_load(empty_dsn: str) -> None:
    made = enumerate((EXPAND, INDEX, CONTRACT), NEWEST + 1)
    known = (*all_migrations(), *(Migration(n, f"more{n}", text) for n, text in made))
    database = Database({"dsn": empty_dsn})
    await migrations.migrate(database, all_migrations()[:1])
    connections = [await asyncpg.connect(empty_dsn) for _ in range(3)]
    producer, other, worker = connections
    await producer.execute(f"{ENQUEUE[: ENQUEUE.index('VALUES')]} SELECT 'q', 't', '{{}}' "
                           f"FROM generate_series(1, {BACKLOG})")  # fmt: skip

    async def work() -> None:
        ids = [row[0] for row in await worker.fetch(CLAIM)]
        await worker.execute(ACK, ids)

    load = Load()
    async with load.of(
        producer=lambda: producer.execute(ENQUEUE),
        other=lambda: other.execute(ENQUEUE),
        worker=work,
    ):
        for each in known[1:]:
            await load.goes_on()
            usual_s = load.stall_s()
            await migrations.migrate(database, known[: each.number])
            await load.goes_on()
            print(f"{each.label}: {load.stall_s() * 1000:.0f} ms, else {usual_s * 1000:.0f} ms")
    for connection in connections:
        await connection.close()
    entries = await migrations.entries(database)
    assert [each.number for each in entries if each.is_applied] == [each.number for each in known]


async def test_an_expand_and_a_contract_are_applied_while_jobs_run(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    @desk.task()
    async def small(number: int) -> None:
        ran.append(number)

    numbers = iter(range(1_000_000))
    asked: list[int] = []

    async def by_client() -> None:
        await client.enqueue(small.job(number=_next()))

    async def by_sql() -> None:
        await desk.sql.execute(
            "SELECT taskd.enqueue($1, jsonb_build_object('number', $2::int), 'default')",
            small.name, _next(),
        )  # fmt: skip

    def _next() -> int:
        asked.append(next(numbers))
        return asked[-1]

    made = [Migration(NEWEST + n, f"more{n}", text) for n, text in enumerate((EXPAND, INDEX), 1)]
    contract = Migration(NEWEST + 3, "less", CONTRACT)
    old = await desk.start(lease_s=3.0)
    load = Load()
    async with Client(desk.dsn) as client, load.of(client=by_client, sql=by_sql):
        for number, each in enumerate(made, 1):
            await load.goes_on()
            usual_s = load.stall_s()
            known = (*all_migrations(), *made[:number])
            assert await migrations.migrate(desk.database, known) == [each]
            await load.goes_on()
            print(f"{each.name}: {load.stall_s() * 1000:.0f} ms, else {usual_s * 1000:.0f} ms")
        assert not old.task.done()

        # The next release is rolled out; one worker was forgotten.
        known = (*all_migrations(), *made, contract)
        monkeypatch.setattr(migrations, "all_migrations", lambda: known)
        new = await desk.start(lease_s=3.0)
        assert await migrations.migrate(desk.database) == []
        assert not desk.emitted.of("worker.outgrown")
        usual_s = load.stall_s()
        assert await migrations.migrate(desk.database, drain=True) == [contract]
        assert await old.end() == 78
        await load.goes_on()
        print(f"{contract.name}: {load.stall_s() * 1000:.0f} ms, else {usual_s * 1000:.0f} ms")
        assert not new.task.done()
    await until(lambda: len(ran) == len(asked))
    await new.stop()
    assert sorted(ran) == asked
    assert {name: desk.emitted.of(name) for name in TROUBLE if desk.emitted.of(name)} == {}
