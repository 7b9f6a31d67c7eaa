"""The pytest plugin: a real database for each test, into which tasks enqueue.

The server is given by TASKD_TEST_DSN, or by `taskd_test_dsn` in pytest's configuration. If neither
is set, the session starts an embedded server. No other setting names the server, because the plugin
creates and drops databases on it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from taskd.client.connecting.background_loop import BackgroundLoop
    from taskd.config import Settings
    from taskd.testing.db import TaskdDB
    from taskd.testing.server import Server

VARIABLE = "TASKD_TEST_DSN"
INI = "taskd_test_dsn"
REAL_INI = "taskd_real_database"
# DSNs of the databases that fixtures have made for the running test.
_made: set[str] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of this plugin."""
    parser.addini(
        INI,
        f"The PostgreSQL server for tests with taskd; {VARIABLE} overrides it. Databases named "
        "taskd_test_* are created and dropped there. Without both, an embedded server is started.",
        default="",
    )
    parser.addini(
        REAL_INI,
        "Whether code under test is allowed to use the database that taskd's settings name "
        "(TASKD_DSN, taskd.toml, ...) without the fixture taskd_db.",
        type="bool",
        default=False,
    )


def pytest_configure(config: pytest.Config) -> None:
    """Prevent tests without a fixture of this plugin from using the database of the settings."""
    from taskd.client.connecting.loaded_settings import restrict

    if not config.getini(REAL_INI):
        config.add_cleanup(restrict(_refuse_real_database))


def _refuse_real_database(settings: Settings) -> None:
    if settings.dsn not in _made:
        from taskd.errors import ConfigError

        raise ConfigError(
            "a test must not use the database that taskd's settings name, because that could be a "
            "real one: add the fixture taskd_db to the test, or give the client a DSN. To allow "
            f"that database for all tests, set {REAL_INI} = true in pytest's configuration"
        )


@pytest.fixture(scope="session")
def taskd_background() -> Iterator[BackgroundLoop]:
    """The event loop that creates and queries the databases."""
    from taskd.client.connecting.background_loop import BackgroundLoop

    loop = BackgroundLoop()
    yield loop
    loop.stop()


@pytest.fixture(scope="session")
def taskd_server(
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
    taskd_background: BackgroundLoop,
) -> Iterator[Server]:
    """The PostgreSQL server of this session."""
    from taskd import embedded
    from taskd.testing.server import Server

    started = None
    dsn = _configured_dsn(pytestconfig)
    if not dsn:
        # All processes of pytest-xdist use the same home, so they join one server.
        base = tmp_path_factory.getbasetemp()
        home = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "taskd-postgresql"
        with _without_traceback():
            started = embedded.start(home, durable=False)
        dsn = started.dsn("postgres")
    server = Server(dsn, taskd_background)
    yield server
    server.close()
    if started is not None:
        started.close()


@pytest.fixture(scope="session")
def taskd_prepare() -> Callable[[str], Any]:
    """Override this fixture to add your own tables: return a function or a coroutine function.

    The function is called once, with the DSN of the template, which already has the schema taskd.
    """
    return lambda dsn: None


@pytest.fixture(scope="session")
def taskd_template(taskd_server: Server, taskd_prepare: Callable[[str], Any]) -> Iterator[str]:
    """The name of the template: the databases of tests are copies of it."""
    with _without_traceback():
        name = taskd_server.make_template(taskd_prepare)
    yield name
    taskd_server.drop(name)


@pytest.fixture
def taskd_dsn(taskd_server: Server, taskd_template: str) -> Iterator[str]:
    """The DSN of a new database with the schema taskd; dropped after the test."""
    name, dsn = taskd_server.make(taskd_template)
    _made.add(dsn)
    yield dsn
    _made.remove(dsn)
    taskd_server.drop(name)


@pytest.fixture
def taskd_db(taskd_dsn: str, taskd_background: BackgroundLoop) -> Iterator[TaskdDB]:
    """A new database, into which tasks enqueue during the test."""
    from taskd.client import configure, default_client, set_default_client
    from taskd.testing.db import TaskdDB

    with pytest.MonkeyPatch.context() as patch:
        # For commands that the test starts, and for clients that the app makes.
        patch.setenv("TASKD_DSN", taskd_dsn)
        patch.delenv("TASKD_DSN_FILE", raising=False)
        before = default_client()
        client = configure(taskd_dsn)
        db = TaskdDB(taskd_dsn, taskd_background)
        try:
            yield db
        finally:
            set_default_client(before)
            client.close_sync()
            db.close()


@contextmanager
def _without_traceback() -> Iterator[None]:
    """Fail the test without a traceback if the server cannot be used."""
    from taskd.errors import TaskdError

    try:
        yield
    except TaskdError as error:
        pytest.fail(f"no database for tests with taskd: {error}", pytrace=False)


def _configured_dsn(config: pytest.Config) -> str:
    from taskd.config import check_dsn

    dsn_of_environment = os.environ.get(VARIABLE)
    dsn, source = (
        (dsn_of_environment, VARIABLE) if dsn_of_environment else (str(config.getini(INI)), INI)
    )
    try:
        return check_dsn(dsn) if dsn else ""
    except ValueError as error:
        raise pytest.UsageError(f"{source}: {error}") from None
