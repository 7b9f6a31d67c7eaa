"""What a user of taskd tests, in an event loop and without one."""

from __future__ import annotations

from typing import Any

import pytest
from shop import mail
from shop.jobs import charge, charge_carelessly, confirm, report
from shop.orders import place

from taskd.testing import AttemptFailed, Crash, TaskdDB


async def test_placing_an_order_enqueues_its_charge(taskd_db: TaskdDB) -> None:
    await place(order=7, cents=1250)
    taskd_db.assert_enqueued(charge, order=7, cents=1250)
    taskd_db.assert_not_enqueued(confirm)


async def test_an_order_is_charged_and_confirmed(
    taskd_db: TaskdDB, conn: Any, mails: list[tuple[str, str]]
) -> None:
    await place(order=7, cents=1250)
    ran = await taskd_db.run_all(check=True)
    assert [(job.task, job.state) for job in ran] == [("charge", "done"), ("confirm", "done")]
    assert await conn.fetchval("SELECT sum(cents) FROM charge") == 1250
    assert mails == [("ada@example.org", "order 7, in en")]
    assert taskd_db.enqueued() == []


async def test_a_worker_that_dies_after_the_commit_charges_once(
    taskd_db: TaskdDB, conn: Any, mails: list[tuple[str, str]]
) -> None:
    job_id = await charge.enqueue(order=7, cents=1250)
    await taskd_db.run_all(crash=[job_id])
    assert await conn.fetchval("SELECT count(*) FROM charge") == 1
    assert mails  # the next worker goes on


async def test_without_complete_it_would_charge_twice(taskd_db: TaskdDB, conn: Any) -> None:
    job_id = await charge_carelessly.enqueue(order=7, cents=1250)
    [job] = await taskd_db.run_all(crash=[job_id])
    assert (job.state, job.crashes) == ("done", 1)
    assert await conn.fetchval("SELECT count(*) FROM charge") == 2


async def test_a_worker_that_dies_in_the_middle_sends_the_mail_after_all(
    taskd_db: TaskdDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []

    async def dies_once(to: str, text: str) -> None:
        sent.append(to)
        if len(sent) == 1:
            raise Crash

    monkeypatch.setattr(mail, "send", dies_once)
    job_id = await confirm.enqueue(order=7, to="ada@example.org")
    await taskd_db.run_all()
    assert taskd_db.job(job_id).state == "done"
    assert len(sent) == 2


async def test_a_mail_server_that_is_down_is_tried_again_after_a_minute(
    taskd_db: TaskdDB, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await confirm.enqueue(order=7, to="ada@example.org")
    [job] = await taskd_db.run_all()
    assert job.state == "scheduled"
    assert 40 < job.due_in_s <= 60
    assert job.error.startswith("OSError: there is no mail server")
    taskd_db.travel(30)
    assert await taskd_db.run_all() == []

    async def send(to: str, text: str) -> None:
        """The mail server is back."""

    monkeypatch.setattr(mail, "send", send)
    taskd_db.travel(30)
    await taskd_db.run_all(check=True)
    assert taskd_db.job(job_id).state == "done"


async def test_the_error_of_a_handler_is_raised_when_asked(taskd_db: TaskdDB) -> None:
    await confirm.enqueue(order=7, to="ada@example.org")
    with pytest.raises(AttemptFailed, match="there is no mail server") as raised:
        await taskd_db.run_all(check=True)
    assert isinstance(raised.value.__cause__, OSError)


async def test_a_reminder_comes_in_a_week(taskd_db: TaskdDB, mails: list[tuple[str, str]]) -> None:
    await confirm.options(delay_s=7 * 86400).enqueue(order=7, to="ada@example.org")
    assert await taskd_db.run_all() == []
    taskd_db.travel(7 * 86400)
    await taskd_db.run_all()
    assert len(mails) == 1


def test_plain_code_works_as_well(taskd_db: TaskdDB) -> None:
    first = report.enqueue_sync(month="2026-10")
    taskd_db.assert_enqueued(report, month="2026-10")
    assert [job.result for job in taskd_db.run_all_sync()] == [{"pages": 3}]
    assert report.enqueue_sync(month="2026-10") == first  # an hour must pass
    taskd_db.travel(3600)
    assert report.enqueue_sync(month="2026-10") != first


def test_a_worker_that_dies_with_a_plain_function(taskd_db: TaskdDB) -> None:
    job_id = report.enqueue_sync(month="2026-10")
    [job] = taskd_db.run_all_sync(crash=[job_id])
    assert (job.state, job.crashes) == ("done", 1)


def test_nothing_of_another_test_is_there(taskd_db: TaskdDB) -> None:
    assert taskd_db.jobs() == []
