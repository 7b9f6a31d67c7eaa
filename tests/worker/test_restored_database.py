"""After a good start everything about the database that was there and is missing is an outage."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskd.client import open_target
from taskd.config import Settings
from taskd.core.jobs.job import NewJob
from taskd.errors import ConfigError, PermissionDenied, SchemaMissing, StoreUnavailable
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.schema import migrations, roles
from taskd.worker import Worker
from tests.conftest import TestServer
from tests.logins import Logins, as_user
from tests.system.faults.cluster import private
from tests.worker.conftest import Desk, Emitted, Started, until

LEASE_S = 6.0


class Held:
    """A task whose handler runs until it is let go, and a worker that runs it."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.began, self.let_go = asyncio.Event(), asyncio.Event()
        self.runs: list[str] = []

        @desk.task(max_attempts=2)
        async def held() -> None:
            self.began.set()
            await self.let_go.wait()
            self.runs.append("held")

        @desk.task()
        async def quick() -> None:
            self.runs.append("quick")

    async def start(self, **settings: Any) -> Started:
        worker = await self.desk.start(lease_s=LEASE_S, **settings)
        await self.desk.enqueue(NewJob("held", queue="default"))
        await self.began.wait()
        return worker


@pytest.fixture
def held(desk: Desk) -> Held:
    return Held(desk)


@pytest.fixture
async def own(server: TestServer, desk: Desk) -> AsyncIterator[str]:
    """The name of a database that the test can drop; no connection of a fixture is in it."""
    name = await asyncio.to_thread(server.create)
    desk.dsn = server.dsn(name)
    await desk.lane.close()
    desk.lane = Lane(Database({"dsn": desk.dsn}), "desk")
    yield name
    for each in desk.started:
        if not each.task.done():
            await each.stop(3)
    await desk.lane.close()
    await asyncio.to_thread(server.drop, name)


async def run_new(desk: Desk, held: Held) -> None:
    """Enqueue a job as soon as the database takes it; wait until it has run."""

    async def enqueued() -> bool:
        try:
            return bool(await desk.enqueue(NewJob("quick", queue="default")))
        except (StoreUnavailable, ConfigError):
            return False

    before = held.runs.count("quick")
    await until(enqueued)
    await until(lambda: held.runs.count("quick") > before)


async def dropped(admin: Any) -> bool:
    """Drop the schema; the worker's statements lock its tables in other orders."""
    try:
        await admin.execute("DROP SCHEMA taskd CASCADE")
    except asyncpg.DeadlockDetectedError:
        return False
    return True


async def test_a_database_that_is_dropped_and_made_again_is_waited_for(
    server: TestServer, own: str, desk: Desk, held: Held, emitted: Emitted
) -> None:
    worker = await held.start()
    old = worker.worker._lease.worker_id
    await asyncio.to_thread(server.drop, own)
    [event] = await emitted.wait("store.unusable")
    assert f"has no database '{own}'" in event["error"]
    assert "taskd db migrate" in event["remedy"]
    await until(lambda: f"has no database '{own}'" in worker.worker.condition().unready)
    assert own in str(worker.worker.parts.health.missing)
    await asyncio.sleep(LEASE_S)  # longer than a lease is trusted
    assert not emitted.of("worker.fenced")
    admin = await asyncpg.connect(server.admin_dsn)
    await admin.execute(f'CREATE DATABASE "{own}" TEMPLATE template0')
    await admin.close()
    await until(lambda: "no schema taskd" in worker.worker.condition().unready)
    await migrations.migrate(Database({"dsn": desk.dsn}))
    await until(lambda: worker.worker._lease.worker_id != old)
    await run_new(desk, held)
    await emitted.wait("store.back")
    await until(lambda: worker.worker.condition().unready == "")
    assert not emitted.of("service.crashed")
    assert await worker.stop() == 0


async def test_a_schema_that_is_dropped_and_restored_leaves_attempts_and_outcomes_as_they_were(
    own: str, desk: Desk, held: Held, emitted: Emitted
) -> None:
    worker = await held.start()
    admin = await asyncpg.connect(desk.dsn)
    await admin.execute("ALTER SCHEMA taskd RENAME TO aside")
    [event] = await emitted.wait("store.unusable")
    assert "no schema taskd" in event["error"]
    held.let_go.set()  # its outcome waits
    await until(lambda: held.runs == ["held"])
    await asyncio.sleep(LEASE_S)
    await admin.execute("ALTER SCHEMA aside RENAME TO taskd")
    ended = "SELECT state::text, attempt FROM taskd.job_history"

    async def written() -> Any:
        return await admin.fetch(ended)

    [(state, attempt)] = await until(written)
    assert (state, attempt) == ("done", 1)
    await run_new(desk, held)
    assert held.runs == ["held", "quick"]
    assert not emitted.of("service.crashed")
    assert not emitted.of("worker.declared_dead")
    assert await worker.stop() == 0
    await admin.close()


