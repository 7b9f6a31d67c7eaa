"""Start, join, leave, linger, keep, stop."""

import asyncio
import gc
import os
import subprocess
import sys
import threading

import asyncpg
import psycopg
import pytest
from embedded_helpers import FAST, gone, processes, until

from taskd import embedded
from taskd.config import Settings
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from tests.processes import children


async def ask(server, sql="select current_database()"):
    connection = await asyncpg.connect(**server.connect_args())
    try:
        return await connection.fetchval(sql)
    finally:
        await connection.close()


async def test_first_start_restart_join_leave(empty):
    first = embedded.start(empty, **FAST)
    assert first.started
    assert await ask(first) == "taskd"
    joined = embedded.start(empty, **FAST)
    assert not joined.started
    assert joined == embedded.Server(empty, first.host, 5432, "taskd", first.major, False, None)
    first.close()
    assert await ask(joined, "select current_user::text") == "taskd"
    joined.close()
    until(lambda: gone(empty))
    again = embedded.start(empty, **FAST)
    assert again.started
    assert await ask(again) == "taskd"
    again.close(wait_s=10)
    assert gone(empty)
    assert not (empty / "data.new").exists()


async def test_a_table_of_a_user_is_created_in_the_schema_public(start):
    server = start()
    await migrations.migrate(Database(server.connect_args()))
    await ask(server, "CREATE TABLE customer (id integer)")
    schema = "SELECT schemaname::text FROM pg_tables WHERE tablename = 'customer'"
    assert await ask(server, schema) == "public"


@pytest.mark.parametrize("count", [2, 5])
def test_many_at_once_make_one_server(empty, users, tmp_path, count):
    many = []
    for i in range(count):
        (tmp_path / f"tmp{i}").mkdir()
        odd = {"TMPDIR": str(tmp_path / f"tmp{i}"), "PGPORT": str(7000 + i), "LC_ALL": f"xx_{i}"}
        many.append(users(empty, env=odd))
    assert sorted(u.hello["started"] for u in many) == [False] * (count - 1) + [True]
    assert {u.hello["host"] for u in many} == {str(empty)}
    assert [u.ask("query") for u in many] == [{"answer": "taskd"}] * count
    for user in many:
        user.end()
    until(lambda: gone(empty))


@pytest.mark.parametrize("loops", [1, pytest.param(15, marks=pytest.mark.long)])
def test_churn(home, users, loops):
    """Users that come and go while the server stops behind them: everybody gets one that works."""

    def come_and_go():
        for _ in range(loops * 3):
            user = users(home, {**FAST, "linger_s": 0.0})
            answers.append(user.ask("query"))
            user.kill()

    answers = []
    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [{"answer": "taskd"}] * (loops * 9)
    until(lambda: gone(home))


async def test_handles_of_one_process_are_independent(start):
    one, two = start(), start()
    one.close()
    one.close()
    assert await ask(two) == "taskd"
    home = two.home
    two.close()
    until(lambda: gone(home))


async def test_threads(start):
    servers = await asyncio.gather(*(asyncio.to_thread(start) for _ in range(8)))
    assert sum(s.started for s in servers) == 1
    assert await asyncio.gather(*(ask(s) for s in servers)) == ["taskd"] * 8


async def test_the_loop_runs_on_during_a_start(empty):
    ticks = 0
    starting = asyncio.ensure_future(asyncio.to_thread(embedded.start, empty, **FAST))
    while not starting.done():
        ticks += 1
        await asyncio.sleep(0.005)
    starting.result().close()
    assert ticks > 5


async def test_a_joiner_within_the_linger_keeps_the_server(home, start):
    first = start(linger_s=2.0)
    before = await ask(first, "select pg_postmaster_start_time()")
    first.close()
    second = start()
    assert not second.started
    assert await ask(second, "select pg_postmaster_start_time()") == before


def test_leaving_needs_no_handler(home, users):
    user = users(home)
    assert user.hello["started"]
    user.tell("exit")
    until(lambda: gone(home))


def test_a_forked_child_uses_the_server(home, users):
    user = users(home)
    child = user.ask("fork")["child"]
    user.kill()
    joined = users(home)
    assert not joined.hello["started"]
    joined.end()
    assert not gone(home)
    os.kill(child, 9)
    until(lambda: gone(home))


FORKING = """
import os, sys, time
from pathlib import Path
from taskd import embedded
from taskd.config import Settings
from tests.processes import children
from taskd.embedded import launch

def fork_meanwhile(home):
    if os.fork() == 0:
        time.sleep(60)
        os._exit(0)
    return choose_runner(home)

choose_runner, launch.choose_runner = launch.choose_runner, fork_meanwhile
embedded.start(Path(sys.argv[1]), durable=False)
print("started", flush=True)
time.sleep(60)
"""


