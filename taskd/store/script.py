"""The migrations as one script for psql: for databases whose owner lets no program change them."""

from __future__ import annotations

from collections.abc import Iterable

from taskd.store.migrations import LEDGER, Migration

HEAD = """\
-- taskd's schema; run it as the role that is to own it:  psql -X -v ON_ERROR_STOP=1 -f this-file
-- Each migration is one transaction and records itself in taskd.migration, so that
-- `taskd db migrate` and `taskd db check` know of it.
SET lock_timeout = '2s';
SET client_min_messages = 'warning';
"""


def script(migrations: Iterable[Migration]) -> str:
    """The SQL that applies these migrations, in order, and records them."""
    return "\n".join([HEAD, *(_one(each) for each in migrations)])


def _one(migration: Migration) -> str:
    # Name and digest come from a file's name and a hash: no quote can be in them.
    row = f"({migration.number}, '{migration.name}', '{migration.digest}')"
    return (
        f"BEGIN;\n{migration.text.rstrip()}\n{LEDGER.rstrip()};\n"
        f"INSERT INTO taskd.migration (number, name, digest) VALUES {row};\nCOMMIT;\n"
    )
