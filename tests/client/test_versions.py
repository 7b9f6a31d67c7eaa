"""Versions of one key: newer wins, never two at once, and none is lost."""

from __future__ import annotations

import asyncio
import json
import random
import uuid
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import IntEnum
from typing import Annotated, Any, NewType

import asyncpg
import pytest

from taskd import Client, NewJob, Unique, task
from taskd.core.jobs.job import JobState
from taskd.errors import InvalidJob, JobCancelled
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import jobs
from taskd.store.reading import reports
from tests.client.conftest import ME, claim, end
from tests.client.test_unique import ROWS, SOON, TWICE

ENDS = ["done", "failed", "cancelled", "completed", "crashed"]
ERROR = '{"type": "ValueError", "message": "odd"}'
PAST = "SELECT * FROM taskd.job_history ORDER BY id"


def job(version: int, **options: Any) -> NewJob:
    args = json.dumps({"v": version})
    return NewJob("sync", args, queue="sync", unique=Unique("k", version=version), **options)


async def waits_for_a_retry(client: Client, worker: Lane, **options: Any) -> int:
    """A job of version 3 that waits for its retry."""
    first = await client.enqueue(job(3, **options))
    await end(worker, await claim(worker), JobState.SCHEDULED, delay_s=60.0, error=ERROR)
    return first


async def test_a_newer_version_replaces_a_job_that_waits(client: Client, sql: Any) -> None:
    first = await client.enqueue(job(3))
    newer = await client.enqueue(job(4))
    older = await client.enqueue(job(2))
    equal = await client.enqueue(job(4))
    assert [newer, older, equal] == [first] * 3
    outcomes = [each.outcome for each in (first, newer, older, equal)]
    assert outcomes == ["enqueued", "replaced", "ignored", "ignored"]
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["version"]) == ('{"v": 4}', 4)


async def test_what_has_finished_is_done_again_for_a_newer_version_only(
    client: Client, worker: Lane, sql: Any
) -> None:
    first = await client.enqueue(job(3))
    await end(worker, await claim(worker), JobState.DONE)
    for version in (2, 3):
        old = await client.enqueue(job(version))
        assert (old, old.outcome) == (first, "ignored")
    assert not await sql.fetch(ROWS)
    newer = await client.enqueue(job(4))
    assert (newer.outcome, newer > first) == ("enqueued", True)


@pytest.mark.parametrize("how", ENDS)
async def test_a_newer_version_of_a_running_job_follows_its_end(
    client: Client, worker: Lane, sql: Any, listener: Any, how: str
) -> None:
    await listener.listen("sync")
    first = await client.enqueue(job(3))
    claimed = await claim(worker)
    newer = await client.enqueue(job(5, priority=7, max_attempts=2))
    assert (newer, newer.outcome) == (first, "follows")
    assert (await client.enqueue(job(4))).outcome == "ignored"
    assert not await jobs.claim(worker, ME, "sync", 10)
    await listener.notified()
    if how == "crashed":
        await workers.declare_dead(worker, [ME], proved=True)
        await jobs.rescue(worker, 10, 1, 1)
    elif how == "completed":
        await worker.fetch("complete_job", claimed.id, ME, claimed.fence, None, None, None)
    else:
        await end(worker, claimed, JobState(how))
    if how != "crashed":
        assert await listener.notified() == ["sync"]
    [row] = await sql.fetch(ROWS)
    # After a crash, the newer version starts in the quarantine.
    state = "scheduled" if how == "crashed" else "queued"
    assert (row["id"] > first, row["state"], row["version"]) == (True, state, 5)
    assert (row["args"], row["priority"], row["max_attempts"]) == ('{"v": 5}', 7, 2)
    ended = await sql.fetchrow("SELECT * FROM taskd.job_history")
    assert (ended["id"], ended["version"]) == (first, 3)
    assert (await client.enqueue(job(5))).outcome == "ignored"


