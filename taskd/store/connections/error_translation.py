"""Translate the errors of PostgreSQL and asyncpg into taskd's; no other package sees the originals.

The text of an asyncpg error has a DETAIL, which can quote a whole row: only its first line, the
message, is passed on.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Sequence

import asyncpg

from taskd.errors import (
    ConfigError,
    InvalidJob,
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

# Errors behind a pooler that assigns a session to each transaction, for a statement that was
# prepared in another session, or by another client under the same name.
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
# At this address, no server accepts connections, or none accepts writes.
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
# The server answers, but cannot run the statement now: deadlocks, no room, a full NOTIFY queue.
_BUSY = (
    asyncpg.ProgramLimitExceededError,
    asyncpg.TransactionRollbackError,
    asyncpg.InsufficientResourcesError,
    asyncpg.OperatorInterventionError,
    asyncpg.ObjectNotInPrerequisiteStateError,
    asyncpg.PostgresSystemError,
)
# A column, a function, a type.
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

# Constraint names in the errors of enqueue_unique() and its index, and of check_queue_room().
REFUSALS: dict[str, type[KeyHeld | QueueFull]] = {
    "job_holds_key": KeyHeld,
    "queue_has_room": QueueFull,
}

# Keys of tables whose ids come from sequences.
ID_KEYS = {
    "job_pkey": "job_id_seq",
    "workflow_pkey": "workflow_id_seq",
    "dependency_pkey": "job_id_seq",
}

NO_SCHEMA = "this database has no schema taskd. Run `taskd db migrate`."
OTHER_SCHEMA = "`taskd db check` says whether the schema is older or newer than this taskd."
# asyncpg refuses a value before it is sent, with a message that quotes the value.
_ARGUMENT = re.compile(r"(?s)(invalid input for query argument \$\d+): .* (?=\()")
_CODES = re.compile(r"\[Errno (\d+)\]")
# The innermost function in the context of an error; its name has its schema, as the search path has
# only pg_catalog. Other lines can quote values.
_FUNCTION = re.compile(r"PL/pgSQL function ([^(\s]+)")
# How PostgreSQL names what is missing, whatever the language of its messages.
_OURS = re.compile(r"\btaskd\b")


class Silence(StoreUnavailable):
    """PostgreSQL did not answer in time: it is unknown whether the statement ran."""


class Down(StoreUnavailable):
    """The server has stopped, stops, starts, or is a standby: it takes no writes now."""


class LoginRefused(StoreUnavailable, PermissionDenied):
    """The server refuses a login that it accepted before."""


class RightRefused(StoreUnavailable, PermissionDenied):
    """The server refuses a statement for want of a right."""


class NotAsBefore(StoreUnavailable, SchemaError):
    """A part of the schema that was there is missing, as while a dump is restored."""


class NotUsable(StoreUnavailable, ConfigError):
    """The DSN, or a file that it names, cannot be used any more."""


class DatabaseMissing(Down, ConfigError):
    """The database that was there is missing."""


class TablesMissing(Down, SchemaMissing):
    """The tables that were there are missing."""


class HeldUp(StoreUnavailable):
    """The server cancelled the statement after its timeout, or after waiting for a lock.

    Nothing of it was written. A smaller statement may succeed.
    """


class NoRoom(StoreUnavailable):
    """The server has no free connection for this process."""


class ValueRefused(InvalidJob):
    """The database refused a value of the statement; nothing of the statement was written."""


def may_concern_one_row(error: TaskdError) -> bool:
    """Return whether the server refused a statement for a reason that may lie in one of its rows.

    A trigger of the user can raise any error, or lack a right or a table; or an id is taken.
    """
    if isinstance(error, StoreUnavailable):
        return False
    refusals = (ValueRefused, StatementRefused, PermissionDenied, SchemaError)
    whole = isinstance(error, SchemaMissing) and not _is_of_user(error)
    return isinstance(error, refusals) and not whole


def is_outage(error: TaskdError) -> bool:
    """Return whether the server did not answer, or takes no statements of this login now."""
    if not isinstance(error, StoreUnavailable) or isinstance(error, HeldUp):
        return False
    outages = (Down, Silence, NoRoom, LoginRefused, NotUsable)
    cause = error.__cause__
    return (
        isinstance(error, outages) or not isinstance(cause, asyncpg.PostgresError) or is_gone(cause)
    )


def outage(error: TaskdError) -> StoreUnavailable | None:
    """Return a permanent error as an outage, for a program that has worked with this database.

    What was there comes back: a database or schema that is restored, a password that was rotated.
    If the database or its tables are missing, no other worker can work either; a refused login may
    concern this one only.
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
    """Return whether a function of the user raised it, as a trigger on a table of taskd can."""
    context = getattr(error.__cause__ or error, "context", None) or ""
    inner = _FUNCTION.search(context)
    return inner is not None and not inner[1].startswith("taskd.")


