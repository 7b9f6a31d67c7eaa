"""Error reporters: which errors they receive, where they run, and what their own errors do."""

from __future__ import annotations

import asyncio
import contextvars
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import pytest

from taskd import Cancel, Fail, Fixed, Retry, Snooze
from taskd.errors import StatementRefused
from taskd.handlers import HandlerRaised, Item, ProcessDied
from taskd.reporting import (
    ErrorReport,
    ReportedError,
    ServiceFailing,
    TimedOut,
    WorkerLost,
    report_errors,
)
from taskd.store import workers
from taskd.worker.finishing import error_queue
from taskd.worker.services import failures
from tests.worker import process_app
from tests.worker.conftest import Desk, until

NOW = Fixed(0.01)
user: contextvars.ContextVar[str] = contextvars.ContextVar("user", default="nobody")


@dataclass
class Number:
    n: int


@pytest.fixture
def reports(desk: Desk) -> list[ErrorReport]:
    """The reports of jobs that have failed."""
    found: list[ErrorReport] = []

    @report_errors(registry=desk.registry)
    def collect(report: ErrorReport) -> None:
        found.append(report)

    return found


@pytest.fixture
def all_reports(desk: Desk) -> list[ErrorReport]:
    """The reports of all failed attempts."""
    found: list[ErrorReport] = []

    @report_errors(each_attempt=True, registry=desk.registry)
    def collect_all(report: ErrorReport) -> None:
        found.append(report)

    return found


async def test_the_last_attempt_is_reported_or_each(
    desk: Desk, reports: list[ErrorReport], all_reports: list[ErrorReport]
) -> None:
    @desk.task(queue="shop", max_attempts=3, backoff=NOW)
    def fails() -> None:
        raise ValueError("it failed")

    (job,) = await desk.enqueue(fails.job())
    await desk.start()
    await desk.settled(job)
    await until(lambda: len(all_reports) == 3 and len(reports) == 1)
    (last,) = reports
    assert isinstance(last.exception, ValueError)
    assert (last.type, last.message, last.final) == ("ValueError", "it failed", True)
    assert (last.task, last.queue, last.job_id, last.attempt) == ("fails", "shop", job, 3)
    assert "raise ValueError" in "".join(traceback.format_exception(last.exception))
    assert [(each.attempt, each.final) for each in all_reports] == [
        (1, False), (2, False), (3, True),
    ]  # fmt: skip


async def test_errors_of_each_kind_of_handler_are_reported(
    desk: Desk, reports: list[ErrorReport]
) -> None:
    options: dict[str, Any] = {"max_attempts": 1}

    @desk.task(**options)
    async def in_first_step() -> None:
        raise KeyError("first step")

    @desk.task(**options)
    async def after_a_wait() -> None:
        await asyncio.sleep(0)
        raise KeyError("after a wait")

    @desk.task(**options, batch=2)
    async def in_batch(items: list[Item[Number]]) -> list[Exception | None]:
        return [KeyError("in a batch"), None]

    @desk.task(**options, transaction=True)
    async def in_transaction(ctx: Any) -> None:
        await ctx.conn.execute("SELECT 1/0")

    for each in (process_app.raises, process_app.dies):
        desk.registry.add(each)
    ids = await desk.enqueue(
        in_first_step.job(), after_a_wait.job(), in_batch.job(Number(1)), in_batch.job(Number(2)),
        in_transaction.job(), process_app.dies.job("exit"), process_app.raises.job("wrong"),
        process_app.raises.job("rule"),
    )  # fmt: skip
    await desk.start(process_slots=1)
    await desk.settled(*ids)
    await until(lambda: len(reports) == 7)
    found = {each.job_id: each for each in reports}
    assert [(found[i].type, found[i].message) for i in ids[:3]] == [
        ("KeyError", "'first step'"), ("KeyError", "'after a wait'"), ("KeyError", "'in a batch'"),
    ]  # fmt: skip
    assert ids[3] not in found
    assert found[ids[4]].type == "DivisionByZeroError"
    assert isinstance(found[ids[5]].exception, ProcessDied)
    there = found[ids[6]]
    assert isinstance(there.exception, HandlerRaised)
    assert (there.type, there.message, there.attempt) == ("ValueError", "it was wrong", 2)
    # An error tracker shows where it was raised, too.
    assert "process_app.py" in "".join(traceback.format_exception(there.exception))
    assert found[ids[7]].type == "KeyError"


