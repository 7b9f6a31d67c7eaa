"""Helpers of the store's tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from taskd.core.jobs.job import Job, JobState, NewJob
from taskd.core.outcomes.ack import Ack
from taskd.store import workers
from taskd.store.connections.statements import Fetches
from taskd.store.jobs import jobs

Connect = Callable[..., Awaitable[Any]]

# States as words, for tables of cases.
SCHEDULED, QUEUED, RUNNING = JobState.SCHEDULED, JobState.QUEUED, JobState.RUNNING
DONE, FAILED, CANCELLED = JobState.DONE, JobState.FAILED, JobState.CANCELLED

MAX_CRASHES = 3
PATIENCE_S = 10.0


@asynccontextmanager
async def workers_locked(sql: Any) -> AsyncIterator[None]:
    """Make statements that read taskd.worker, such as enqueues, wait until the block ends."""
    await sql.execute("SELECT setval('taskd.needs', 1)")  # otherwise no statement reads it
    async with sql.transaction():
        await sql.execute("LOCK TABLE taskd.worker IN ACCESS EXCLUSIVE MODE")
        yield


async def held_up(sql: Any, number: int) -> None:
    """Wait until `number` sessions wait for taskd.worker."""
    # Databases that are copies of one template share the oids of their tables.
    query = """
        SELECT count(*) FROM pg_locks
        WHERE NOT granted AND relation = 'taskd.worker'::regclass
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
    """
    async with asyncio.timeout(PATIENCE_S * 3):
        while await sql.fetchval(query) != number:
            await asyncio.sleep(0.005)


def incarnation(
    worker_id: int, host: str = "host", pid: int = 1, name: str | None = None
) -> workers.Incarnation:
    return workers.Incarnation(worker_id, pid, 100, host, "boot", "pid:[1]", "0", "app", name=name)


async def new_worker(
    on: Fetches,
    *,
    lease_s: float = 3600.0,
    host: str = "host",
    queues: Sequence[str] = ("q",),
    tasks: Sequence[str] = ("t",),
    name: str | None = None,
) -> int:
    worker_id = random.getrandbits(63)
    versions = dict.fromkeys(tasks, 1)
    me = incarnation(worker_id, host, name=name)
    await workers.register(on, me, lease_s, queues, versions)
    return worker_id


async def enqueue(on: Fetches, count: int = 1, queue: str = "q", **options: Any) -> list[int]:
    return await jobs.enqueue(
        on, [NewJob(options.pop("task", "t"), queue=queue, **options)] * count
    )


async def running(on: Fetches, worker_id: int, count: int = 1, **options: Any) -> list[Job]:
    """Claim jobs for this worker; return them sorted by id."""
    await enqueue(on, count, **options)
    claimed = await jobs.claim(on, worker_id, options.get("queue", "q"), count)
    assert len(claimed) == count
    return sorted(claimed, key=lambda job: job.id)


async def run_one(on: Fetches, worker_id: int, **options: Any) -> Job:
    return (await running(on, worker_id, **options))[0]


def ack(job: Job, state: JobState, **more: Any) -> Ack:
    return Ack(job.id, job.worker_id, job.fence, state, **more)


async def settle(on: Fetches, job: Job, state: JobState, **more: Any) -> JobState | None:
    """Write one outcome; return the new state, or None if the job was not this worker's."""
    moved = await jobs.ack_outcomes(on, job.worker_id, [ack(job, state, **more)])
    return moved.get(job.id)


async def done(on: Fetches, *several: Job) -> int:
    return await jobs.ack_done(
        on, several[0].worker_id, [job.id for job in several], [job.fence for job in several]
    )


async def fate(on: Fetches, job: Job) -> str:
    return (await jobs.check_acks(on, job.worker_id, [job.id], [job.fence]))[job.id]


async def claim_suspect(
    on: Fetches, worker_id: int, queues: Sequence[str], tasks: Sequence[str], stride: int = 1
) -> Job | None:
    """Claim one suspect; an isolated one if there is no other."""
    slots = dict.fromkeys(queues, 1)
    for isolated in (False, True):
        claimed = await jobs.claim_suspects(
            on, worker_id, slots, tasks, 1, isolated=isolated, stride=stride
        )
        if claimed:
            return claimed[0]
    return None


async def bury(on: Fetches, worker_id: int) -> None:
    assert await workers.declare_dead(on, [worker_id], proved=True)


async def rescue(on: Fetches) -> dict[int, JobState]:
    rescued = await jobs.rescue(on, 1000, MAX_CRASHES, MAX_CRASHES)
    return {job_id: each.state for job_id, each in rescued.items()}


