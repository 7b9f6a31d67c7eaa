"""A job enqueued over SQLAlchemy, Django or psycopg2 is part of the caller's transaction.

The first statement of each transaction is taskd's: frameworks begin a transaction with their first
statement, and code that uses the driver's connection directly writes outside of it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import django.conf
import psycopg
import psycopg2
import psycopg2.extensions
import psycopg2.extras
import pytest
import sqlalchemy as sa
from django.db import connection as django_connection
from django.db import connections as django_connections
from django.db import transaction as django_transaction
from django.db.utils import ConnectionHandler
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import orm
from sqlalchemy.ext import asyncio as sa_asyncio

from taskd import Client, NewJob
from taskd.core.jobs.unique import Unique
from taskd.core.tasks.registry import Registry
from taskd.errors import InvalidArgs, KeyHeld, UnknownTask
from taskd.store.connections.statements import load
from taskd.workflows import Workflow, chain

# Nothing listens on port 1: with conn, a client is never connected.
NOWHERE = "postgresql://nobody@127.0.0.1:1/nowhere"
NOTE = "INSERT INTO note VALUES (1)"
REFUSED = NewJob("refused", "[]", queue="q")


def over(dsn: str, driver: str) -> str:
    # SQLAlchemy hands a DSN's options to asyncpg, which has another name for this one.
    dsn = dsn.replace("sslmode=", "ssl=") if driver == "asyncpg" else dsn
    return dsn.replace("postgresql://", f"postgresql+{driver}://")


class Caller:
    """A connection of a framework, and how an app works with it."""

    def __init__(self, conn: Any, run: Any, commit: Any, rollback: Any, savepoint: Any) -> None:
        self.conn = conn
        self.run, self.commit, self.rollback, self.savepoint = run, commit, rollback, savepoint


@pytest.fixture
def looks(dsn: str) -> Iterator[Any]:
    """What others see: tasks of jobs, and how many notes."""
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("CREATE TABLE note (id int)")

        def look() -> tuple[list[str], int]:
            tasks = other.execute("SELECT task FROM taskd.job ORDER BY id").fetchall()
            return [row[0] for row in tasks], other.execute("TABLE note").rowcount

        yield look
    other.close()


@pytest.fixture
def client() -> Client:
    return Client(NOWHERE)


# Callers without an event loop.


@contextmanager
def psycopg2_caller(dsn: str) -> Iterator[Caller]:
    conn = psycopg2.connect(dsn, cursor_factory=psycopg2.extras.RealDictCursor)

    def run(text: str) -> None:
        with conn.cursor() as cursor:
            cursor.execute(text)

    @contextmanager
    def savepoint() -> Iterator[None]:
        run("SAVEPOINT here")
        try:
            yield
        except BaseException:
            run("ROLLBACK TO here")
            raise

    yield Caller(conn, run, conn.commit, conn.rollback, savepoint)
    conn.close()


@contextmanager
def sqlalchemy_caller(dsn: str, driver: str, kind: str) -> Iterator[Caller]:
    engine = sa.create_engine(over(dsn, driver))
    if kind == "Connection":
        conn: Any = engine.connect()
        begun = conn.in_transaction
    elif kind == "Session":
        conn = orm.Session(engine)
        begun = conn.in_transaction
    else:
        conn = orm.scoped_session(orm.sessionmaker(engine))
        begun = conn().in_transaction
    yield Caller(
        conn,
        lambda text: conn.execute(sa.text(text)),
        lambda: (begun(), conn.commit()),
        conn.rollback,
        conn.begin_nested,
    )
    conn.close()
    engine.dispose()


@contextmanager
def django_aliases(**databases: dict[str, Any]) -> Iterator[None]:
    if not django.conf.settings.configured:
        django.conf.settings.configure(USE_TZ=True)
        django.setup()
    made = ConnectionHandler({"default": {}} | databases)
    for alias in databases:
        django_connections[alias] = made[alias]
    try:
        yield
    finally:
        for alias in databases:
            django_connections[alias].close()
            del django_connections[alias]


def django_settings(dsn: str) -> dict[str, Any]:
    parts = conninfo_to_dict(dsn)
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": parts["dbname"],
        "USER": parts.get("user", ""),
        "PASSWORD": parts.get("password", ""),
        "HOST": parts.get("host", ""),
        "PORT": str(parts.get("port", "")),
    }


@contextmanager
def django_caller(dsn: str, alias: str, conn: Any) -> Iterator[Caller]:
    with django_aliases(**{alias: django_settings(dsn)}):
        found = django_connections[alias] if conn is None else conn
        found.set_autocommit(False)

        def run(text: str) -> None:
            with found.cursor() as cursor:
                cursor.execute(text)

        def savepoint() -> Any:
            return django_transaction.atomic(using=alias)

        yield Caller(found, run, found.commit, found.rollback, savepoint)


SYNC = {
    "psycopg2": psycopg2_caller,
    "Connection psycopg": lambda dsn: sqlalchemy_caller(dsn, "psycopg", "Connection"),
    "Connection psycopg2": lambda dsn: sqlalchemy_caller(dsn, "psycopg2", "Connection"),
    "Session psycopg": lambda dsn: sqlalchemy_caller(dsn, "psycopg", "Session"),
    "Session psycopg2": lambda dsn: sqlalchemy_caller(dsn, "psycopg2", "Session"),
    "scoped_session": lambda dsn: sqlalchemy_caller(dsn, "psycopg", "scoped_session"),
    "django connection": lambda dsn: django_caller(dsn, "default", django_connection),
    "django alias": lambda dsn: django_caller(dsn, "jobs", None),
}


@pytest.fixture(params=SYNC)
def caller(request: pytest.FixtureRequest, dsn: str) -> Iterator[Caller]:
    with SYNC[request.param](dsn) as made:
        yield made


def test_a_rollback_takes_the_jobs_back(client: Client, caller: Caller, looks: Any) -> None:
    client.enqueue_sync(NewJob("a", queue="q"), conn=caller.conn)
    client.enqueue_many_sync([NewJob("a", queue="q")] * 1001, conn=caller.conn)
    caller.run(NOTE)
    assert looks() == ([], 0)
    caller.rollback()
    assert looks() == ([], 0)


def test_a_commit_brings_the_jobs_and_what_was_written_beside_them(
    client: Client, caller: Caller, looks: Any, send: Any
) -> None:
    ids = [send.on(caller.conn).enqueue_sync(to="x")]
    ids.append(client.enqueue_named_sync("b", {"x": 1}, queue="q", conn=caller.conn))
    assert looks() == ([], 0)
    caller.commit()  # of a transaction in which taskd's statements are all there is
    assert looks() == (["send", "b"], 0)
    client.enqueue_sync(NewJob("c", queue="q"), conn=caller.conn)
    caller.run(NOTE)
    caller.commit()
    assert looks() == (["send", "b", "c"], 1)
    assert ids == sorted(ids)


def test_a_savepoint_that_is_rolled_back_takes_its_own_jobs_only(
    client: Client, caller: Caller, looks: Any
) -> None:
    client.enqueue_sync(NewJob("before", queue="q"), conn=caller.conn)
    with caller.savepoint():
        client.enqueue_sync(NewJob("kept", queue="q"), conn=caller.conn)
    with pytest.raises(ZeroDivisionError), caller.savepoint():
        client.enqueue_sync(NewJob("lost", queue="q"), conn=caller.conn)
        raise ZeroDivisionError
    client.enqueue_sync(NewJob("after", queue="q"), conn=caller.conn)
    assert looks() == ([], 0)
    caller.commit()
    assert looks() == (["before", "kept", "after"], 0)


def test_a_refused_job_harms_its_savepoint_and_nothing_else(
    client: Client, caller: Caller, looks: Any
) -> None:
    client.enqueue_sync(NewJob("before", queue="q"), conn=caller.conn)
    with pytest.raises(Exception, match="violates check constraint"), caller.savepoint():
        client.enqueue_sync(REFUSED, conn=caller.conn)
    caller.run(NOTE)
    caller.commit()
    assert looks() == (["before"], 1)


def test_a_key_that_is_held_is_reported_by_one_error_whatever_the_driver(
    client: Client, caller: Caller, looks: Any
) -> None:
    held = client.enqueue_sync(NewJob("t", queue="q", unique=Unique("k")), conn=caller.conn)
    again = NewJob("t", queue="q", unique=Unique("k", on_conflict="raise"))
    with pytest.raises(KeyHeld, match=f"job {held} of task"), caller.savepoint():
        client.enqueue_sync(again, conn=caller.conn)
    caller.commit()
    assert looks() == (["t"], 0)


@pytest.mark.usefixtures("published")
def test_what_taskd_refuses_itself_leaves_the_transaction_as_it_was(
    client: Client, caller: Caller, looks: Any
) -> None:
    with pytest.raises(UnknownTask, match="'send'"):
        client.enqueue_named_sync("sent", conn=caller.conn)
    with pytest.raises(InvalidArgs):
        client.enqueue_named_sync("send", {"to": 5}, conn=caller.conn)
    client.enqueue_named_sync("send", {"to": "x"}, conn=caller.conn)
    caller.run(NOTE)
    caller.commit()
    assert looks() == (["send"], 1)


def test_every_option_and_any_text_arrives(
    dsn: str, client: Client, caller: Caller, registry: Registry, send: Any
) -> None:
    text = "100 %s %(x)s %% ' \\ $1 {a,b} \N{SNOWMAN}"
    moment = datetime(2040, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
    jobs = [
        send.options(priority=-9, timeout_s=1, max_attempts=300, run_at=moment).job(to=text),
        send.options(delay_s=2.5, timeout_s=2.5).job(to="b"),
        send.job(to="c"),
    ]
    client.enqueue_many_sync(jobs, conn=caller.conn)
    caller.commit()
    with psycopg.connect(dsn) as other:
        rows = other.execute(
            "SELECT args ->> 'to', priority, timeout_s, max_attempts, state::text, run_at = %s"
            " FROM taskd.job ORDER BY id",
            [moment],
        ).fetchall()
    other.close()
    assert rows == [
        (text, -9, 1.0, 300, "scheduled", True),
        ("b", 100, 2.5, None, "scheduled", False),
        ("c", 100, None, None, "queued", False),
    ]


# Callers in an event loop.


@asynccontextmanager
async def async_caller(dsn: str, driver: str, kind: str) -> AsyncIterator[Caller]:
    engine = sa_asyncio.create_async_engine(over(dsn, driver))
    make: dict[str, Any] = {
        "AsyncConnection": engine.connect,
        "AsyncSession": lambda: sa_asyncio.AsyncSession(engine),
        "async_scoped_session": lambda: sa_asyncio.async_scoped_session(
            sa_asyncio.async_sessionmaker(engine), scopefunc=lambda: 1
        ),
    }
    conn = make[kind]()
    if kind == "AsyncConnection":
        await conn.start()
    yield Caller(
        conn,
        lambda text: conn.execute(sa.text(text)),
        conn.commit,
        conn.rollback,
        conn.begin_nested,
    )
    await conn.close()
    await engine.dispose()


@pytest.fixture(
    params=[
        ("asyncpg", "AsyncConnection"),
        ("asyncpg", "AsyncSession"),
        ("psycopg", "AsyncConnection"),
        ("psycopg", "AsyncSession"),
        ("asyncpg", "async_scoped_session"),
    ],
    ids=" ".join,
)
async def acaller(request: pytest.FixtureRequest, dsn: str) -> AsyncIterator[Caller]:
    async with async_caller(dsn, *request.param) as made:
        yield made


async def test_an_async_rollback_takes_the_jobs_back(
    client: Client, acaller: Caller, looks: Any
) -> None:
    await client.enqueue(NewJob("a", queue="q"), conn=acaller.conn)
    await client.enqueue_many([NewJob("a", queue="q")] * 1001, conn=acaller.conn)
    await acaller.run(NOTE)
    assert looks() == ([], 0)
    await acaller.rollback()
    assert looks() == ([], 0)


async def test_an_async_commit_brings_the_jobs_and_what_was_written_beside_them(
    client: Client, acaller: Caller, looks: Any, send: Any
) -> None:
    ids = [await send.on(acaller.conn).enqueue(to="100 %s $1")]
    ids.append(await client.enqueue_named("b", {"x": 1}, queue="q", conn=acaller.conn))
    assert looks() == ([], 0)
    await acaller.commit()  # of a transaction in which taskd's statements are all there is
    assert looks() == (["send", "b"], 0)
    await client.enqueue(NewJob("c", queue="q"), conn=acaller.conn)
    await acaller.run(NOTE)
    await acaller.commit()
    assert looks() == (["send", "b", "c"], 1)
    assert ids == sorted(ids)


async def test_an_async_savepoint_holds_what_is_refused_and_what_is_rolled_back(
    client: Client, acaller: Caller, looks: Any
) -> None:
    await client.enqueue(NewJob("before", queue="q"), conn=acaller.conn)
    async with acaller.conn.begin_nested():
        await client.enqueue(NewJob("kept", queue="q"), conn=acaller.conn)
    with pytest.raises(ZeroDivisionError):
        async with acaller.conn.begin_nested():
            await client.enqueue(NewJob("lost", queue="q"), conn=acaller.conn)
            raise ZeroDivisionError
    with pytest.raises(sa.exc.IntegrityError):
        async with acaller.conn.begin_nested():
            await client.enqueue(REFUSED, conn=acaller.conn)
    with pytest.raises(UnknownTask):
        await client.enqueue_named("nobody knows", conn=acaller.conn)
    await acaller.run(NOTE)
    await acaller.commit()
    assert looks() == (["before", "kept"], 1)


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
async def test_inside_run_sync_the_sync_methods_take_the_sync_session(
    dsn: str, client: Client, looks: Any, driver: str
) -> None:
    async with async_caller(dsn, driver, "AsyncSession") as caller:
        await caller.conn.run_sync(
            lambda session: client.enqueue_sync(NewJob("a", queue="q"), conn=session)
        )
        assert looks() == ([], 0)
        await caller.commit()
        assert looks() == (["a"], 0)


# Blocks of the frameworks.


def test_a_begin_block_decides_for_its_jobs(dsn: str, client: Client, looks: Any) -> None:
    engine = sa.create_engine(over(dsn, "psycopg"))
    with engine.begin() as conn:
        client.enqueue_sync(NewJob("a", queue="q"), conn=conn)
    with pytest.raises(ZeroDivisionError), orm.Session(engine) as session, session.begin():
        client.enqueue_sync(NewJob("b", queue="q"), conn=session)
        raise ZeroDivisionError
    with orm.Session(engine) as session, session.begin():
        client.enqueue_sync(NewJob("c", queue="q"), conn=session)
    with orm.Session(engine) as session:
        client.enqueue_sync(NewJob("never committed", queue="q"), conn=session)
    engine.dispose()
    assert looks() == (["a", "c"], 0)


def test_atomic_blocks_decide_for_their_jobs(dsn: str, client: Client, looks: Any) -> None:
    atomic = django_transaction.atomic
    with django_aliases(default=django_settings(dsn)):
        with atomic():
            client.enqueue_sync(NewJob("a", queue="q"), conn=django_connection)
            with pytest.raises(ZeroDivisionError), atomic():
                client.enqueue_sync(NewJob("inner", queue="q"), conn=django_connection)
                raise ZeroDivisionError
            with pytest.raises(django.db.IntegrityError), atomic():
                client.enqueue_sync(REFUSED, conn=django_connection)
            assert looks() == ([], 0)
        with pytest.raises(ZeroDivisionError), atomic():
            client.enqueue_sync(NewJob("outer", queue="q"), conn=django_connection)
            raise ZeroDivisionError
        assert looks() == (["a"], 0)
        # Outside of a block Django commits every statement, and this one is no exception.
        client.enqueue_sync(NewJob("alone", queue="q"), conn=django_connection)
        assert looks() == (["a", "alone"], 0)


def test_django_over_psycopg2_works_as_well(dsn: str, looks: Any) -> None:
    program = f"""
