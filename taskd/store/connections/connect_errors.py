"""Explain why a database cannot be reached: where it is, why the connection failed, what to do.

The message says where and why in one line, for logs and people. What to do next is in the error's
notes (PEP 678), which a traceback shows and the command line prints. So a worker that retries every
second does not log the advice each time.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg

from taskd.config import DEFAULT_PORT
from taskd.errors import ConfigError, PermissionDenied, StoreUnavailable, TaskdError
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
# Part of asyncpg's error if the server does not support SSL, or is not PostgreSQL.
NO_SSL = "rejected SSL upgrade"
ASKS_FOR_SSL = re.compile(r"sslmode=(require|verify-ca|verify-full)")
NAME_UNKNOWN = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))


class Target(NamedTuple):
    """Where a database is, for messages; contains no password.

    Attributes:
        where: the host and port, or those of all hosts.
        database: the name of the database.
        wants_ssl: whether the DSN requires SSL.
    """

    where: str
    database: str
    wants_ssl: bool = False

    def __str__(self) -> str:
        return f"{self.where}, database {self.database}"


def target_of(connect_args: Mapping[str, Any]) -> Target:
    """Return the target of these arguments of the driver.

    Missing arguments have the values of libpq's environment variables, or libpq's defaults.
    """
    dsn = str(connect_args.get("dsn") or "postgresql://")
    parts = urlsplit(dsn)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    env = os.environ
    user, at, hosts = parts.netloc.rpartition("@")
    login = query.get("user") or unquote(user.partition(":")[0]) if at else query.get("user")
    given = str(
        connect_args.get("host") or unquote(hosts) or query.get("host") or env.get("PGHOST") or ""
    )
    ports = str(connect_args.get("port") or query.get("port") or env.get("PGPORT") or DEFAULT_PORT)
    name = (
        connect_args.get("database")
        or unquote(parts.path.lstrip("/"))
        or query.get("dbname")
        or query.get("database")
        or env.get("PGDATABASE")
        or connect_args.get("user")
        or login
        or env.get("PGUSER")
        or "named like the user"
    )
    service = query.get("service") or env.get("PGSERVICE")
    if service and not given:
        return Target(f"the service {service}", str(name))
    return Target(_hosts(given, ports), str(name), bool(ASKS_FOR_SSL.search(dsn)))


def _hosts(given: str, ports: str) -> str:
    if not given:
        return f"the local socket or localhost, port {ports}"
    hosts, each = given.split(","), ports.split(",")
    fill = each[0] if len(each) == 1 else DEFAULT_PORT
    each += [fill] * (len(hosts) - len(each))
    named = []
    for host, port in zip(hosts, each, strict=False):
        if host.startswith(("/", "@")):
            named.append(f"the socket in {host}, port {port}")
            continue
        found = re.fullmatch(r"(\[[^\]]*\]|[^:]*)(?::(\d+))?", host)
        name, own = (found[1], found[2]) if found else (host, None)
        named.append(f"host {name or 'localhost'}, port {own or port}")
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
        return None  # the driver did not raise this error, and its message is complete
    made: TaskdError
    if isinstance(cause, asyncpg.InvalidCatalogNameError):
        made = ConfigError(f"PostgreSQL at {target.where} has no database {target.database!r}")
        made.add_note(
            "Create it, or correct the DSN. A new database needs `taskd db migrate` first."
        )
    elif isinstance(cause, asyncpg.InvalidAuthorizationSpecificationError):
        made = PermissionDenied(f"PostgreSQL at {target} refuses the login: {first_line(cause)}")
        made.add_note(_login_remedy(cause))
    elif isinstance(error, StoreUnavailable):
        why, remedy = _why(error, cause, target, limit_s)
        # The database has ALLOW_CONNECTIONS false.
        closed = isinstance(cause, asyncpg.ObjectNotInPrerequisiteStateError)
        made = (Down if closed else type(error))(f"PostgreSQL cannot be reached at {target}: {why}")
        made.add_note(remedy)
    else:
        return None
    return made


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
        f"allow them again, {remedy}. For one program alone, add "
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
        remedy = "Connect fewer processes, raise max_connections, or use a pooler."
        return first_line(cause), remedy
    if is_refused(cause):
        return "connection refused", RUNS
    if isinstance(cause, OSError) or NO_SSL in str(cause):
        return _why_not_connected(cause, target)
    if isinstance(cause, asyncpg.ConnectionDoesNotExistError):
        return CLOSED, MEND_CLOSED
    remedy = "Check that the server is up and takes writes, and try again."
    return first_line(cause), remedy if isinstance(error, Down) else RUNS


def _why_not_connected(cause: BaseException, target: Target) -> tuple[str, str]:
    """Return reason and remedy for an error of the operating system or of the TLS handshake."""
    if NO_SSL in str(cause):
        return _no_ssl(target)
    if isinstance(cause, ConnectionResetError):
        return CLOSED, MEND_CLOSED
    if isinstance(cause, ssl.SSLError):
        remedy = "Correct sslmode or sslrootcert of the DSN, or the server's certificate."
        return f"SSL: {getattr(cause, 'verify_message', '') or cause.reason or cause}", remedy
    if isinstance(cause, socket.gaierror):
        if cause.errno in NAME_UNKNOWN:
            return (
                "no such host",
                "Correct the host of the DSN, or the name resolution of this machine.",
            )
        return "its name cannot be looked up now", "Check that this machine has a network."
    if isinstance(cause, FileNotFoundError):
        return "there is no such socket", RUNS
    number = cause.errno if isinstance(cause, OSError) else None
    return os.strerror(number).lower() if number else first_line(cause), RUNS


def _no_ssl(target: Target) -> tuple[str, str]:
    if target.wants_ssl:
        remedy = "Enable SSL in the server, or remove sslmode from the DSN."
        return "the DSN requires SSL, and the server does not support it", remedy
    return "the server there is not PostgreSQL", "Correct the host and port of the DSN."
