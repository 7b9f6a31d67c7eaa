"""The engine under the rights of its roles: workers and producers that are nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import asyncpg
import psycopg
import pytest

from taskd import Cancel, Client, Context, Fail, Retry, Snooze
from taskd.core.jobs.job import NewJob
from taskd.errors import PermissionDenied
from taskd.store.jobs import jobs
from tests.logins import Logins
from tests.worker.conftest import Desk, until


@pytest.fixture
async def office(desk: Desk, logins: Logins) -> Desk:
    """A desk whose workers log in as a member of taskd_worker; its own connection is unchanged."""
    desk.dsn = logins.dsn("worker")
    return desk


@pytest.fixture
async def producer(logins: Logins) -> AsyncIterator[Client]:
    async with Client(logins.dsn("producer")) as made:
        yield made


def well(desk: Desk) -> None:
    """Nothing that the worker does beside its jobs was refused."""
    for name in (
        "service.crashed",
        "upkeep.failed",
        "upkeep.postponed",
        "acks.delayed",
        "listener.lost",
    ):
        assert desk.emitted.of(name) == [], name


async def test_jobs_of_every_way_to_enqueue_run(
    office: Desk, producer: Client, logins: Logins
) -> None:
    @office.task()
    async def greet(name: str) -> str:
        return name

    await office.start(queues=("default",))
    ids = [
        await producer.enqueue(greet.job(name="ada")),
        await producer.enqueue_named("greet", {"name": "ada"}),
        *await producer.enqueue_many(greet.job(name=str(n)) for n in range(3)),
        await producer.enqueue(greet.job(name="later").after(0.2)),
    ]
    ids.append(await asyncio.to_thread(producer.enqueue_named_sync, "greet", {"name": "ada"}))
    connection = await asyncpg.connect(logins.dsn("producer"))
    async with connection.transaction():
        ids.append(await producer.enqueue(greet.job(name="ada"), conn=connection))
        ids.append(
            await connection.fetchval("""SELECT taskd.enqueue('greet', '{"name": "sql"}')""")
        )
    await connection.close()

    def blocking() -> int:
        with psycopg.connect(logins.dsn("producer")) as conn:
            return producer.enqueue_sync(greet.job(name="ada"), conn=conn)

    ids.append(await asyncio.to_thread(blocking))
    rows = await office.settled(*ids)
    assert len(rows) == 10
    assert {row["state"] for row in rows} == {"done"}
    well(office)


async def test_every_outcome_can_be_written(office: Desk, producer: Client, logins: Logins) -> None:
    @office.task()
    async def ends(ctx: Context, how: str) -> None:
        if how == "complete":
            connection = await asyncpg.connect(logins.dsn("worker"))
            async with connection.transaction():
                await ctx.complete(connection)
            await connection.close()
        elif how != "done" and ctx.attempt == 1:
            raise {"retry": Retry(0.01), "fail": Fail("no"), "cancel": Cancel("no")}[how]

    @office.task()
    async def snoozes(ctx: Context) -> None:
        if not office.emitted.of("job.snoozed"):
            raise Snooze(0.01)

    @office.task()
    async def waits() -> None:
        await asyncio.sleep(60)

    await office.start(queues=("default",))
    kinds = ("done", "complete", "retry", "fail", "cancel")
    ids = await producer.enqueue_many([*(ends.job(how=how) for how in kinds), snoozes.job()])
    rows = await office.settled(*ids)
    assert [row["state"] for row in rows] == ["done", "done", "done", "failed", "cancelled", "done"]
    # A job that is cancelled while it runs, and jobs that are released at the end.
    cancelled, released = await producer.enqueue_many([waits.job(), waits.job()])
    await office.state(cancelled, "running")
    await office.state(released, "running")
    await jobs.cancel(office.lane, [cancelled], "by hand")
    await office.settled(cancelled)
    await office.started[0].stop(2)
    assert (await office.row(released))["state"] == "queued"
    died = "SELECT count(*) FROM taskd.worker WHERE died_at IS NOT NULL"
    assert await office.sql.fetchval(died) == 1
    well(office)


async def test_a_dead_workers_jobs_are_rescued_and_run_in_quarantine(
    office: Desk, producer: Client
) -> None:
    @office.task()
    async def work() -> None: ...

    job_id = await producer.enqueue(work.job())
    await office.other_worker(7, pid=2**22 + 1)
    [job] = await jobs.claim(office.lane, 7, "default", 1)
    assert job.id == job_id
    await office.start(queues=("default",))
    [row] = await office.settled(job_id)
    assert (row["state"], row["crashes"]) == ("done", 1)
    well(office)


async def test_upkeep_of_the_history_is_done_by_functions(office: Desk, logins: Logins) -> None:
    @office.task()
    async def work() -> None: ...

    await office.sql.execute(
        "CREATE TABLE taskd.job_history_20010101 (LIKE taskd.job_history INCLUDING ALL);"
        f"ALTER TABLE taskd.job_history_20010101 OWNER TO {logins.role('owner')};"
        "ALTER TABLE taskd.job_history ATTACH PARTITION taskd.job_history_20010101 "
        "FOR VALUES FROM ('2001-01-01') TO ('2001-01-02');"
        "INSERT INTO taskd.worker (id, lease_until, died_at, pid, pid_started, host, boot_id, "
        "pid_namespace, version, app, queues, tasks) "
        "VALUES (1, now(), '2001-01-01', 1, 1, '', '', '', '', '', '{}', '{}')"
    )
    await office.start(queues=("default",))
    await office.emitted.wait("partition.dropped", partition="job_history_20010101")

    async def forgotten() -> bool:
        return not await office.sql.fetchval("SELECT count(*) FROM taskd.worker WHERE id = 1")

    await until(forgotten)
    well(office)


async def test_a_handler_that_enqueues_needs_to_be_a_producer_too(
    office: Desk, logins: Logins
) -> None:
    @office.task(max_attempts=1)
    async def enqueues() -> None:
        async with Client(logins.dsn("worker")) as client:
            await client.enqueue(NewJob("enqueues", queue="other"))

    await office.start(queues=("default",))
    [job_id] = await office.enqueue(enqueues.job())
    [row] = await office.settled(job_id)
    assert "needs a member of taskd_producer" in row["reason"]


@pytest.mark.parametrize("kind", ["producer", "observer", "admin"])
async def test_a_worker_without_its_role_does_not_start_and_says_what_it_needs(
    desk: Desk, logins: Logins, kind: str
) -> None:
    @desk.task()
    async def work() -> None: ...

    desk.dsn = logins.dsn(kind)
    with pytest.raises(PermissionDenied, match="needs a member of taskd_worker"):
        await desk.start(queues=("default",))
