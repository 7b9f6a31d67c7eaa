"""The history of migrations, and the workers and sessions that block a migration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from taskd.core.migration import Entry, Migration
from taskd.errors import SchemaEdited, SchemaError

if TYPE_CHECKING:
    from taskd.store.connections.statements import Fetches

HOLDERS_MAX = 5
UNDEFINED_COLUMN = "42703"
OTHER_LEDGER = (
    "the table taskd.migration has other columns than this taskd expects. Either the schema was "
    "changed by hand, or a taskd before the first release made it, and this taskd cannot migrate "
    "it. Use the taskd that made the schema. If no job matters, start over: DROP SCHEMA taskd "
    "CASCADE."
)


class OldWorker(NamedTuple):
    """A live worker whose code is too old for a migration."""

    id: int
    host: str
    pid: int
    version: str
    schema_newest: int

    def __str__(self) -> str:
        return f"{self.host}/{self.pid} (taskd {self.version})"


class Holder(NamedTuple):
    """A session that blocks a migration."""

    pid: int
    username: str
    application: str
    state: str
    xact_age_s: float

    def __str__(self) -> str:
        who = self.application or self.username or "a session"
        return f"pid {self.pid} ({who}, {self.state or 'hidden'}, for {self.xact_age_s:.1f} s)"


async def entries(on: Fetches) -> list[Entry]:
    """Return the applied and the announced migrations, by number.

    Raises:
        SchemaMissing: there is no schema taskd.
        SchemaEdited: the schema was made by an unreleased taskd, or changed by hand.
    """
    try:
        return [Entry(*row) for row in await on.fetch("list_migrations")]
    except SchemaError as error:
        if getattr(error.__cause__, "sqlstate", "") != UNDEFINED_COLUMN:
            raise
        raise SchemaEdited(OTHER_LEDGER) from error


async def record(on: Fetches, migration: Migration, *, is_applied: bool) -> None:
    """Record that a migration was applied, or announce that it will be applied."""
    await on.fetch(
        "record_migration",
        migration.number,
        migration.name,
        migration.digest,
        migration.works_with,
        is_applied,
    )


async def outgrown(on: Fetches, works_with: int) -> list[OldWorker]:
    """Return the live workers whose code is older than `works_with`."""
    return [OldWorker(*row) for row in await on.fetch("outgrown_workers", works_with)]


async def holders(on: Fetches, tables: Sequence[str]) -> list[Holder]:
    """Return sessions that hold locks on these tables; if no table is given, those with a snapshot.

    At most HOLDERS_MAX sessions are returned; sessions with the oldest transactions come first.
    """
    return [Holder(*row) for row in await on.fetch("lock_holders", list(tables), HOLDERS_MAX)]


async def is_invalid(on: Fetches, index: str) -> bool:
    """Return whether the index exists and is invalid, because its build has failed."""
    return bool((await on.fetch("is_index_invalid", index))[0][0])
