"""Translation of the driver's errors, which decides whether a caller can go on."""

from __future__ import annotations

import socket
from typing import Any

import asyncpg
import pytest

from taskd.errors import StatementRefused, StoreUnavailable
from taskd.store.connections.error_translation import (
    Down,
    HeldUp,
    NoRoom,
    Silence,
    ValueRefused,
    is_gone,
    may_concern_one_row,
    translate,
)


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),
        FileNotFoundError(2, "No such file or directory"),
        asyncpg.AdminShutdownError("terminating connection due to administrator command"),
        asyncpg.CrashShutdownError("terminating connection because of a crash"),
        asyncpg.CannotConnectNowError("the database system is starting up"),
        asyncpg.ReadOnlySQLTransactionError("cannot execute UPDATE in a read-only transaction"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_server_that_is_down_is_down_for_everybody(error: Exception) -> None:
    assert isinstance(translate(error), Down)
    assert is_gone(error)


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        socket.gaierror(-2, "Name or service not known"),
        OSError(101, "Network is unreachable"),
        OSError(113, "No route to host"),
        ConnectionResetError(104, "Connection reset by peer"),
        asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation"),
        asyncpg.TooManyConnectionsError("sorry, too many clients already"),
        asyncpg.LockNotAvailableError("canceling statement due to lock timeout"),
        asyncpg.QueryCanceledError("canceling statement due to statement timeout"),
        asyncpg.DeadlockDetectedError("deadlock detected"),
    ],
    ids=lambda error: f"{type(error).__name__} {error}",
)
def test_what_only_this_machine_may_suffer_is_no_outage(error: Exception) -> None:
    """Another worker may still reach the server, and rescue the jobs when the lease ends."""
    said = translate(error)
    assert isinstance(said, StoreUnavailable)
    assert not isinstance(said, Down)


def test_an_obstacle_of_one_statement_is_distinguished_from_one_of_all_statements() -> None:
    assert isinstance(translate(asyncpg.LockNotAvailableError("lock timeout")), HeldUp)
    assert isinstance(translate(asyncpg.QueryCanceledError("statement timeout")), HeldUp)
    assert isinstance(translate(TimeoutError()), Silence)
    assert isinstance(translate(asyncpg.TooManyConnectionsError("sorry")), NoRoom)
    assert not is_gone(asyncpg.LockNotAvailableError("lock timeout"))


async def raised_by(sql: Any, body: str) -> asyncpg.PostgresError:
    """The error of a function of the user with this body."""
    await sql.execute("SET search_path = pg_catalog")  # as in the sessions of taskd
    await sql.execute(
        f"CREATE FUNCTION public.refuse() RETURNS void LANGUAGE plpgsql AS $$ BEGIN {body}; END $$"
    )
    with pytest.raises(asyncpg.PostgresError) as raised:
        await sql.execute("SELECT public.refuse()")
    return raised.value


@pytest.mark.parametrize(
    "code",
    ["08006", "25006", "40001", "40P01", "53100", "53300", "54000", "55000", "55P03", "57014",
     "57P01", "57P03", "58030"],
)  # fmt: skip
async def test_an_error_that_a_trigger_raises_is_no_outage_whatever_its_code(
    sql: Any, code: str
) -> None:
    error = await raised_by(sql, f"RAISE EXCEPTION 'not this one' USING ERRCODE = '{code}'")
    said = translate(error)
    assert isinstance(said, StatementRefused)
    assert may_concern_one_row(said)
    assert f"SQLSTATE {code}, raised by public.refuse()" in str(said)
    assert not is_gone(error)


async def test_an_object_in_the_wrong_state_for_a_trigger_is_no_outage(sql: Any) -> None:
    await sql.execute("CREATE SEQUENCE public.unused")
    error = await raised_by(sql, "PERFORM currval('public.unused')")
    assert error.sqlstate == "55000"
    assert isinstance(translate(error), StatementRefused)


@pytest.mark.parametrize(
    ("setting", "body"),
    [
        ("statement_timeout", "PERFORM pg_sleep(60)"),
        ("lock_timeout", "PERFORM pg_advisory_xact_lock(1)"),
        ("lock_timeout", "PERFORM pg_advisory_xact_lock(1); EXCEPTION WHEN OTHERS THEN RAISE"),
    ],
)
async def test_what_the_server_raises_in_a_trigger_stays_what_it_is(
    sql: Any, dsn: str, setting: str, body: str
) -> None:
    other = await asyncpg.connect(dsn)
    await other.execute("SELECT pg_advisory_lock(1)")
    await sql.execute(f"SET {setting} = '50ms'")
    error = await raised_by(sql, body)
    await other.close()
    assert isinstance(translate(error), HeldUp)


def test_a_full_disk_in_a_trigger_is_no_refusal() -> None:
    error = asyncpg.DiskFullError("could not extend file")
    error.context = "PL/pgSQL function public.audit() line 3 at SQL statement"
    error.server_source_function = "mdextend"
    assert type(translate(error)) is StoreUnavailable


def test_an_error_that_taskd_raises_is_no_refusal_of_the_user() -> None:
    error = asyncpg.LockNotAvailableError("the row is locked")
    error.context = "PL/pgSQL function taskd.retry(bigint) line 3 at RAISE"
    error.server_source_function = "exec_stmt_raise"
    assert isinstance(translate(error), HeldUp)


def test_a_full_notify_queue_is_no_bad_value() -> None:
    too_large = asyncpg.ProgramLimitExceededError("index row size exceeds btree maximum")
    assert isinstance(translate(too_large), ValueRefused)
    full = asyncpg.ProgramLimitExceededError("too many notifications in the NOTIFY queue")
    full.server_source_filename = "async.c"
    said = translate(full)
    assert isinstance(said, StoreUnavailable)
    assert not isinstance(said, Down | HeldUp)