import sys
sys.modules["psycopg"] = None  # not installed
import django.conf
django.conf.settings.configure(USE_TZ=True, DATABASES={{"default": {django_settings(dsn)!r}}})
django.setup()
from django.db import connection, transaction
from taskd import Client, NewJob
client = Client({NOWHERE!r})
for task in "committed", "rolled back":
    with transaction.atomic():
        job = NewJob(task, '{{"a": "%s"}}', queue="q", delay_s=1)
        client.enqueue_many_sync([job], conn=connection)
        transaction.set_rollback(task == "rolled back")
assert connection.Database.__name__ == "psycopg2"
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=45, cwd=Path.cwd())
    assert looks() == (["committed"], 0)


def test_a_connection_in_autocommit_commits_at_once(dsn: str, client: Client, looks: Any) -> None:
    conn = psycopg2.connect(dsn)
    conn.autocommit = True
    client.enqueue_sync(NewJob("a", queue="q"), conn=conn)
    assert conn.status == psycopg2.extensions.STATUS_READY
    conn.close()
    assert looks() == (["a"], 0)


def test_no_argument_stands_in_a_comment_where_psycopg2_would_write_its_text() -> None:
    for each in load().values():
        assert all("$" not in line.partition("--")[2] for line in each.text.splitlines()), each.name


