"""Roles: sql/roles.sql, which makes them, hands the schema over and grants what each needs."""

from __future__ import annotations

import re

from taskd.errors import PermissionDenied, SchemaMissing
from taskd.store.connections.database import Database, Lane
from taskd.store.connections.error_translation import NO_SCHEMA
from taskd.store.connections.statements import sql_root
from taskd.store.schema.migrations import entries

KINDS = ("owner", "producer", "worker", "observer", "admin")
PREFIX = re.compile(r"[a-z_][a-z0-9_]{0,39}")
PREFIX_DEFAULT = "taskd"

_NAME = re.compile(rf"\btaskd_({'|'.join(KINDS)})\b")


def names(prefix: str = PREFIX_DEFAULT) -> list[str]:
    """The names of the roles, the owner's first.

    Raises:
        ValueError: a prefix that is not plain lower-case letters, digits and underscores.
    """
    if not PREFIX.fullmatch(prefix):
        raise ValueError(
            f"prefix {prefix!r}: use 1 to 40 of the characters a-z 0-9 _, no digit first"
        )
    return [f"{prefix}_{kind}" for kind in KINDS]


def script(prefix: str = PREFIX_DEFAULT) -> str:
    """The SQL that makes the roles and grants; for psql as it stands.

    Raises:
        ValueError: as names().
    """
    names(prefix)
    text = (sql_root() / "roles.sql").read_text(encoding="utf-8")
    return _NAME.sub(rf"{prefix}_\1", text)


async def make(database: Database, prefix: str = PREFIX_DEFAULT) -> None:
    """Make the roles that are missing, and grant each what it needs. Safe to repeat.

    Raises:
        SchemaMissing: there is nothing yet to grant.
        PermissionDenied: this role may not make roles, or does not own the schema.
    """
    if not await entries(database):
        raise SchemaMissing(NO_SCHEMA)
    try:
        async with database.connection("roles") as connection:
            await connection.execute(script(prefix))
    except PermissionDenied as error:
        raise PermissionDenied(
            f"{error} Roles are made by a superuser, or by the owner of the schema if it may "
            "create roles: `taskd db roles --sql` prints what to run."
        ) from None


async def renew(database: Database) -> list[str]:
    """Grant anew after a migration, if the schema has been handed over to roles; their names."""
    lane = Lane(database, "roles")
    try:
        rows = await lane.fetch("find_roles")
    finally:
        await lane.close()
    if not rows:
        return []
    await make(database, rows[0][0])
    return names(rows[0][0])