async def test_a_follower_may_be_due_later(client: Client, worker: Lane, sql: Any) -> None:
    await client.enqueue(job(3))
    claimed = await claim(worker)
    await client.enqueue(job(4, run_at=SOON))
    await end(worker, claimed, JobState.DONE)
    [row] = await sql.fetch(ROWS)
    assert (row["state"], row["run_at"]) == ("scheduled", SOON)


async def restarted_with_a_follower(client: Client, worker: Lane, sql: Any) -> int:
    """A job of version 3 that was restarted by hand, while a job of version 5 follows it.

    Only a job of a workflow then still waits: any other one gives way to the newer version.
    """
    first = await client.enqueue(job(3))
    await sql.fetchval(
        "SELECT taskd.enqueue_after('t', queue => 'q', after => ARRAY[$1::bigint])", first
    )
    await claim(worker)
    assert (await client.enqueue(job(5))).outcome == "follows"
    assert await jobs.restart(worker, [first], "it hung", 0.0) == {first: "queued"}
    return first


@pytest.mark.parametrize("rule", ["replace", "replace_args", "debounce"])
async def test_an_enqueue_without_a_version_keeps_the_follower_of_a_restarted_job(
    client: Client, worker: Lane, sql: Any, rule: str
) -> None:
    first = await restarted_with_a_follower(client, worker, sql)
    args = json.dumps({"v": "none"})
    unversioned = NewJob("sync", args, queue="sync", unique=Unique("k", on_conflict=rule))
    assert await client.enqueue(unversioned) == first
    assert [(await client.enqueue(job(n))).outcome for n in (4, 5)] == ["ignored", "ignored"]
    await end(worker, await claim(worker), JobState.DONE)
    [_, row] = await sql.fetch(ROWS)
    assert (row["args"], row["version"]) == ('{"v": 5}', 5)


async def test_the_newest_arguments_take_the_version_of_a_follower_that_they_replace(
    client: Client, worker: Lane, sql: Any
) -> None:
    await restarted_with_a_follower(client, worker, sql)
    args = json.dumps({"v": "newest"})
    newest = NewJob("sync", args, queue="sync", unique=Unique("k", on_conflict="latest"))
    assert (await client.enqueue(newest)).outcome == "replaced"
    assert [(await client.enqueue(job(n))).outcome for n in (4, 5)] == ["ignored", "ignored"]
    await end(worker, await claim(worker), JobState.DONE)
    [dependant] = await sql.fetch(ROWS)
    assert dependant["task"] == "t"
    assert [(await client.enqueue(job(n))).outcome for n in (5, 6)] == ["ignored", "enqueued"]


BAD_ENDS = {
    "retry": {"delay_s": 3000.0, "error": ERROR},
    "retry at once": {"error": ERROR},
    "snooze": {"delay_s": 3000.0, "refund": True},
    "release": {"refund": True},
    "interrupt": {"refund": True, "interrupted": True},
    "parked": {"delay_s": 3600.0, "refund": True, "parked": True},
}


@pytest.mark.parametrize("how", BAD_ENDS)
async def test_an_attempt_that_would_run_again_gives_way_to_the_newer_version(
    client: Client, worker: Lane, sql: Any, how: str
) -> None:
    first = await client.enqueue(job(3))
    claimed = await claim(worker)
    assert (await client.enqueue(job(4, max_attempts=2))).outcome == "follows"
    state = JobState.SCHEDULED if "delay_s" in BAD_ENDS[how] else JobState.QUEUED
    await end(worker, claimed, state, **BAD_ENDS[how])
    [row] = await sql.fetch(ROWS)
    assert (row["version"], row["state"], row["attempt"], row["errors"]) == (4, "queued", 0, "[]")
    assert (row["crashes"], row["max_attempts"]) == (0, 2)
    [past] = await sql.fetch(PAST)
    assert (past["id"], past["state"]) == (first, "cancelled")
    assert past["reason"] == f"superseded by version 4 (job {row['id']})"
    assert len(json.loads(past["errors"])) == ("error" in BAD_ENDS[how])
    assert past["attempt"] == ("refund" not in BAD_ENDS[how])


