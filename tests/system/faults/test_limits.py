"""The server is there and has no room: for connections, for a lock, on its disk."""

from __future__ import annotations

import asyncio
import re
import time
from contextlib import suppress

import asyncpg
import pytest

from taskd import config
from taskd.embedded.binaries import find_binaries
from tests.system.faults import app
from tests.system.faults.cluster import Cluster, private
from tests.system.faults.disk import ClusterOnDisk, stuffed
from tests.system.faults.fixture import Outcome, Scene, scene

# A role that is no superuser: superusers keep their reserved connections.
ROLE = """
CREATE ROLE app LOGIN;
GRANT USAGE ON SCHEMA taskd TO app;
GRANT ALL ON ALL TABLES IN SCHEMA taskd TO app;
GRANT ALL ON ALL SEQUENCES IN SCHEMA taskd TO app;
GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA taskd TO app
"""
LOCK = "LOCK TABLE taskd.job IN ACCESS EXCLUSIVE MODE"
MAJOR = find_binaries(config.load().settings).major


async def connections(workers: int = 5, away_s: float = 10.0) -> Outcome:
    """No connection left: for workers that start, and for workers that lost theirs."""
    most = 30 + 8 * workers
    settings = {"max_connections": str(most), "log_connections": "on"}
    async with private(settings) as cluster:
        dsn = cluster.dsn().replace("taskd@", "app@")
        async with scene(cluster.dsn(), worker_dsn=dsn) as made:
            for statement in ROLE.strip().split(";"):
                await cluster.ask(statement)
            hogs = await _hog(dsn)
            for _ in range(workers):
                await made.worker(ready=False)
            for worker in made.workers:
                await worker.wait_for("connections.none")
            for hog in hogs:
                await hog.close()
            room = time.monotonic()
            for worker in made.workers:
                await worker.wait_for("worker.ready")
            made.figures["all_ready_s"] = time.monotonic() - room
            made.feed(200)
            await made.ended(200)
            await _lose_connections(made, cluster, away_s)
            return await made.finish("connections")


async def _hog(dsn: str) -> list[asyncpg.Connection]:
    """Take every connection that there is."""
    taken = []
    with suppress(asyncpg.TooManyConnectionsError):
        while True:
            taken.append(
                await asyncpg.connect(dsn, server_settings={"application_name": "judge hog"})
            )
    return taken


async def _lose_connections(made: Scene, cluster: Cluster, away_s: float) -> None:
    """End every session of the workers, refuse new ones for a while, and count the attempts."""
    await cluster.ask("ALTER ROLE app CONNECTION LIMIT 0")
    knocked = _knocks(cluster)
    await cluster.ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'app'"
    )
    began = time.monotonic()
    for worker in made.workers:
        await worker.wait_for("listener.lost")
    await asyncio.sleep(max(0.0, away_s - (time.monotonic() - began)))
    made.figures["knocks_per_s"] = (_knocks(cluster) - knocked) / (time.monotonic() - began)
    await cluster.ask("ALTER ROLE app CONNECTION LIMIT -1")
    made.figures["first_claim_s"] = await made.first_claim_after(time.time())
    made.figures["declared_dead"] = len(made.events("workers.declared_dead"))


def _knocks(cluster: Cluster) -> int:
    # A refused client has sent its name by then.
    log = (cluster.home / "log").read_text(errors="replace")
    return len(re.findall("too many connections for role", log))


