"""The unique key of a task applies to every producer: its code, SQL, or a client by its name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import asyncpg
import msgspec
import pytest

from taskd import Client, NewJob, Unique, task
from taskd.client.workflows import Workflow
from taskd.core.jobs.limit import Limit
from taskd.core.jobs.unique import of_rule
from taskd.core.tasks.batch import Item
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import InvalidJob, KeyHeld
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import limits

OF_RULE = "SELECT taskd.unique_key_of($1::jsonb, $2::jsonb)"
KEYS = "SELECT unique_key FROM taskd.job ORDER BY id"
VALUES: list[Any] = [
    None, True, False, 0, -0.0, 1, 1.0, -7, 0.1, 1.10, 1e16, 1e22, 1e23, 1.5e-7, 5e-324, 1.7e308,
    2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 2**70, 123456789.123456789,
    "", "ada", "ü", "\u00a0\u200b", "\U0001f600", 'a"b\\c/d', "\b\f\n\r\t\x01\x1f", "\x7f", "\x85",
    "\u2028", "1.0", "null", "x" * 500, "ü" * 99,
    [], {}, [[]], [1, [2.0, {"b": 1, "a": [None]}]],
    {"b": 1, "a": 2, "aa": 3, "": 4, "ü": 5, "Z": 6},
    {"\U0001f600": 1, "\uffee": 2, "a\n": {"x": 1.50}}, ["a, b", {"k": ": "}],
]  # fmt: skip
TEXTS = [
    "1.0", "1.00e1", "1e3", "-0", "-0.0e5", "0.1000", "1E+2", "1e-7", "12345678901234567890.50",
    '"\\u00fc\\/\\u0001"', '{"a": 1, "b": 2, "a": 3.0}', "[ 1 ,2.50 ]", "1e400", "1e-400",
]  # fmt: skip


@dataclass
class Account:
    account: int
    region: str = "eu"


async def sync(account: Any, region: str = "eu", since: float | None = 1.0, rev: int = 0) -> None:
    """Any task."""


def tasks(unique: Unique, handler: Any = sync, **options: Any) -> tuple[Registry, Task[..., Any]]:
    registry = Registry()
    return registry, task(queue="sync", unique=unique, registry=registry, **options)(handler)


async def publish(lane: Lane, unique: Unique, **options: Any) -> Task[..., Any]:
    registry, made = tasks(unique, **options)
    await workers.publish(lane, "app", registry, ["sync"])
    await limits.publish(lane, "app", registry)
    return made


async def by_sql(sql: Any, args: str, more: str = "") -> int:
    job_id: int = await sql.fetchval(f"SELECT taskd.enqueue('sync', $1::jsonb{more})", args)
    return job_id


@pytest.mark.parametrize("by", [("account",), ("account", "region", "since")])
async def test_sql_makes_the_very_keys_that_python_makes(sql: Any, by: tuple[str, ...]) -> None:
    _, made = tasks(Unique(by=by))
    assert made.unique is not None
    rule = made.unique.rule(made.unique_defaults)
    for text in [msgspec.json.encode(value).decode() for value in VALUES] + TEXTS:
        args = f'{{"account": {text}}}'
        key = of_rule(rule, args).key
        assert await sql.fetchval(OF_RULE, rule, args) == key, text
        assert made.unique_of(args) == Unique(key), text


@pytest.mark.parametrize(
    "args",
    [
        {"account": 1, "since": None},
        {"account": 1, "since": 2},
        {"account": 1, "since": 2.0, "region": "us"},
        {"account": 1.0, "region": "\x7f"},
        {"account": None},
        {"account": {"b": [1.50, None], "a": "ü"}, "region": "eu"},
    ],
)
async def test_every_way_to_enqueue_gives_a_job_the_same_key(
    client: Client, sql: Any, lane: Lane, args: dict[str, Any]
) -> None:
    made = await publish(lane, Unique(by=("account", "region", "since"), for_s=60))
    first = await client.enqueue(made.job(**args))
    assert first.outcome == "enqueued"
    assert await by_sql(sql, json.dumps(args)) == first
    assert await client.enqueue_named("sync", args) == first
    assert await client.enqueue_named("sync", args, queue="other") == first
    assert await client.enqueue(NewJob("sync", json.dumps(args))) == first
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 1


async def test_what_no_number_of_postgresql_can_hold_makes_no_key() -> None:
    with pytest.raises(InvalidJob, match="more than 131,072 digits"):
        Unique(by=("n",)).of('{"n": 1e999999999}')


async def test_sql_follows_the_rule_in_every_part(sql: Any, lane: Lane, client: Client) -> None:
    unique = Unique(
        by=("account",), scope="waiting", for_s=60, on_conflict="debounce", debounce_max_s=30
    )
    await publish(lane, unique, limit=Limit(1, by="account"))
    first = await by_sql(sql, '{"account": 1, "rev": 1}', ", delay_s => 10")
    assert await by_sql(sql, '{"account": 1, "rev": 2}', ", delay_s => 500, priority => 5") == first
    row = await sql.fetchrow(
        "SELECT *, date_part('epoch', run_at - enqueued_at) AS delay_s FROM taskd.job"
    )
    assert (row["key_scope"], row["delay_s"], row["priority"]) == ("waiting", 30, 5)
    assert (row["limit_name"], row["limit_key"], row["queue"]) == ("sync", "1", "sync")
    assert json.loads(row["args"]) == {"account": 1, "rev": 2}
    held_s = "SELECT date_part('epoch', until - now()) FROM taskd.job_key"
    assert 0 < await sql.fetchval(held_s) <= 60


async def test_a_key_that_is_to_raise_does_so_in_sql_and_by_name(
    sql: Any, lane: Lane, client: Client
) -> None:
    await publish(lane, Unique("nightly", on_conflict="raise"))
    await by_sql(sql, '{"account": 1}')
    with pytest.raises(asyncpg.UniqueViolationError, match="holds the unique key"):
        await by_sql(sql, '{"account": 2}')
    with pytest.raises(KeyHeld):
        await client.enqueue_named("sync", {"account": 3})


async def test_a_version_is_an_argument_in_sql_too(sql: Any, lane: Lane, client: Client) -> None:
    await publish(lane, Unique(by=("account",), version_by="rev"))
    first = await by_sql(sql, '{"account": 1, "rev": 7.0}')
    assert await by_sql(sql, '{"account": 1, "rev": 6}') == first
    assert await by_sql(sql, '{"account": 1}') == first  # its default is older still
    assert (await client.enqueue_named("sync", {"account": 1, "rev": 8})).outcome == "replaced"
    row = await sql.fetchrow("SELECT version, args FROM taskd.job")
    assert (row["version"], json.loads(row["args"])["rev"]) == (8, 8)
    for odd in ("7.5", '"7"', "true"):
        with pytest.raises(asyncpg.PostgresError, match=r"must be (a whole number|integer)"):
            await by_sql(sql, f'{{"account": 1, "rev": {odd}}}')


async def test_who_wants_no_key_says_so(sql: Any, lane: Lane, client: Client) -> None:
    made = await publish(lane, Unique(by=("account",)))
    await by_sql(sql, '{"account": 1}')
    await by_sql(sql, '{"account": 1}', ", no_key => true")
    await client.enqueue_named("sync", {"account": 1}, no_key=True)
    await client.enqueue(made.options(no_key=True).job(1))  # type: ignore[attr-defined]
    assert [row[0] for row in await sql.fetch(KEYS)] == ["[1]", None, None, None]
    with pytest.raises(InvalidJob, match="not both"):
        NewJob("sync", unique=Unique("k"), no_key=True)


async def test_a_key_of_the_callers_own_goes_before_the_tasks(
    sql: Any, lane: Lane, client: Client
) -> None:
    await publish(lane, Unique(by=("account",)))
    await client.enqueue_named("sync", {"account": 1}, unique=Unique("mine"))
    await sql.execute("""SELECT taskd.enqueue_unique('sync', '{"account": 1}', 'own')""")
    assert [row[0] for row in await sql.fetch(KEYS)] == ["mine", "own"]


async def test_a_rule_that_the_code_drops_is_dropped(sql: Any, lane: Lane) -> None:
    await publish(lane, Unique(by=("account",)))
    registry = Registry()
    task(queue="sync", registry=registry)(sync)
    await workers.publish(lane, "app", registry, ["sync"])
    await by_sql(sql, '{"account": 1}')
    assert await sql.fetchval(KEYS) is None


async def test_members_of_a_batch_are_keyed_by_the_fields_of_their_arguments(
    sql: Any, lane: Lane, client: Client
) -> None:
    registry = Registry()

    @task(batch=10, queue="sync", unique=Unique(by=("account", "region")), registry=registry)
    async def sync(items: list[Item[Account]]) -> None: ...

    await workers.publish(lane, "app", registry, ["sync"])
    first = await client.enqueue(sync.job(Account(1)))
    assert await by_sql(sql, '{"account": 1}') == first
    assert await sql.fetchval(KEYS) == '[1,"eu"]'


async def test_a_part_of_a_workflow_has_no_key(sql: Any, lane: Lane, client: Client) -> None:
    await publish(lane, Unique(by=("account",)))
    await by_sql(sql, '{"account": 1}')
    workflow = Workflow("w")
    workflow.add(NewJob("sync", '{"account": 1}'), name="part")
    await workflow.start(client=client)
    assert [row[0] for row in await sql.fetch(KEYS)] == ["[1]", None]