async def take_over(on: Fetches, job: Job) -> None:
    """Declare the job's worker dead, and rescue its jobs."""
    await bury(on, job.worker_id)
    assert job.id in await rescue(on)


async def row(sql: Any, job_id: int) -> Any:
    """Return the job from the view taskd.jobs, and check that it is there once."""
    rows = await sql.fetch("SELECT * FROM taskd.jobs WHERE id = $1", job_id)
    assert len(rows) <= 1, f"job {job_id} is live and finished at once: {rows}"
    return rows[0] if rows else None


async def state_of(sql: Any, job_id: int) -> str | None:
    found = await row(sql, job_id)
    return found and found["state"]


async def due_now(sql: Any, *ids: int) -> None:
    """Change the times of rows instead of the clock."""
    await sql.execute(
        "UPDATE taskd.job SET run_at = now() - interval '1 s' WHERE id = ANY ($1::bigint[])", ids
    )


async def waits_for_lock(sql: Any, connection: Any) -> None:
    """Wait until the connection's statement waits for a lock."""
    async with asyncio.timeout(PATIENCE_S):
        while not await sql.fetchval(
            "SELECT cardinality(pg_blocking_pids($1)) > 0", connection.get_server_pid()
        ):
            await asyncio.sleep(0.002)


async def steps_back(sql: Any, connection: Any) -> None:
    """Wait until the connection's statement could not get a lock, and sleeps before a retry."""
    async with asyncio.timeout(PATIENCE_S):
        while not await sql.fetchval(
            "SELECT wait_event = 'PgSleep' FROM pg_stat_activity WHERE pid = $1",
            connection.get_server_pid(),
        ):
            await asyncio.sleep(0.002)


class Transaction:
    """A transaction on a connection of its own, open until the test commits it."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection

    async def __aenter__(self) -> Any:
        self._open = self.connection.transaction()
        await self._open.start()
        return self

    async def __aexit__(self, *failed: object) -> None:
        if self._open is not None:
            await self.rollback()

    async def commit(self) -> None:
        held, self._open = self._open, None
        await held.commit()

    async def rollback(self) -> None:
        held, self._open = self._open, None
        await held.rollback()


# As databases do whose schema only a deployment may change.
REFUSE_DDL = """
CREATE FUNCTION public.refuse_ddl() RETURNS event_trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'no % outside of a deployment', tg_tag; END $$;
CREATE EVENT TRIGGER refuse_ddl ON ddl_command_start EXECUTE FUNCTION public.refuse_ddl()
"""

# Whether a queue is polled; and its busy mark as a worker writes it, a number of seconds ahead.
MARKED = "SELECT taskd.is_polled($1)"
MARK = """
SELECT setval(
    taskd.busy_mark_sequence($1, 0),
    taskd.busy_mark_until($1, clock_timestamp() + make_interval(secs => $2)) | ($3::bigint & 1023)
)
"""
UNMARK = "SELECT setval(taskd.busy_mark_sequence($1, 0), 0)"
MARK_SEQUENCE = "SELECT taskd.busy_mark_sequence($1, 0)::text"

# A queue without workers is not notified, so this worker serves it.
SERVES = 9001
SERVE = f"""
INSERT INTO taskd.worker (id, lease_until, pid, pid_started, host, boot_id, pid_namespace, version,
                          app, queues, tasks)
VALUES ({SERVES}, now() + interval '1 h', 1, 1, '', '', '', '', '', $1::text[], '{{}}')
ON CONFLICT (id) DO UPDATE SET queues = worker.queues || excluded.queues
"""


class Ears:
    """Listen to channels over a connection; `notifications` grows in the order of the commits."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._end = asyncio.Event()
        self.notifications: list[str] = []

    async def listen(self, *channels: str, serve_by: Any = None) -> None:
        queues = [channel.removeprefix("taskd_") for channel in channels]
        await (serve_by or self._connection).execute(SERVE, queues)
        for channel in channels:
            await self._connection.add_listener(channel, self._add)
        await self._connection.add_listener("the_end", lambda *_: self._end.set())

    def _add(self, _connection: Any, _pid: int, channel: str, payload: str) -> None:
        assert payload == ""
        self.notifications.append(channel)

    async def so_far(self) -> list[str]:
        """Return the notifications; they arrive in order, so a last one ends the list."""
        self._end.clear()
        await self._connection.execute("SELECT pg_notify('the_end', '')")
        async with asyncio.timeout(PATIENCE_S):
            await self._end.wait()
        return self.notifications
