"""tasks.sql: what workers publish about their tasks; one app does not overwrite another's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from taskd import task
from taskd import tasks as built_in
from taskd.config import Settings
from taskd.core.tasks.registry import Registry
from taskd.errors import AppError
from taskd.store import tasks, workers
from taskd.store.connections.lanes import Lane
from tests.schema import fetches
from tests.store.helpers import Connect, Transaction, bury, new_worker, waits_for_lock


def registry(*names: str, typed: type = str, **options: Any) -> Registry:
    made = Registry()
    for name in names:

        async def handler(to) -> None: ...

        handler.__annotations__["to"] = typed
        task(name=name, registry=made, **options)(handler)
    return made


async def publish(on, app: str, *names: str, **options: Any) -> None:
    await workers.publish(on, app, registry(*names, **options), ["q"])


async def test_a_published_task_can_be_found_by_clients_that_do_not_import_it(lane: Lane) -> None:
    await publish(lane, "shop", "b", "a", queue="mail", max_attempts=3, timeout_s=9)
    assert await tasks.names(lane) == ["a", "b"]
    found = await tasks.find(lane, ["a", "nobody's"])
    assert found.keys() == {"a"}
    mine = found["a"]
    assert (mine.app, mine.queue, mine.max_attempts, mine.timeout_s) == ("shop", "mail", 3, 9.0)
    assert '"to"' in mine.args_schema


async def test_within_an_app_the_newest_start_wins(lane: Lane) -> None:
    await publish(lane, "shop", "a", max_attempts=3)
    before = (await tasks.find(lane, ["a"]))["a"]
    await publish(lane, "shop", "a", typed=int, max_attempts=4)
    after = (await tasks.find(lane, ["a"]))["a"]
    assert (before.max_attempts, after.max_attempts) == (3, 4)
    assert before.signature != after.signature
    assert before.published_at < after.published_at


async def test_a_refused_app_is_recorded_until_the_definitions_agree(lane: Lane, sql: Any) -> None:
    contested = "SELECT contested_by FROM taskd.task WHERE name = 'a'"
    await publish(lane, "shop", "a")
    with pytest.raises(AppError, match="TASKD_TASK_PREFIX"):
        await publish(lane, "bank", "a", "b", typed=int)
    assert await sql.fetchval(contested) == "bank"
    # Another start of the owner does not change that; a start with the arguments of the other does.
    await publish(lane, "shop", "a")
    assert await sql.fetchval(contested) == "bank"
    await publish(lane, "shop", "a", typed=int)
    assert await sql.fetchval(contested) is None
    await publish(lane, "bank", "a", "b", typed=int)


async def test_another_app_with_other_arguments_is_refused_with_the_name_of_the_owner(lane) -> None:
    await publish(lane, "shop", "a")
    before = await tasks.find(lane, ["a"])
    with pytest.raises(AppError, match="'a' of app 'shop'"):
        await publish(lane, "bank", "a", typed=int)
    assert await tasks.find(lane, ["a"]) == before


async def test_another_app_with_the_same_arguments_takes_the_task_over(lane: Lane) -> None:
    await publish(lane, "shop", "a")
    await publish(lane, "bank", "a")
    assert (await tasks.find(lane, ["a"]))["a"].app == "bank"


async def test_a_conflict_is_seen_even_when_it_comes_from_a_start_at_the_same_time(
    sql, lane: Lane, connect: Connect
) -> None:
    # The other app's row is not in the snapshot of the statement that then finds it.
    second = await connect()
    async with Transaction(await connect()) as first:
        await publish(fetches(first.connection), "shop", "a")
        late = asyncio.create_task(publish(fetches(second), "bank", "a", typed=int))
        await waits_for_lock(sql, second)
        await first.commit()
        with pytest.raises(AppError, match="'a'"):
            await late
    assert (await tasks.find(lane, ["a"]))["a"].app == "shop"


async def test_publishing_declares_the_queues_that_are_served(sql, lane: Lane) -> None:
    await workers.publish(lane, "shop", registry("a"), ["one", "two"])
    assert {each["name"] for each in await sql.fetch("SELECT name FROM taskd.queue")} == {
        "one",
        "two",
    }


# The built-in tasks, which `taskd db migrate` publishes without a worker.

ALL_BUILT_IN = ["http_request", "run_command", "send_email"]


async def app_of(lane: Lane, name: str) -> str:
    return (await tasks.find(lane, [name]))[name].app


async def test_what_a_migration_has_published_is_replaced_by_a_newer_one(sql, lane: Lane) -> None:
    await workers.publish_built_in(lane, registry("send_email", queue="old"))
    await workers.publish_built_in(lane, built_in.signatures())
    assert await tasks.names(lane) == ALL_BUILT_IN
    found = (await tasks.find(lane, ["send_email"]))["send_email"]
    assert (found.app, found.queue) == ("taskd", "email")


async def test_an_apps_own_task_replaces_a_built_in_one_and_stays(lane: Lane) -> None:
    await workers.publish_built_in(lane, built_in.signatures())
    await publish(lane, "shop", "send_email", queue="own")
    await workers.publish_built_in(lane, built_in.signatures())
    assert await app_of(lane, "send_email") == "shop"
    with pytest.raises(AppError, match="'send_email' of app 'shop'"):
        await publish(lane, "bank", "send_email", typed=int)


async def test_what_a_live_worker_has_published_is_replaced_by_nobody(sql, lane: Lane) -> None:
    await publish(lane, "taskd", "send_email", queue="of_the_worker")
    worker_id = await new_worker(lane)
    await sql.execute("UPDATE taskd.worker SET app = 'taskd', tasks = '{send_email}'")
    await workers.publish_built_in(lane, built_in.signatures())
    assert (await tasks.find(lane, ["send_email"]))["send_email"].queue == "of_the_worker"
    with pytest.raises(AppError, match="'send_email' of app 'taskd'"):
        await publish(lane, "bank", "send_email", typed=int)
    await bury(lane, worker_id)
    await publish(lane, "bank", "send_email", typed=int)
    assert await app_of(lane, "send_email") == "bank"


async def test_a_worker_replaces_the_built_in_tasks_of_another_version(lane: Lane) -> None:
    await workers.publish_built_in(lane, built_in.signatures())
    await publish(lane, "taskd", "send_email", queue="newer")
    assert (await tasks.find(lane, ["send_email"]))["send_email"].queue == "newer"


async def test_the_tasks_that_a_worker_enables_are_those_that_a_migration_publishes() -> None:
    settings = Settings(
        smtp_host="localhost",
        smtp_sender="a@example.org",
        commands={"w": {"argv": ["true"]}},
        http_hosts=["example.org"],
    )
    enabled = {task.name: task for task in built_in.built_in(settings)}
    try:
        for known in built_in.signatures():
            made = enabled[known.name]
            for field in ("args_schema", "queue", "max_attempts", "timeout_s", "redact", "kind"):
                assert getattr(made, field) == getattr(known, field), (known.name, field)
    finally:
        await built_in.close()
