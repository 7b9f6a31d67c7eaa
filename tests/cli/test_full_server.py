"""Commands while the server has no free connection for their login."""

import json
import threading

import psycopg
import pytest

from taskd.cli.shared import session
from taskd.store.connections.database import Database
from tests.cli.conftest import Shell


@pytest.fixture
def login(logins, dsn):
    """An admin's login without any connection; the role of an operator is not limited."""
    name = f"{logins.role('admin')}_login"
    limit(dsn, name, 0)
    yield name
    limit(dsn, name, -1)


def limit(dsn, login, connections):
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"ALTER ROLE {login} CONNECTION LIMIT {connections}")


@pytest.mark.parametrize("args", [("jobs", "list"), ("enqueue", "t", "--queue", "q")])
def test_a_command_says_how_to_get_in(logins, login, monkeypatch, args):
    monkeypatch.setattr(session, "ROOM_S", 0.3)
    result = Shell(logins.dsn("admin"))(*args, code=69)
    assert "too many connections" in result.stderr
    assert "pg_use_reserved_connections" in result.stderr


def test_the_doctor_says_so_too(logins, login, monkeypatch):
    monkeypatch.setattr(session, "ROOM_S", 0.3)
    result = Shell(logins.dsn("admin"))("doctor", "connections", "reach", "--json", code=69)
    [finding] = [json.loads(line) for line in result.stdout.splitlines()]
    assert (finding["check"], finding["level"]) == ("reach", "error")
    assert "pg_use_reserved_connections" in finding["repairs"][0]["text"]


@pytest.mark.parametrize("args", [("jobs", "list"), ("enqueue", "t", "--queue", "q")])
def test_a_command_waits_until_a_connection_is_free(logins, login, dsn, monkeypatch, args):
    monkeypatch.setattr(session, "ROOM_S", 60.0)
    later = threading.Timer(0.5, limit, (dsn, login, -1))
    later.start()
    Shell(logins.dsn("admin"))(*args)
    later.join()


def test_only_the_databases_of_commands_wait(dsn, monkeypatch):
    """The services of workers and of the dashboard retry by themselves."""
    monkeypatch.setattr(session, "ROOM_S", 60.0)
    Shell(dsn)("jobs", "list")
    assert Database({"dsn": dsn}).room_s == 0.0


def test_the_doctor_names_who_holds_connections(dsn, monkeypatch):
    from taskd.core.doctor import server

    monkeypatch.setattr(server, "FREE_SHARE_MIN", 1.0)
    with psycopg.connect(dsn, application_name="shop"):
        [finding] = Shell(dsn).json("doctor", "connections", code=4)
    assert "by the login" in finding["found"][0]
