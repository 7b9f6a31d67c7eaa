"""Write what sql/ has from the schema itself: `python -m tests.contracts.schema`.

These are the lines `Called by` of the migrations, and sql/objects.tsv, the list of the objects.
Each line of the list is a row that the statement `doctor_objects` returns for a freshly migrated
database: the kind, name and definition of an object, with tabs between them. PostgreSQL 15 to 18
return the same rows.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import asyncpg

from taskd.core.doctor.objects import on_one_line
from taskd.store.connections.statements import sql_root, statement
from taskd.store.reading.doctor import DEFINITIONS
from tests.contracts import sql_functions

OBJECTS = sql_root() / "objects.tsv"


async def prepare(connection: Any) -> None:
    """Give a session the settings of the doctor's."""
    for name, value in {"search_path": "pg_catalog", **DEFINITIONS}.items():
        await connection.execute(f"SET {name} = '{value}'")


async def installed(connection: Any) -> str:
    """Return the text of sql/objects.tsv for a freshly migrated database."""
    await prepare(connection)
    rows = await connection.fetch(statement("doctor_objects").text)
    lines = [f"{row['kind']}\t{row['name']}\t{on_one_line(row)}" for row in rows]
    return "\n".join(sorted(lines)) + "\n"


async def write(dsn: str) -> None:
    """Migrate an empty database and write its objects to sql/objects.tsv."""
    from taskd.store.connections.database import Database
    from taskd.store.schema import migrations

    await migrations.migrate(Database({"dsn": dsn}))
    connection = await asyncpg.connect(dsn)
    try:
        OBJECTS.write_text(await installed(connection), encoding="utf-8")
    finally:
        await connection.close()


def main() -> None:
    from taskd import embedded

    for path in sql_functions.paths():
        text = path.read_text(encoding="utf-8")
        path.write_text(sql_functions.with_callers(text), encoding="utf-8")
    with tempfile.TemporaryDirectory() as home:
        server = embedded.start(Path(home), durable=False)
        try:
            asyncio.run(write(server.dsn("postgres")))
        finally:
            server.close()


if __name__ == "__main__":
    main()