# What is refused.


async def test_a_connection_that_would_block_the_loop_is_refused(
    client: Client, send: Any, dsn: str
) -> None:
    engine = sa.create_engine(over(dsn, "psycopg"))
    with orm.Session(engine) as session, pytest.raises(TypeError, match="block the event loop"):
        await client.enqueue(send.job(to="x"), conn=session)
    with pytest.raises(TypeError, match=r"django.*block the event loop.*SQLAlchemy's AsyncConn"):
        await client.enqueue(send.job(to="x"), conn=django_connection)
    engine.dispose()


async def test_a_connection_that_needs_a_loop_is_refused_by_the_sync_methods(
    client: Client, send: Any, dsn: str
) -> None:
    async with async_caller(dsn, "asyncpg", "AsyncSession") as caller:
        with pytest.raises(
            TypeError, match=r"needs an event loop\. Await the method without _sync"
        ):
            client.enqueue_sync(send.job(to="x"), conn=caller.conn)


def test_other_databases_and_drivers_are_refused_by_name(client: Client, send: Any) -> None:
    engine = sa.create_engine("sqlite://")
    with engine.connect() as conn, pytest.raises(TypeError, match=r"over sqlite\+pysqlite; taskd"):
        client.enqueue_sync(send.job(to="x"), conn=conn)
    with pytest.raises(TypeError, match=r"sqlalchemy\.engine.*Engine; taskd takes"):
        client.enqueue_sync(send.job(to="x"), conn=engine)
    engine.dispose()
    sqlite = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
    with (
        django_aliases(small=sqlite),
        pytest.raises(TypeError, match=r"'small' to sqlite. Pass the one to PostgreSQL"),
    ):
        client.enqueue_sync(send.job(to="x"), conn=django_connections["small"])


