"""Roles: run sql/roles.sql, which makes the roles and grants their rights in the schema."""

from __future__ import annotations

import re

from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.errors import PermissionDenied, SchemaMissing
from taskd.store.connections.database import Database
from taskd.store.connections.error_translation import no_schema
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import sql_root
from taskd.store.schema.migrations import entries
from taskd.store.schema_text import in_schema

KINDS = ("owner", "producer", "worker", "observer", "admin")
PREFIX = re.compile(r"[a-z_][a-z0-9_]{0,39}")


def names(prefix: str = SCHEMA_DEFAULT) -> list[str]:
    """Return the names of the roles, the owner first.

    Raises:
        ValueError: the prefix is not 1 to 40 of the characters a-z 0-9 _, or begins with a digit.
    """
    if not PREFIX.fullmatch(prefix):
        raise ValueError(
            f"prefix {prefix!r}: use 1 to 40 of the characters a-z 0-9 _, no digit first"
        )
    return [f"{prefix}_{kind}" for kind in KINDS]


def script(prefix: str | None = None, schema: str = SCHEMA_DEFAULT) -> str:
    """Return the SQL that makes the roles and grants their rights.

    Roles belong to the whole server, so each installation has roles of its own.

    Args:
        prefix: the first part of the names of the roles; the name of the schema by default.
        schema: the schema of the installation.

    Raises:
        ValueError: as names().
    """
    prefix = schema if prefix is None else prefix
    names(prefix)
    text = (sql_root() / "roles.sql").read_text(encoding="utf-8")
    names_of_schema = re.compile(rf"\b{schema}_({'|'.join(KINDS)})\b")
    return names_of_schema.sub(rf"{prefix}_\1", in_schema(text, schema))


async def make(database: Database, prefix: str | None = None) -> None:
    """Make the missing roles, and grant each role its rights. Safe to repeat.

    Raises:
        SchemaMissing: the database has no schema taskd.
        PermissionDenied: this user is not allowed to make roles, or does not own the schema.
        ValueError: as names().
    """
    if not await entries(database):
        raise SchemaMissing(no_schema(database.schema))
    try:
        async with database.connection("roles") as connection:
            await connection.execute(script(prefix, database.schema))
    except PermissionDenied as error:
        raise PermissionDenied(
            f"{error} Only a superuser, or a schema owner that has CREATEROLE, can make roles. "
            "`taskd db roles --sql` prints the statements."
        ) from None


async def renew(database: Database) -> list[str]:
    """Grant the rights of the roles again after a migration; return the names of the roles.

    If make() has not made the owner of the schema, do nothing and return an empty list.
    """
    lane = Lane(database, "roles")
    try:
        rows = await lane.fetch("find_roles")
    finally:
        await lane.close()
    if not rows:
        return []
    await make(database, rows[0][0])
    return names(rows[0][0])