async def test_a_newer_version_can_keep_the_delay_of_the_retry(
    client: Client, worker: Lane, sql: Any
) -> None:
    async def newer(version: int) -> str:
        unique = Unique("k", version=version, newer_starts="after_delay")
        new = NewJob("sync", json.dumps({"v": version}), queue="sync", unique=unique)
        return (await client.enqueue(new)).outcome

    in_s = "SELECT date_part('epoch', run_at - now()) FROM taskd.job"
    await newer(3)
    claimed = await claim(worker)
    assert await newer(4) == "follows"
    await end(worker, claimed, JobState.SCHEDULED, delay_s=3000.0, error=ERROR)
    assert 2900 < await sql.fetchval(in_s) <= 3000
    # Each newer version keeps it: frequent enqueues do not remove the delay.
    assert [await newer(version) for version in (5, 6)] == ["replaced", "replaced"]
    assert 2900 < await sql.fetchval(in_s) <= 3000
    await sql.execute("UPDATE taskd.job SET state = 'queued', run_at = now()")
    await end(worker, await claim(worker), JobState.SCHEDULED, delay_s=500.0, error=ERROR)
    assert await newer(7) == "replaced"
    assert 400 < await sql.fetchval(in_s) <= 500


async def test_a_newer_version_that_arrives_during_the_wait_for_a_retry_is_due_at_once(
    client: Client, worker: Lane, sql: Any
) -> None:
    first = await waits_for_a_retry(client, worker)
    assert (await client.enqueue(job(3))).outcome == "ignored"
    newer = await client.enqueue(job(5))
    assert (newer.outcome, newer > first) == ("replaced", True)
    [row] = await sql.fetch(ROWS)
    assert (row["id"], row["version"], row["state"]) == (newer, 5, "queued")
    assert (row["attempt"], row["errors"]) == (0, "[]")
    [past] = await sql.fetch(PAST)
    assert (past["id"], past["state"], past["attempt"]) == (first, "cancelled", 1)
    assert past["reason"] == f"superseded by version 5 (job {newer})"
    assert len(json.loads(past["errors"])) == 1


async def test_the_caller_that_waits_for_a_superseded_job_hears_of_it(
    client: Client, worker: Lane
) -> None:
    first = await waits_for_a_retry(client, worker)
    waiting = asyncio.create_task(client.result(first, timeout_s=60))
    await asyncio.sleep(0.1)
    newer = await client.enqueue(job(4))
    with pytest.raises(JobCancelled, match=rf"superseded by version 4 \(job {newer}\)"):
        await waiting


async def test_the_newer_version_of_a_suspect_starts_as_a_suspect(
    client: Client, worker: Lane, sql: Any
) -> None:
    async def crash() -> None:
        await workers.declare_dead(worker, [ME], proved=True)
        await jobs.rescue(worker, 10, 3, 10)

    await client.enqueue(job(3))
    await claim(worker)
    await client.enqueue(job(4))
    await crash()
    [row] = await sql.fetch(ROWS)
    assert (row["version"], row["state"], row["crashes"], row["attempt"]) == (4, "scheduled", 1, 0)
    [past] = await sql.fetch(PAST)
    assert past["reason"] == f"superseded by version 4 (job {row['id']})"
    assert "crashed" in json.loads(past["errors"])[0]["message"]
    # Also one that replaces a suspect that was claimed before.
    await sql.execute("UPDATE taskd.job SET fence = 1, crashes = 4, isolated = true")
    assert (await client.enqueue(job(5))).outcome == "replaced"
    [row] = await sql.fetch(ROWS)
    assert (row["state"], row["crashes"], row["isolated"]) == ("scheduled", 1, True)


