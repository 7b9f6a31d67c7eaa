"""Find the database: the database of the DSN in the settings, or the embedded one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from taskd.config import Settings, check_dsn, hide_password, read_dsn
from taskd.errors import ConfigError
from taskd.store.connections.database import Database

if TYPE_CHECKING:
    from taskd.embedded import Server

NO_DSN = (
    "no DSN is configured, and the embedded PostgreSQL is switched off (TASKD_EMBEDDED=off). "
    "Set TASKD_DSN or DATABASE_URL to postgresql://user@host/database, or give --dsn-file."
)


@dataclass(frozen=True, slots=True)
class Target:
    """The database that a client or a worker uses.

    Attributes:
        database: how to connect to it.
        dsn: the DSN for psql and other programs; it contains the password and must not be logged.
        embedded: the embedded server, which this process uses until close(). None if the database
            is on another server.
    """

    database: Database
    dsn: str
    embedded: Server | None = None

    def describe(self) -> str:
        """Return a description for people; a password is masked."""
        if self.embedded is None:
            return hide_password(self.dsn)
        return f"the embedded PostgreSQL {self.embedded.major} in {self.embedded.home}"

    def close(self, wait_s: float = 0.0) -> None:
        """Stop using the embedded server. The server stops shortly after the last use of it ends.

        Args:
            wait_s: for at most this many seconds, block until the server has stopped.
        """
        if self.embedded is not None:
            self.embedded.close(wait_s)


async def open_target(settings: Settings, room_s: float = 0.0) -> Target:
    """Return the database of these settings.

    If the settings have a DSN, no connection is made yet. Otherwise, the embedded server is
    started, and missing migrations are applied.

    Args:
        room_s: as in Database.

    Raises:
        ConfigError: the DSN is not valid, or there is no DSN and the embedded server is off.
        EmbeddedError: the embedded PostgreSQL cannot be started.
        SchemaTooNew: newer code has migrated the embedded database.
        MigrationFailed: a migration of the embedded database could not be applied.
    """
    if settings.dsn is not None:
        return _remote(settings.dsn, settings, room_s)
    if settings.embedded == "off":
        raise ConfigError(NO_DSN)
    return await _embedded(settings, room_s)


def _remote(dsn: str, settings: Settings, room_s: float) -> Target:
    try:
        dsn = check_dsn(dsn)
    except ValueError as error:
        raise ConfigError(f"the DSN: {error}") from None
    file = settings.dsn_file
    database = Database(
        {"dsn": dsn},
        statement_timeout_s=settings.statement_timeout_s,
        schema=settings.schema,
        read_args=None if file is None else lambda: {"dsn": read_dsn(file, "the DSN file")},
        room_s=room_s,
    )
    return Target(database, dsn)


async def _embedded(settings: Settings, room_s: float) -> Target:
    # Imported here: structlog alone would double the time of `import taskd`.
    from taskd import events
    from taskd.store.schema import migrations

    server = await asyncio.to_thread(_start, settings)
    database = Database(
        server.connect_args(),
        statement_timeout_s=settings.statement_timeout_s,
        schema=settings.schema,
        # If the embedded server was killed, the first program that needs the server starts it again
        # at the same address.
        revive=lambda: _start(settings).close(),
        room_s=room_s,
    )
    try:
        if server.started:
            events.embedded_started(str(server.home), server.major)
        for migration in await migrations.migrate(database):
            events.migration_applied(migration.number, migration.name)
    except BaseException:
        server.close()
        raise
    return Target(database, server.dsn(), server)


def _start(settings: Settings) -> Server:
    from taskd import embedded

    return embedded.start(settings=settings)
