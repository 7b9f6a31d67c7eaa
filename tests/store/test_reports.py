"""Reports about one job, queue or worker scan no table of jobs from end to end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from taskd.store.connections.statements import statement

FILL = """
INSERT INTO taskd.job (queue, task, state, run_at, crashes, errors)
SELECT 'q' || n % 3, 't', state::taskd.job_state, now() + make_interval(secs => n),
       CASE WHEN state = 'scheduled' AND n % 100 = 0 THEN 1 ELSE 0 END, '[]'
FROM (
    SELECT n, CASE WHEN n % 2 = 0 THEN 'queued' ELSE 'scheduled' END AS state
    FROM generate_series(1, 20000) AS n
) AS job
"""
HISTORY = """
INSERT INTO taskd.job_history (id, enqueued_at, run_at, finished_at, expires_at, fence, state,
                               priority, attempt, crashes, interrupts, queue, task, args, errors)
SELECT 100000 + n, now(), now(), now() - make_interval(secs => n), now() + interval '7 days', 1,
       CASE WHEN n % 100 = 0 THEN 'failed' ELSE 'done' END::taskd.job_state,
       100, 1, 0, 0, 'q1', 't', '{}', '[]'
FROM generate_series(1, 20000) AS n
"""


@pytest.fixture
async def filled(sql: Any) -> Any:
    await sql.execute(FILL)
    await sql.execute(HISTORY)
    await sql.execute("ANALYZE taskd.job, taskd.job_history")
    return sql


async def read(sql: Any, name: str, *args: object) -> set[str]:
    """Return the indexes that a statement reads, and the tables that it reads from end to end."""
    types, text = statement(name).types, statement(name).text
    values = ", ".join("NULL" if arg is None else str(arg) for arg in args)
    await sql.execute(f"PREPARE asked ({', '.join(types)}) AS {text}")
    plan = await sql.fetchval(f"EXPLAIN (FORMAT JSON) EXECUTE asked({values})")
    await sql.execute("DEALLOCATE asked")
    found: set[str] = set()
    collect(json.loads(plan)[0]["Plan"], found)
    return found


def collect(node: dict[str, Any], found: set[str]) -> None:
    if "Index Name" in node:
        found.add(node["Index Name"])
    elif node["Node Type"] == "Seq Scan":
        found.add(node["Relation Name"])
    for each in node.get("Plans", []):
        collect(each, found)


async def leaf(sql: Any) -> str:
    """The partition that holds the finished jobs; the others are empty."""
    name: str = await sql.fetchval(
        "SELECT relname::text FROM taskd.job_history AS j JOIN pg_class AS c ON c.oid = j.tableoid"
    )
    return name


async def test_why_finds_the_job_and_those_before_it_by_index(filled: Any) -> None:
    found = await read(filled, "why_job", 10_000, 10_001, 20)
    assert {"job_pkey", "job_claim", "job_due", "job_running"} <= found
    assert not {"job", await leaf(filled)} & found


async def test_errors_are_read_along_the_indexes_of_what_failed_and_of_what_is_due(
    filled: Any,
) -> None:
    found = await read(filled, "stats_errors", 3600, None, None, None, 1000)
    assert "job_due" in found
    assert not {"job", await leaf(filled)} & found
