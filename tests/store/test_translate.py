"""Translation of the driver's errors, which decides whether a caller can go on."""

from __future__ import annotations

import socket

import asyncpg
import pytest

from taskd.errors import StoreUnavailable
from taskd.store.connections.error_translation import (
    Down,
    HeldUp,
    NoRoom,
    Silence,
    ValueRefused,
    is_gone,
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


def test_a_full_notify_queue_is_no_bad_value() -> None:
    too_large = asyncpg.ProgramLimitExceededError("index row size exceeds btree maximum")
    assert isinstance(translate(too_large), ValueRefused)
    full = asyncpg.ProgramLimitExceededError("too many notifications in the NOTIFY queue")
    full.server_source_filename = "async.c"
    said = translate(full)
    assert isinstance(said, StoreUnavailable)
    assert not isinstance(said, Down | HeldUp)
