"""Apply migrations to a database that is in use; migrations.py decides which.

Each migration runs in one transaction, which also inserts its row into taskd.migration. Only steps
that PostgreSQL refuses in a transaction, such as concurrent index builds, run without a
transaction. One process migrates at a time. Statements of other sessions queue behind a lock
request that waits. So a migration waits for a lock only briefly, and then tries again. If live
workers are too old for a migration, see has_outgrown_nobody().
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any
from zlib import crc32

import asyncpg

from taskd import events
from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.core.migration import Lock, Migration, floor_of, missing, out_of_date
from taskd.errors import MigrationFailed, StatementRefused
from taskd.store.connections.callers_connection import fetches
from taskd.store.connections.database import Database, close
from taskd.store.connections.error_translation import first_line, translate
from taskd.store.schema import migration_history
from taskd.store.schema_text import in_schema

ADVISORY_LOCK = 0x7461736B64  # "taskd"; each other schema adds its own number
# A waiting lock request blocks all later requests, and so delays jobs by at most this time.
LOCK_TIMEOUT_MS = 100
RUNNER_WAIT_S = 120.0
RETRY_S_MAX = 3.0
# In practice no limit: a migration takes as long as it needs.
STATEMENT_S = 6 * 3600.0

# This table lists the applied migrations, so no migration can create it.
LEDGER = """
CREATE TABLE IF NOT EXISTS taskd.migration (
    number integer PRIMARY KEY,
    name text NOT NULL,
    digest text NOT NULL,
    works_with integer NOT NULL,
    applied_at timestamptz
)
"""


class Runner:
    """Applies migrations over one connection.

    While steps run without a transaction, a second connection holds the lock for migrations.

    Args:
        known: all migrations of this code.
        lock_wait_s: how long to retry to lock the tables of a migration. One try waits at most
            LOCK_TIMEOUT_MS for each lock; a step without a transaction waits up to `lock_wait_s`.
    """

    def __init__(
        self,
        database: Database,
        connection: asyncpg.Connection,
        known: Sequence[Migration],
        lock_wait_s: float,
    ) -> None:
        self._database = database
        self._connection = connection
        self._schema = database.schema
        self._on = fetches(connection, database.schema)
        self._known = known
        self._lock_wait_s = lock_wait_s

    def _text(self, text: str) -> str:
        return in_schema(text, self._schema)

    async def is_missing(self, migration: Migration) -> bool:
        """Return whether the migration must be applied.

        Raises:
            SchemaTooNew, SchemaEdited: this code must not migrate this database.
        """
        ledger = self._text("SELECT to_regclass('taskd.migration')")
        if await self._connection.fetchval(ledger) is None:
            return True
        found = await migration_history.entries(self._on)
        error = out_of_date(self._known, found)
        if error is not None:
            raise error
        return bool(missing([migration], found))

    async def has_outgrown_nobody(self, migration: Migration, drain: bool, wait_s: float) -> bool:
        """Return whether the migration can be applied now: no live worker is too old for it.

        Args:
            drain: if workers are too old, announce the migration, so that these workers drain, and
                wait for their end.
            wait_s: the longest wait for their end.

        Returns:
            False: workers are too old. The migration is postponed, because this code works without
            the migration.

        Raises:
            MigrationFailed: workers are too old. With `drain`, they have not ended within `wait_s`.
                Without it, this code needs the migration.
        """
        if migration.number == 1:
            return True
        applied = [each for each in await migration_history.entries(self._on) if each.is_applied]
        if floor_of(applied) >= migration.works_with:
            return True
        old = await migration_history.outgrown(self._on, migration.works_with)
        if not old:
            return True
        if not drain:
            if not migration.is_needed:
                events.migration_postponed(migration.number, migration.name, _names(old))
                return False
            raise MigrationFailed(
                f"{migration.label} works with code {migration.works_with:04d} and later, but "
                f"older workers run: {', '.join(_names(old))}. It changed nothing. Stop these "
                "workers first, or ask them to drain: taskd db migrate --drain."
            )
        async with self._alone(self._connection):
            await migration_history.record(self._on, migration, is_applied=False)
        events.migration_announced(migration.number, migration.name, _names(old))
        deadline = time.monotonic() + wait_s
        while old := await migration_history.outgrown(self._on, migration.works_with):
            if time.monotonic() > deadline:
                raise MigrationFailed(
                    f"{migration.label} waits until workers that are too old for it have drained: "
                    f"{', '.join(_names(old))}. It is announced, and changed nothing else. Run "
                    "`taskd db migrate --drain` again when they have ended."
                )
            await asyncio.sleep(0.25)
        return True

    async def apply(self, migration: Migration) -> bool:
        """Apply a migration.

        Returns:
            Whether this process applied it; False if another process has applied it meanwhile.

        Raises:
            MigrationFailed: the migration could not be applied; the message says what was changed.
        """
        once = self._in_transaction if migration.in_transaction else self._apart
        tries, deadline = 0, time.monotonic() + self._lock_wait_s
        while True:
            tries += 1
            try:
                return await once(migration)
            except (asyncpg.LockNotAvailableError, asyncpg.DeadlockDetectedError) as error:
                tables = [lock.table for lock in migration.locks] or ["migration"]
                held = await migration_history.holders(
                    self._on, tables if migration.in_transaction else []
                )
                delay_s = random.uniform(0.2, min(0.2 * 2**tries, RETRY_S_MAX))
                if time.monotonic() + delay_s > deadline:
                    raise MigrationFailed(_not_locked(migration, tries, error, held)) from None
                events.migration_delayed(
                    migration.number, migration.name, first_line(error), delay_s, _names(held)
                )
                await asyncio.sleep(delay_s)
            except asyncpg.PostgresError as error:
                if not _is_its_own_fault(error):
                    raise
                raise MigrationFailed(_failed(migration, error)) from error

    async def _in_transaction(self, migration: Migration) -> bool:
        connection = self._connection
        async with self._alone(connection):
            if not await self.is_missing(migration):
                return False
            # Lock all tables, in order, before the first change. If a later statement had to wait
            # for a lock, other sessions would wait for the locks that this transaction holds.
            for lock in migration.locks:
                await connection.execute(self._text(lock_text(lock)))
            await connection.execute(self._text(migration.text), timeout=STATEMENT_S)
            await connection.execute(self._text(LEDGER))
            await migration_history.record(self._on, migration, is_applied=True)
        return True

    async def _apart(self, migration: Migration) -> bool:
        """Apply a migration that cannot run in a transaction; each of its steps can be repeated."""
        # Another connection holds the lock for migrations in an idle transaction. The transaction
        # has no snapshot, because a concurrent index build waits for the end of each snapshot.
        keeper = await self._database.connect("migrate", idle_in_transaction_session_timeout="0")
        try:
            async with self._alone(keeper):
                if not await self.is_missing(migration):
                    return False
                await self._take_steps(migration)
        finally:
            await close(keeper)
        return True

    async def _take_steps(self, migration: Migration) -> None:
        connection = self._connection
        # The steps wait for the end of older transactions. No job waits for the locks of the steps,
        # so the short lock_timeout does not apply.
        await connection.execute(f"SET lock_timeout = {int(self._lock_wait_s * 1000)}")
        try:
            for step in migration.steps:
                made = step.made and self._text(step.made)
                if made and await migration_history.is_invalid(self._on, made):
                    await connection.execute(drop_text(made), timeout=STATEMENT_S)
                await connection.execute(self._text(step.text), timeout=STATEMENT_S)
            await migration_history.record(self._on, migration, is_applied=True)
        finally:
            if not connection.is_closed():
                await connection.execute("SET lock_timeout = 0")

    @contextlib.asynccontextmanager
    async def _alone(self, connection: asyncpg.Connection) -> AsyncIterator[None]:
        """Run the block in a transaction that holds the lock for migrations.

        Raises:
            MigrationFailed: another session has held the lock for RUNNER_WAIT_S.
        """
        deadline, logged = time.monotonic() + RUNNER_WAIT_S, False
        while True:
            transaction = connection.transaction()
            await transaction.start()
            # The lock belongs to the transaction and not to the session, because a pooler can give
            # the session to other clients. Try the lock repeatedly instead of waiting for it: a
            # waiting session has a snapshot, which would delay a concurrent index build.
            lock = _lock_of(self._schema)
            if await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", lock):
                break
            await transaction.rollback()
            if time.monotonic() > deadline:
                raise MigrationFailed(
                    f"another session has held the lock for migrations for {RUNNER_WAIT_S:.0f} s "
                    "(in pg_locks: locktype advisory). The migration was not started. Try again "
                    "later."
                )
            if not logged:
                logged = True
                events.migration_waits()
            await asyncio.sleep(random.uniform(0.1, 0.3))
        try:
            # A further statement also closes the portal of the SELECT above, and so releases its
            # snapshot.
            await connection.execute(
                f"SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"
            )
            yield
        except BaseException:
            if not connection.is_closed():
                await transaction.rollback()
            raise
        await transaction.commit()


# Errors whose cause is the SQL of the migration, or the rows that it changes.
_ITS_OWN_FAULTS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.ObjectNotInPrerequisiteStateError,
)


def _is_its_own_fault(error: asyncpg.PostgresError) -> bool:
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return False
    return isinstance(error, _ITS_OWN_FAULTS) or isinstance(translate(error), StatementRefused)


def _lock_of(schema: str) -> int:
    """Return the number of the advisory lock for migrations of the schema."""
    return ADVISORY_LOCK + (0 if schema == SCHEMA_DEFAULT else crc32(schema.encode()))


def lock_text(lock: Lock) -> str:
    """Return the statement that takes the lock."""
    return f"LOCK TABLE taskd.{lock.table} IN {lock.mode.upper()} MODE"


def drop_text(index: str) -> str:
    """Return the statement that drops a partly built index."""
    return f"DROP INDEX CONCURRENTLY {index}"


def _names(found: Sequence[Any]) -> list[str]:
    return [str(each) for each in found]


def _not_locked(
    migration: Migration, tries: int, error: Exception, held: Sequence[migration_history.Holder]
) -> str:
    who = f" Held by {', '.join(_names(held))}." if held else ""
    count = "1 try" if tries == 1 else f"{tries} tries"
    what = "It changed nothing" if migration.in_transaction else "It continues where it stopped"
    return (
        f"{migration.label} got no lock in {count}: {first_line(error)}.{who} {what}. End "
        "those transactions, or wait for a quieter time, and run `taskd db migrate` again."
    )


def _failed(migration: Migration, error: Exception) -> str:
    what = (
        "It changed nothing; the migrations before it are applied"
        if migration.in_transaction
        else "Its earlier steps are done; another run continues from there"
    )
    return f"{migration.label} failed: {first_line(error)}. {what}."
