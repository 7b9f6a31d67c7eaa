"""How a migration is applied to a database that is in use; migrations.py says which.

One transaction each, with its record, and one runner at a time. For a lock it waits a moment only,
for whoever comes behind it waits as well, and then tries again. What living workers are too old for
is not applied before they have ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg

from taskd import events
from taskd.core.migration import Lock, Migration, floor_of, missing, out_of_date
from taskd.errors import MigrationFailed
from taskd.store.connections.callers_connection import fetches
from taskd.store.connections.database import Database, close
from taskd.store.connections.error_translation import first_line, translate
from taskd.store.schema import migration_history

ADVISORY_LOCK = 0x7461736B64  # "taskd"
# A lock that is waited for holds up all who come later, so that is how long a job may be held up.
LOCK_TIMEOUT_MS = 100
RUNNER_WAIT_S = 120.0
RETRY_S_MAX = 3.0
# A migration may take as long as it needs.
STATEMENT_S = 6 * 3600.0

# It holds the list of what was applied, so it cannot itself be a migration.
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

    Args:
        known: all migrations of this code.
        lock_wait_s: seconds to try for the locks of a migration, in tries of a tenth of a second.
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
        self._on = fetches(connection)
        self._known = known
        self._lock_wait_s = lock_wait_s

    async def is_missing(self, migration: Migration) -> bool:
        """Whether it is to be applied.

        Raises:
            SchemaTooNew, SchemaEdited: the database does not fit this code.
        """
        if await self._connection.fetchval("SELECT to_regclass('taskd.migration')") is None:
            return True
        found = await migration_history.entries(self._on)
        error = out_of_date(self._known, found)
        if error is not None:
            raise error
        return bool(missing([migration], found))

    async def has_outgrown_nobody(self, migration: Migration, drain: bool, wait_s: float) -> bool:
        """Whether no living worker is too old for it; waits for them if they are to drain.

        False: it has to wait, and this code works without it.

        Raises:
            MigrationFailed: there are such workers, and this code needs the migration; or they
                have not ended in time.
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
                f"{migration.label} works with code of {migration.works_with:04d} and later, and "
                f"older workers run: {', '.join(_names(old))}. Nothing was changed. Stop them "
                "first, or tell them to drain with `taskd db migrate --drain`."
            )
        async with self._alone(self._connection):
            await migration_history.record(self._on, migration, is_applied=False)
        events.migration_announced(migration.number, migration.name, _names(old))
        deadline = time.monotonic() + wait_s
        while old := await migration_history.outgrown(self._on, migration.works_with):
            if time.monotonic() > deadline:
                raise MigrationFailed(
                    f"{migration.label} waits for workers to drain that it is too new for: "
                    f"{', '.join(_names(old))}. It is announced, and nothing else was changed: run "
                    "`taskd db migrate --drain` again when they have ended."
                )
            await asyncio.sleep(0.25)
        return True

    async def apply(self, migration: Migration) -> bool:
        """Apply it; whether nobody else has done so meanwhile.

        Raises:
            MigrationFailed: it could not be; the message says what is left.
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
            # All at the beginning, in their order: what waits later would hold these meanwhile.
            for lock in migration.locks:
                await connection.execute(lock_text(lock))
            await connection.execute(migration.text, timeout=STATEMENT_S)
            await connection.execute(LEDGER)
            await migration_history.record(self._on, migration, is_applied=True)
        return True

    async def _apart(self, migration: Migration) -> bool:
        """One that cannot run in a transaction: step by step, each of which may be repeated."""
        # Another connection holds the place of the runner. It is idle in its transaction and so has
        # no snapshot, which an index that is built concurrently would wait for.
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
        # These locks hold up no job. What they wait for is the end of older transactions.
        await connection.execute(f"SET lock_timeout = {int(self._lock_wait_s * 1000)}")
        try:
            for step in migration.steps:
                if step.made and await migration_history.is_invalid(self._on, step.made):
                    await connection.execute(drop_text(step.made), timeout=STATEMENT_S)
                await connection.execute(step.text, timeout=STATEMENT_S)
            await migration_history.record(self._on, migration, is_applied=True)
        finally:
            if not connection.is_closed():
                await connection.execute("SET lock_timeout = 0")

    @contextlib.asynccontextmanager
    async def _alone(self, connection: asyncpg.Connection) -> AsyncIterator[None]:
        """A transaction, as soon as nobody else migrates.

        Raises:
            MigrationFailed: somebody else does so for too long.
        """
        deadline, told = time.monotonic() + RUNNER_WAIT_S, False
        while True:
            transaction = connection.transaction()
            await transaction.start()
            # Held until the commit, and by the transaction: behind a pooler the session is
            # anybody's. Tried, not waited for: who waits has a snapshot, and would hold up the
            # index that the other one builds.
            if await connection.fetchval("SELECT pg_try_advisory_xact_lock($1)", ADVISORY_LOCK):
                break
            await transaction.rollback()
            if time.monotonic() > deadline:
                raise MigrationFailed(
                    f"another session has held the lock of migrations for {RUNNER_WAIT_S:.0f} s "
                    "(in pg_locks: locktype advisory). Nothing was changed; run it again later."
                )
            if not told:
                told = True
                events.migration_waits()
            await asyncio.sleep(random.uniform(0.1, 0.3))
        try:
            # It also closes what the last statement has left open, and with that its snapshot.
            await connection.execute(
                f"SET LOCAL statement_timeout = 0; SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}"
            )
            yield
        except BaseException:
            if not connection.is_closed():
                await transaction.rollback()
            raise
        await transaction.commit()


# What these say is the fault of the migration's text, or of the rows that it meets.
_ITS_OWN_FAULTS = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.SyntaxOrAccessError,
    asyncpg.ObjectNotInPrerequisiteStateError,
)


def _is_its_own_fault(error: asyncpg.PostgresError) -> bool:
    if isinstance(error, asyncpg.InsufficientPrivilegeError):
        return False
    return isinstance(error, _ITS_OWN_FAULTS) or translate(error) is None


def lock_text(lock: Lock) -> str:
    """The statement that takes it."""
    return f"LOCK TABLE taskd.{lock.table} IN {lock.mode.upper()} MODE"


def drop_text(index: str) -> str:
    """The statement that drops an index which was made in part."""
    return f"DROP INDEX CONCURRENTLY {index}"


def _names(found: Sequence[Any]) -> list[str]:
    return [str(each) for each in found]


def _not_locked(
    migration: Migration, tries: int, error: Exception, held: Sequence[migration_history.Holder]
) -> str:
    who = f" Held by {', '.join(_names(held))}." if held else ""
    count = "1 try" if tries == 1 else f"{tries} tries"
    what = "Nothing was changed" if migration.in_transaction else "It goes on where it stopped"
    return (
        f"{migration.label} got no lock in {count}: {first_line(error)}.{who} {what}: end "
        "those transactions, or wait for a quieter time, and run `taskd db migrate` again."
    )


def _failed(migration: Migration, error: Exception) -> str:
    what = (
        "It changed nothing; what came before it is applied"
        if migration.in_transaction
        else "Its steps before that are done; run again, it goes on from there"
    )
    return f"{migration.label} failed: {first_line(error)}. {what}."