def translate(error: BaseException, roles: Sequence[str] = ()) -> TaskdError | None:
    """Return the taskd error for what the driver raised; None if it is not the driver's.

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
        hint = getattr(error, "hint", None)  # our own functions put the remedy there
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
        return StatementRefused(f"PostgreSQL refused the statement: {message} {_origin(error)}")
    return None


def _origin(error: asyncpg.PostgresError) -> str:
    """Return what raised an error that taskd does not know, and what to do about it."""
    raised = _FUNCTION.search(getattr(error, "context", None) or "")
    by = f", raised by {raised[1]}()" if raised else ""
    return (
        f"(SQLSTATE {error.sqlstate}{by}). Nothing of it was written. A trigger, an event trigger "
        "or a rule of this database can raise this: change it, or exempt the schema taskd."
    )


def _permanent(error: BaseException, message: str, roles: Sequence[str]) -> TaskdError | None:
    """Return an error whose cause a person must fix (DSN, right, schema); None for any other."""
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
    # A trigger or a rule of another application can need a table of its own that is missing.
    ours = _OURS.search(message)
    return SchemaMissing(NO_SCHEMA) if ours else SchemaError(f"PostgreSQL: {message}")


def is_refused(error: BaseException) -> bool:
    """Return whether no address of the host accepts connections."""
    if isinstance(error, ConnectionRefusedError):
        return True
    # For a name with several addresses, such as localhost with ::1, asyncio raises one error.
    codes = _CODES.findall(str(error)) if type(error) is OSError and error.errno is None else []
    return bool(codes) and all(int(code) == errno.ECONNREFUSED for code in codes)


def is_gone(error: BaseException) -> bool:
    """Return whether the connection is unusable after this error."""
    # Another host of the DSN may accept writes now if this one refuses them.
    gone = (*_GONE, *_DOWN, TimeoutError, asyncio.TimeoutError)
    return isinstance(error, gone) and not _unencodable(error)


def _is_bad_value(error: BaseException) -> bool:
    if getattr(error, "server_source_filename", None) == "async.c":
        return False  # the NOTIFY queue is full, which has the code of a value that is too large
    return isinstance(error, _BAD_VALUE) or _unencodable(error)


def _unencodable(error: BaseException) -> bool:
    # asyncpg refuses a Python value, such as a lone surrogate, before sending anything.
    return isinstance(error, asyncpg.InterfaceError) and isinstance(error, ValueError)


def first_line(error: BaseException) -> str:
    """Return the error's message without DETAIL and HINT, and without the quoted value."""
    text = getattr(error, "message", None) or str(error) or type(error).__name__
    return _ARGUMENT.sub(r"\1 ", str(text)).splitlines()[0].rstrip(".")


def _broken_rule(error: BaseException, message: str) -> KeyHeld | QueueFull | SequenceBehind | None:
    """Return the error for a constraint that taskd knows, as any driver reports it."""
    # asyncpg's errors have the fields themselves, those of psycopg and psycopg2 have a `diag`.
    fields = error if hasattr(error, "constraint_name") else getattr(error, "diag", None)
    name: str = getattr(fields, "constraint_name", None) or ""
    if name in REFUSALS:
        return REFUSALS[name](message)
    if name in ID_KEYS and getattr(fields, "schema_name", None) == "taskd":
        return SequenceBehind(
            f"nothing was written: the sequence taskd.{ID_KEYS[name]} gave an id that is taken, as "
            "it was reset, or not copied with the rows by logical replication. Advance it: "
            "taskd db check --mend. A worker also does so at its start."
        )
    return None


class refusals:  # noqa: N801 - as translated, and for the same reason no generator
    """Raise refusals of the enqueue functions as errors of taskd, whatever the driver.

    Raises:
        KeyHeld, QueueFull: a function has refused a job.
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


def _refusal(error: BaseException) -> KeyHeld | QueueFull | SequenceBehind | None:
    """Return the refusal of an enqueue function, whatever driver or framework raised it."""
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

    A class, as a generator would add microseconds to every statement.

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
            # The original error quotes rows, and a traceback would print it.
            error.detail = None
        ours = translate(error, self._roles)
        if ours is not None and ours is not error:
            raise ours from error
