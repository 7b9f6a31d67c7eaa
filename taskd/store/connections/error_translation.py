"""Translate errors of PostgreSQL and asyncpg into errors of taskd.

The errors of taskd contain the first line of PostgreSQL's message. They add the SQLSTATE of an
unknown error, and the HINT of an error about a value. They never contain the DETAIL, because it can
quote a whole row.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Sequence

import asyncpg

from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.errors import (
    ConfigError,
    InvalidJob,
    JobNotFound,
    KeyHeld,
    PermissionDenied,
    QueueFull,
    SchemaError,
    SchemaMissing,
    SequenceBehind,
    StatementRefused,
    StoreUnavailable,
    TaskdError,
)
from taskd.store.schema_text import is_schema, names_schema

# Errors through a pooler that assigns a session to each transaction. The statement was prepared in
# another session, or another client has prepared a statement of the same name in this session.
STRAYED = (asyncpg.InvalidSQLStatementNameError, asyncpg.DuplicatePreparedStatementError)
# The connection or the server has ended, or is ending; the statement may have run.
_GONE = (
    asyncpg.PostgresConnectionError,
    asyncpg.InternalClientError,
    asyncpg.InterfaceError,
    ConnectionError,
    OSError,
    *STRAYED,
)
# No server at this address accepts connections, or the server accepts no writes.
_DOWN = (
    ConnectionRefusedError,
    FileNotFoundError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.CannotConnectNowError,
    asyncpg.ReadOnlySQLTransactionError,
    asyncpg.exceptions.TargetServerAttributeNotMatched,
)
_WAITED_TOO_LONG = (asyncpg.LockNotAvailableError, asyncpg.QueryCanceledError)
# The server cannot run the statement now, for example because of a deadlock, a full disk or a full
# NOTIFY queue.
_BUSY = (
    asyncpg.ProgramLimitExceededError,
    asyncpg.TransactionRollbackError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.PostgresSystemError,
)
# Classes of SQLSTATE with which the server reports an outage, a lock or a conflict. A trigger of
# the user can raise them as well: `RAISE EXCEPTION ... USING ERRCODE = '55000'`.
_OUTAGE_CLASSES = {"08", "25", "40", "53", "54", "55", "57", "58"}
# The function of the server that runs RAISE.
_RAISE = "exec_stmt_raise"
# A column, a function or a type is missing.
_PART_MISSING = (
    asyncpg.UndefinedColumnError,
    asyncpg.UndefinedFunctionError,
    asyncpg.UndefinedObjectError,
)
_BAD_VALUE = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
    OverflowError,
)

Refusal = KeyHeld | QueueFull | JobNotFound

# Maps constraint names in errors of PostgreSQL to errors of taskd. `job_holds_key` is a unique
# index. The other names are not constraints: taskd.check_queue_room() and taskd.lock_parents() set
# these names in their errors.
REFUSALS: dict[str, type[Refusal]] = {
    "job_holds_key": KeyHeld,
    "queue_has_room": QueueFull,
    "parent_is_stored": JobNotFound,
}

# Maps each primary key whose ids come from a sequence to the name of the sequence.
ID_KEYS = {
    "job_pkey": "job_id_seq",
    "workflow_pkey": "workflow_id_seq",
    "dependency_pkey": "job_id_seq",
}

OTHER_SCHEMA = "`taskd db check` says whether the schema is older or newer than this taskd."
# The message of asyncpg for a value that it cannot encode; the part between `:` and `(` quotes the
# value.
_ARGUMENT = re.compile(r"(?s)(invalid input for query argument \$\d+): .* (?=\()")
_CODES = re.compile(r"\[Errno (\d+)\]")
# The innermost function in the context of an error. The name contains the schema, because the
# search path has only pg_catalog. Other parts of the context can quote values.
_FUNCTION = re.compile(r"PL/pgSQL function ([^(\s]+)")


class Silence(StoreUnavailable):
    """PostgreSQL did not answer in time: it is unknown whether the statement ran."""


class Down(StoreUnavailable):
    """No server runs there, the server is starting or stopping, or it accepts no writes."""


class LoginRefused(StoreUnavailable, PermissionDenied):
    """The server refuses a login that it accepted before."""


class RightRefused(StoreUnavailable, PermissionDenied):
    """The server refuses a statement because the login lacks a right that it had before."""


class NotAsBefore(StoreUnavailable, SchemaError):
    """A part of the schema that existed before is missing, for example during a restore."""


class NotUsable(StoreUnavailable, ConfigError):
    """The DSN, or a file that the DSN names, cannot be used any more."""


class DatabaseMissing(Down, ConfigError):
    """The database existed before, and is missing now."""


class TablesMissing(Down, SchemaMissing):
    """The tables of the schema existed before, and are missing now."""


class HeldUp(StoreUnavailable):
    """The server ended the statement: it took too long, or waited too long for a lock.

    Nothing was written. A smaller statement may succeed. A session that cancels the statement
    causes the same error.
    """


class NoRoom(StoreUnavailable):
    """The server has no free connection for this process."""


class ValueRefused(InvalidJob):
    """The database refused a value of the statement; nothing of the statement was written."""


def may_concern_one_row(error: TaskdError) -> bool:
    """Return whether the server may have refused a statement because of a single row.

    A trigger of the user can raise any error, and can lack a right or a table. The id of a single
    row can be taken (SequenceBehind).
    """
    if isinstance(error, StoreUnavailable):
        return False
    refusals = (ValueRefused, StatementRefused, PermissionDenied, SchemaError)
    whole = isinstance(error, SchemaMissing) and not _is_of_user(error)
    return isinstance(error, refusals) and not whole


def is_outage(error: TaskdError) -> bool:
    """Return whether the server does not answer, or accepts no statements from this login now."""
    if not isinstance(error, StoreUnavailable) or isinstance(error, HeldUp):
        return False
    outages = (Down, Silence, NoRoom, LoginRefused, NotUsable)
    cause = error.__cause__
    return (
        isinstance(error, outages) or not isinstance(cause, asyncpg.PostgresError) or is_gone(cause)
    )


def outage(error: TaskdError) -> StoreUnavailable | None:
    """Convert a permanent error to an outage.

    A program that could use this database before can wait until the cause ends. The cause ends, for
    example, when the database is restored, or when the new password is stored in the DSN file. A
    missing database and missing tables affect all workers, so these errors are kinds of Down. The
    other errors may affect only this worker.

    Returns:
        None if the error is a StoreUnavailable already, or if it would not help to wait.
    """
    cause = error.__cause__
    kind: type[StoreUnavailable]
    if isinstance(error, StoreUnavailable | SequenceBehind) or _is_of_user(error):
        return None
    if isinstance(error, SchemaMissing):
        kind = TablesMissing
    elif isinstance(error, SchemaError):
        kind = NotAsBefore
    elif isinstance(error, PermissionDenied):
        login = isinstance(cause, asyncpg.InvalidAuthorizationSpecificationError)
        kind = LoginRefused if login else RightRefused
    elif isinstance(error, ConfigError):
        missing = isinstance(cause, asyncpg.InvalidCatalogNameError)
        kind = DatabaseMissing if missing else NotUsable
    else:
        return None
    made = kind(str(error))
    made.__cause__ = cause
    for note in getattr(error, "__notes__", ()):
        made.add_note(note)
    return made


def _is_of_user(error: BaseException) -> bool:
    """Return whether the error comes from a function of the user, such as a trigger function."""
    context = getattr(error.__cause__ or error, "context", None) or ""
    inner = _FUNCTION.search(context)
    return inner is not None and not is_schema(inner[1].partition(".")[0])


def _is_users_refusal(error: BaseException) -> bool:
    """Return whether a function of the user raised an error of a class in _OUTAGE_CLASSES.

    While a function of the user runs, the server itself can also raise an error of these classes.
    Such an error is an outage or a conflict (a full disk, a deadlock), except in class 55. There,
    the function has used an object in a wrong state, for example currval() of an unused sequence.
    A lock timeout, although in class 55, is a conflict.
    """
    state: str = getattr(error, "sqlstate", None) or ""
    if state[:2] not in _OUTAGE_CLASSES or not _is_of_user(error):
        return False
    raised = getattr(error, "server_source_function", None) == _RAISE
    return raised or (state[:2] == "55" and not isinstance(error, asyncpg.LockNotAvailableError))


def translate(error: BaseException, roles: Sequence[str] = ()) -> TaskdError | None:
    """Return the error of taskd for an error of the driver.

    An error of taskd is returned unchanged. The result is None if the error comes neither from
    taskd nor from the driver.

    Args:
        roles: roles whose members are allowed to run the statement.
    """
    message = first_line(error)
    if isinstance(error, TaskdError):
        return error
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return Silence("PostgreSQL did not answer in time")
    permanent = _permanent(error, message, roles)
    if permanent is not None:
        return permanent
    refused = _broken_rule(error, message)
    if refused is not None:
        return refused
    if _is_bad_value(error):
        # Functions of the schema write the remedy into the HINT.
        hint = getattr(error, "hint", None)
        return ValueRefused(f"PostgreSQL: {message}" + (f". {hint}" if hint else ""))
    if isinstance(error, _DOWN) or is_refused(error):
        return Down(f"PostgreSQL cannot be reached: {message}")
    if isinstance(error, _WAITED_TOO_LONG):
        return HeldUp(f"PostgreSQL: {message}")
    if isinstance(error, _BUSY):
        full = isinstance(error, asyncpg.TooManyConnectionsError)
        return (NoRoom if full else StoreUnavailable)(f"PostgreSQL: {message}")
    if isinstance(error, _GONE):
        return StoreUnavailable(f"PostgreSQL cannot be reached: {message}")
    if isinstance(error, asyncpg.PostgresError):
        return _unknown_refusal(error, message)
    return None


def _unknown_refusal(error: asyncpg.PostgresError, message: str) -> StatementRefused:
    """Return an error that names an unknown SQLSTATE, the function that raised it, and advice."""
    raised = _FUNCTION.search(getattr(error, "context", None) or "")
    by = f", raised by {raised[1]}()" if raised else ""
    return StatementRefused(
        f"PostgreSQL refused the statement: {message} (SQLSTATE {error.sqlstate}{by}). Nothing of "
        "it was written. A trigger, an event trigger or a rule of this database can raise this: "
        "change it, or exempt the schema taskd."
    )


def _permanent(error: BaseException, message: str, roles: Sequence[str]) -> TaskdError | None:
    """Return an error whose cause a person must fix, or None for any other error.

    Such a cause is in the DSN, a right, the schema or a function of the user.
    """
    if isinstance(error, asyncpg.PostgresError) and _is_users_refusal(error):
        return _unknown_refusal(error, message)
    if isinstance(error, asyncpg.InvalidAuthorizationSpecificationError):
        return PermissionDenied(f"PostgreSQL refuses the login: {message}")
    if isinstance(error, asyncpg.ClientConfigurationError):
        return ConfigError(f"the DSN cannot be used: {message}")
    if isinstance(error, asyncpg.InvalidCatalogNameError):
        return ConfigError(message)
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return PermissionDenied(f"PostgreSQL: {message}. {_needs(roles)}")
    if isinstance(error, asyncpg.InvalidSchemaNameError | asyncpg.UndefinedTableError):
        return _missing(message)
    if isinstance(error, _PART_MISSING):
        return SchemaError(f"PostgreSQL: {message}. {OTHER_SCHEMA}")
    return None


def _missing(message: str) -> SchemaError:
    # The missing table can belong to another application. A trigger or a rule on a table of taskd
    # can use it.
    schema = names_schema(message)
    return SchemaMissing(no_schema(schema)) if schema else SchemaError(f"PostgreSQL: {message}")


def no_schema(schema: str) -> str:
    """Return the message about a database without the schema of the installation."""
    hint = "" if schema == SCHEMA_DEFAULT else f" (TASKD_SCHEMA={schema})"
    return f"this database has no schema {schema}{hint}. Run `taskd db migrate`."


def is_refused(error: BaseException) -> bool:
    """Return whether the host refused the connection at each of its addresses."""
    if isinstance(error, ConnectionRefusedError):
        return True
    # For a host with several addresses, such as localhost, asyncio raises one error that lists all.
    codes = _CODES.findall(str(error)) if type(error) is OSError and error.errno is None else []
    return bool(codes) and all(int(code) == errno.ECONNREFUSED for code in codes)


def is_gone(error: BaseException) -> bool:
    """Return whether the connection is unusable after this error."""
    # A connection to a host that accepts no writes is unusable, too: another host of the DSN may
    # accept writes.
    gone = (*_GONE, *_DOWN, TimeoutError, asyncio.TimeoutError)
    return isinstance(error, gone) and not (_unencodable(error) or _is_users_refusal(error))


def _is_bad_value(error: BaseException) -> bool:
    # A full NOTIFY queue has the SQLSTATE of a value that is too large.
    if getattr(error, "server_source_filename", None) == "async.c":
        return False
    return isinstance(error, _BAD_VALUE) or _unencodable(error)


def _unencodable(error: BaseException) -> bool:
    # asyncpg refuses some Python values, such as a lone surrogate, before it sends anything.
    return isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)


def first_line(error: BaseException) -> str:
    """Return the message of an error without DETAIL and HINT, and without a quoted argument."""
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    return _ARGUMENT.sub(r"\1 ", str(text)).splitlines()[0].rstrip(".")


def _broken_rule(error: BaseException, message: str) -> Refusal | SequenceBehind | None:
    """Return taskd's error for a constraint in REFUSALS or ID_KEYS, or None for other errors."""
    # asyncpg's errors have these fields; errors of psycopg and psycopg2 have them in `diag`.
    fields = error if hasattr(error, "constraint_name") else getattr(error, "diag", None)
    name: str = getattr(fields, "constraint_name", None) or ""
    if name in REFUSALS:
        return REFUSALS[name](message)
    schema: str = getattr(fields, "schema_name", None) or ""
    if name in ID_KEYS and is_schema(schema):
        return SequenceBehind(
            f"nothing was written: the sequence {schema}.{ID_KEYS[name]} gave an id that is taken. "
            "Someone has reset the sequence, or logical replication has copied only the rows. "
            "Advance the sequence: taskd db check --mend. A worker also advances it at its start."
        )
    return None


