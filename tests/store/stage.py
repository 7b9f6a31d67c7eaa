"""The database of the machine (machine.py): read as a whole, saved, and restored."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Self

import asyncpg

from taskd.core.jobs.limit import Limit
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import workers
from taskd.store.jobs import limits
from taskd.store.reading import reports
from taskd.worker.assembly import PLANS
from tests.planted_bugs import Bug, FunctionBug, Hand

QUEUES = ["a", "b"]
# A task without a limit, and one whose jobs have one, by their tenant.
FREE, LIMITED = "t", "lim"
CONCURRENCY = 2
TABLES = (
    "job", "job_history", "job_key", "workflow", "dependency", "queue", "task", "worker",
    "job_limit", "bucket", "opening", "job_log",
)  # fmt: skip
SEQUENCES = {"job": "taskd.job_id_seq", "workflow": "taskd.workflow_id_seq"}

# Where rows that tie are found in the order of their places, an autovacuum between two plays of the
# same steps would make them differ, and hypothesis could neither repeat a play nor shrink it.
NOBODY_ELSE_MOVES_ROWS = """
DO $$ DECLARE each regclass; BEGIN
FOR each IN SELECT oid FROM pg_class
            WHERE relkind = 'r'
              AND relnamespace::regnamespace::text IN ('taskd', 'base', 'backup')
LOOP EXECUTE format('ALTER TABLE %s SET (autovacuum_enabled = off)', each); END LOOP;
END $$
"""

SEE = """
SELECT id, queue::text, task::text, state::text, priority, run_at::timestamptz, attempt,
       max_attempts::smallint, crashes, interrupts, fence, worker_id AS worker, version,
       unique_key::text, limit_key, workflow_id IS NOT NULL AS workflow, key_scope::text AS scope,
       CASE WHEN errors -> -1 ->> 'type' = 'WorkerLost'
            THEN (errors -> -1 ->> 'worker')::bigint END AS lost_by,
       NULL AS reason, run_at <= clock_timestamp() AS due, gate::text, waits_for, parked, isolated,
       cancel_reason AS cancel, deadline < clock_timestamp() AS over,
       (follower ->> 'version')::bigint AS follows
FROM taskd.job
UNION ALL
SELECT id, queue, task, state::text, priority, run_at, attempt, max_attempts, crashes, interrupts,
       fence, worker_id, version, unique_key, limit_key, workflow_id IS NOT NULL, key_scope::text,
       CASE WHEN errors -> -1 ->> 'type' = 'WorkerLost'
            THEN (errors -> -1 ->> 'worker')::bigint END,
       reason, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
FROM taskd.job_history
"""


async def _handler(tenant: str = "main") -> None:
    """Never called."""


class Stage:
    """One migrated database, one connection, and copies of all tables. Blocking: it has a loop."""

    def __init__(
        self, dsn: str, bugs: Sequence[Bug] = (), function_bugs: Sequence[FunctionBug] = ()
    ) -> None:
        self._texts = {bug.statement: bug.text() for bug in bugs}
        self._function_bugs = function_bugs
        self._loop = asyncio.new_event_loop()
        self._dsn = dsn
        self._columns: dict[str, str] = {}

    def __enter__(self) -> Self:
        self.run(self._open())
        return self

    def __exit__(self, *failed: object) -> None:
        self.run(self.connection.close())
        self._loop.close()

    def run(self, step: Coroutine[Any, Any, Any]) -> Any:
        """What it returns."""
        return self._loop.run_until_complete(step)

    async def _open(self) -> None:
        # A plan against PLANS costs so much, before PostgreSQL 18, that JIT takes a second for it.
        self.connection = await asyncpg.connect(
            self._dsn, server_settings=PLANS | {"jit": "off"}, command_timeout=60.0
        )
        self.hand = Hand(self.connection, self._texts)
        for bug in self._function_bugs:
            await bug.plant(self.connection)
        registry = Registry()
        limit = Limit(concurrency=CONCURRENCY, by="tenant")
        registry.add(Task(_handler, name=FREE, queue=QUEUES[0]))
        registry.add(Task(_handler, name=LIMITED, queue=QUEUES[0], limit=limit))
        await workers.publish(self.hand, "app", registry, QUEUES)
        await limits.publish(self.hand, "app", registry)
        await limits.admit(self.hand, 100)
        await reports.keep_queue(self.hand, QUEUES[1], 0, None)
        for copy in ("base", "backup"):
            await self.connection.execute(f"CREATE SCHEMA {copy}")
            for table in TABLES:
                await self.connection.execute(
                    f"CREATE UNLOGGED TABLE {copy}.{table} AS TABLE taskd.{table} WITH NO DATA"
                )
            await self.connection.execute(
                f"CREATE UNLOGGED TABLE {copy}.sequences (name text, last bigint)"
            )
        await self.connection.execute(NOBODY_ELSE_MOVES_ROWS)
        for table in TABLES:
            self._columns[table] = await self.connection.fetchval(
                "SELECT string_agg(attname, ', ' ORDER BY attnum) FROM pg_attribute "
                "WHERE attrelid = $1::regclass AND attnum > 0 AND attgenerated = '' "
                "AND NOT attisdropped",
                f"taskd.{table}",
            )
        await self.remember("base")

    async def remember(self, copy: str) -> None:
        """Copy all rows, and the state of the sequences."""
        await self.connection.execute(
            "BEGIN;"
            + "".join(
                f"DELETE FROM {copy}.{t}; INSERT INTO {copy}.{t} ({c}) SELECT {c} FROM taskd.{t};"
                for t, c in self._columns.items()
            )
            + f"DELETE FROM {copy}.sequences;"
            + "".join(
                f"INSERT INTO {copy}.sequences "
                f"SELECT '{s}', last_value + is_called::integer FROM {s};"
                for s in SEQUENCES.values()
            )
            + "COMMIT"
        )

    async def put_back(self, copy: str) -> None:
        """Restore all rows and sequences."""
        all_tables = ", ".join(f"taskd.{table}" for table in TABLES)
        await self.connection.execute(
            f"BEGIN; TRUNCATE {all_tables};"
            + "".join(
                f"INSERT INTO taskd.{t} ({c}) "
                f"{'OVERRIDING SYSTEM VALUE' if t in SEQUENCES else ''} SELECT {c} FROM {copy}.{t};"
                for t, c in self._columns.items()
            )
            + f"SELECT setval(name::regclass, last, false) FROM {copy}.sequences; COMMIT"
        )

    async def see(self) -> dict[int, dict[str, Any]]:
        """Return all jobs, live and finished, and check that each is there once."""
        rows = await self.connection.fetch(SEE)
        seen = {row["id"]: dict(row) for row in rows}
        assert len(seen) == len(rows), "a job is live and finished at once, or twice"
        return seen

    async def sql(self, text: str, *args: Any) -> Any:
        return await self.connection.fetch(text, *args)
