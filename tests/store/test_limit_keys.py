"""Keys of limits: SQL and Python compute the same key for every value."""

from __future__ import annotations

from typing import Any

import pytest

from taskd.core.jobs.job import NewJob
from taskd.core.jobs.limit import Limit
from taskd.store import tasks
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs, limits
from tests.store.helpers import (
    row,
)
from tests.store.limit_helpers import enqueue, publish, queued


async def test_sql_clients_and_programs_without_the_app_get_the_same_limit_and_key(
    lane: Lane, sql: Any
) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    await enqueue(lane, task, "acme", "main")
    for args in ('{"tenant": "acme"}', "{}"):
        await sql.execute("SELECT taskd.enqueue('t', $1::text::jsonb)", args)
        await sql.execute("SELECT taskd.enqueue_unique('t', $1::text::jsonb, 'k' || $1)", args)
        published = (await tasks.find(lane, ["t"]))["t"]
        await jobs.enqueue(lane, [NewJob("t", args, queue="q", limit=published.limit_of(args))])
    rows = await sql.fetch("SELECT limit_name, limit_key, count(*) FROM taskd.job GROUP BY 1, 2")
    assert {tuple(each) for each in rows} == {("t", "acme", 4), ("t", "main", 4)}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ("[]", ""),
        ('["acme"]', "acme"),
        ("[7]", "7"),
        ("[7.0]", "7"),
        ("[null]", "null"),
        ('["acme", 7]', '["acme",7]'),
        ('["acme", 7.0]', '["acme",7]'),
        ("[[7.0]]", "[7]"),
        ('["' + "x" * 300 + '"]', 64),
        ('["a\\u0007b"]', 64),
    ],
)
async def test_a_key_is_the_value_itself_or_a_hash_of_it(
    sql: Any, values: str, key: str | int
) -> None:
    encoded = await sql.fetchval("SELECT taskd.limit_key($1::text::jsonb)", values)
    assert encoded == key if isinstance(key, str) else len(encoded) == key


async def test_a_number_has_the_same_key_from_python_and_from_sql(sql: Any, lane: Lane) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    args = '{"tenant": 0.10000000000000000001}'
    await jobs.enqueue(lane, [NewJob("t", args, queue="q", limit=task.limit_of(args))])
    await sql.execute("SELECT taskd.enqueue('t', $1::text::jsonb)", args)
    keys = [row[0] for row in await sql.fetch("SELECT limit_key FROM taskd.job")]
    assert keys == ["0.10000000000000000001"] * 2


@pytest.mark.parametrize("name", ["", "a\nb", "x" * 300])
async def test_a_name_that_no_limit_can_have_keeps_no_other_job_at_its_gate(
    sql: Any, lane: Lane, name: str
) -> None:
    task = await publish(lane, Limit(concurrency=1))
    # No function accepts the name; a superuser has written it.
    await sql.execute(
        "INSERT INTO taskd.job (queue, task, state, limit_name, limit_key) "
        "VALUES ('q', 't', 'blocked', $1, '')",
        name,
    )
    [job_id] = await enqueue(lane, task, "main")
    admitted = await limits.admit(lane, 100)
    assert (admitted.checked, await queued(sql)) == (2, [job_id])
    # It waits for a limit that nobody can publish, and is not checked again.
    assert (await limits.admit(lane, 100)).checked == 0
    assert [each["name"] for each in await limits.list_limits(lane)] == ["t"]


async def test_a_new_key_of_a_waiting_job_moves_it_to_another_line(
    lane: Lane, sql: Any, me: int
) -> None:
    task = await publish(lane, Limit(concurrency=1, by="tenant"))
    replace = (
        "SELECT job_id FROM taskd.enqueue_unique('t', jsonb_build_object('tenant', $1::text), 'k', "
        "on_conflict => 'replace', delay_s => $2)"
    )
    holder = await sql.fetchval(replace, "x", None)
    _, second = await enqueue(lane, task, "y", "x")
    await limits.admit(lane, 100)
    assert holder in await queued(sql, "x")
    assert await sql.fetchval(replace, "y", None) == holder
    await limits.admit(lane, 100)
    assert await queued(sql, "x") == [second]
    assert (await row(sql, holder))["state"] == "blocked"
    assert await sql.fetchval(replace, "x", 60.0) == holder
    assert (await row(sql, holder))["state"] == "scheduled"
