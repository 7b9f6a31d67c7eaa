"""Clients and event loops: one after the other, none, forks; databases that are not there."""

from __future__ import annotations

import asyncio
import gc
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest

import taskd
from taskd import Client, aclose_default, configure
from taskd.client import default_client, open_target, set_default_client
from taskd.config import Settings
from taskd.errors import (
    ConfigError,
    JobCancelled,
    PermissionDenied,
    SchemaError,
    SchemaMissing,
    StoreUnavailable,
    TaskdError,
)
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import translate
from taskd.store.schema import migrations

CHECKOUT = Path(taskd.__file__).parent.parent


def count(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute("SELECT count(*) FROM taskd.job").fetchone()
    connection.close()
    return row[0] if row else 0


def connections(dsn: str) -> int:
    with psycopg.connect(dsn) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'taskd client'"
        ).fetchone()
    connection.close()
    return row[0] if row else 0


def test_one_client_serves_one_loop_after_the_other_and_leaves_nothing(dsn: str, send: Any) -> None:
    configure(dsn)

    async def produce() -> None:
        await asyncio.gather(*(send.enqueue(to=str(n)) for n in range(20)))

    for _ in range(3):
        asyncio.run(produce())
        gc.collect()  # an unclosed socket would warn here, which is an error
    assert count(dsn) == 60
    wait_until_none_is_left(dsn)


def wait_until_none_is_left(dsn: str) -> None:
    # The server notices a closed socket a moment later; pg_stat_activity has no event to wait for.
    while connections(dsn):
        pass


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_loop_closed_without_ceremony_does_not_hang_the_next_one(dsn: str, send: Any) -> None:
    client = Client(dsn)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client.enqueue(send.job(to="x")))
    loop.close()
    asyncio.run(client.enqueue(send.job(to="y")))
    gc.collect()
    assert count(dsn) == 2
    wait_until_none_is_left(dsn)


def test_a_loop_of_uvloop_is_served_as_well(dsn: str, send: Any) -> None:
    uvloop = pytest.importorskip("uvloop")
    client = Client(dsn)
    for _ in range(2):
        uvloop.run(client.enqueue(send.job(to="x")))
        gc.collect()
    assert count(dsn) == 2
    wait_until_none_is_left(dsn)


async def test_closing_twice_at_once_is_harmless(dsn: str, send: Any) -> None:
    client = Client(dsn)
    await client.enqueue(send.job(to="x"))
    await asyncio.gather(client.close(), client.close())
    assert await asyncio.to_thread(connections, dsn) == 0


async def test_two_loops_at_once_have_connections_of_their_own(dsn: str, send: Any) -> None:
    async with Client(dsn) as client:
        await client.enqueue(send.job(to="here"))
        await asyncio.to_thread(lambda: asyncio.run(client.enqueue(send.job(to="there"))))
        await asyncio.to_thread(client.enqueue_sync, send.job(to="background"))
        await client.enqueue(send.job(to="here"))
    assert count(dsn) == 4


async def test_a_client_opens_at_its_first_use_and_may_be_used_after_its_close(
    dsn: str, send: Any
) -> None:
    client = Client(dsn)
    for _ in range(2):
        await client.enqueue(send.job(to="x"))
        await client.close()
        await client.close()
    assert count(dsn) == 2


async def test_a_client_uses_no_more_connections_than_allowed(dsn: str, send: Any) -> None:
    async with Client(dsn, pool_max=2) as client:
        await asyncio.gather(*(client.enqueue(send.job(to=str(n))) for n in range(50)))
        assert 1 <= await asyncio.to_thread(connections, dsn) <= 2


async def test_a_client_survives_the_loss_of_its_connections(dsn: str, sql: Any, send: Any) -> None:
    async with Client(dsn) as client:
        await client.enqueue(send.job(to="x"))
        await sql.fetch(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'taskd client'"
        )
        for _ in range(3):  # the first one may find the broken connection before the pool does
            try:
                await client.enqueue(send.job(to="y"))
            except StoreUnavailable:
                continue
            break
    assert count(dsn) == 2


# Without a loop.


def test_sync_twins_need_no_loop(dsn: str, send: Any) -> None:
    client = Client(dsn)
    assert client.enqueue_sync(send.job(to="x")) == 1
    assert client.enqueue_many_sync(send.job(to=str(n)) for n in range(3)) == [2, 3, 4]
    assert client.enqueue_named_sync("other", {"a": 1}, queue="q") == 5
    client.close_sync()
    client.close_sync()
    assert client.enqueue_sync(send.job(to="again")) == 6
    client.close_sync()
    gc.collect()
    assert not [t for t in threading.enumerate() if t.name == "taskd client"]
    wait_until_none_is_left(dsn)


