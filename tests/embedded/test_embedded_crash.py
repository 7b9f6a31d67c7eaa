"""Kills of every process at every moment: nothing is left running, and the next start works."""

import os
import signal
import subprocess
import sys

import asyncpg
import pytest
from embedded_helpers import (
    FAST,
    can,
    gone,
    kill_postmaster,
    kill_watcher,
    only,
    postmaster_pid,
    processes,
    root_only,
    until,
    watcher_pid,
)

from taskd import embedded


def test_the_only_user_is_killed(home, users):
    user = users(home)
    assert user.hello["started"]
    user.kill()
    until(lambda: gone(home))
    assert "database system is shut down" in (home / "log").read_text()


def test_one_of_two_users_is_killed(home, users):
    one, two = users(home), users(home)
    assert one.hello["started"] != two.hello["started"]
    one.kill()
    assert two.ask("query") == {"answer": "taskd"}
    two.end()
    until(lambda: gone(home))


def test_the_watcher_is_killed_and_the_next_user_brings_another(home, users, start):
    user = users(home)
    assert user.hello["started"]
    kill_watcher(home)
    joined = start()
    assert not joined.started
    assert only(home, b"last_user.py\0adopt\0")
    start()
    assert only(home, b"last_user.py\0adopt\0")  # one is enough
    user.kill()
    embedded.start(home, **FAST).close()
    assert not gone(home)


def test_an_adopted_server_stops_after_its_last_user(home, start):
    first = start()
    kill_watcher(home)
    second = start()
    first.close()
    second.close()
    until(lambda: gone(home))
    assert "received fast shutdown request" in (home / "log").read_text()


def test_an_adopter_goes_with_its_server(home, start):
    start()
    kill_watcher(home)
    start()
    assert embedded.stop(home)
    until(lambda: not processes(home))


def test_the_watcher_ignores_the_signals_of_a_group(home, users, start):
    server = start()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(watcher_pid(home), number)
    assert users(home).ask("query") == {"answer": "taskd"}
    server.close()


async def test_the_postmaster_is_killed(home, start):
    before = start()
    kill_postmaster(home)
    after = start()
    assert after.started
    assert after.dsn() == before.dsn()
    connection = await asyncpg.connect(**before.connect_args())
    await connection.close()


@pytest.mark.parametrize("text", ["", "12", "{pid}\n/nowhere\n1\n5432\n/tmp\n\n 0 0\nready   \n"])
def test_everything_is_killed_and_pid_files_lie(home, users, start, text):
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        user = users(home)
        assert user.hello["started"]
        doomed = [watcher_pid(home), postmaster_pid(home), user.hello["pid"]]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        until(lambda: gone(home))
        lie = text.format(pid=stranger.pid)
        (home / "data/postmaster.pid").write_text(lie)
        (home / ".s.PGSQL.5432.lock").write_text(lie)
        server = start()
        assert server.started
        server.close(wait_s=10)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


async def test_committed_work_survives_a_kill_of_everything(home, start):
    server = start(durable=True)
    connection = await asyncpg.connect(**server.connect_args())
    await connection.execute("create table t as select generate_series(1, 200000) as i")
    connection.terminate()
    kill_watcher(home)
    kill_postmaster(home)
    again = start()
    assert again.started
    connection = await asyncpg.connect(**again.connect_args())
    assert await connection.fetchval("select count(*) from t") == 200000
    await connection.close()
    assert "automatic recovery in progress" in (home / "log").read_text()


# What the first start has made when it is killed, in this order.
MOMENTS = {
    "locks": "start.lock",
    "initdb begins": "data.new",
    "configured": "data.new/postgresql.conf",
    "bootstrapped": "data.new/base/1/PG_VERSION",
    "template0": "data.new/base/4",
    "database postgres": "data.new/base/5",
    "renamed": "data",
}
KILLS = [
    (signal.SIGKILL, False, "bootstrapped"),
    (signal.SIGKILL, True, "configured"),
    (signal.SIGTERM, True, "database postgres"),
    (signal.SIGINT, True, "initdb begins"),
]


def kill_during_the_first_start(home, users, number, group, moment):
    user = users(home, start_new_session=True)
    until((home / MOMENTS[moment]).exists)
    if group:
        os.killpg(user.process.pid, number)
    else:
        user.process.send_signal(number)
    user.process.wait()
    server = embedded.start(home, **FAST)
    assert sorted(p.name for p in home.glob("data*")) == ["data"]
    server.close()
    assert users(home).ask("query") == {"answer": "taskd"}


@pytest.mark.parametrize(("number", "group", "moment"), KILLS)
def test_a_kill_during_the_first_start_heals(empty, users, number, group, moment):
    kill_during_the_first_start(empty, users, number, group, moment)


@pytest.mark.long
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_every_kill_during_the_first_start_heals(empty, users, number, group, moment):
    kill_during_the_first_start(empty, users, number, group, moment)


DRAIN = """
import asyncio, os, signal, sys
from pathlib import Path
import asyncpg
from taskd import embedded

async def main():
    server = embedded.start(Path(sys.argv[1]), durable=False, linger_s=0.0)
    asked = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, asked.set)
    async with asyncpg.create_pool(**server.connect_args(), min_size=1, max_size=4) as pool:
        print("ready", flush=True)
        await asked.wait()
        answers = await asyncio.gather(*(pool.fetchval("select 1 from pg_sleep(0.2)")
                                         for _ in range(4)))
        print(sum(answers), flush=True)

asyncio.run(main())
"""


def test_ctrl_c_on_the_group_lets_a_user_drain(home, users):
    repo = os.pathsep.join(sys.path)
    user = subprocess.Popen(
        [sys.executable, "-c", DRAIN, str(home)], stdout=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "PYTHONPATH": repo},
    )  # fmt: skip
    with user:
        assert user.stdout.readline() == "ready\n"
        os.killpg(user.pid, signal.SIGINT)
        assert user.stdout.readline() == "4\n"
    assert user.returncode == 0
    until(lambda: gone(home))


NAMESPACES = ("unshare", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc")
containers = pytest.mark.skipif(not can(*NAMESPACES), reason="no pid namespaces here")


@root_only
@containers
def test_two_containers_share_one_server(home, users):
    inside = users(home, prefix=NAMESPACES)
    assert inside.hello["started"]
    outside = users(home)
    assert not outside.hello["started"]
    assert outside.ask("query") == {"answer": "taskd"}
    other = users(home, prefix=NAMESPACES)
    assert not other.hello["started"]
    assert "another container" in other.ask("stop")["error"]
    other.end()
    outside.end()
    inside.end()
    until(lambda: gone(home))


@root_only
@containers
def test_pid_1_waits_for_a_clean_end(home, users):
    user = users(home, prefix=NAMESPACES)
    assert user.hello["pid"] == 1
    assert user.ask("wait") == {"running": False}
    user.end()
    assert "database system is shut down" in (home / "log").read_text()


@root_only
@containers
def test_the_kernel_kills_the_server_with_pid_1(home, users, start):
    user = users(home, prefix=NAMESPACES)
    assert user.hello["pid"] == 1
    user.tell("exit")
    user.process.wait()
    until(lambda: gone(home))
    assert start().started
