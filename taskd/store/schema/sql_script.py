"""Migrations as one script for psql, for databases that a DBA changes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from taskd.config.parsing import SCHEMA_DEFAULT
from taskd.core.migration import Migration, Step
from taskd.store.schema.migrate import LEDGER, LOCK_TIMEOUT_MS, drop_text, lock_text
from taskd.store.schema_text import in_schema

HEAD = f"""\
-- taskd's schema. Run this as the role that will own it:  psql -X -v ON_ERROR_STOP=1 -f this-file
-- Each migration inserts its row into taskd.migration, where taskd looks for it. If a lock is not
-- free within {LOCK_TIMEOUT_MS} ms, the transaction rolls back, and the script ends: run it again.
SET lock_timeout = '{LOCK_TIMEOUT_MS}ms';
SET client_min_messages = 'warning';
"""


def script(migrations: Sequence[Migration], schema: str = SCHEMA_DEFAULT) -> str:
    """Return the SQL that applies these migrations in order and records them.

    Args:
        schema: the schema of the installation.

    The SQL is one transaction, except for steps that cannot run in a transaction.
    """
    parts = [HEAD]
    for in_transaction, group in groupby(migrations, lambda each: each.in_transaction):
        made = list(group)
        if in_transaction:
            parts += ["BEGIN;\n", *(_in_transaction(each) for each in made), "COMMIT;\n"]
        else:
            parts += [_apart(each) for each in made]
    return in_schema("\n".join(parts), schema)


def _in_transaction(migration: Migration) -> str:
    locks = "".join(f"{lock_text(each)};\n" for each in migration.locks)
    return f"{_title(migration)}{locks}{migration.text.rstrip()}\n{_record(migration)}"


def _apart(migration: Migration) -> str:
    # The steps wait for the end of older transactions. No job waits for the locks of the steps, so
    # the lock_timeout does not apply.
    steps = "".join(_step(each) for each in migration.steps)
    return (
        f"{_title(migration)}SET lock_timeout = 0;\n{steps}"
        f"SET lock_timeout = '{LOCK_TIMEOUT_MS}ms';\n{_record(migration)}"
    )


def _step(step: Step) -> str:
    again = (
        f"SELECT '{drop_text(step.made)}' FROM pg_index\n"  # noqa: S608 - our own names
        f"WHERE indexrelid = to_regclass('{step.made}') AND NOT indisvalid \\gexec\n"
        if step.made
        else ""
    )
    return f"{again}{step.text};\n"


def _title(migration: Migration) -> str:
    old = f"workers with code before {migration.works_with:04d}"
    return f"-- {migration.label}: when the migration is committed, {old} drain.\n"


def _record(migration: Migration) -> str:
    # Name and digest come from a file's name and a hash, so they contain no quote.
    row = (
        f"({migration.number}, '{migration.name}', '{migration.digest}', {migration.works_with}, "
        "clock_timestamp())"
    )
    return (
        f"{LEDGER.strip()};\n"
        "INSERT INTO taskd.migration (number, name, digest, works_with, applied_at)\n"
        f"VALUES {row}\nON CONFLICT (number) DO UPDATE SET applied_at = excluded.applied_at;\n"
    )