async def test_a_job_for_which_others_wait_keeps_its_retries(
    client: Client, worker: Lane, sql: Any
) -> None:
    first = await client.enqueue(job(3))
    await sql.execute(
        "SELECT taskd.enqueue_after('t', '{}', ARRAY[$1::bigint], queue => 'q')", first
    )
    claimed = await claim(worker)
    await client.enqueue(job(4))
    await end(worker, claimed, JobState.SCHEDULED, delay_s=60.0, error=ERROR)
    row = await sql.fetchrow("SELECT * FROM taskd.job WHERE id = $1", first)
    assert (row["state"], json.loads(row["follower"])["version"]) == ("scheduled", 4)
    await client.cancel([first])
    row = await sql.fetchrow("SELECT * FROM taskd.job WHERE task = 'sync'")
    assert (row["version"], row["state"]) == (4, "queued")


@pytest.mark.parametrize("rule", ["replace", "debounce"])
async def test_who_says_no_version_takes_none_away(
    client: Client, worker: Lane, sql: Any, rule: str
) -> None:
    await waits_for_a_retry(client, worker)
    to_json_type = NewJob("sync", '{"v": 0}', queue="sync", unique=Unique("k", on_conflict=rule))
    assert (await client.enqueue(to_json_type)).outcome == f"{rule}d"
    assert (await client.enqueue(job(2))).outcome == "ignored"
    [row] = await sql.fetch(ROWS)
    assert (row["args"], row["version"]) == ('{"v": 0}', 3)


async def test_a_job_shows_which_version_follows_it(client: Client, worker: Lane) -> None:
    first = await client.enqueue(job(3))
    shown = await reports.show_job(worker, first)
    assert shown
    assert (shown["version"], shown["next_version"]) == (3, None)
    await claim(worker)
    await client.enqueue(job(4))
    shown = await reports.show_job(worker, first)
    assert shown
    assert (shown["version"], shown["next_version"]) == (3, 4)


async def test_why_a_job_is_not_retried_shows_of_the_newer_version_that_has_ended(
    client: Client, worker: Lane, sql: Any
) -> None:
    first = await client.enqueue(job(3))
    await end(worker, await claim(worker), JobState.FAILED, reason="x")
    assert await sql.fetchval("SELECT taskd.key_holder($1)", first) is None
    newer = await client.enqueue(job(4))
    await end(worker, await claim(worker), JobState.DONE)
    assert await client.retry([first]) == []
    assert await sql.fetchval("SELECT taskd.key_holder($1)", first) == newer


async def test_fifty_producers_lose_no_version_and_none_runs_beside_another(
    client: Client, worker: Lane, sql: Any
) -> None:
    left = list(range(1, 301))
    random.Random(5).shuffle(left)

    async def produce() -> None:
        while left:
            await client.enqueue(job(left.pop()))

    ran: list[int] = []

    async def work() -> None:
        for claimed in await jobs.claim(worker, ME, "sync", 10):
            assert not await sql.fetch(TWICE)
            ran.append(json.loads(claimed.args)["v"])
            # One in four is given back and runs again.
            state = JobState.QUEUED if len(ran) % 4 == 0 else JobState.DONE
            await end(
                worker, claimed, state, **({} if state is JobState.DONE else {"refund": True})
            )

    producing = asyncio.gather(*(produce() for _ in range(50)))
    while not producing.done():
        await work()
    await producing
    while await sql.fetch(ROWS):
        await work()
    assert ran[-1] == 300
    assert ran == sorted(ran)


async def test_a_task_s_own_versions_come_from_an_argument(client: Client, registry: Any) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("account",), version_by="revision"))
    async def sync(account: int, revision: int) -> None: ...

    first = await client.enqueue(sync.job(1, revision=5))
    assert (await client.enqueue(sync.job(1, revision=4))).outcome == "ignored"
    assert (await client.enqueue(sync.job(1, revision=6))).outcome == "replaced"
    assert (await client.enqueue(sync.job(2, revision=1))) > first


