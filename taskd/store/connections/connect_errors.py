"""Explain why a database cannot be reached: where it is, why the connection failed, what to do.

The message names the address and the reason in one line, for logs and people. The advice is in the
error's notes (PEP 678), which a traceback shows and the command line prints. So a worker that
retries every second does not log the advice each time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import asyncpg

from taskd.config import DEFAULT_PORT
from taskd.errors import ConfigError, PermissionDenied, StoreUnavailable, TaskdError
from taskd.store.connections.driver_args import VERIFIED, addresses
from taskd.store.connections.error_translation import (
    Down,
    NoRoom,
    Silence,
    first_line,
    is_refused,
    translated,
)
from taskd.store.connections.statements import statement

CLOSED = "the server closed the connection before it answered"
MEND_CLOSED = "Check that PostgreSQL listens there, and read its log."
MEND_SSL = "Correct sslmode or sslrootcert of the DSN, or the server's certificate."
MEND_BINDING = (
    "The DSN requires channel binding. The driver cannot do it, so taskd verifies the server's "
    "certificate instead. In sslrootcert=FILE, name the authority that signed the certificate. To "
    "connect without any check of the server, write sslmode=require and remove "
    "channel_binding=require."
)
# Part of asyncpg's error if the server does not support SSL, or is not PostgreSQL.
NO_SSL = "rejected SSL upgrade"
NAME_UNKNOWN = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class Target(NamedTuple):
    """Where a database is, for messages; contains no password.

    Attributes:
        where: the host and port of the database, or of all its hosts.
        database: the name of the database.
        wants_ssl: whether the DSN requires SSL.
        binds_channel: whether the DSN requires channel binding.
    """

    where: str
    database: str
    wants_ssl: bool = False
    binds_channel: bool = False

    def __str__(self) -> str:
        return f"{self.where}, database {self.database}"


def target_of(parameters: Mapping[str, str]) -> Target:
    """Return the target of these connection parameters of libpq."""
    return Target(
        _hosts(parameters),
        parameters.get("dbname", ""),
        parameters.get("sslmode") in VERIFIED,
        parameters.get("channel_binding") == "require",
    )


def _hosts(parameters: Mapping[str, str]) -> str:
    named = []
    for address in addresses(parameters):
        host, port = address.get("host"), address.get("port", DEFAULT_PORT)
        if host is None:
            named.append(f"the local socket or localhost, port {port}")
        elif host.startswith("/"):
            named.append(f"the socket in {host}, port {port}")
        else:
            named.append(f"host {f'[{host}]' if ':' in host else host}, port {port}")
    return " or ".join(named)


@contextlib.contextmanager
def reaching(target: Target, limit_s: float) -> Iterator[None]:
    """Raise the error of a failed connect with the address, the reason, and what to do.

    Args:
        limit_s: seconds within which each host had to answer.

    Raises:
        StoreUnavailable, PermissionDenied, ConfigError: as Database.connect().
    """
    try:
        with translated():
            yield
    except TaskdError as error:
        explained = _explained(error, target, limit_s)
        if explained is None:
            raise
        raise explained from error.__cause__


def _explained(error: TaskdError, target: Target, limit_s: float) -> TaskdError | None:
    cause = error.__cause__
    if cause is None:
        return None  # taskd itself raised this error, and the message of the error is complete
    made: TaskdError
    if isinstance(cause, asyncpg.InvalidCatalogNameError):
        made = ConfigError(f"PostgreSQL at {target.where} has no database {target.database!r}")
        made.add_note(
            "Create it, or correct the DSN. A new database needs `taskd db migrate` first."
        )
    elif isinstance(cause, asyncpg.InvalidAuthorizationSpecificationError):
        made = PermissionDenied(f"PostgreSQL at {target} refuses the login: {first_line(cause)}")
        made.add_note(_login_remedy(cause))
    elif _is_refused_parameter(cause):
        made = ConfigError(f"PostgreSQL at {target} refuses a parameter: {first_line(cause)}")
        made.add_note(
            "taskd sends parameters of the DSN that are not libpq's to the server, as settings of "
            "the session. Correct or remove the parameter in the DSN, its service or PGOPTIONS."
        )
    elif isinstance(error, StoreUnavailable):
        why, remedy = _why(error, cause, target, limit_s)
        # PostgreSQL raises this error if the database has ALLOW_CONNECTIONS false.
        closed = isinstance(cause, asyncpg.ObjectNotInPrerequisiteStateError)
        made = (Down if closed else type(error))(f"PostgreSQL cannot be reached at {target}: {why}")
        made.add_note(remedy)
    else:
        return None
    return made


def _is_refused_parameter(cause: BaseException) -> bool:
    refusals = (
        asyncpg.UndefinedObjectError,
        asyncpg.CantChangeRuntimeParamError,
        asyncpg.InvalidParameterValueError,
    )
    # Poolers refuse parameters that they do not know.
    pooler = isinstance(cause, asyncpg.ProtocolViolationError) and "startup param" in str(cause)
    return isinstance(cause, refusals) or pooler


async def why_read_only(connection: asyncpg.Connection, target: Target) -> Down:
    """Return an error that says why the server accepts no writes, and how to change that."""
    row = await connection.fetchrow(statement("read_only_cause").text)
    if row["standby"]:
        made = Down(f"PostgreSQL at {target} is a standby: it accepts no writes")
        made.add_note(
            "Name the primary, or all hosts, in the DSN: postgresql://host1,host2/database."
        )
        return made
    made = Down(
        f"PostgreSQL at {target} accepts no writes: default_transaction_read_only is on, set "
        f"{row['place']}"
    )
    remedy = f"run `{row['reset']};`" if row["reset"] else "set it to off there"
    made.add_note(
        "Someone may have stopped all writes on purpose, for example during a switch-over. To "
        f"allow writes again, {remedy}. For one program alone, add "
        "default_transaction_read_only=off to the parameters of its DSN."
    )
    return made


def _login_remedy(cause: BaseException) -> str:
    if "pg_hba.conf" in str(cause):
        return "Allow this user from this machine with a line in the server's pg_hba.conf."
    return "Correct the user and password of the DSN, or change the user's password."


RUNS = "Check that PostgreSQL runs there, and that the host and port of the DSN are right."


def _why(
    error: StoreUnavailable, cause: BaseException, target: Target, limit_s: float
) -> tuple[str, str]:
    """Return why the database cannot be reached, and what to do."""
    if isinstance(error, Silence):
        remedy = "Check that the machine is up, and that no firewall drops the packets."
        return f"no answer within {limit_s:g} s", remedy
    if isinstance(error, NoRoom):
        remedy = (
            "Connect fewer processes, raise max_connections, or use a pooler. To look at a full "
            "server, use a login that is a superuser or a member of pg_use_reserved_connections: "
            "see 'When the server is full' in the guide 'Operate'."
        )
        return first_line(cause), remedy
    if is_refused(cause):
        return "connection refused", RUNS
    if isinstance(cause, OSError) or NO_SSL in str(cause):
        return _why_not_connected(cause, target)
    if isinstance(cause, asyncpg.ConnectionDoesNotExistError):
        return CLOSED, MEND_CLOSED
    remedy = "Check that the server is up and accepts writes, and try again."
    return first_line(cause), remedy if isinstance(error, Down) else RUNS


def _why_not_connected(cause: BaseException, target: Target) -> tuple[str, str]:
    """Return reason and remedy for an error of the operating system or of the TLS handshake."""
    if NO_SSL in str(cause):
        return _no_ssl(target)
    if isinstance(cause, ConnectionResetError):
        return CLOSED, MEND_CLOSED
    if isinstance(cause, ssl.SSLError):
        why = f"SSL: {getattr(cause, 'verify_message', '') or cause.reason or cause}"
        unverified = isinstance(cause, ssl.SSLCertVerificationError)
        return why, MEND_BINDING if target.binds_channel and unverified else MEND_SSL
    if isinstance(cause, socket.gaierror):
        if cause.errno in NAME_UNKNOWN:
            return (
                "no such host",
                "Correct the host of the DSN, or the name resolution of this machine.",
            )
        return "the host name cannot be resolved now", "Check that this machine has a network."
    if isinstance(cause, FileNotFoundError):
        return "there is no such socket", RUNS
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number).lower() if number else first_line(cause), RUNS


def _no_ssl(target: Target) -> tuple[str, str]:
    if target.wants_ssl:
        remedy = "Enable SSL in the server, or remove sslmode from the DSN."
        return "the DSN requires SSL, and the server does not support it", remedy
    return "the server there is not PostgreSQL", "Correct the host and port of the DSN."