async def test_verdicts_are_not_reported_except_a_retry_after_the_last_attempt(
    desk: Desk, all_reports: list[ErrorReport]
) -> None:
    @desk.task(max_attempts=1, backoff=NOW, on_error={OSError: Cancel, KeyError: Fail})
    def decides(how: str) -> Any:
        match how:
            case "fail":
                raise Fail("there is no such page")
            case "returned":
                return Fail("there is no such page")
            case "cancel":
                raise Cancel("not wanted")
            case "snooze":
                raise Snooze(3600)
            case "cancelled by a rule":
                raise OSError("no")
            case "failed by a rule":
                raise KeyError("no")
            case "retry":
                raise Retry(0.01, "not yet")
            case _:
                raise Retry(0.01) from ValueError("the cause")

    process_app.REGISTRY.get("raises")
    desk.registry.add(process_app.raises)
    hows = ["fail", "returned", "cancel", "snooze", "cancelled by a rule"]
    reported = ["failed by a rule", "retry", "retry from"]
    ids = await desk.enqueue(
        *(decides.job(how) for how in hows + reported),
        process_app.raises.job("verdict"), process_app.raises.job("returned"),
    )  # fmt: skip
    worker = await desk.start(process_slots=1)
    await desk.settled(*(each for each in ids if each != ids[3]))
    await worker.stop()
    found = {each.job_id: each.exception for each in all_reports}
    assert found.keys() == set(ids[5:8])
    assert [type(found[each]) for each in ids[5:8]] == [KeyError, Retry, ValueError]


async def test_a_timeout_is_reported_with_the_place_where_the_handler_waited(
    desk: Desk, reports: list[ErrorReport]
) -> None:
    @desk.task(max_attempts=1, timeout_s=0.1)
    async def waits_too_long() -> None:
        await asyncio.sleep(60)

    ended = threading.Event()

    @desk.task(max_attempts=1, timeout_s=0.1)
    def deaf() -> None:
        ended.wait(60)

    first, second = await desk.enqueue(waits_too_long.job(), deaf.job())
    await desk.start(cancel_s=0.2)
    await desk.settled(first, second)
    ended.set()
    await until(lambda: len(reports) == 2)
    found = {each.job_id: each for each in reports}
    assert {type(each.exception) for each in reports} == {TimedOut}
    assert found[first].message == "the attempt took longer than 0.1 s"
    assert "in waits_too_long" in "".join(traceback.format_exception(found[first].exception))
    assert "ignored its cancellation" in found[second].message


async def test_a_stop_a_cancellation_and_an_expiry_are_no_errors(
    desk: Desk, all_reports: list[ErrorReport]
) -> None:
    began = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        began.set()
        await asyncio.sleep(60)

    await desk.enqueue(waits.job())
    worker = await desk.start(drain_s=0.01)
    await began.wait()
    await worker.stop()
    assert all_reports == []


async def test_a_job_that_has_no_attempt_left_is_reported(
    desk: Desk, reports: list[ErrorReport]
) -> None:
    """Its attempts ended without an error, such as those that were abandoned at a stop."""

    @desk.task(max_attempts=2)
    async def never() -> None: ...

    job = await desk.sql.fetchval(
        "INSERT INTO taskd.job (queue, task, attempt) VALUES ('default', 'never', 2) RETURNING id"
    )
    await desk.start()
    await desk.settled(job)
    await until(lambda: reports)
    assert type(reports[0].exception) is ReportedError
    assert reports[0].message == "no attempt is left: the limit is 2"


async def test_a_reporter_runs_in_a_thread_and_in_the_variables_of_the_attempt(
    desk: Desk,
) -> None:
    found: list[tuple[str, str]] = []

    @report_errors(registry=desk.registry)
    def collect(report: ErrorReport) -> None:
        found.append((threading.current_thread().name, user.get()))
        user.set("changed by a reporter")

    @report_errors(registry=desk.registry)
    def again(report: ErrorReport) -> None:
        found.append((threading.current_thread().name, user.get()))

    @desk.task(max_attempts=1)
    async def fails(name: str, waits: bool) -> None:
        user.set(name)
        if waits:
            await asyncio.sleep(0)
        raise ValueError

    ids = await desk.enqueue(fails.job("ada", False), fails.job("bob", True))
    worker = await desk.start()
    await desk.settled(*ids)
    await worker.stop()
    assert {name for name, _ in found} == {"taskd-errors"}
    assert sorted(who for _, who in found) == [
        "ada", "bob", "changed by a reporter", "changed by a reporter",
    ]  # fmt: skip


async def test_an_error_of_a_reporter_is_logged_and_the_others_are_called(desk: Desk) -> None:
    found: list[int | None] = []

    @report_errors(registry=desk.registry)
    def broken(report: ErrorReport) -> None:
        raise SystemExit("no network")

    @report_errors(registry=desk.registry)
    def collect(report: ErrorReport) -> None:
        found.append(report.job_id)

    @desk.task(max_attempts=1)
    async def fails() -> None:
        raise ValueError

    ids = await desk.enqueue(*[fails.job()] * 3)
    worker = await desk.start()
    await desk.settled(*ids)
    await worker.stop()
    assert sorted(found) == sorted(ids)
    (logged,) = desk.emitted.of("errors.not_reported")  # once a minute
    assert logged == {"count": 1, "why": "broken raised SystemExit: no network"}