async def test_a_schema_that_is_dropped_and_migrated_again_gets_a_new_worker(
    own: str, desk: Desk, held: Held, emitted: Emitted
) -> None:
    worker = await held.start()
    old = worker.worker._lease.worker_id
    admin = await asyncpg.connect(desk.dsn)
    await until(lambda: dropped(admin))
    await emitted.wait("store.unusable")
    await migrations.migrate(Database({"dsn": desk.dsn}))
    await emitted.wait("worker.declared_dead")
    await until(lambda: worker.worker._lease.worker_id != old)
    await run_new(desk, held)
    assert not emitted.of("service.crashed")
    assert await worker.stop() == 0
    await admin.close()


async def test_parts_of_a_schema_that_come_back_one_by_one_are_waited_for(
    own: str, desk: Desk, held: Held, emitted: Emitted
) -> None:
    worker = await held.start()
    admin = await asyncpg.connect(desk.dsn)
    await admin.execute("CREATE SCHEMA aside")
    await admin.execute("ALTER FUNCTION taskd.notify_workers(text) SET SCHEMA aside")
    await admin.execute("ALTER TABLE taskd.queue SET SCHEMA aside")
    await emitted.wait("store.unusable")
    await admin.execute("ALTER TABLE aside.queue SET SCHEMA taskd")
    await admin.execute("ALTER FUNCTION aside.notify_workers(text) SET SCHEMA taskd")
    held.let_go.set()
    await run_new(desk, held)
    assert not emitted.of("service.crashed")
    assert await worker.stop() == 0
    await admin.close()


async def test_rights_that_are_revoked_and_granted_again_are_waited_for(
    desk: Desk, held: Held, emitted: Emitted, logins: Logins
) -> None:
    desk.dsn = logins.dsn("worker")
    worker = await held.start()
    await desk.sql.execute(f"REVOKE ALL ON taskd.job FROM {logins.role('worker')}")
    [event, *_] = await emitted.wait("store.unusable")
    assert "permission denied for table job" in event["error"]
    await until(lambda: "permission denied" in worker.worker.condition().unready)
    await roles.make(Database({"dsn": logins._owner_dsn}), logins.prefix)
    held.let_go.set()
    await run_new(desk, held)
    assert not emitted.of("service.crashed")
    assert await worker.stop() == 0


async def test_a_password_that_is_rotated_is_read_from_the_dsn_file_at_the_next_connect(
    desk: Desk, held: Held, emitted: Emitted, tmp_path: Path
) -> None:
    file = tmp_path / "dsn"
    async with private() as cluster:
        shop = cluster.tcp_dsn().replace("taskd@", "shop:{}@")
        await migrations.migrate(Database({"dsn": cluster.dsn()}))
        await cluster.ask("CREATE ROLE shop LOGIN SUPERUSER PASSWORD 'one'")
        (cluster.data / "pg_hba.conf").write_text(
            "local all all trust\nhost all shop all scram-sha-256\n"
        )
        await cluster.ask("SELECT pg_reload_conf()")
        file.write_text(shop.format("one"))
        settings = Settings(dsn=shop.format("one"), dsn_file=file, lease_s=LEASE_S)
        target = await open_target(settings)
        worker = await Started(Worker(settings, desk.registry, target.database)).ready()
        desk.started.append(worker)
        lane = Lane(Database({"dsn": cluster.dsn()}), "desk")
        await cluster.ask("ALTER ROLE shop PASSWORD 'two'")
        await cluster.ask(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'shop'"
        )
        [event] = await emitted.wait("store.unusable")
        assert "refuses the login: password authentication failed" in event["error"]
        assert "change the user's password" in event["remedy"]
        await until(lambda: "password authentication" in worker.worker.condition().unready)
        file.write_text(shop.format("two"))
        await lane.fetch("enqueue_usual_job", "quick", "default", "{}", 100)
        await until(lambda: held.runs == ["quick"])
        assert not emitted.of("service.crashed")
        assert await worker.stop() == 0
        await lane.close()


@pytest.mark.parametrize("what", ["database", "schema", "login"])
async def test_at_the_first_start_each_of_these_is_an_error(
    server: TestServer, own: str, desk: Desk, held: Held, what: str
) -> None:
    kind, words = {
        "database": (ConfigError, "has no database 'taskd_nowhere'"),
        "schema": (SchemaMissing, "no schema taskd"),
        "login": (PermissionDenied, "refuses the login"),
    }[what]
    if what == "schema":
        admin = await asyncpg.connect(desk.dsn)
        await admin.execute("DROP SCHEMA taskd CASCADE")
        await admin.close()
    elif what == "database":
        desk.dsn = server.dsn("taskd_nowhere")
    else:
        desk.dsn = as_user(desk.dsn, "taskd_nobody")
    with pytest.raises(kind, match=words) as raised:
        await desk.start()
    assert not isinstance(raised.value, StoreUnavailable)
