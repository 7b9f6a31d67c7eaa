"""A real PostgreSQL for every test: one server per run, one database per test.

Without TASKD_TEST_DSN the suite starts an embedded server of its own. No other variable that names
a database is read; existing ones are removed from the environment, so that no test reaches a real
database.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.schema import migrations
from taskd.testing.server import with_database
from tests import memory
from tests.canary import PASSWORD, PAYLOAD, with_canary
from tests.logins import Logins
from tests.schema import SCHEMA, PlainConnection

for _name in list(os.environ):
    if _name in {"DATABASE_URL", "CREDENTIALS_DIRECTORY"} or (
        _name.startswith(("PG", "TASKD_"))
        and _name not in {"TASKD_TEST_DSN", "TASKD_TEST_SCHEMA", "TASKD_PG_BIN", "TASKD_PG_MAJOR"}
    ):
        del os.environ[_name]

# The suite starts some thousand Python processes, and each would compile taskd for itself: 1.5 s
# where it takes 0.4 s to load the compiled modules.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_numbers = itertools.count(1)


class TestServer:
    """The server of this run: hands out fresh, migrated databases."""

    __test__ = False

    def __init__(self, admin_dsn: str) -> None:
        self.admin_dsn = admin_dsn
        self.run = uuid.uuid4().hex[:10]
        self.template = f"taskd_template_{self.run}"
        self.roles: list[str] = []

    def tell_password(self) -> None:
        """Put a password into every DSN, if the server requires none: no output may show it."""
        with_password = with_canary(self.admin_dsn)
        with contextlib.suppress(asyncpg.PostgresError, OSError):
            asyncio.run(_connects(with_password))
            self.admin_dsn = with_password

    def dsn(self, database: str) -> str:
        return with_database(self.admin_dsn, database)

    def admin(self, *statements: str) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.admin_dsn)
            try:
                for each in statements:
                    await connection.execute(each)
            finally:
                await connection.close()

        asyncio.run(run())

    def create(self, *, template: str | None = None) -> str:
        name = f"taskd_test_{self.run}_{next(_numbers)}"
        # A copy of files takes 0.04 s in memory, 0.09 s through the WAL; on a disk 0.2 to 0.4 s.
        self.admin(
            f'CREATE DATABASE "{name}" TEMPLATE "{template or self.template}" STRATEGY FILE_COPY'
        )
        return name

    def create_encoded(self, encoding: str) -> str:
        """Create an empty database with another encoding than UTF8."""
        name = f"taskd_test_{self.run}_{next(_numbers)}"
        self.admin(
            f"CREATE DATABASE \"{name}\" ENCODING '{encoding}' LOCALE_PROVIDER libc LOCALE 'C' "
            "TEMPLATE template0"
        )
        return name

    def drop(self, name: str) -> None:
        self.admin(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')


async def _connects(dsn: str) -> None:
    await (await asyncpg.connect(dsn)).close()


def pytest_configure(config: pytest.Config) -> None:
    """Choose the home of this run's server before the processes of the run start."""
    if not hasattr(config, "workerinput") and "TASKD_TEST_DSN" not in os.environ:
        memory.choose()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Give the memory back when all processes of the run have ended."""
    if not hasattr(config, "workerinput"):
        memory.forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """A test whose output contains a canary has failed."""
    report = yield
    output = "".join(text for _, text in report.sections)
    if report.passed and any(canary in output for canary in (PASSWORD, PAYLOAD)):
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: a password or a payload is in its output:\n{output}"
    return report


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestServer]:
    embedded = None
    dsn = os.environ.get("TASKD_TEST_DSN")
    if not dsn:
        from taskd import embedded as embedded_postgres

        # All xdist processes join one server: its home is shared, and flock sorts them out.
        base = tmp_path_factory.getbasetemp()
        on_disk = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "pg"
        embedded = embedded_postgres.start(memory.home() or on_disk, durable=False)
        dsn = embedded.dsn("postgres")
    made = TestServer(dsn)
    made.tell_password()
    made.admin(f'CREATE DATABASE "{made.template}" TEMPLATE template0')
    asyncio.run(migrations.migrate(Database({"dsn": made.dsn(made.template)}, schema=SCHEMA)))
    yield made
    made.drop(made.template)
    for role in made.roles:
        made.admin(f"DROP ROLE {role}")
    if embedded is not None:
        embedded.close()


@pytest.fixture
def dsn(server: TestServer) -> Iterator[str]:
    """The DSN of a migrated database that only this test uses."""
    name = server.create()
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def empty_dsn(server: TestServer) -> Iterator[str]:
    """The DSN of a database without the schema taskd."""
    name = server.create(template="template0")
    yield server.dsn(name)
    server.drop(name)


@pytest.fixture
def logins(server: TestServer, dsn: str) -> Logins:
    """Logins that are members of one role of `taskd db roles` each, on the database of `dsn`."""
    return Logins(server, dsn)


@pytest.fixture
def database(dsn: str) -> Database:
    return Database({"dsn": dsn}, schema=SCHEMA)


@pytest.fixture
async def lane(database: Database) -> AsyncIterator[Lane]:
    made = Lane(database, "test")
    yield made
    await made.close()


@pytest.fixture
async def sql(dsn: str) -> AsyncIterator[Any]:
    """A plain connection, for looking at rows and moving them."""
    connection = await asyncpg.connect(dsn, connection_class=PlainConnection)
    yield connection
    await connection.close()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory, so that no settings file of the checkout is read."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
