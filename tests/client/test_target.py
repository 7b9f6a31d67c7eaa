"""Where the database is: the embedded one when no DSN is configured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from taskd import Client, embedded, events
from taskd.client import open_target
from taskd.config import Settings, hide_password


@pytest.fixture
def emitted() -> Any:
    found: list[tuple[str, Any]] = []
    end = events.subscribe(lambda name, fields: found.append((name, dict(fields))))
    yield found
    end()


async def test_without_a_dsn_the_embedded_one_is_started_migrated_and_announced(
    tmp_path: Path, emitted: Any
) -> None:
    settings = Settings(data_dir=tmp_path)
    target = await open_target(settings)
    try:
        server = target.embedded
        assert server is not None
        assert server.home.parent == tmp_path
        assert server.home.name == f"pg{server.major}"
        assert str(server.home) in target.describe()
        assert [name for name, _ in emitted][:2] == ["embedded.started", "migration.applied"]
        # What the DSN leads to is the same database.
        connection = await asyncpg.connect(target.dsn)
        assert await connection.fetchval("SELECT count(*) FROM taskd.job") == 0
        await connection.close()
    finally:
        target.close()
    assert not (await joins_quietly(settings, emitted))


async def joins_quietly(settings: Settings, emitted: Any) -> list[Any]:
    """A second use while the server still runs logs nothing; enqueueing through it works."""
    emitted.clear()
    holder = embedded.start(settings=settings)
    async with Client(settings=settings) as client:
        job_id = await client.enqueue_named("any", {"a": 1}, queue="q")
    connection = await asyncpg.connect(holder.dsn())
    stored = await connection.fetchval("SELECT args FROM taskd.job WHERE id = $1", job_id)
    await connection.close()
    assert json.loads(stored) == {"a": 1}
    holder.close(wait_s=10)
    return list(emitted)


async def test_a_dsn_keeps_the_embedded_one_away(tmp_path: Path, dsn: str) -> None:
    target = await open_target(Settings(dsn=dsn, data_dir=tmp_path))
    assert target.embedded is None
    assert target.describe() == hide_password(dsn)
    target.close(wait_s=5)
    assert not list(tmp_path.iterdir())
