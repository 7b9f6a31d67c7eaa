"""What PostgreSQL and asyncpg raise, in taskd's words. Nobody above the store sees theirs.

The text of an asyncpg error carries DETAIL, which may hold a whole row: only its first line, the
message, is passed on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg

from taskd.errors import (
    ConfigError,
    InvalidJob,
    PermissionDenied,
    SchemaMissing,
    StoreUnavailable,
    TaskdError,
)

# The connection, or the server behind it, is gone or going; the statement may have run or not.
_GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.InternalClientError,
    asyncpg.InterfaceError,
    ConnectionError,
    OSError,
)
# The server answers, but not now: locks, timeouts, deadlocks, no room, a standby.
_BUSY = (
    asyncpg.TransactionRollbackError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.PostgresSystemError,
)
_BAD_VALUE = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    OverflowError,
)


class Silence(StoreUnavailable):
    """No answer within the time limit: nobody knows whether the statement ran."""


class ValueRefused(InvalidJob):
    """The database refused a value of the statement; nothing of the statement was written."""


def translate(error: BaseException) -> TaskdError | None:
    """The taskd error for what the driver raised, or None when it is not the driver's."""
    message = first_line(error)
    if isinstance(error, TaskdError):
        return error
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return Silence("PostgreSQL did not answer in time")
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return PermissionDenied(
            f"PostgreSQL refuses the login: {message}. Check user and password."
        )
    if isinstance(error, asyncpg.ClientConfigurationError):
        return ConfigError(f"the DSN cannot be used: {message}")
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return ConfigError(f"{message}. Create it, or correct the DSN.")
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return PermissionDenied(f"PostgreSQL: {message}. Grant it, or use another role.")
    if isinstance(error, asyncpg.InvalidSchemaNameError | asyncpg.UndefinedTableError):
        return SchemaMissing(f"{message}. Run `taskd db migrate`.")
    if isinstance(error, _BAD_VALUE) or _unencodable(error):
        return ValueRefused(f"PostgreSQL: {message}")
    if isinstance(error, _BUSY):
        return StoreUnavailable(f"PostgreSQL: {message}")
    if isinstance(error, _GONE):
        return StoreUnavailable(f"PostgreSQL cannot be reached: {message}")
    return None


def is_gone(error: BaseException) -> bool:
    """Whether the connection is of no further use after this error."""
    return isinstance(error, (*_GONE, TimeoutError, asyncio.TimeoutError)) and not _unencodable(
        error
    )


def _unencodable(error: BaseException) -> bool:
    # asyncpg refuses a Python value, such as a lone surrogate, before anything is sent.
    return isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)


def first_line(error: BaseException) -> str:
    """The error's message without DETAIL and HINT."""
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    return str(text).splitlines()[0].rstrip(".")


@contextmanager
def translated() -> Iterator[None]:
    """Raise taskd's errors in place of the driver's."""
    try:
        yield
    except Exception as error:
        ours = translate(error)
        if ours is None or ours is error:
            raise
        raise ours from error