@pytest.mark.parametrize(
    "wrong",
    [
        {"version": "5"},
        {"version": True},
        {"version": 7.0},
        {"version": 2**62},
        {"version": datetime(2026, 1, 1)},  # noqa: DTZ001 - that is the mistake
        {"version": 1, "scope": "waiting"},
        {"version": 1, "for_s": 60.0},
        {"version": 1, "on_conflict": "replace"},
        {"version_by": "revision"},
        {"newer_starts": "after_delay"},
        {"version": 1, "newer_starts": "later"},
    ],
)
def test_what_is_no_version_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"version|newer_starts"):
        Unique("k", **wrong)


async def test_versions_from_sql(sql: Any) -> None:
    call = "taskd.enqueue_unique('sync', '{}', 'k', queue => 'q', version => $1::int)"
    ask = f"SELECT outcome FROM {call}"
    assert [await sql.fetchval(ask, version) for version in (2, 1, 3)] == [
        "enqueued",
        "ignored",
        "replaced",
    ]


# Versions that are times.

SOON_AFTER = datetime(2026, 1, 1, 12, 0, 0, 1, tzinfo=UTC)
NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


def timed(at: datetime, **options: Any) -> NewJob:
    args = json.dumps({"v": at.isoformat()})
    return NewJob("sync", args, queue="sync", unique=Unique("k", version=at), **options)


async def test_a_version_can_be_a_time(client: Client, worker: Lane, sql: Any) -> None:
    first = await client.enqueue(timed(NOON))
    in_another_zone = NOON.astimezone(timezone(timedelta(hours=5)))
    outcomes = [
        (await client.enqueue(timed(at))).outcome
        for at in (in_another_zone, NOON - timedelta(days=1), SOON_AFTER)
    ]
    assert outcomes == ["ignored", "ignored", "replaced"]
    shown = await reports.show_job(worker, first)
    assert shown is not None
    assert shown["version"] == SOON_AFTER
    claimed = await claim(worker)
    await client.enqueue(timed(NOON + timedelta(days=1)))
    shown = await reports.show_job(worker, first)
    assert shown is not None
    assert shown["next_version"] == NOON + timedelta(days=1)
    held = await client.find_key("sync", "k")
    assert held is not None
    assert held.version == NOON + timedelta(days=1)
    await end(worker, claimed, JobState.SCHEDULED, delay_s=60.0, error=ERROR)
    row = await sql.fetchrow("SELECT * FROM taskd.jobs WHERE id = $1", first)
    assert (row["version"], row["version_at"]) == (None, SOON_AFTER)
    assert row["reason"].startswith("superseded by version 2026-01-02T12:00:00Z (job ")


@pytest.mark.parametrize("first", [NOON, 5])
async def test_versions_of_a_key_have_one_type(client: Client, sql: Any, first: Any) -> None:
    """A number is refused after a time, and a time after a number, whatever became of the job."""
    second = 5 if first is NOON else NOON
    [before, other] = [NewJob("sync", queue="sync", unique=Unique("k", version=each))
                       for each in (first, second)]  # fmt: skip
    enqueued = await client.enqueue(before)
    for _ in range(2):
        with pytest.raises(InvalidJob, match="cannot be compared with the last version"):
            await client.enqueue_many([other])
        await client.cancel([enqueued])
    assert await client.forget_key("sync", "k")
    assert (await client.enqueue(other)).outcome == "enqueued"