async def lock(seconds: float = 5.0, before: int = 1500) -> Outcome:
    """Lock the table of the jobs under load, as a careless ALTER TABLE does."""
    async with private() as cluster, scene(cluster.dsn()) as made:
        for _ in range(2):
            await made.worker()
        made.feed(300)
        await made.ended(before)
        since = time.time()
        holder = await asyncpg.connect(
            cluster.dsn(), server_settings={"application_name": "judge lock"}
        )
        async with holder.transaction():
            await holder.execute(LOCK)
            locked = time.time()
            await asyncio.sleep(seconds)
        released = time.time()
        await holder.close()
        made.figures["locked_after_s"] = locked - since
        made.figures["first_claim_s"] = await made.first_claim_after(released)
        await made.ended(before // 2)
        made.figures["full_speed_s"] = await _full_speed_after(made, locked, released)
        for event in (
            "workers.declared_dead",
            "worker.declared_dead",
            "worker.fenced",
            "service.crashed",
        ):
            made.figures[event] = len(made.events(event))
        outcome = await made.finish("lock")
        outcome.figures["repeated_runs"] = outcome.verdict.figures.repeated
        return outcome


async def _full_speed_after(made: Scene, locked: float, released: float) -> float:
    """From the release until a quarter second saw as many ends as one did before on average."""
    return float(
        await made.ask(
            """
            WITH ended AS (
                SELECT date_part('epoch', at) AS at FROM judge.event WHERE kind = 'kept'
            ), before AS (
                SELECT count(*) / 8.0 AS mean FROM ended WHERE at > $1 - 2 AND at <= $1
            ), since AS (
                SELECT floor((at - $2) * 4) AS quarter, count(*) AS ends
                FROM ended WHERE at > $2 GROUP BY 1
            )
            SELECT coalesce(min(quarter) / 4 + 0.25, 999)::double precision
            FROM since, before WHERE ends >= mean
            """,
            locked,
            released,
        )
    )


async def disk_full(full_s: float = 10.0, *, wal: bool = False) -> Outcome:
    """No room on the disk of the data; with `wal`, none for the log either, which stops the server.

    Acks are kept meanwhile. A server that has stopped is started again when there is room.
    """
    async with ClusterOnDisk(wal=wal) as (cluster, place), scene(cluster.dsn()) as made:
        worker = await made.worker()
        made.feed(200)
        gate = made.home / "gate"
        await made.running(await made.enqueue([app.holds.job(gate=str(gate))] * 15))
        await made.ended(200)
        async with stuffed(place / "filler"):
            async with asyncio.timeout(30):
                while made.refused < 5:
                    await asyncio.sleep(0.02)
            if wal:
                await _use_up_the_log(cluster)
            gate.touch()
            await worker.wait_for("acks.delayed", within_s=30)
            await asyncio.sleep(full_s)
            made.figures["alive"] = worker.process.returncode is None
        made.figures["server_stopped"] = not cluster.runs
        if wal:
            # Most often it has ended by itself: its recovery, too, has found no room. But now and
            # then PostgreSQL 18 loses the process that recovers and stays there without it, for
            # ever "not yet accepting connections". Whoever is on call starts it again either way.
            await cluster.stop()
            await cluster.start()
        room = time.time()
        made.figures["first_claim_s"] = await made.first_claim_after(room)
        made.figures["store_back_s"] = [line["outage_s"] for line in worker.events("store.back")]
        made.figures["service.crashed"] = len(worker.events("service.crashed"))
        outcome = await made.finish("disk_full_wal" if wal else "disk_full")
        outcome.figures["repeated_runs"] = outcome.verdict.figures.repeated
        return outcome


async def _use_up_the_log(cluster: Cluster) -> None:
    """Write what needs no page of a table until the server cannot make a new segment of its log."""
    with suppress(OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        while True:
            await cluster.ask("SELECT pg_logical_emit_message(true, 'judge', repeat('x', 4000000))")


async def test_without_room_for_connections_workers_wait_and_say_so() -> None:
    outcome = await connections(workers=2, away_s=2.0)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["declared_dead"] == 0


async def test_a_locked_table_costs_time_and_nothing_else() -> None:
    outcome = await lock(seconds=3.0, before=300)
    print(outcome)
    outcome.verdict.require()
    events = ("workers.declared_dead", "worker.declared_dead", "worker.fenced", "service.crashed")
    assert [outcome.figures[event] for event in events] == [0] * 4
    assert outcome.figures["repeated_runs"] == 0


async def test_a_full_disk_keeps_acks_waiting() -> None:
    outcome = await disk_full(full_s=1.0)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["alive"]
    assert not outcome.figures["server_stopped"]
    assert outcome.figures["service.crashed"] == outcome.figures["repeated_runs"] == 0


async def test_a_server_that_stopped_for_want_of_room_is_an_outage() -> None:
    outcome = await disk_full(full_s=2.0, wal=True)
    print(outcome)
    outcome.verdict.require()
    assert outcome.figures["alive"]
    assert outcome.figures["service.crashed"] == outcome.figures["repeated_runs"] == 0


@pytest.mark.skipif(MAJOR < 17, reason="before PostgreSQL 17 the queue of notifications has 8 GB")
async def test_a_full_queue_of_notifications_refuses_no_job_and_no_outcome() -> None:
    async with private({"max_notify_queue_pages": "64"}) as cluster, scene(cluster.dsn()) as made:
        await made.worker()
        hog, filler = [await asyncpg.connect(cluster.dsn()) for _ in range(2)]
        await hog.execute("LISTEN hog")
        await hog.execute("BEGIN")
        with pytest.raises(asyncpg.ProgramLimitExceededError):
            while True:
                await filler.execute("SELECT pg_notify('hog', repeat('x', 7000) || random())")
        made.feed(200)
        await made.ended(100)
        assert await filler.fetchval("SELECT pg_notification_queue_usage()") > 0.9
        await hog.execute("ROLLBACK")
        await hog.close()
        await filler.close()
        (await made.finish("notify_full")).verdict.require()
