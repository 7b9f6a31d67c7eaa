"""Statements are prepared once per connection."""

from __future__ import annotations

from typing import Any

from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.connections.statements import statement

# How often this session has prepared the text.
PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE statement = $1"
CHANGED = (
    "DROP VIEW taskd.due; CREATE VIEW taskd.due AS "
    "SELECT 1 AS job_s, 2 AS suspect_s, 3 AS gate_s, '{q}'::text[] AS limited"
)


async def test_a_statement_is_prepared_once(database: Database) -> None:
    connection = await database.connect("test")
    try:
        for _ in range(3):
            await database.run(connection, "draw_xid", ())
        text = statement("draw_xid").text
        assert await connection.fetchval(PREPARED, text) == 1
    finally:
        await connection.close()


async def test_a_statement_whose_columns_have_changed_is_prepared_anew(
    sql: Any, lane: Lane
) -> None:
    before = await lane.fetch("next_due")
    assert before[0]["limited"] == []
    await sql.execute(CHANGED)
    for _ in range(2):
        assert [tuple(row) for row in await lane.fetch("next_due")] == [(1, 2, 3, ["q"])]
