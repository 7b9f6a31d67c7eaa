"""Assertions about enqueued jobs, and their messages."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from taskd import Client
from taskd.testing import TaskdDB


@pytest.fixture
def send(task: Any) -> Any:
    @task(queue="mail")
    async def send(to: str, month: dt.date, copies: int = 1) -> None: ...

    return send


@pytest.fixture
def other(task: Any) -> Any:
    @task()
    async def other() -> None: ...

    return other


MONTH = dt.date(2026, 10, 1)


async def test_a_job_is_found_by_some_of_its_arguments_or_by_all(
    db: TaskdDB, client: Client, send: Any
) -> None:
    job_id = await client.enqueue(send.options(priority=5).job(to="ada", month=MONTH))
    assert db.assert_enqueued(send).id == job_id
    assert db.assert_enqueued(send, to="ada").priority == 5
    assert db.assert_enqueued(send, to="ada", month=MONTH, copies=1).id == job_id
    assert db.assert_enqueued("send", month="2026-10-01").id == job_id
    db.assert_not_enqueued(send, to="bob")
    db.assert_not_enqueued("other")
    assert [row.id for row in db.enqueued(send)] == [job_id]
    assert db.enqueued("other") == []


async def test_the_difference_is_reported_argument_by_argument(
    db: TaskdDB, client: Client, send: Any, other: Any
) -> None:
    first = await client.enqueue(send.job(to="ada", month=MONTH))
    second = await client.enqueue(send.job(to="bob", month=MONTH, copies=3))
    await client.enqueue(other.job())
    with pytest.raises(AssertionError) as raised:
        db.assert_enqueued(send, to="ada", month=MONTH, copies=2)
    assert str(raised.value).splitlines() == [
        "send(to='ada', month=datetime.date(2026, 10, 1), copies=2) is not enqueued.",
        "2 jobs of send waiting, with other arguments:",
        f"  job {first} send(to='ada', month='2026-10-01')",
        "      copies: wanted 2, is 1",
        f"  job {second} send(to='bob', month='2026-10-01', copies=3)",
        "      to: wanted 'ada', is 'bob'",
        "      copies: wanted 2, is 3",
        "Waiting besides: other (1 job).",
    ]


async def test_an_argument_of_a_task_by_name_may_be_absent(
    db: TaskdDB, client: Client, send: Any
) -> None:
    await client.enqueue(send.job(to="ada", month=MONTH))
    with pytest.raises(AssertionError, match="copies: wanted 1, is not given"):
        db.assert_enqueued("send", copies=1)


async def test_what_waits_instead_is_reported(
    db: TaskdDB, client: Client, send: Any, other: Any
) -> None:
    with pytest.raises(AssertionError, match=r"No job waits\. .* once its transaction"):
        db.assert_enqueued(send)
    await client.enqueue_many([other.job(), other.job()])
    with pytest.raises(AssertionError, match=r"Waiting instead: other \(2 jobs\)\."):
        db.assert_enqueued(send)


async def test_a_job_that_has_run_already_is_reported(
    db: TaskdDB, client: Client, send: Any
) -> None:
    job_id = await client.enqueue(send.job(to="ada", month=MONTH))
    await db.run_all()
    with pytest.raises(AssertionError, match=rf"does not wait any more: job {job_id} send.*done"):
        db.assert_enqueued(send, to="ada")


async def test_a_job_that_should_not_be_there_is_reported(
    db: TaskdDB, client: Client, send: Any
) -> None:
    job_id = await client.enqueue(send.job(to="ada", month=MONTH).after(60))
    with pytest.raises(AssertionError) as raised:
        db.assert_not_enqueued(send, to="ada")
    head, line = str(raised.value).splitlines()
    assert head == "send(to='ada') is enqueued, and should not be:"
    assert line.startswith(f"  job {job_id} send(to='ada', month='2026-10-01'): scheduled, due in ")


def test_an_argument_that_the_task_does_not_have_is_a_mistake_of_the_test(
    db: TaskdDB, send: Any
) -> None:
    for ask in (db.assert_enqueued, db.assert_not_enqueued):
        with pytest.raises(TypeError, match="no argument 'too'; it has to, month, copies"):
            ask(send, too="ada")


async def test_of_many_jobs_the_nearest_are_shown_and_long_values_are_cut(
    db: TaskdDB, client: Client, send: Any
) -> None:
    await client.enqueue_many(send.job(to="x" * 1000, month=MONTH) for _ in range(30))
    with pytest.raises(AssertionError) as raised:
        db.assert_enqueued(send, to="ada")
    assert "and 25 more, with at least as many differences" in str(raised.value)
    assert max(map(len, str(raised.value).splitlines())) < 300