async def test_a_reporter_that_hangs_harms_no_job_and_holds_no_stop(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(error_queue, "WAITING_MAX", 5)
    monkeypatch.setattr(error_queue, "CLOSE_S_MAX", 0.2)
    goes_on = threading.Event()

    @report_errors(registry=desk.registry)
    def hangs(report: ErrorReport) -> None:
        goes_on.wait(60)

    @desk.task(max_attempts=1)
    async def fails() -> None:
        raise ValueError

    ids = await desk.enqueue(*[fails.job()] * 20)
    worker = await desk.start()
    await desk.settled(*ids)
    (logged,) = await desk.emitted.wait("errors.not_reported")
    assert logged["why"] == "5 errors wait already"
    began = time.monotonic()
    await worker.stop()
    assert time.monotonic() - began < 30
    goes_on.set()


async def test_a_lost_worker_and_its_jobs_are_reported(
    desk: Desk, reports: list[ErrorReport], all_reports: list[ErrorReport]
) -> None:
    @desk.task()
    async def works() -> None: ...

    ids = await desk.enqueue(works.job(), works.job())
    await desk.other_worker(77)
    await desk.sql.execute(
        "UPDATE taskd.job SET state = 'running', worker_id = 77, attempt = 1, fence = 1, "
        "started_at = now(), crashes = CASE id WHEN $1 THEN 9 ELSE 0 END",
        ids[1],
    )
    await desk.sql.execute("UPDATE taskd.worker SET pid = 4242, crashed = true WHERE id = 77")
    assert await workers.declare_dead(desk.lane, [77], proved=True)
    await desk.start()
    await until(lambda: len(all_reports) == 2)
    found = {each.job_id: each for each in all_reports}
    assert {type(each.exception) for each in all_reports} == {WorkerLost}
    assert (found[ids[0]].final, found[ids[1]].final) == (False, True)
    assert found[ids[1]].message == "the worker that ran this attempt crashed"
    assert (found[ids[1]].task, found[ids[1]].attempt) == ("works", 1)
    assert [each.job_id for each in reports] == [ids[1]]


async def test_a_worker_that_is_declared_dead_is_reported(
    desk: Desk, reports: list[ErrorReport]
) -> None:
    @desk.task()
    async def works() -> None: ...

    child = await asyncio.create_subprocess_exec("sleep", "60")
    await desk.other_worker(77, pid=child.pid)
    await desk.start()
    os.kill(child.pid, signal.SIGKILL)
    await child.wait()
    await until(lambda: reports)
    (report,) = reports
    assert (report.type, report.final, report.job_id) == ("WorkerLost", True, None)
    assert f"/{child.pid} was declared dead: its process has ended" in report.message


async def test_services_that_crash_or_fail_are_reported(
    desk: Desk, reports: list[ErrorReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def works() -> None: ...

    monkeypatch.setattr(failures, "LASTING_S", 0.0)
    worker = await desk.start()
    crashes = iter([LookupError("a mistake")])

    async def tick() -> float:
        for error in crashes:
            raise error
        raise StatementRefused("permission denied for table job")

    monkeypatch.setattr(worker.worker.parts.promoter, "tick", tick)
    monkeypatch.setattr(worker.worker.parts.promoter, "again_s", 0.01)
    worker.worker.parts.promoter.wakeup.set()
    await until(lambda: len(reports) == 2)
    crashed, failing = reports
    assert (crashed.service, crashed.type) == ("promoter", "LookupError")
    assert isinstance(crashed.exception, LookupError)
    assert isinstance(failing.exception, ServiceFailing)
    assert (failing.service, failing.message) == ("promoter", "permission denied for table job")


async def test_reports_leave_out_redacted_arguments(desk: Desk, reports: list[ErrorReport]) -> None:
    @desk.task(max_attempts=1, redact=["token"])
    async def fails(token: str) -> None:
        raise ValueError(f"bad token {token}")

    (job,) = await desk.enqueue(fails.job("s3cret"))
    await desk.start()
    await desk.settled(job)
    await until(lambda: reports)
    assert reports[0].message == "bad token ***"


def test_what_cannot_be_a_reporter_is_refused() -> None:
    async def on_the_loop(report: ErrorReport) -> None: ...

    def takes_none() -> None: ...

    with pytest.raises(TypeError, match="runs in a thread"):
        report_errors(on_the_loop)
    with pytest.raises(TypeError, match="must take one parameter"):
        report_errors(takes_none)  # type: ignore[type-var]