async def test_a_task_s_own_versions_can_be_times(
    client: Client, lane: Lane, registry: Any, sql: Any
) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("doc",), version_by="updated_at"))
    async def index(doc: int, updated_at: datetime) -> None: ...

    await workers.publish(lane, "app", registry, ["sync"])
    await client.enqueue(index.job(1, updated_at=NOON))
    # By name, in Python and in SQL, the published rule makes the same version.
    for text in ("2026-01-01T12:00:00Z", "2026-01-01T13:00:00+01:00"):
        args = {"doc": 1, "updated_at": text}
        assert (await client.enqueue_named("index", args)).outcome == "ignored"
        await sql.fetchval("SELECT taskd.enqueue('index', $1)", json.dumps(args))
    args = {"doc": 1, "updated_at": "2026-01-01T12:00:00.000001Z"}
    await sql.fetchval("SELECT taskd.enqueue('index', $1)", json.dumps(args))
    assert await sql.fetchval("SELECT version_at FROM taskd.jobs") == SOON_AFTER
    naive = datetime(2026, 1, 1)  # noqa: DTZ001 - that is the mistake
    with pytest.raises(InvalidJob, match="a time with a time zone"):
        await client.enqueue(index.job(1, updated_at=naive))
    with pytest.raises(asyncpg.PostgresError, match="a time with a time zone"):
        await sql.fetchval(
            'SELECT taskd.enqueue(\'index\', \'{"doc": 1, "updated_at": "2026-01-01T12:00:00"}\')'
        )


Revision = NewType("Revision", int)


class Number(IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "kind", [int, datetime, int | None, Annotated[datetime, "x"], Revision, Number, Any]
)
def test_a_version_is_an_int_or_a_datetime(registry: Any, kind: Any) -> None:
    async def index(doc: int, rev: Any) -> None: ...

    index.__annotations__["rev"] = kind
    task(queue="q", registry=registry, unique=Unique(by=("doc",), version_by="rev"))(index)


@pytest.mark.parametrize(
    "kind", [str, float, bool, date, Decimal, int | datetime, list[int], str | None, uuid.UUID]
)
def test_what_cannot_be_a_version_is_refused_when_the_task_is_declared(
    registry: Any, kind: Any
) -> None:
    async def index(doc: int, rev: Any) -> None: ...

    index.__annotations__["rev"] = kind
    with pytest.raises(TypeError, match="the argument 'rev' cannot be the version"):
        task(queue="q", registry=registry, unique=Unique(by=("doc",), version_by="rev"))(index)


@pytest.mark.parametrize(
    ("version", "later"),
    [
        ("timestamptz '2026-01-01 12:00Z'", "now()"),
        ("1::smallint", "2::numeric"),
        ("extract(epoch FROM timestamptz '2026-01-01 00:00Z')", "1e15::numeric"),
        ("7.00", "8"),
    ],
)
async def test_versions_of_all_types_of_sql(sql: Any, version: str, later: str) -> None:
    ask = "SELECT outcome FROM taskd.enqueue_unique('sync', '{}', 'k', queue => 'q', version => "
    outcomes = [await sql.fetchval(f"{ask}{each})") for each in (version, version, later)]
    assert outcomes == ["enqueued", "ignored", "replaced"]


@pytest.mark.parametrize(
    ("version", "why"),
    [
        ("1.5", "the version 1.5 is not a whole number"),
        ("2::numeric ^ 62", "is not a whole number between"),
        ("-1e30", "is not a whole number between"),
        ("'NaN'::numeric", "is not a whole number between"),
        ("timestamptz 'infinity'", "a finite timestamp with time zone, and not the"),
        ("timestamp '2026-01-01 12:00'", "not the timestamp without time zone 2026-01-01"),
        ("1.5::float", "not the double precision 1.5"),
        ("true", "not the boolean t"),
        ("'x'::text", "not the text x"),
    ],
)
async def test_what_is_no_version_in_sql_is_refused(sql: Any, version: str, why: str) -> None:
    with pytest.raises(asyncpg.PostgresError, match=why):
        await sql.fetchval(
            f"SELECT taskd.enqueue_unique('sync', '{{}}', 'k', queue => 'q', version => {version})"
        )
    assert not await sql.fetch(ROWS)
