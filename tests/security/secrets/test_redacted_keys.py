"""Keys made of redacted arguments: hashed by every producer alike, and shown nowhere in clear."""

from __future__ import annotations

import asyncio
import hashlib
import json
from datetime import UTC, datetime
from typing import Any

import asyncpg
import pytest

from taskd import Client, Limit, NewJob, Unique, task
from taskd.cli import cli
from taskd.client.workflows import Workflow
from taskd.core.jobs.limit import limit_of
from taskd.core.jobs.unique import of_rule
from taskd.core.schedule import Every, Schedule
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.errors import AppError, InvalidJob
from taskd.store import schedules, workers
from taskd.store.connections.database import Database
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import limits
from tests.client.test_unique_rules import TEXTS, VALUES
from tests.logins import Logins

SECRET = "tok-4711-canary"
ARGS = {"account": 7, "token": SECRET}
HASHED = "sha256:" + hashlib.sha256(json.dumps(SECRET).encode()).hexdigest()
# The tables in which keys are stored.
KEYED = ("job", "job_history", "job_key", "opening", "bucket")


async def reset(account: int, token: str = "none", rev: int = 0) -> None:
    """A handler with a secret argument."""


async def publish(lane: Lane, **options: Any) -> Task[..., Any]:
    registry = Registry()
    made = task(queue="mail", redact=["token"], registry=registry, **options)(reset)
    await workers.publish(lane, "app", registry, ["mail"])
    await limits.publish(lane, "app", registry)
    return made


async def stored(sql: Any) -> str:
    """Return all rows that contain keys, as text, without the arguments of jobs."""
    rows: list[Any] = []
    for table in KEYED:
        found = await sql.fetch(f"SELECT to_jsonb(t) - 'args' - 'follower' FROM taskd.{table} AS t")
        rows += [row[0] for row in found]
    return "\n".join(rows)


async def enqueue_every_way(made: Task[..., Any], client: Client, sql: Any) -> list[int]:
    args = json.dumps(ARGS)
    return [
        await client.enqueue(made.job(**ARGS)),
        await client.enqueue_named("reset", ARGS),
        await client.enqueue(NewJob("reset", args)),
        *await client.enqueue_many([made.job(**ARGS), NewJob("reset", args, queue="mail")]),
        await sql.fetchval("SELECT taskd.enqueue('reset', $1::jsonb)", args),
    ]


async def test_every_producer_makes_the_same_hashed_unique_key(
    client: Client, sql: Any, lane: Lane
) -> None:
    made = await publish(lane, unique=Unique(by=("account", "token"), for_s=60))
    assert len(set(await enqueue_every_way(made, client, sql))) == 1
    assert await sql.fetchval("SELECT unique_key FROM taskd.job") == f'[7,"{HASHED}"]'
    assert SECRET not in await stored(sql)


async def test_every_producer_makes_the_same_hashed_limit_key(
    client: Client, sql: Any, lane: Lane
) -> None:
    made = await publish(lane, limit=Limit(1, rate=5, by="token"))
    args = json.dumps(ARGS)
    ids = await enqueue_every_way(made, client, sql)
    workflow = Workflow("w")
    workflow.add(made.job(**ARGS), name="a")
    workflow.add(NewJob("reset", args), name="b")
    await workflow.start(client=client)
    after = "SELECT taskd.enqueue_after('reset', $1::jsonb, ARRAY[$2::bigint])"
    await sql.execute(after, args, ids[0])
    every = Every(60.0, datetime.now(UTC))
    await schedules.set_(lane, [Schedule("s", NewJob("reset", args, queue="mail"), every)])
    await schedules.run(lane, "s")
    change = "SELECT taskd.change(ARRAY[$1::bigint], args => $2::jsonb)"
    await sql.execute(change, ids[0], json.dumps(ARGS | {"rev": 2}))
    await limits.admit(lane, 100)
    keys = await sql.fetch("SELECT limit_key FROM taskd.job")
    assert {row[0] for row in keys} == {HASHED}
    assert len(keys) == 10
    assert SECRET not in await stored(sql)


