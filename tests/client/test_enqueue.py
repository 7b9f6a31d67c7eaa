"""What enqueueing writes, in which order, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from enum import Enum
from functools import partial
from typing import Any, Literal

import pytest

from taskd import Client, JobFilter, NewJob, task
from taskd.client import configure, enqueueing
from taskd.client.operations import bulk
from taskd.core.jobs.job import JobState
from taskd.core.jobs.job_changes import ChangeOutcome
from taskd.core.tasks.registry import Registry
from taskd.errors import InvalidArgs, InvalidJob, UnknownTask
from taskd.store import workers
from taskd.store.connections.lanes import Lane


class Counters:
    """Runs statements on a lane and records the known tasks when each was sent."""

    def __init__(self, lane: Lane, known: Callable[[], Any]) -> None:
        self.lane = lane
        self.known = known
        self.statements: list[tuple[str, Any]] = []

    async def fetch(self, name: str, *args: Any) -> list[Any]:
        self.statements.append((name, self.known()))
        return await self.lane.fetch(name, *args)


SOON = datetime(2100, 1, 1, tzinfo=UTC)


async def test_a_job_is_queued_with_its_arguments(client: Client, sql: Any, send: Any) -> None:
    job_id = await client.enqueue(send.job(to="ada@example.org"))
    row = await sql.fetchrow("SELECT * FROM taskd.jobs WHERE id = $1", job_id)
    assert (row["queue"], row["task"], row["state"]) == ("email", "send", "queued")
    assert json.loads(row["args"]) == {"to": "ada@example.org"}
    assert (row["priority"], row["max_attempts"], row["timeout_s"]) == (100, None, None)


async def test_a_task_enqueues_through_the_default_client(dsn: str, sql: Any, send: Any) -> None:
    client = configure(dsn)
    job_id = await send.enqueue("ada@example.org", copies=2)
    assert json.loads(await sql.fetchval("SELECT args FROM taskd.job WHERE id = $1", job_id)) == {
        "to": "ada@example.org",
        "copies": 2,
    }
    await client.close()


async def test_every_option_reaches_its_column(client: Client, sql: Any, send: Any) -> None:
    job = send.options(queue="bulk", priority=-5, run_at=SOON, max_attempts=3, timeout_s=7.5).job(
        to="x"
    )
    row = await sql.fetchrow("SELECT * FROM taskd.job WHERE id = $1", await client.enqueue(job))
    assert (row["queue"], row["priority"], row["run_at"]) == ("bulk", -5, SOON)
    assert (row["max_attempts"], row["timeout_s"], row["state"]) == (3, 7.5, "scheduled")


async def test_options_apply_to_enqueue(dsn: str, sql: Any, send: Any) -> None:
    client = configure(dsn)
    job_id = await send.options(delay_s=60).enqueue(to="x")
    row = await sql.fetchrow(
        "SELECT state, run_at - enqueued_at AS d FROM taskd.job WHERE id = $1", job_id
    )
    assert (row["state"], row["d"]) == ("scheduled", timedelta(seconds=60))
    await client.close()


async def test_a_run_at_in_the_past_is_queued_at_once(client: Client, sql: Any, send: Any) -> None:
    job_id = await client.enqueue(send.job(to="x").at(datetime(2020, 1, 1, tzinfo=UTC)))
    assert await sql.fetchval("SELECT state FROM taskd.job WHERE id = $1", job_id) == "queued"


async def test_run_at_keeps_its_moment_whatever_the_time_zone(
    client: Client, sql: Any, send: Any
) -> None:
    far = datetime(2100, 1, 1, 12, tzinfo=timezone(timedelta(hours=9, minutes=30)))
    job_id = await client.enqueue(send.job(to="x").at(far))
    assert await sql.fetchval("SELECT run_at FROM taskd.job WHERE id = $1", job_id) == far


async def test_many_jobs_take_one_statement_per_thousand_and_keep_their_order(
    lane: Lane, sql: Any, send: Any
) -> None:
    taken = 0

    def jobs() -> Any:
        nonlocal taken
        for number in range(2500):
            taken += 1
            yield send.job(to=str(number))

    counting = Counters(lane, lambda: taken)
    ids = await enqueueing.insert_jobs(counting, jobs())
    # The generator was read as the statements went, one job ahead.
    assert counting.statements == [
        ("enqueue_usual_jobs", 1001),
        ("enqueue_usual_jobs", 2001),
        ("enqueue_usual_jobs", 2500),
    ]
    assert ids == sorted(ids)
    rows = await sql.fetch("SELECT id, args ->> 'to' AS number FROM taskd.job ORDER BY id")
    assert [row["id"] for row in rows] == ids
    assert [int(row["number"]) for row in rows] == list(range(2500))


async def test_large_jobs_are_sent_in_smaller_statements(
    lane: Lane, send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enqueueing, "BATCH_CHARACTERS", 1000)
    counting = Counters(lane, lambda: None)
    ids = await enqueueing.insert_jobs(counting, (send.job(to="x" * 400) for _ in range(6)))
    assert (len(ids), len(counting.statements)) == (6, 3)


async def test_without_conn_each_thousand_is_a_transaction_of_its_own(
    client: Client, sql: Any, send: Any
) -> None:
    def jobs() -> Any:
        for number in range(1500):
            yield send.job(to=str(number))
        raise LookupError("the producer breaks")

    with pytest.raises(LookupError):
        await client.enqueue_many(jobs())
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 1000


async def test_no_jobs_are_no_statement(client: Client) -> None:
    assert await client.enqueue_many([]) == []


async def test_priority_time_and_attempts_may_differ_within_a_batch(
    client: Client, sql: Any, send: Any
) -> None:
    ids = await client.enqueue_many(
        [
            send.options(delay_s=5, timeout_s=1).job(to="a"),
            send.options(delay_s=2.5, timeout_s=2.5, max_attempts=3).job(to="b"),
            send.job(to="c"),
        ]
    )
    rows = await sql.fetch(
        "SELECT timeout_s, max_attempts, state FROM taskd.job WHERE id = ANY ($1) ORDER BY id", ids
    )
    assert [tuple(row) for row in rows] == [
        (1.0, None, "scheduled"),
        (2.5, 3, "scheduled"),
        (None, None, "queued"),
    ]


class Color(Enum):
    RED = "red"


@dataclasses.dataclass
class Address:
    street: str
    number: int


async def test_typed_arguments_come_back_as_they_were(
    client: Client, sql: Any, registry: Registry
) -> None:
    @task(registry=registry)
    async def typed(
        when: datetime,
        key: uuid.UUID,
        price: Decimal,
        home: Address,
        matrix: list[list[int]],
        color: Color,
        mode: Literal["fast", "slow"],
        note: str | None = None,
        tags: dict[str, list[Address]] | None = None,
    ) -> None: ...

    given: dict[str, Any] = {
        "when": SOON,
        "key": uuid.uuid4(),
        "price": Decimal("10.10"),
        "home": Address("Main", 5),
        "matrix": [[1, 2], [], [3]],
        "color": Color.RED,
        "mode": "fast",
        "note": None,
        "tags": {"a": [Address("Side", 6)]},
    }
    job_id = await client.enqueue(typed.job(**given))
    text = await sql.fetchval("SELECT args::text FROM taskd.job WHERE id = $1", job_id)
    assert typed.decode(text) == given


TEXTS = ["", "\u00fc\u4e2d\U0001f600", "\\u0000", '"\\', "\x01\x1f\x7f", "  ", "'; DROP TABLE x"]


@pytest.mark.parametrize("text", TEXTS)
async def test_odd_texts_come_back_as_they_were(
    client: Client, sql: Any, send: Any, text: str
) -> None:
    job_id = await client.enqueue(send.job(to=text))
    stored = await sql.fetchval("SELECT args::text FROM taskd.job WHERE id = $1", job_id)
    assert send.decode(stored)["to"] == text


@pytest.mark.parametrize(
    "queue", ["", "Email", "a b", "q" * 49, "it's", 'a"b', "a;b", "\u00fc", "a\n", None.__class__]
)
def test_a_queue_outside_the_limits_is_refused(send: Any, queue: Any) -> None:
    with pytest.raises(InvalidJob):
        send.options(queue=queue).job(to="x")


async def test_a_queue_of_48_characters_works(client: Client, sql: Any, send: Any) -> None:
    job_id = await client.enqueue(send.options(queue="q" * 48).job(to="x"))
    assert await sql.fetchval("SELECT queue FROM taskd.job WHERE id = $1", job_id) == "q" * 48


# Named tasks.


async def test_a_named_job_takes_its_queue_from_the_published_task(
    client: Client, sql: Any, published: Registry
) -> None:
    job_id = await client.enqueue_named("send", {"to": "x"}, priority=7)
    row = await sql.fetchrow("SELECT queue, priority FROM taskd.job WHERE id = $1", job_id)
    assert tuple(row) == ("email", 7)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ({}, "'to' is a required property; it takes copies, to$"),
        ({"to": 5}, "the value is not of type 'string'"),
        ({"to": "x", "cpies": 2}, r"'cpies' was unexpected\); it takes copies, to$"),
        ({"to": "x", "copies": "2"}, r"\$\.copies"),
    ],
)
async def test_a_named_job_is_checked_against_the_published_task(
    client: Client, sql: Any, published: Registry, args: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgs, match=says):
        await client.enqueue_named("send", args)
    with pytest.raises(InvalidArgs):  # a named queue does not switch the check off
        await client.enqueue_named("send", args, queue="other")
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


async def test_formats_of_named_arguments_are_checked(
    client: Client, lane: Lane, registry: Registry
) -> None:
    @task(registry=registry)
    async def typed(day: date, key: uuid.UUID, price: Decimal, pause: timedelta) -> None: ...

    await workers.publish(lane, "app", registry, [])
    good = {
        "day": date(2026, 1, 1),
        "key": uuid.uuid4(),
        "price": Decimal("1.5"),
        "pause": timedelta(minutes=5),
    }
    assert await client.enqueue_named("typed", good)
    for name in good:
        with pytest.raises(InvalidArgs, match=name):
            await client.enqueue_named("typed", good | {name: "nonsense"})


async def test_an_unknown_task_names_the_nearest_ones(client: Client, published: Registry) -> None:
    with pytest.raises(UnknownTask, match="Did you mean 'send'"):
        await client.enqueue_named("sent", {"to": "x"})


async def test_an_unknown_task_with_a_queue_is_enqueued_unchecked(client: Client, sql: Any) -> None:
    job_id = await client.enqueue_named("elsewhere", {"any": [1, None]}, queue="q", delay_s=9)
    row = await sql.fetchrow("SELECT queue, task, state FROM taskd.job WHERE id = $1", job_id)
    assert tuple(row) == ("q", "elsewhere", "scheduled")


async def test_a_job_without_a_queue_goes_where_its_task_is_published(
    client: Client, sql: Any, published: Registry
) -> None:
    ids = await client.enqueue_many(
        [NewJob("send", '{"to": "a"}'), NewJob("other", queue="q"), NewJob("send", '{"to": "b"}')]
    )
    rows = await sql.fetch("SELECT queue FROM taskd.job WHERE id = ANY ($1) ORDER BY id", ids)
    assert [row["queue"] for row in rows] == ["email", "q", "email"]
    with pytest.raises(InvalidArgs):
        await client.enqueue(NewJob("send", '{"to": 1}'))
    with pytest.raises(UnknownTask):
        await client.enqueue(NewJob("nobody"))


@pytest.mark.parametrize(
    "args",
    [
        [1],
        "text",
        5,
        {"a": float("nan")},
        {"a": [float("inf")]},
        {"a": object()},
        {"a": "\ud800"},
        {"a": "\x00"},
        {"a": "x" * 300_000},
    ],
)
async def test_named_arguments_without_a_json_form_are_refused(client: Client, args: Any) -> None:
    with pytest.raises(InvalidArgs):
        await client.enqueue_named("x", args, queue="q")


@pytest.mark.parametrize("args", ["[1]", "5", "nonsense", '{"a": "\\ud800"}', "", "{"])
async def test_a_job_value_with_odd_json_is_refused_by_the_database(
    client: Client, sql: Any, args: str
) -> None:
    with pytest.raises(InvalidJob):
        await client.enqueue_many([NewJob("fine", queue="q"), NewJob("x", args, queue="q")])
    assert await sql.fetchval("SELECT count(*) FROM taskd.job") == 0


# By hand.


async def test_cancel_and_retry_move_waiting_jobs(client: Client, sql: Any, send: Any) -> None:
    first, second = await client.enqueue_many([send.job(to="a"), send.job(to="b").after(60)])
    assert await client.cancel([first, second, 12345], "not\x00needed") == {
        first: JobState.CANCELLED,
        second: JobState.CANCELLED,
    }
    reason = await sql.fetchval("SELECT reason FROM taskd.jobs WHERE id = $1", first)
    assert reason == "not\u2400needed"
    assert await client.retry([first, 12345]) == [first]
    assert await sql.fetchval("SELECT state FROM taskd.jobs WHERE id = $1", first) == "queued"


async def test_one_id_is_enough_for_an_action_by_hand(client: Client, send: Any) -> None:
    job_id = await client.enqueue(send.job(to="a"))
    assert await client.change(job_id, priority=7) == {job_id: ChangeOutcome.CHANGED}
    assert await client.cancel(job_id) == {job_id: JobState.CANCELLED}
    assert await client.retry(job_id) == [job_id]


async def test_a_filter_selects_the_jobs_of_an_action(
    client: Client, sql: Any, send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bulk, "BATCH_JOBS", 2)
    jobs = [replace(send.job(to="a"), metadata={"n": n % 2}) for n in range(10)]
    ids = await client.enqueue_many([*jobs, send.job(to="b")])
    odd = JobFilter(args={"to": "a"}, metadata={"n": 1})
    assert await client.change(odd, delay_s=3600) == dict.fromkeys(ids[1:10:2], "changed")
    waiting = JobFilter(task=send.name, states=["scheduled"])
    assert await client.cancel(waiting, "x") == dict.fromkeys(ids[1:10:2], "cancelled")
    assert await client.retry(JobFilter(error="x", since_s=60), delay_s=60) == ids[1:10:2]
    assert await sql.fetchval("SELECT count(*) FROM taskd.job WHERE state = 'queued'") == 6
    assert await client.retry(JobFilter(error="x", since_s=60)) == []


async def test_an_action_on_all_jobs_or_on_wrong_states_is_refused(
    client: Client, sql: Any, send: Any
) -> None:
    await client.enqueue(send.job(to="a"))
    for act in (client.cancel, client.retry, partial(client.change, priority=1)):
        with pytest.raises(InvalidJob, match="an empty JobFilter selects all jobs"):
            await act(JobFilter())
    with pytest.raises(InvalidJob, match="give one of the states failed, cancelled"):
        await client.retry(JobFilter(states=["queued"]))
    with pytest.raises(InvalidJob, match="no new value"):
        await client.change(JobFilter(task="none"))
    assert await sql.fetchval("SELECT state FROM taskd.jobs") == "queued"
    assert len(await client.cancel(JobFilter(states=["queued"]))) == 1


async def test_a_queue_is_paused_and_resumed(client: Client, sql: Any, listener: Any) -> None:
    assert await client.pause(["email", "bulk"], for_s=60, reason="deploy") == ["bulk", "email"]
    row = await sql.fetchrow("SELECT * FROM taskd.queue WHERE name = 'email'")
    assert row["pause_reason"] == "deploy"
    paused_for = row["paused_until"] - row["paused_at"]
    assert abs(paused_for - timedelta(seconds=60)) < timedelta(seconds=1)
    assert await client.resume(["email", "never"]) == ["email"]
    assert await listener.notified() == ["email"]


@pytest.mark.parametrize("for_s", [0, -1, 315_360_001, float("nan"), float("inf")])
async def test_a_pause_needs_a_length_within_its_limits(client: Client, for_s: float) -> None:
    with pytest.raises(InvalidJob):
        await client.pause(["email"], for_s=for_s)


async def test_names_of_queues_are_checked_before_they_are_paused(client: Client) -> None:
    with pytest.raises(InvalidJob):
        await client.pause(["E-Mail!"])
    with pytest.raises(InvalidJob):
        await client.resume(["E-Mail!"])
