"""on_conflict="latest": the newest arguments of a key win, also while a job of the key runs."""

from __future__ import annotations

import json
from typing import Any

import asyncpg
import pytest

from taskd import Client, NewJob, Unique, task
from taskd.core.jobs.job import JobState
from taskd.errors import InvalidJob
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, jobs
from taskd.store.reading import reports
from tests.client.conftest import ME, claim, end
from tests.client.test_unique import ROWS

ERROR = '{"type": "ValueError", "message": "odd"}'


def job(n: int, **rules: Any) -> NewJob:
    unique = Unique("k", **{"on_conflict": "latest"} | rules)
    return NewJob("sync", json.dumps({"n": n}), queue="sync", unique=unique)


async def args_of(sql: Any) -> list[Any]:
    return [json.loads(row["args"])["n"] for row in await sql.fetch(ROWS)]


async def test_the_newest_arguments_replace_those_of_a_job_that_waits(
    client: Client, sql: Any
) -> None:
    first = await client.enqueue(job(1))
    second = await client.enqueue(job(2))
    assert (second, second.outcome) == (first, "replaced")
    assert await args_of(sql) == [2]


async def test_a_running_job_is_followed_by_one_with_the_newest_arguments(
    client: Client, worker: Lane, sql: Any
) -> None:
    first = await client.enqueue(job(1))
    running = await claim(worker)
    for n in (2, 3):
        newer = await client.enqueue(job(n))
        assert (newer, newer.outcome) == (first, "follows")
    shown = await reports.show_job(worker, first)
    assert shown is not None
    assert shown["newer_follows"] is True
    assert not await jobs.claim(worker, ME, "sync", 10)
    await end(worker, running, JobState.DONE)
    assert await args_of(sql) == [3]
    await end(worker, await claim(worker), JobState.DONE)
    assert not await sql.fetch(ROWS)
    assert (await client.enqueue(job(4))).outcome == "enqueued"


async def test_a_retry_runs_the_newest_arguments(client: Client, worker: Lane, sql: Any) -> None:
    first = await client.enqueue(job(1))
    running = await claim(worker)
    await client.enqueue(job(2))
    await end(worker, running, JobState.SCHEDULED, delay_s=3000.0, error=ERROR)
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["state"], row["attempt"]) == ('{"n": 2}', "queued", 0)
    past = await sql.fetchrow("SELECT * FROM taskd.job_history")
    assert (past["id"], past["reason"]) == (first, f"superseded by job {row['id']}")
    # Also the arguments that arrive while a job waits for its retry.
    await end(worker, await claim(worker), JobState.SCHEDULED, delay_s=3000.0, error=ERROR)
    assert (await client.enqueue(job(3))).outcome == "replaced"
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["state"]) == ('{"n": 3}', "queued")


async def test_the_newest_arguments_can_keep_the_delay_of_the_retry(
    client: Client, worker: Lane, sql: Any
) -> None:
    await client.enqueue(job(1))
    running = await claim(worker)
    await client.enqueue(job(2, newer_starts="after_delay"))
    await end(worker, running, JobState.SCHEDULED, delay_s=3000.0, error=ERROR)
    await client.enqueue(job(3, newer_starts="after_delay"))
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["state"]) == ('{"n": 3}', "scheduled")


async def test_a_crash_starts_the_newest_arguments_in_the_quarantine(
    client: Client, worker: Lane, sql: Any
) -> None:
    await client.enqueue(job(1))
    await claim(worker)
    await client.enqueue(job(2))
    await workers.declare_dead(worker, [ME], proved=True)
    await jobs.rescue(worker, 10, 3, 10)
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["state"], row["crashes"]) == ('{"n": 2}', "scheduled", 1)


async def test_the_key_of_a_follower_is_pruned_when_it_is_no_longer_needed(
    client: Client, worker: Lane, sql: Any
) -> None:
    await client.enqueue(job(1))
    running = await claim(worker)
    await client.enqueue(job(2))
    await history.prune_keys(worker)
    await end(worker, running, JobState.DONE)
    assert await args_of(sql) == [2]
    await history.prune_keys(worker)
    assert not await sql.fetch("SELECT FROM taskd.job_key")


async def test_it_keeps_the_last_version_of_the_key(client: Client, worker: Lane, sql: Any) -> None:
    versioned = {"on_conflict": "skip", "version": 5}
    await client.enqueue(job(1, **versioned))
    running = await claim(worker)
    assert (await client.enqueue(job(2))).outcome == "follows"
    assert (await client.enqueue(job(3, **versioned))).outcome == "ignored"
    await end(worker, running, JobState.DONE)
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["version"]) == ('{"n": 2}', 5)
    await end(worker, await claim(worker), JobState.DONE)
    # The key remembers its version, and the latest arguments are not dropped.
    assert (await client.enqueue(job(4))).outcome == "enqueued"
    assert (await client.enqueue(job(5, **versioned))).outcome == "ignored"
    assert await args_of(sql) == [4]


@pytest.mark.parametrize("wrong", [{"scope": "waiting"}, {"for_s": 60.0}, {"version": 1}])
def test_what_would_drop_arguments_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"latest|version"):
        job(1, **wrong)


# From SQL.


async def test_the_same_from_sql(sql: Any, worker: Lane) -> None:
    ask = (
        "SELECT outcome FROM taskd.enqueue_unique('sync', $1, 'k', 'sync', on_conflict => 'latest')"
    )
    outcomes = [await sql.fetchval(ask, f'{{"n": {n}}}') for n in (1, 2)]
    await claim(worker)
    outcomes.append(await sql.fetchval(ask, '{"n": 3}'))
    assert outcomes == ["enqueued", "replaced", "follows"]
    for wrong in ("key_scope => 'waiting'", "for_s => 60"):
        with pytest.raises(asyncpg.InvalidParameterValueError, match="latest needs"):
            await sql.fetchval(
                "SELECT taskd.enqueue_unique('sync', '{}', 'k', 'sync', on_conflict => 'latest', "
                f"{wrong})"
            )


async def test_an_enqueue_by_name_says_that_its_arguments_were_dropped(
    sql: Any, lane: Lane, registry: Any
) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("account",)))
    async def sync(account: int, note: str = "") -> None: ...

    @task(queue="sync", registry=registry, unique=Unique(by=("doc",), version_by="rev"))
    async def index(doc: int, rev: int) -> None: ...

    await workers.publish(lane, "app", registry, ["sync"])
    said: list[str] = []
    sql.add_log_listener(lambda _, message: said.append(message.message))
    first = await sql.fetchval("SELECT taskd.enqueue('sync', '{\"account\": 1}')")
    assert said == []
    ask = 'SELECT taskd.enqueue(\'sync\', \'{"account": 1, "note": "new"}\')'
    assert await sql.fetchval(ask) == first
    assert said == [
        f'no job was enqueued (skipped): job {first} of the task "sync" holds the unique key'
    ]
    for rev in (2, 1):
        await sql.fetchval("SELECT taskd.enqueue('index', $1)", f'{{"doc": 1, "rev": {rev}}}')
    [ignored] = said[1:]
    assert "(ignored)" in ignored