def test_nobodys_library_is_imported_for_a_driver_connection(dsn: str) -> None:
    program = f"""
import sys, psycopg
from taskd import Client, NewJob
with psycopg.connect({dsn!r}) as conn:
    Client({NOWHERE!r}).enqueue_sync(NewJob("a", queue="q"), conn=conn)
assert not sys.modules.keys() & {{"sqlalchemy", "django", "psycopg2"}}
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=45, cwd=Path.cwd())


# Workflows.

WAITS = "SELECT node, state::text, waits_for FROM taskd.job ORDER BY id"
FLOW = [("a", "queued", None), ("b", "queued", None), ("a-2", "blocked", 1)]


def flow() -> Workflow:
    made = chain(NewJob("a", queue="q"), NewJob("a", '{"text": "100 %s"}', queue="q"))
    made.add(NewJob("b", queue="q"))
    return made


def test_a_workflow_is_part_of_the_callers_transaction(
    dsn: str, client: Client, caller: Caller, looks: Any
) -> None:
    flow().start_sync(conn=caller.conn, client=client)
    assert looks() == ([], 0)
    caller.rollback()
    run = flow().start_sync(conn=caller.conn, client=client)
    assert list(run.jobs) == ["a", "b", "a-2"]
    caller.commit()
    with psycopg.connect(dsn) as other:
        assert other.execute(WAITS).fetchall() == FLOW
    other.close()


async def test_a_workflow_is_part_of_the_callers_async_transaction(
    dsn: str, client: Client, acaller: Caller, looks: Any
) -> None:
    await flow().start(conn=acaller.conn, client=client)
    assert looks() == ([], 0)
    await acaller.rollback()
    await flow().start(conn=acaller.conn, client=client)
    await acaller.commit()
    with psycopg.connect(dsn) as other:
        assert other.execute(WAITS).fetchall() == FLOW
    other.close()
