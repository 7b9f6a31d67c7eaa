"""What the long commands play on: a server, and a database of their own there."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import asyncpg

from taskd import embedded
from taskd.store.connections.database import Database
from taskd.store.schema import migrations
from taskd.testing.server import with_database


def add_dsn(parser: argparse.ArgumentParser) -> None:
    """The option of all of them."""
    parser.add_argument(
        "--dsn",
        default=os.environ.get("TASKD_TEST_DSN"),
        help="a server where databases may be created: TASKD_TEST_DSN, else an embedded one",
    )


@contextmanager
def server(dsn: str | None, *, durable: bool = True) -> Iterator[str]:
    """The DSN of a server: that one, or an embedded one for the length of the block.

    Args:
        durable: whether an embedded one waits for its disk.
    """
    if dsn:
        yield dsn
        return
    with tempfile.TemporaryDirectory(prefix="taskd-server-") as home:
        own = embedded.start(Path(home) / "pg", durable=durable)
        try:
            yield own.dsn("postgres")
        finally:
            own.close(wait_s=30.0)


@asynccontextmanager
async def database(place: str, purpose: str, *, keep: bool = False) -> AsyncIterator[str]:
    """The DSN of a new, migrated database on a server, dropped in the end unless it is kept."""
    name = f"taskd_{purpose}_{os.getpid()}"
    admin = await asyncpg.connect(place)
    try:
        await admin.execute(f"CREATE DATABASE {name} TEMPLATE template0")
        try:
            dsn = with_database(place, name)
            await migrations.migrate(Database({"dsn": dsn}))
            yield dsn
        finally:
            if not keep:
                await admin.execute(f"DROP DATABASE {name} WITH (FORCE)")
    finally:
        await admin.close()
