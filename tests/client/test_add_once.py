"""Keys that are held after the end of their job, keys by value, and keys that are freed by hand."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from typing import Any

import asyncpg
import pytest

from taskd import Client, NewJob, Unique, make_key, task
from taskd.core.jobs.job import JobState
from taskd.errors import InvalidJob, KeyHeld
from taskd.store import workers
from taskd.store.connections.lanes import Lane
from taskd.store.jobs import history, limits
from tests.client.conftest import claim, end

FORGET = "UPDATE taskd.job_history SET expires_at = now() - interval '1 s'"


def once(scope: str, n: int = 0, **rules: Any) -> NewJob:
    unique = Unique("k", scope=scope, **rules)
    return NewJob("sync", json.dumps({"n": n}), queue="sync", unique=unique)


async def prune(lane: Lane, sql: Any) -> None:
    """Let the history expire."""
    await sql.execute(FORGET)
    await history.prune_default(lane)
    await history.drop_expired(lane)


@pytest.mark.parametrize("scope", ["history", "forever"])
@pytest.mark.parametrize("state", [JobState.DONE, JobState.FAILED, JobState.CANCELLED])
async def test_a_job_is_added_once_whatever_became_of_it(
    client: Client, worker: Lane, scope: str, state: JobState
) -> None:
    first = await client.enqueue(once(scope))
    assert await client.enqueue(once(scope)) == first
    reason = None if state is JobState.DONE else "x"
    await end(worker, await claim(worker), state, reason=reason)
    again = await client.enqueue(once(scope))
    assert (again, again.outcome) == (first, "skipped")
    with pytest.raises(KeyHeld, match=f"job {first} of task"):
        await client.enqueue(once(scope, on_conflict="raise"))


async def test_a_key_of_the_scope_history_is_free_when_the_history_forgets_the_job(
    client: Client, worker: Lane, sql: Any
) -> None:
    first = await client.enqueue(once("history"))
    await end(worker, await claim(worker), JobState.DONE)
    await prune(worker, sql)
    second = await client.enqueue(once("history"))
    assert (second > first, second.outcome) == (True, "enqueued")


async def test_a_queue_that_keeps_no_jobs_frees_the_key_at_the_end(
    client: Client, worker: Lane, sql: Any
) -> None:
    await sql.execute("INSERT INTO taskd.queue (name, keep_done_s) VALUES ('sync', 0)")
    for scope, outcome in (("history", "enqueued"), ("forever", "skipped")):
        await client.enqueue(once(scope))
        await end(worker, await claim(worker), JobState.DONE)
        assert (await client.enqueue(once(scope))).outcome == outcome
        await sql.execute("DELETE FROM taskd.job")


async def test_upkeep_deletes_keys_of_the_scope_history_with_their_jobs(
    client: Client, worker: Lane, sql: Any
) -> None:
    """Upkeep checks a key when the history forgets its job, and every hour while the job lives."""
    due = "UPDATE taskd.job_key SET until = now() WHERE until < 'infinity'"
    left = "SELECT extract(epoch FROM until - now())::integer FROM taskd.job_key"
    await client.enqueue(once("history"))
    await sql.execute(due)
    await history.prune_keys(worker)
    assert await sql.fetchval(left) == pytest.approx(3600, abs=60)
    await end(worker, await claim(worker), JobState.DONE)
    await sql.execute(due)
    await history.prune_keys(worker)
    kept = await sql.fetchval(
        "SELECT extract(epoch FROM expires_at - now()) FROM taskd.job_history"
    )
    assert await sql.fetchval(left) == pytest.approx(float(kept), abs=60)
    await prune(worker, sql)
    await sql.execute(due)
    assert await history.prune_keys(worker) == 1
    assert not await sql.fetch("SELECT FROM taskd.job_key")


async def test_upkeep_never_deletes_a_key_that_is_held_forever(
    client: Client, worker: Lane, sql: Any
) -> None:
    first = await client.enqueue(once("forever"))
    await end(worker, await claim(worker), JobState.DONE)
    await prune(worker, sql)
    assert await history.prune_keys(worker) == 0
    held = await client.find_key("sync", "k")
    assert held is not None
    assert (held.job_id, held.state, held.scope) == (first, None, "forever")
    assert (await client.enqueue(once("forever"))).outcome == "skipped"


async def test_a_job_that_failed_is_retried_and_holds_its_key_on(
    client: Client, worker: Lane
) -> None:
    first = await client.enqueue(once("forever"))
    await end(worker, await claim(worker), JobState.FAILED, reason="x")
    assert await client.retry([first]) == [first]
    await end(worker, await claim(worker), JobState.DONE)
    assert (await client.enqueue(once("forever"))).outcome == "skipped"


async def test_an_older_job_of_the_key_is_not_retried_beside_one_that_is_added_once(
    client: Client, worker: Lane
) -> None:
    older = await client.enqueue(once("live"))
    await client.cancel([older])
    await client.enqueue(once("history"))
    await end(worker, await claim(worker), JobState.DONE)
    assert await client.retry([older]) == []


@pytest.mark.parametrize("scope", ["history", "forever"])
async def test_producers_that_race_the_end_of_the_job_add_it_once(
    client: Client, worker: Lane, sql: Any, scope: str
) -> None:
    over = asyncio.Event()
    outcomes: list[str] = []

    async def produce() -> None:
        while not over.is_set():
            outcomes.append((await client.enqueue(once(scope))).outcome)

    producers = [asyncio.create_task(produce()) for _ in range(8)]
    while "enqueued" not in outcomes:
        await asyncio.sleep(0)
    await end(worker, await claim(worker), JobState.DONE)
    ended = len(outcomes)
    while len(outcomes) < ended + 50:
        await asyncio.sleep(0)
    over.set()
    await asyncio.gather(*producers)
    assert outcomes.count("enqueued") == 1
    assert await sql.fetchval("SELECT count(*) FROM taskd.jobs") == 1


def test_scopes_after_the_end_exclude_a_time() -> None:
    for scope in ("history", "forever"):
        with pytest.raises(InvalidJob, match=f"scope='{scope}' excludes for_s"):
            Unique("k", scope=scope, for_s=60)
        with pytest.raises(InvalidJob, match="a version cannot be combined with scope"):
            Unique("k", scope=scope, version=1)


# Keys that are freed by hand.


@pytest.mark.parametrize("rules", [{"scope": "forever"}, {"scope": "history"}, {"for_s": 3600.0}])
async def test_a_key_that_is_forgotten_is_taken_by_the_next_job(
    client: Client, worker: Lane, rules: dict[str, Any]
) -> None:
    new = NewJob("sync", queue="sync", unique=Unique("k", **rules))
    first = await client.enqueue(new)
    await end(worker, await claim(worker), JobState.DONE)
    assert await client.forget_key("sync", "k")
    assert await client.find_key("sync", "k") is None
    assert not await client.forget_key("sync", "k")
    assert await client.enqueue(new) != first


async def test_a_version_that_is_forgotten_makes_room_for_an_older_one(client: Client) -> None:
    wrong = await client.enqueue(NewJob("sync", queue="sync", unique=Unique("k", version=99_999)))
    await client.cancel([wrong])
    right = NewJob("sync", queue="sync", unique=Unique("k", version=3))
    assert (await client.enqueue(right)).outcome == "ignored"
    assert await client.forget_key("sync", "k")
    assert (await client.enqueue(right)).outcome == "enqueued"


async def test_a_key_of_a_live_job_is_not_forgotten(client: Client, worker: Lane) -> None:
    first = await client.enqueue(once("forever"))
    with pytest.raises(KeyHeld, match=f"job {first} of task .* until it has ended"):
        await client.forget_key("sync", "k")
    await claim(worker)
    with pytest.raises(KeyHeld):
        await client.forget_key("sync", "k")
    assert (await client.enqueue(once("forever"))).outcome == "skipped"


async def test_a_key_that_a_producer_is_just_taking_is_not_forgotten(
    client: Client, worker: Lane, sql: Any, dsn: str
) -> None:
    await client.enqueue(NewJob("sync", queue="sync", unique=Unique("k", for_s=3600.0)))
    await end(worker, await claim(worker), JobState.DONE)
    await sql.execute("UPDATE taskd.job_key SET until = now()")
    connection = await asyncpg.connect(dsn)
    async with connection.transaction():
        second = await client.enqueue(once("forever"), conn=connection)
        forgetting = asyncio.create_task(client.forget_key("sync", "k"))
        while not await sql.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            await asyncio.sleep(0.005)
    with pytest.raises(KeyHeld, match=f"job {second} "):
        await forgetting
    await connection.close()


async def test_a_key_is_found_with_its_job_and_its_time(client: Client, worker: Lane) -> None:
    first = await client.enqueue(once("live"))
    assert await client.find_key("sync", "k") == (first, "queued", "live", None, None)
    await claim(worker)
    held = await client.find_key("sync", "k")
    assert held is not None
    assert held.state == "running"
    await client.enqueue(NewJob("sync", queue="sync", unique=Unique("v", version=7)))
    versioned = await client.find_key("sync", "v")
    assert versioned is not None
    assert (versioned.version, versioned.until is not None) == (7, True)
    assert await client.find_key("other", "k") is None


async def test_a_waiting_key_is_free_once_its_job_was_claimed(client: Client, worker: Lane) -> None:
    await client.enqueue(once("waiting"))
    await claim(worker)
    assert await client.find_key("sync", "k") is None


# Keys by value.

SAME = ['["X", "2026-01"]', '["X","2026-01"]', '[ "X"\n,"2026-01" ]', '["\\u0058", "2026-01"]']


def test_keys_that_are_json_are_compared_by_value() -> None:
    assert {Unique(each).key for each in SAME} == {make_key("X", "2026-01")} == {SAME[1]}
    assert Unique('{"b": 1.0, "a": [1e3]}').key == '{"a":[1000],"b":1}'
    for other in ("X", "1.0", '"X" ', "[", "[x]", "{1}", '["\\u0000" ]', "[1] [2]"):
        assert Unique(other).key == other
    long = json.dumps(["x" * 300])
    assert Unique(long).key == make_key("x" * 300)
    with pytest.raises(InvalidJob, match="NaN"):
        make_key(float("nan"))
    with pytest.raises(InvalidJob, match="no JSON form"):
        make_key(object())


async def test_keys_from_sql_meet_the_declared_ones(client: Client, sql: Any) -> None:
    first = await client.enqueue(NewJob("sync", queue="sync", unique=Unique(SAME[1])))
    ask = "SELECT outcome FROM taskd.enqueue_unique('sync', '{}', $1, queue => 'sync')"
    for each in SAME:
        assert await sql.fetchval(ask, each) == "skipped"
        assert await sql.fetchval("SELECT job_id FROM taskd.find_key('sync', $1)", each) == first
        assert await sql.fetchval("SELECT taskd.make_key($1)", each) == SAME[1]
    for other in ("[", "[x]", '["\\u0000" ]', '{"a": 1', "[1] [2]", "[1e99999999999]"):
        assert (
            await sql.fetchval("SELECT taskd.normal_key($1)", other) == Unique(other).key == other
        )


async def test_python_and_sql_make_the_same_keys_of_values(sql: Any) -> None:
    for values in ([], [None, True, 1.0, 1e20, -0.0], ["ü\n", {"b": [], "a": "\x7f"}], ["x" * 300]):
        made = await sql.fetchval("SELECT taskd.make_key($1)", json.dumps(values))
        assert made == make_key(*values) == Unique(json.dumps(values)).key


async def test_a_declared_key_is_found_by_its_values(
    client: Client, lane: Lane, registry: Any
) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("account", "month"), scope="forever"))
    async def bill(account: int, month: str = "2026-01") -> None: ...

    await workers.publish(lane, "app", registry, ["sync"])
    first = await client.enqueue_named("bill", {"account": 42})
    held = await client.find_key("bill", make_key(42, "2026-01"))
    assert held is not None
    assert held.job_id == first


async def test_jobs_are_cancelled_in_sql_by_their_key(client: Client, sql: Any) -> None:
    first = await client.enqueue(once("forever"))
    cancel = "SELECT * FROM taskd.cancel(ARRAY(SELECT job_id FROM taskd.find_key('sync', 'k')))"
    assert [tuple(row) for row in await sql.fetch(cancel)] == [(first, "cancelled")]


# Before a worker has published the task.


async def test_an_enqueue_by_name_says_that_no_worker_has_published_the_task(
    client: Client, lane: Lane, sql: Any, registry: Any
) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("account",)))
    async def bill(account: int) -> None: ...

    early = await client.enqueue_named("bill", {"account": 42}, queue="sync")
    assert not early.published
    keyed = await client.enqueue_named(
        "bill", {"account": 42}, queue="sync", unique=Unique(make_key(42))
    )
    assert (keyed.published, keyed.outcome) == (False, "enqueued")
    [other] = await client.enqueue_many([NewJob("bill", '{"account": 1}', "sync")])
    assert not other.published
    await workers.publish(lane, "app", registry, ["sync"])
    late = await client.enqueue_named("bill", {"account": 42}, queue="sync")
    assert (late, late.published, late.outcome) == (keyed, True, "skipped")
    assert (await client.enqueue(bill.job(43))).published


async def test_sql_says_that_no_worker_has_published_the_task(sql: Any, published: Any) -> None:
    notices: list[Any] = []
    sql.add_log_listener(lambda _, notice: notices.append(notice))
    await sql.execute("SELECT taskd.enqueue('send', '{\"to\": \"x\"}')")
    await sql.execute("SELECT taskd.enqueue('unheard', queue => 'q', no_key => true)")
    assert not notices
    await sql.execute("SELECT taskd.enqueue('unheard', queue => 'q')")
    (notice,) = notices
    assert 'no worker has published the task "unheard"' in notice.message
    assert "no unique key applies" in notice.message


# Only the arguments are replaced.


async def test_replace_args_keeps_time_priority_and_options(client: Client, sql: Any) -> None:
    kept = (
        "SELECT run_at, priority, max_attempts, timeout_s, deadline, queue, state, metadata "
        "FROM taskd.job"
    )
    options = {"priority": 5, "max_attempts": 3, "timeout_s": 9.0, "metadata": {"a": 1}}
    unique = Unique("k", on_conflict="replace_args")
    first = await client.enqueue(
        NewJob("sync", '{"n": 1}', "sync", delay_s=600, deadline_s=900, unique=unique, **options)
    )
    before = await sql.fetchrow(kept)
    again = await client.enqueue(NewJob("sync", '{"n": 2}', "other", unique=unique))
    assert (again, again.outcome) == (first, "replaced")
    assert await sql.fetchrow(kept) == before
    assert await sql.fetchval("SELECT args FROM taskd.job") == '{"n": 2}'


async def test_replace_args_leaves_a_job_that_runs_and_one_that_is_parked(
    client: Client, worker: Lane, sql: Any
) -> None:
    def new(n: int) -> NewJob:
        unique = Unique("k", on_conflict="replace_args")
        return NewJob("sync", f'{{"n": {n}}}', "sync", unique=unique)

    await client.enqueue(new(1))
    claimed = await claim(worker)
    assert (await client.enqueue(new(2))).outcome == "skipped"
    await end(worker, claimed, JobState.SCHEDULED, delay_s=3600.0, refund=True, parked=True)
    before = await sql.fetchrow("SELECT state, run_at, parked FROM taskd.job")
    assert (await client.enqueue(new(3))).outcome == "replaced"
    row = await sql.fetchrow("SELECT state, run_at, parked, args FROM taskd.job")
    assert tuple(row)[:3] == tuple(before)
    assert row["args"] == '{"n": 3}'


# A change of the arguments of which a key is made.


async def test_a_change_of_an_argument_that_makes_the_key_is_refused(
    client: Client, lane: Lane, sql: Any, registry: Any
) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("account",), version_by="rev"))
    async def bill(account: int, rev: int, full: bool = False) -> None: ...

    await workers.publish(lane, "app", registry, ["sync"])
    first = await client.enqueue(bill.job(42, 1))
    own = await client.enqueue(bill.options(unique=Unique("own")).job(42, 1))
    for new in ({"account": 43}, {"rev": 2}):
        with pytest.raises(
            InvalidJob,
            match=rf"key of job {first} is made of arguments that would change: account, rev"
            r"\. Cancel the job",
        ):
            await client.change([own, first], update_args=new)
    assert await client.change([first], update_args={"full": True, "account": 42.0})
    assert await client.change([first], args={"account": 42, "rev": 1, "full": True})
    assert await client.change([own], update_args={"account": 43}) == {own: "changed"}
    keys = await sql.fetch("SELECT unique_key FROM taskd.job ORDER BY id")
    assert [row[0] for row in keys] == ["[42]", "own"]


# Outcomes in place of errors.


async def test_try_enqueue_tells_an_outcome_in_place_of_an_error(
    client: Client, sql: Any, lane: Lane, registry: Any
) -> None:
    @task(queue="sync", registry=registry, unique=Unique(by=("n",), on_conflict="raise"))
    async def keyed(n: int) -> None: ...

    @task(queue="small", registry=registry)
    async def plain() -> None: ...

    await workers.publish(lane, "app", registry, ["sync", "small"])
    await limits.limit_queue(lane, "small", max_depth=2, without=[])
    first = await client.enqueue(keyed.job(1))
    calls = (
        """'keyed', '{"n": 2}'""",
        """'keyed', '{"n": 1}'""",
        "'plain'",
        "'plain', run_at => now()",
        "'plain'",
        "'plain', unique_key => 'k'",
        """'keyed', '{"n": 1}', no_key => true""",
        """'keyed', '{"n": 1}', unique_key => '[1]', on_conflict => 'skip'""",
        """'keyed', '{"n": 1}', unique_key => '[ 1.0 ]', on_conflict => 'raise'""",
    )
    async with sql.transaction():
        rows = [await sql.fetchrow(f"SELECT * FROM taskd.try_enqueue({call})") for call in calls]
    told = [tuple(row) for row in rows]
    outcomes = [outcome for _, outcome in told]
    assert outcomes == [
        "enqueued", "held", "enqueued", "enqueued", "full", "full", "enqueued", "skipped", "held"
    ]  # fmt: skip
    assert told[1][0] == told[7][0] == told[8][0] == first
    assert told[4][0] is None
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 5
    with pytest.raises(asyncpg.PostgresError, match='task "keyed" needs the argument "n"'):
        await sql.fetch("SELECT * FROM taskd.try_enqueue('keyed')")


async def test_try_enqueue_applies_the_versions_and_the_priority_of_the_task(
    client: Client, sql: Any, lane: Lane, registry: Any
) -> None:
    @task(queue="q", registry=registry, priority=7, unique=Unique(by=("n",), version_by="at"))
    async def index(n: int, at: datetime) -> None: ...

    @task(queue="q", registry=registry, priority=8)
    async def plain() -> None: ...

    await workers.publish(lane, "app", registry, ["q"])
    timed = '\'index\', \'{"n": 1, "at": "2026-01-01T12:00:00'
    calls = (
        f"{timed}Z\"}}'",
        f"{timed}Z\"}}'",
        f"{timed}.5Z\"}}'",
        "'plain'",
        "'plain', unique_key => 'k', version => now()",
    )
    rows = [await sql.fetchrow(f"SELECT * FROM taskd.try_enqueue({call})") for call in calls]
    outcomes = [row["outcome"] for row in rows]
    assert outcomes == ["enqueued", "ignored", "replaced", "enqueued", "enqueued"]
    found = await sql.fetch("SELECT priority FROM taskd.job ORDER BY id")
    assert [row[0] for row in found] == [7, 8, 8]


async def test_a_rule_without_newer_starts_means_at_once(
    client: Client, sql: Any, lane: Lane, registry: Any
) -> None:
    @task(queue="q", registry=registry, unique=Unique(by=("n",)))
    async def keyed(n: int) -> None: ...

    await workers.publish(lane, "app", registry, ["q"])
    await sql.execute("UPDATE taskd.task SET unique_rule = unique_rule - 'newer_starts'")
    first = await sql.fetchval("SELECT taskd.enqueue('keyed', '{\"n\": 1}')")
    assert await sql.fetchval("SELECT taskd.enqueue('keyed', '{\"n\": 1}')") == first