def test_a_child_forked_during_a_start_holds_no_lock_but_that_of_a_user(empty):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "ignore"}
    user = subprocess.Popen(
        [sys.executable, "-c", FORKING, str(empty)], env=env, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert user.stdout.readline() == "started\n"
        user.kill()
        embedded.start(empty, deadline_s=5).close()
        assert not gone(empty)
        assert embedded.stop(empty, deadline_s=5)
        assert gone(empty)
    finally:
        os.killpg(user.pid, 9)
        user.communicate()


def test_a_dropped_handle_does_not_leave(home, start):
    dropped = embedded.start(home, **FAST)
    fd = dropped._use._fd
    del dropped
    gc.collect()
    os.close(fd)  # would raise if the collector had closed it
    until(lambda: gone(home))


def test_a_program_that_a_user_runs_does_not_use_the_server(home, start):
    server = start()
    sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        server.close()
        until(lambda: gone(home))
    finally:
        sleeper.kill()
        sleeper.wait()


def test_no_descriptor_and_no_child_is_left(home, start):
    before = os.listdir("/proc/self/fd")
    # Other tests of this process may have left children.
    others = set(children(os.getpid()))
    server = start()
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    server.close(wait_s=10)
    assert os.listdir("/proc/self/fd") == before
    assert set(children(os.getpid())) <= others


def test_close_can_wait(home, start):
    start(linger_s=30.0).close(wait_s=10)
    assert gone(home)


def test_close_waits_no_longer_than_requested_for_other_users(home, start):
    one, two = start(), start()
    one.close(wait_s=0.05)
    assert not gone(home)
    two.close()


async def test_keep_until_stop(home):
    server = embedded.keep(home)
    embedded.keep(home).close()
    assert embedded.status(home).kept
    server.close()
    assert len([p for p in processes(home).values() if b"\0keep\0" in p]) == 1
    again = embedded.start(home)
    assert not again.started
    again.close(wait_s=0.05)
    assert embedded.status(home).running
    assert embedded.stop(home)
    found = embedded.status(home)
    assert (found.running, found.kept) == (False, False)
    assert not embedded.stop(home)


def test_a_guard_obeys_a_shutdown_of_the_machine(home):
    embedded.keep(home).close()
    (holder,) = (p for p, line in processes(home).items() if b"\0keep\0" in line)
    os.kill(holder, 15)
    until(lambda: gone(home))


def test_stop_does_not_ask_the_users(home, start):
    first = start()
    assert embedded.stop(home)
    assert gone(home)
    second = start()
    assert second.started
    first.close()
    second.close()


def test_status(empty):
    found = embedded.status(empty)
    assert (found.running, found.kept, found.major, found.data_bytes) == (False, False, None, 0)
    assert not empty.exists()
    assert not embedded.stop(empty)
    server = embedded.start(empty, **FAST)
    found = embedded.status(empty)
    assert (found.running, found.kept, found.major) == (True, False, server.major)
    assert found.data_bytes > 10_000_000
    assert found.log.read_text()
    server.close()


async def test_how_clients_connect(home, start, monkeypatch):
    server = start()
    for name, value in PG_VARIABLES.items():
        monkeypatch.setenv(name, value)
    assert await ask(server) == "taskd"
    async with await psycopg.AsyncConnection.connect(server.dsn()) as connection:
        row = await (await connection.execute("select current_database()")).fetchone()
    assert row == ("taskd",)


async def test_dsn(home, start):
    server = start()
    connection = await asyncpg.connect(server.dsn("postgres"))
    assert await connection.fetchval("select current_database()") == "postgres"
    await connection.close()
    psql = embedded.pg_binary("psql", Settings())
    done = subprocess.run([psql, server.dsn(), "-Atc", "select 1"], capture_output=True, check=True)
    assert done.stdout == b"1\n"


async def test_settings(home, start):
    server = start(durable=True)
    shown = {
        "fsync": "on",
        "full_page_writes": "on",
        "synchronous_commit": "on",
        "listen_addresses": "",
        "max_connections": "100",
        "shared_buffers": "64MB",
        "TimeZone": "UTC",
        "unix_socket_permissions": "0700",
        "wal_level": "minimal",
        "server_encoding": "UTF8",
    }
    connection = await asyncpg.connect(**server.connect_args())
    try:
        assert {name: await connection.fetchval(f"show {name}") for name in shown} == shown
        sql = "select datcollate from pg_database where datname = 'taskd'"
        assert await connection.fetchval(sql) == "C"
    finally:
        await connection.close()


async def test_alter_system_survives_a_restart(home, start):
    server = start()
    connection = await asyncpg.connect(**server.connect_args())
    await connection.execute("alter system set work_mem = '7MB'")
    await connection.close()
    server.close(wait_s=10)
    assert await ask(start(), "select current_setting('work_mem')") == "7MB"


PG_VARIABLES = {
    "PGHOST": "192.0.2.1",
    "PGPORT": "1",
    "PGUSER": "nobody",
    "PGDATABASE": "nothing",
    "PGPASSWORD": "x",
    "PGSSLMODE": "verify-full",
    "PGTARGETSESSIONATTRS": "any",
    "PGTZ": "Asia/Tokyo",
    "PGCLIENTENCODING": "UTF8",
    "PGDATA": "/nowhere",
    "PGAPPNAME": "x",
}
