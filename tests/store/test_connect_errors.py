"""A database that cannot be reached: the error says where, why, and in its notes what to do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from taskd.errors import ConfigError, PermissionDenied, StoreUnavailable, TaskdError
from taskd.store.connections import database as databases
from taskd.store.connections.connect_errors import target_of
from taskd.store.connections.database import Database
from taskd.store.connections.driver_args import parameters_of
from taskd.store.connections.error_translation import Down, Silence, translate
from tests.canary import PASSWORD
from tests.logins import Logins

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@pytest.mark.parametrize(
    ("dsn", "place"),
    [
        (
            "postgresql://ada:{p}@db.example.org/jobs",
            "host db.example.org, port 5432, database jobs",
        ),
        ("postgresql://ada:{p}@[::1]:5433/jobs", "host [::1], port 5433, database jobs"),
        ("postgresql://ada@a:1,b/jobs", "host a, port 1 or host b, port 5432, database jobs"),
        ("postgresql:///jobs?host=/run/pg&port=6", "the socket in /run/pg, port 6, database jobs"),
        ("postgresql://ada:{p}@h", "host h, port 5432, database ada"),
        ("postgresql://h/?user=ada&password={p}", "host h, port 5432, database ada"),
        ("postgresql:///jobs", "the local socket or localhost, port 5432, database jobs"),
    ],
)
def test_the_place_is_that_of_the_dsn_without_its_password(
    monkeypatch: pytest.MonkeyPatch, dsn: str, place: str
) -> None:
    for name in ("PGHOST", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    found = str(target_of(parameters_of({"dsn": dsn.format(p=PASSWORD)})))
    assert found == place
    assert PASSWORD not in found


def test_the_variables_of_libpq_fill_what_the_dsn_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PGHOST", "there")
    monkeypatch.setenv("PGPORT", "7")
    monkeypatch.setenv("PGDATABASE", "jobs")
    target = target_of(parameters_of({"dsn": "postgresql://"}))
    assert str(target) == "host there, port 7, database jobs"


async def refused(dsn: str, **more: str) -> TaskdError:
    with pytest.raises(TaskdError) as caught:
        await Database({"dsn": dsn, **more}).connect("test")
    assert PASSWORD not in str(caught.value)
    assert caught.value.__notes__
    return caught.value


@pytest.fixture
async def port() -> AsyncIterator[Callable[[Answer], Awaitable[int]]]:
    """Start servers that are not PostgreSQL; return their ports."""
    servers: list[asyncio.Server] = []

    async def start(answer: Answer) -> int:
        servers.append(await asyncio.start_server(answer, "127.0.0.1", 0))
        return int(servers[-1].sockets[0].getsockname()[1])

    yield start
    for each in servers:
        each.close()


async def test_nobody_listens_there() -> None:
    error = await refused(f"postgresql://ada:{PASSWORD}@127.0.0.1:1/jobs")
    assert isinstance(error, Down)
    assert str(error) == (
        "PostgreSQL cannot be reached at host 127.0.0.1, port 1, database jobs: connection refused"
    )
    assert "Check that PostgreSQL runs there" in error.__notes__[0]


async def test_there_is_no_such_host() -> None:
    error = await refused("postgresql://ada@taskd-no-such-host.invalid/jobs")
    assert isinstance(error, StoreUnavailable)
    assert "the host name cannot be resolved now" in str(error) or str(error).endswith(
        "host taskd-no-such-host.invalid, port 5432, database jobs: no such host"
    )


async def test_there_is_no_such_socket() -> None:
    error = await refused("postgresql:///jobs?host=/nowhere")
    assert isinstance(error, Down)
    assert str(error).endswith(": there is no such socket")


async def test_the_database_is_missing(server) -> None:  # type: ignore[no-untyped-def]
    error = await refused(server.dsn("taskd_no_such_database"))
    assert isinstance(error, ConfigError)
    assert "has no database 'taskd_no_such_database'" in str(error)
    assert "`taskd db migrate`" in error.__notes__[0]


async def test_the_server_speaks_no_ssl(port: Callable[[Answer], Awaitable[int]]) -> None:
    async def says_no(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(b"N")
        await reader.read()
        writer.close()

    number = await port(says_no)
    error = await refused(f"postgresql://ada@127.0.0.1:{number}/jobs?sslmode=require")
    assert str(error).endswith(": the DSN requires SSL, and the server does not support it")
    assert "sslmode" in error.__notes__[0]


async def test_what_answers_is_no_postgresql(port: Callable[[Answer], Awaitable[int]]) -> None:
    async def http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(8)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        writer.close()

    error = await refused(f"postgresql://ada@127.0.0.1:{await port(http)}/jobs")
    assert str(error).endswith(": the server there is not PostgreSQL")


async def test_nobody_answers(
    port: Callable[[Answer], Awaitable[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    monkeypatch.setattr(databases, "CONNECT_TIMEOUT_S", 0.05)
    error = await refused(f"postgresql://ada@127.0.0.1:{await port(silent)}/jobs")
    assert isinstance(error, Silence)
    assert str(error).endswith(": no answer within 0.05 s")


async def test_the_login_is_refused(server) -> None:  # type: ignore[no-untyped-def]
    error = await refused(server.dsn("postgres"), user="taskd_nobody")
    assert isinstance(error, PermissionDenied)
    assert "refuses the login" in str(error)


def test_a_name_with_several_addresses_that_all_refuse_is_down() -> None:
    each = "[Errno 111] Connect call failed ('{}', 1)"
    refusal = f"Multiple exceptions: {each.format('::1')}, {each.format('127.0.0.1')}"
    assert isinstance(translate(OSError(refusal)), Down)
    other = f"Multiple exceptions: {each.format('::1')}, [Errno 113] Connect call failed ('1', 1)"
    assert not isinstance(translate(OSError(other)), Down)


@pytest.mark.parametrize(
    ("place", "where"),
    [
        ("DATABASE {database}", "for the database {database}"),
        ("ROLE {login}", "for the login {login}"),
        ("ROLE {login} IN DATABASE {database}", "for the login {login} in the database {database}"),
    ],
)
async def test_a_server_that_accepts_no_writes_names_the_setting_and_how_to_reset_it(
    dsn: str, sql: Any, logins: Logins, place: str, where: str
) -> None:
    login = f"{logins.role('producer')}_login"
    names = {"database": await sql.fetchval("SELECT current_database()"), "login": login}
    target = place.format(**names)
    await sql.execute(f"ALTER {target} SET default_transaction_read_only = on")
    with pytest.raises(StoreUnavailable) as raised:
        await Database({"dsn": logins.dsn("producer")}).connect("test")
    reason = "accepts no writes: default_transaction_read_only is on, set "
    assert str(raised.value).endswith(reason + where.format(**names))
    [note] = raised.value.__notes__
    reset = note.split("`")[1]
    assert reset == f"ALTER {target} RESET default_transaction_read_only;"
    await sql.execute(reset)
    await (await Database({"dsn": logins.dsn("producer")}).connect("test")).close()


async def test_a_read_only_setting_of_the_dsn_is_named(dsn: str) -> None:
    joined = "&" if "?" in dsn else "?"
    read_only = f"{dsn}{joined}default_transaction_read_only=on"
    with pytest.raises(StoreUnavailable, match="set by the DSN of this client"):
        await Database({"dsn": read_only}).connect("test")


async def test_a_dsn_can_allow_writes_in_a_read_only_database(dsn: str, sql: Any) -> None:
    name = await sql.fetchval("SELECT current_database()")
    await sql.execute(f'ALTER DATABASE "{name}" SET default_transaction_read_only = on')
    joined = "&" if "?" in dsn else "?"
    database = Database({"dsn": f"{dsn}{joined}default_transaction_read_only=off"})
    connection = await database.connect("test")
    try:
        assert await connection.fetchval("SHOW transaction_read_only") == "off"
    finally:
        await connection.close()