class refusals:  # noqa: N801 - a context manager and no generator, as `translated` below
    """Raise taskd's error in place of a driver's error about a refused enqueue, for every driver.

    Raises:
        KeyHeld: another job holds the unique key of a job.
        QueueFull: a queue has no room for a job.
        JobNotFound: a job of a workflow waits for a job that is not stored.
        SequenceBehind: an id is taken.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception) or isinstance(error, TaskdError):
            return
        refused = _refusal(error)
        if refused is not None:
            raise refused from error


def _refusal(error: BaseException) -> Refusal | SequenceBehind | None:
    """Return taskd's error for a refused enqueue, whatever driver or framework raised it."""
    # SQLAlchemy and Django wrap the error of the driver.
    inner: BaseException | None = error
    while inner is not None:
        refused = _broken_rule(inner, first_line(inner))
        if refused is not None:
            return refused
        inner = getattr(inner, "orig", None) or inner.__cause__
    return None


def _needs(roles: Sequence[str]) -> str:
    if not roles:
        return "Grant it, or use another role."
    needed = " or ".join(f"taskd_{role}" for role in roles)
    return (
        f"This needs a member of {needed} (made by `taskd db roles`), or the owner of the schema."
    )


class translated:  # noqa: N801 - a context manager, named as suppress and closing are
    """Raise taskd's errors in place of the driver's.

    This is a class, because a generator would add microseconds to every statement.

    Args:
        roles: roles whose members are allowed to run the statement inside.
    """

    __slots__ = ("_roles",)

    def __init__(self, roles: Sequence[str] = ()) -> None:
        self._roles = roles

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, asyncpg.PostgresError):
            # The DETAIL can quote a row, and a traceback would print it.
            error.detail = None
        ours = translate(error, self._roles)
        if ours is not None and ours is not error:
            raise ours from error