async def test_a_key_that_the_caller_makes_of_a_redacted_argument_is_hashed(
    client: Client, sql: Any, lane: Lane
) -> None:
    made = await publish(lane)
    unique = Unique(by=("token",))
    chosen = made.options(unique=unique).job(**ARGS)  # type: ignore[attr-defined]
    first = await client.enqueue(chosen)
    assert await client.enqueue_named("reset", ARGS, unique=unique) == first
    assert await client.enqueue(NewJob("reset", json.dumps(ARGS), "mail", unique=unique)) == first
    assert await sql.fetchval("SELECT unique_key FROM taskd.job") == f'["{HASHED}"]'


@pytest.mark.parametrize("default", [None, 7.0])
async def test_sql_makes_the_very_hashes_that_python_makes(sql: Any, default: Any) -> None:
    unique = Unique(by=("account", "token"))
    rule = unique.rule({"token": default}, ["token"])
    values = "SELECT taskd.limit_key(taskd.limit_values($1, ARRAY['token'], $2, ARRAY['token']))"
    for text in [json.dumps(value) for value in VALUES] + TEXTS:
        args = f'{{"token": {text}}}'
        key = await sql.fetchval("SELECT taskd.unique_key_of($1::jsonb, $2::jsonb)", rule, args)
        assert key == of_rule(rule, args).key, text
        limit = limit_of("l", ("token",), args, {"token": default}, ("token",))
        defaults = json.dumps({"token": default})
        assert [await sql.fetchval(values, args, defaults)] == json.loads(limit.values), text


async def test_the_holder_of_a_value_is_found_by_its_hash(
    sql: Any, lane: Lane, client: Client, logins: Logins
) -> None:
    made = await publish(lane, limit=Limit(1, by="token"))
    job_id = await client.enqueue(made.job(**ARGS))
    observer = await asyncpg.connect(logins.dsn("observer"))
    find = "SELECT id FROM taskd.jobs WHERE limit_key = taskd.hashed_value(to_jsonb($1::text))"
    try:
        assert await observer.fetchval(find, SECRET) == job_id
        rows = await observer.fetch("SELECT limit_name, limit_key FROM taskd.jobs")
        assert [tuple(row) for row in rows] == [("reset", HASHED)]
    finally:
        await observer.close()


async def test_a_version_that_would_show_a_redacted_argument_is_refused(
    client: Client, lane: Lane
) -> None:
    unique = Unique(by=("account",), version_by="rev")
    with pytest.raises(TypeError, match="version_by 'rev' names an argument that the task redacts"):
        task(redact=["rev"], unique=unique, registry=Registry())(reset)
    registry = Registry()
    made = task(queue="mail", redact=["rev"], registry=registry)(reset)
    await workers.publish(lane, "app", registry, ["mail"])
    with pytest.raises(TypeError, match="version_by"):
        made.options(unique=unique).job(account=1)  # type: ignore[attr-defined]
    with pytest.raises(InvalidJob, match="version_by"):
        await client.enqueue(NewJob("reset", '{"account": 1, "rev": 3}', unique=unique))


async def test_tasks_that_share_a_limit_redact_its_arguments_alike(lane: Lane) -> None:
    registry = Registry()
    shared = Limit(1, by="token", name="shared")
    task(limit=shared, redact=["token"], registry=registry)(reset)
    task(limit=shared, registry=registry, name="other")(reset)
    with pytest.raises(AppError, match="only one of them redacts"):
        await limits.publish(lane, "app", registry)


def test_no_command_prints_the_value(taskd: Any) -> None:
    async def prepare() -> None:
        lane = Lane(Database({"dsn": taskd.dsn}), "test")
        try:
            await publish(
                lane, unique=Unique(by=("token",), on_conflict="raise"), limit=Limit(1, by="token")
            )
        finally:
            await lane.close()

    asyncio.run(prepare())
    job_id = taskd.enqueue("reset", "account:=7", f"token={SECRET}")
    held = taskd("enqueue", "reset", "account:=8", f"token={SECRET}", code=2)
    assert SECRET not in held.output
    for command in (
        ["jobs", "show", job_id],
        ["jobs", "show", job_id, "--json"],
        ["jobs", "list", "--json"],
        ["limits", "show", "reset"],
        ["limits", "list", "--json"],
        ["why", job_id],
        ["doctor"],
    ):
        words = list(map(str, command))
        said = taskd.runner.invoke(cli, words, env={"TASKD_DSN": taskd.dsn})
        assert said.exit_code in (0, 4), said.output
        assert SECRET not in said.output, command
    assert HASHED in taskd("limits", "show", "reset").stdout
    assert SECRET in taskd("jobs", "show", job_id, "--unredacted").stdout
