"""PgBouncer in transaction mode between worker and server: a session lasts for a transaction."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

from taskd import Client, Fixed, task
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.embedded.data_directory import choose_runner
from taskd.handlers import TransactionContext
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from taskd.worker import Worker
from taskd.worker.assembly import PLANS
from tests.system.faults import app
from tests.system.faults.cluster import Cluster, free_port, private
from tests.system.faults.fixture import Outcome, Scene, scene

REFUSES_NOTHING = (
    "statement_timeout,lock_timeout,idle_in_transaction_session_timeout,jit,client_min_messages,"
    "default_transaction_isolation,enable_hashjoin,enable_mergejoin,enable_seqscan,enable_bitmapscan"
)
INI = """
[databases]
taskd = host={host} port={db_port} dbname=taskd user=taskd
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = 5
max_client_conn = 200
ignore_startup_parameters = {ignored}
logfile = {home}/pgbouncer.log
"""


@asynccontextmanager
async def bouncer(cluster: Cluster, *, ignored: str = "") -> AsyncIterator[str]:
    """The DSN of a pooler before a cluster."""
    program = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
    if program is None:
        pytest.skip("pgbouncer is not installed")
    port, ini = free_port(), cluster.home / "pgbouncer.ini"
    ini.write_text(
        INI.format(
            host=cluster.home, db_port=cluster.port, port=port, home=cluster.home, ignored=ignored
        )
    )
    runner = choose_runner(cluster.home)
    process = await asyncio.create_subprocess_exec(
        *runner.prefix, program, str(ini),
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        **({"user": runner.uid} if runner.uid is not None else {}),
    )  # fmt: skip
    dsn = cluster.tcp_dsn(port)
    try:
        async with asyncio.timeout(20):
            while not await _answers(dsn):
                assert process.returncode is None, (cluster.home / "pgbouncer.log").read_text()
                await asyncio.sleep(0.05)
        yield dsn
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _answers(dsn: str) -> bool:
    try:
        connection = await asyncpg.connect(dsn, timeout=2, statement_cache_size=0)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return False
    await connection.close()
    return True


async def drained_per_s(made: Scene, count: int) -> float:
    """Enqueue at once, let one worker work it off; jobs per second, judge and all."""
    before = await made.ask("SELECT max(seq) FROM judge.event")
    for at in range(0, count, 500):
        await made.enqueue([app.instant.job()] * min(500, count - at))
    ids = made.confirmed[-count:]
    took = "SELECT date_part('epoch', max(at) - min(at)) FROM judge.event WHERE seq > $1 AND "

    async def all_ended() -> bool:
        return bool(
            await made.ask(
                "SELECT count(*) = $2 FROM judge.event WHERE kind = 'kept' AND job = ANY ($1)",
                ids, count,
            )
        )  # fmt: skip

    await made.until(all_ended, "the burst has ended")
    seconds = await made.ask(took + "job = ANY ($2) AND kind <> 'born'", before or 0, ids)
    return count / float(seconds)


async def start_latency_s(made: Scene, times: int = 5) -> list[float]:
    """From a confirmed enqueue to the start of the handler, on an idle worker."""
    found = []
    for _ in range(times):
        [job] = await made.enqueue([app.instant.job()])
        enqueued_at = time.time()
        await made.running([job])
        [started] = [row[0] for row in made.records() if row[1] == job and row[5] == "start"]
        found.append(started - enqueued_at)
    return found


async def pooler(
    *, listens: bool = False, ignored: str = "", burst: int = 5000, load: int = 500, looks: int = 5
) -> Outcome:
    """A worker through the pooler; with `listens`, its LISTEN goes to the server directly."""
    async with private() as cluster, bouncer(cluster, ignored=ignored) as dsn:
        settings = {"listen_dsn": cluster.dsn()} if listens else {}
        async with scene(cluster.dsn(), worker_dsn=dsn, **settings) as made:
            worker = await made.worker()
            made.figures["jobs_per_s"] = round(await drained_per_s(made, burst))
            made.figures["start_latency_s"] = await start_latency_s(made, looks)
            made.feed(300)
            await made.worker()
            await made.ended(load)
            made.figures["pooled_events"] = len(made.events("store.pooled")) == 2
            made.figures["polling_events"] = len(made.events("listeners.none"))
            made.figures["crashes"] = len(made.events("service.crashed"))
            connected = worker.events("listener.connected")
            made.figures["listening"] = sorted({each["queues"][0] for each in connected})

            async def leave() -> None:
                # The pooler keeps its sessions under the names of their last clients.
                await cluster.ask(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE application_name LIKE 'taskd %'"
                )

            made.leaving.append(leave)
            name = "pooler" + ("_listen_dsn" if listens else "") + ("_ignoring" if ignored else "")
            return await made.finish(name)


async def direct(burst: int = 5000, looks: int = 5) -> Outcome:
    """The same without a pooler, to compare with."""
    async with private() as cluster, scene(cluster.dsn(), worker_dsn=cluster.tcp_dsn()) as made:
        await made.worker()
        made.figures["jobs_per_s"] = round(await drained_per_s(made, burst))
        made.figures["start_latency_s"] = await start_latency_s(made, looks)
        return await made.finish("direct")


async def test_a_worker_works_through_a_pooler_that_refuses_settings() -> None:
    outcome = await pooler(burst=500, load=100, looks=1)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["pooled_events"]
    assert outcome.figures["polling_events"] == 2
    assert outcome.figures["crashes"] == 0
    assert outcome.figures["listening"] == []


async def test_a_direct_listen_dsn_notifies_behind_a_pooler() -> None:
    outcome = await pooler(listens=True, burst=500, load=100, looks=3)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["pooled_events"]
    assert outcome.figures["listening"] == ["fast", "mixed"]
    assert outcome.figures["polling_events"] == 0
    assert outcome.figures["crashes"] == 0


async def test_a_pooler_that_swallows_settings_is_found_all_the_same() -> None:
    outcome = await pooler(ignored=REFUSES_NOTHING, burst=500, load=100, looks=1)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["pooled_events"]
    assert outcome.figures["crashes"] == 0


async def test_what_a_session_would_remember_goes_with_each_statement() -> None:
    wanted = {**PLANS, "statement_timeout": "1500ms", "lock_timeout": "600ms", "jit": "off"}
    names = ", ".join(f"current_setting('{name}')" for name in wanted)
    async with private() as cluster, bouncer(cluster) as dsn:
        database = Database({"dsn": dsn}, statement_timeout_s=1.5)
        async with database.connection("test", **PLANS) as connection:
            assert database.pooled
            [row] = await database._run_pooled(connection, f"SELECT {names}", (), PLANS)
            assert tuple(row) == tuple(wanted.values())
            with pytest.raises(asyncpg.DivisionByZeroError):
                await database._run_pooled(connection, "SELECT 1 / 0", (), PLANS)
            # Nothing stays behind: neither a transaction nor a setting.
            assert not connection.is_in_transaction()
            assert await connection.fetchval("SHOW enable_seqscan") == "on"


async def test_migrations_run_once_through_a_pooler() -> None:
    async with private() as cluster, bouncer(cluster) as dsn:
        ran = await asyncio.gather(*(migrations.migrate(Database({"dsn": dsn})) for _ in range(4)))
        applied = sorted(each.number for those in ran for each in those)
        assert applied == [each.number for each in migrations.all_migrations()]
        await migrations.check(Database({"dsn": dsn}))
        assert not await cluster.ask("SELECT 1 FROM pg_locks WHERE locktype = 'advisory'")


async def test_transactions_of_handlers_commit_with_their_jobs_through_a_pooler() -> None:
    registry, backends = Registry(), set[int]()

    @task(registry=registry, transaction=True, backoff=Fixed(0.01))
    async def books(ctx: TransactionContext, n: int) -> None:
        backends.add(await ctx.conn.fetchval("SELECT pg_backend_pid()"))
        await ctx.conn.execute("INSERT INTO public.ledger VALUES ($1)", n)
        if n % 5 == 0 and ctx.attempt == 1:
            raise ValueError("rolled back")

    async with private() as cluster, bouncer(cluster) as dsn:
        await migrations.migrate(Database({"dsn": cluster.dsn()}))
        await cluster.ask("CREATE TABLE public.ledger (n int)")
        async with Client(cluster.dsn()) as client:
            await client.enqueue_many(books.job(n) for n in range(50))
        settings = Settings(dsn=dsn, transaction_connections=8)
        worker = Worker(settings, registry, Database({"dsn": dsn}), until_empty=True)
        assert await worker.run() == 0
        assert worker.report.jobs["done"] == 50
        rows = await cluster.ask("SELECT n FROM public.ledger ORDER BY n")
        assert [row[0] for row in rows] == [*range(50)]
        # More than the pooler has sessions: no attempt had one of its own.
        assert len(backends) <= 5