def test_sync_twins_of_many_threads_share_one_background_thread(dsn: str, send: Any) -> None:
    client = configure(dsn)
    threads = [
        threading.Thread(target=lambda: [send.enqueue_sync(to="x") for _ in range(10)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count(dsn) == 80
    assert len([t for t in threading.enumerate() if t.name == "taskd client"]) == 1
    client.close_sync()


async def test_a_sync_twin_inside_a_loop_is_refused(dsn: str, send: Any) -> None:
    client = configure(dsn)
    with pytest.raises(RuntimeError, match=r"Await enqueue\(\)"):
        send.enqueue_sync(to="x")
    with pytest.raises(RuntimeError, match=r"Await enqueue_named\(\)"):
        client.enqueue_named_sync("x", {}, queue="q")
    with pytest.raises(RuntimeError, match="block the event loop"):
        client.enqueue_many_sync([])


def test_errors_reach_the_sync_caller(dsn: str) -> None:
    client = Client(dsn)
    with pytest.raises(taskd.TaskdError, match="no worker has published"):
        client.enqueue_named_sync("nobody", {})
    client.close_sync()


FORKS = """
import asyncio, os, sys
from taskd import configure, task

@task
async def send(to: str) -> None: ...

client = configure(sys.argv[1])

def child() -> None:
    send.enqueue_sync(to="child")
    asyncio.run(send.enqueue(to="child"))

def fork() -> None:
    pid = os.fork()
    if pid == 0:
        child()
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0

send.enqueue_sync(to="parent")
for _ in range(3):
    fork()
    send.enqueue_sync(to="parent")
client.close_sync()

async def forks_while_a_pool_is_open() -> None:
    await send.enqueue(to="parent")
    pid = os.fork()
    if pid == 0:
        os._exit(0)  # the loop is the parent's; a child can only leave
    os.waitpid(pid, 0)
    await send.enqueue(to="parent")

asyncio.run(forks_while_a_pool_is_open())
"""


def test_a_forked_child_enqueues_and_harms_nothing_of_its_parent(dsn: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", FORKS, dsn],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert count(dsn) == 4 + 3 * 2 + 2


EXITS = """
import sys
from taskd import configure, task

@task
async def send(to: str) -> None: ...

configure(sys.argv[1])
send.enqueue_sync(to="x")
"""


def test_a_program_ends_quietly_without_closing_its_client(dsn: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", EXITS, dsn],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    # Development mode names each step that takes 100 ms, as any does on a slow machine.
    said = [line for line in ended.stderr.splitlines() if not line.startswith("Executing <")]
    assert (ended.returncode, said) == (0, [])
    assert count(dsn) == 1


# The default client.


async def test_the_default_client_takes_its_dsn_from_the_environment(
    dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch, send: Any
) -> None:
    monkeypatch.setenv("TASKD_DSN", dsn)
    assert await send.enqueue(to="x") == 1
    await aclose_default()
    await aclose_default()


async def test_the_default_client_listens_over_the_listen_dsn_of_the_environment(
    dsn: str, home: Path, monkeypatch: pytest.MonkeyPatch, send: Any
) -> None:
    connected = asyncio.Event()

    async def accept(_reader: object, writer: asyncio.StreamWriter) -> None:
        connected.set()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        monkeypatch.setenv("TASKD_DSN", dsn)
        monkeypatch.setenv("TASKD_LISTEN_DSN", f"postgresql://app@127.0.0.1:{port}/app")
        job_id = await send.enqueue(to="x")
        waits = asyncio.create_task(job_id.result())
        async with asyncio.timeout(10):
            await connected.wait()
        await default_client().cancel([job_id])
        with pytest.raises(JobCancelled):  # found by polling
            await waits
        await aclose_default()


async def test_the_default_client_takes_its_dsn_from_taskd_toml(
    dsn: str, home: Path, send: Any
) -> None:
    (home / "taskd.toml").write_text(f'dsn = "{dsn}"\n')
    assert await send.enqueue(to="x") == 1
    await aclose_default()


def test_the_default_client_is_one_until_it_is_replaced() -> None:
    first = default_client()
    assert default_client() is first
    other = Client("postgresql://u@h/d")
    assert set_default_client(other) is first
    assert default_client() is other
    assert configure("postgresql://u@h/e") is default_client()


# Databases that are not there.


async def test_without_a_dsn_and_without_the_embedded_one_the_error_says_what_to_set(
    send: Any,
) -> None:
    client = Client(settings=Settings(embedded="off"))
    with pytest.raises(ConfigError, match=r"TASKD_DSN or DATABASE_URL .*--dsn-file") as caught:
        await client.enqueue(send.job(to="x"))
    assert caught.value.exit_code == 78


WRONG: list[tuple[str, type[TaskdError]]] = [
    ("postgresql://u:s3cret@127.0.0.1:1/db", StoreUnavailable),
    ("postgresql://u:s3cret@host.invalid/db", StoreUnavailable),
    ("postgresql://u:s3cret@/db?host=/nowhere/at/all", StoreUnavailable),
    ("mysql://u:s3cret@host/db", ConfigError),
    ("u:s3cret@host/db", ConfigError),
    ("host=host.invalid password=s3cret", StoreUnavailable),
    ("postgresql://u:s3cret/s3cret@host/db", ConfigError),
    ("postgresql://u:s3cret@s3cret@host/db", ConfigError),
    ("postgresql://u:s3[cret@host/db", ConfigError),
    ("postgresql://u:s3cret@host:port/db", ConfigError),
    ("postgresql://u:s3cret@host:99999/db", ConfigError),
    ("postgresql://u:s3cret@host/db?sslmode=odd", ConfigError),
]


@pytest.mark.parametrize(("wrong", "error"), WRONG)
async def test_a_wrong_dsn_is_a_clear_error_without_its_password(
    wrong: str, error: type[TaskdError]
) -> None:
    with pytest.raises(error) as caught:
        await Client(wrong).open()
    shown = "".join(map(str, (caught.value, caught.value.__cause__ or "")))
    assert "s3cret" not in shown
    assert "s3[cret" not in shown


async def test_a_missing_database_is_named(server: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no database 'nowhere'\nCreate it"):
        await Client(server.dsn("nowhere")).open()


async def test_a_refused_login_is_not_permitted(dsn: str) -> None:
    with pytest.raises(PermissionDenied, match="nobody_here"):
        await Client(re.sub(r"://[^@]*@", "://nobody_here:s3cret@", dsn)).open()


def test_a_wrong_password_is_not_permitted() -> None:
    # The servers of the tests trust everybody, so the error itself is put in.
    refused = asyncpg.InvalidPasswordError('password authentication failed for user "u"')
    ours = translate(refused)
    assert isinstance(ours, PermissionDenied)
    assert "refuses the login: password authentication failed" in str(ours)


async def test_a_missing_schema_says_how_to_make_it(empty_dsn: str, send: Any) -> None:
    says = r"^this database has no schema taskd\. Run `taskd db migrate`\.$"
    async with Client(empty_dsn) as client:
        for asked in (
            client.enqueue(send.job(to="x")),
            client.enqueue_named("x", {}),
            client.cancel([1]),
            client.pause(["email"]),
            migrations.check(Database({"dsn": empty_dsn})),
        ):
            with pytest.raises(SchemaMissing, match=says):
                await asked


async def test_a_missing_table_of_somebody_else_is_not_taken_for_a_missing_schema(
    client: Client, sql: Any, send: Any
) -> None:
    await sql.execute(
        """
        CREATE FUNCTION audit() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN INSERT INTO nowhere VALUES (1); RETURN new; END $$;
        CREATE TRIGGER audit BEFORE INSERT ON taskd.job FOR EACH ROW EXECUTE FUNCTION audit();
        """
    )
    with pytest.raises(SchemaError, match='relation "nowhere" does not exist') as caught:
        await client.enqueue(send.job(to="x"))
    assert not isinstance(caught.value, SchemaMissing)


async def test_a_target_hides_its_password() -> None:
    target = await open_target(Settings(dsn="postgresql://u:s3cret@h/d?password=s3cret"))
    assert "s3cret" in target.dsn
    assert target.describe() == "postgresql://u:***@h/d?password=***"
    target.close()


# What it costs to import.


def test_importing_taskd_imports_no_more_than_a_producer_needs() -> None:
    code = "import sys, taskd; print(*sorted(sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=CHECKOUT, capture_output=True, text=True, check=True
    )
    heavy = {
        "aiosmtplib",
        "click",
        "importlib.metadata",
        "jsonschema",
        "psycopg",
        "structlog",
        "taskd.embedded",
        "taskd.worker",
        "uvloop",
    }
    assert not heavy & set(ended.stdout.split())
