"""Operators and running workers: pauses, concurrency, cancellations, deadlines."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from taskd.core.jobs.job import Job, NewJob
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.store import tasks
from taskd.store.jobs import changes, jobs, limits
from taskd.store.reading import reports
from taskd.worker.operator_settings import Calls
from tests.worker.conftest import Desk, until


def sleeper(desk: Desk, **options: Any) -> tuple[Task[..., Any], asyncio.Event]:
    """A task that runs until the event is set."""
    end = asyncio.Event()

    @desk.task(**options)
    async def sleeps(n: int = 0) -> None:
        await end.wait()

    return sleeps, end


# Paused tasks.


async def test_jobs_of_a_paused_task_are_put_aside_and_come_back_when_it_is_resumed(
    desk: Desk,
) -> None:
    ran: list[str] = []

    @desk.task()
    async def report(n: int) -> None:
        ran.append("report")

    @desk.task()
    async def mail(n: int) -> None:
        ran.append("mail")

    await desk.start()
    assert await tasks.pause(desk.lane, ["report"], None, "the source is down") == ["report"]
    await desk.emitted.wait("tasks.paused", tasks=["report"])
    ids = await desk.enqueue(*(report.job(n=n) for n in range(30)), mail.job(n=1))
    await desk.emitted.wait("job.done", task="mail")
    await until(lambda: sum(e["count"] for e in desk.emitted.of("jobs.parked")) == 30)
    await until(
        lambda: desk.sql.fetchval(
            "SELECT count(*) = 30 FROM taskd.job WHERE parked AND state = 'scheduled' "
            "AND attempt = 0 AND run_at > now() + interval '50 min'"
        )
    )
    assert ran == ["mail"]
    assert await tasks.resume(desk.lane, ["report"]) == ["report"]
    rows = await desk.settled(*ids)
    assert {row["state"] for row in rows} == {"done"}
    assert {row["attempt"] for row in rows} == {1}
    assert len(ran) == 31


async def test_a_worker_that_starts_runs_nothing_of_a_paused_task(desk: Desk) -> None:
    @desk.task()
    async def report() -> None:
        raise AssertionError("paused")

    first = await desk.start()
    await tasks.pause(desk.lane, ["report"], None, None)
    await desk.emitted.wait("tasks.paused")
    await first.stop()
    [job_id] = await desk.enqueue(report.job())
    await desk.start()
    await desk.emitted.wait("jobs.parked", task="report", count=1)
    row = await desk.state(job_id, "scheduled")
    assert (row["attempt"], row["errors"]) == (0, "[]")


async def test_a_pause_that_ends_by_itself_brings_the_jobs_back(desk: Desk) -> None:
    @desk.task()
    async def report() -> None: ...

    await desk.start(lease_s=3.0)
    await tasks.pause(desk.lane, ["report"], 0.6, None)
    await desk.emitted.wait("tasks.paused", tasks=["report"])
    [job_id] = await desk.enqueue(report.job())
    await desk.emitted.wait("jobs.parked")
    [row] = await desk.settled(job_id)
    assert row["state"] == "done"


async def test_what_a_worker_parked_late_is_brought_back_all_the_same(desk: Desk) -> None:
    @desk.task()
    async def report() -> None: ...

    await desk.start(lease_s=1.5)
    [job_id] = await desk.enqueue(report.job().after(3600))
    # As if a worker that does not know of the resumption had just written it.
    await desk.sql.execute("UPDATE taskd.job SET parked = true, fence = 1 WHERE id = $1", job_id)
    [row] = await desk.settled(job_id)
    assert row["state"] == "done"


async def test_a_suspect_of_a_paused_task_stays_where_it_is(desk: Desk) -> None:
    @desk.task()
    async def report() -> None: ...

    @desk.task()
    async def other() -> None: ...

    await desk.start()
    await tasks.pause(desk.lane, ["report"], None, None)
    await desk.emitted.wait("tasks.paused")
    held, free = await desk.enqueue(report.job().after(3600), other.job().after(3600))
    await desk.sql.execute("UPDATE taskd.job SET crashes = 1, run_at = now() - interval '1 s'")
    await desk.sql.execute("SELECT pg_notify('taskd_default', '')")
    await desk.settled(free)
    assert (await desk.row(held))["state"] == "scheduled"


async def test_a_suspect_that_is_paused_while_it_is_claimed_is_given_back(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    @desk.task()
    async def report() -> None:
        ran.append(1)

    claim = jobs.claim_suspects

    async def claim_slowly(*args: Any, **options: Any) -> list[Job]:
        claimed = await claim(*args, **options)
        if claimed:
            await tasks.pause(desk.lane, ["report"], None, None)
            await desk.emitted.wait("tasks.paused")
        return claimed

    monkeypatch.setattr(jobs, "claim_suspects", claim_slowly)
    await desk.start()
    [held] = await desk.enqueue(report.job().after(3600))
    await desk.sql.execute("UPDATE taskd.job SET crashes = 1, run_at = now() - interval '1 s'")
    await desk.sql.execute("SELECT pg_notify('taskd_default', '')")
    await desk.emitted.wait("jobs.parked")
    held_again = "SELECT parked FROM taskd.job WHERE id = $1 AND state = 'scheduled'"
    await until(lambda: desk.sql.fetchval(held_again, held))
    assert not ran


# Concurrency.


async def test_a_queue_grows_and_shrinks_while_it_runs(desk: Desk) -> None:
    task, end = sleeper(desk)
    started = await desk.start(concurrency=2)
    [runner] = started.worker.parts.runners
    ids = await desk.enqueue(*(task.job(n=n) for n in range(6)))
    await until(lambda: runner.running == 2)
    await limits.limit_queue(desk.lane, "default", concurrency=5)
    await desk.emitted.wait("queue.resized", queue="default", concurrency=5)
    await until(lambda: runner.running == 5)
    await limits.limit_queue(desk.lane, "default", concurrency=1)
    await desk.emitted.wait("queue.resized", queue="default", concurrency=1)
    assert runner.running == 5  # running attempts go on
    end.set()
    rows = await desk.settled(*ids)
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
    await limits.limit_queue(desk.lane, "default", without=["concurrency"])
    await desk.emitted.wait("queue.resized", queue="default", concurrency=2)


async def test_a_reload_of_the_settings_does_not_undo_what_was_set(desk: Desk) -> None:
    sleeper(desk)
    await limits.limit_queue(desk.lane, "default", concurrency=3)
    started = await desk.start(concurrency=2)
    [runner] = started.worker.parts.runners
    assert runner.limit == 3
    started.worker.parts.controls.configure({"default": 7})
    assert runner.limit == 3
    await limits.limit_queue(desk.lane, "default", without=["concurrency"])
    await desk.emitted.wait("queue.resized", concurrency=7)


# Cancels.


async def test_a_running_job_is_cancelled_at_once_and_keeps_the_reason(desk: Desk) -> None:
    task, _ = sleeper(desk)
    started = await desk.start()
    await started.worker.parts.listeners[0].connected.wait()
    [job_id] = await desk.enqueue(task.job())
    await desk.emitted.wait("job.started")
    began = asyncio.get_running_loop().time()
    assert await jobs.cancel(desk.lane, [job_id], "ordered twice") == {job_id: "running"}
    [row] = await desk.settled(job_id)
    # Without the call it is a matter of up to 2.4 s.
    assert asyncio.get_running_loop().time() - began < 1.0
    assert (row["state"], row["reason"]) == ("cancelled", "ordered twice")
    assert desk.emitted.of("job.cancelled", job_id=job_id, reason="ordered twice")


async def test_a_job_that_was_claimed_and_waits_for_its_turn_is_cancelled_too(desk: Desk) -> None:
    task, end = sleeper(desk)
    started = await desk.start(concurrency=1)
    [runner] = started.worker.parts.runners
    ids = await desk.enqueue(task.job(n=1), task.job(n=2))
    await desk.emitted.wait("job.started", job_id=ids[0])
    claimed = await jobs.claim(desk.lane, started.worker._registration.me.id, "default", 1)
    runner._buffer.extend(claimed)
    runner._moved_at += 60
    await jobs.cancel(desk.lane, [ids[1]], "not this one")
    [row] = await desk.settled(ids[1])
    assert (row["state"], row["reason"]) == ("cancelled", "not this one")
    end.set()
    await desk.settled(ids[0])


async def test_a_call_for_another_worker_is_not_heeded(desk: Desk) -> None:
    sleeper(desk)
    started = await desk.start()
    reconciler, rescuer = started.worker.parts.reconciler, started.worker.parts.rescuer
    calls = Calls(started.worker.parts.shared.lease, rescuer.wakeup, reconciler.wakeup).receive
    reconciler.wakeup.clear()
    calls("12")
    calls("not even a number")
    await asyncio.sleep(0)
    assert not reconciler.wakeup.is_set()
    for _ in range(1000):  # a flood of calls causes two checks
        calls("")
    looks = 0
    look = rescuer.check

    async def counted() -> Any:
        nonlocal looks
        looks += 1
        return await look()

    rescuer.check = counted
    await asyncio.sleep(0.5)
    assert looks <= 2


# Deadlines.


async def test_a_job_that_is_claimed_after_its_deadline_expires_without_running(
    desk: Desk,
) -> None:
    ran: list[int] = []

    @desk.task()
    async def report(n: int) -> None:
        ran.append(n)

    late = NewJob("report", '{"n": 1}', queue="default", deadline_s=0.0)
    early = NewJob("report", '{"n": 2}', queue="default", deadline_s=3600.0)
    ids = await desk.enqueue(late, early)
    await desk.start()
    rows = await desk.settled(*ids)
    assert [(row["state"], row["reason"]) for row in rows] == [
        ("failed", "expired"),
        ("done", None),
    ]
    assert rows[0]["attempt"] == 0
    assert ran == [2]


async def test_no_attempt_starts_after_the_deadline_be_it_the_first_or_another(desk: Desk) -> None:
    @desk.task(max_attempts=5)
    async def fails() -> None:
        raise ValueError("no")

    await desk.start(lease_s=1.5)
    [job_id] = await desk.enqueue(NewJob("fails", queue="default", deadline_s=3600.0))
    await desk.emitted.wait("job.retried")
    await desk.state(job_id, "scheduled")
    await desk.sql.execute("UPDATE taskd.job SET deadline = now()")
    [row] = await desk.settled(job_id)
    assert (row["state"], row["reason"], row["attempt"]) == ("failed", "expired", 1)
    assert '"ValueError"' in row["errors"]


async def test_jobs_that_nobody_claims_expire_too_and_are_counted(desk: Desk) -> None:
    sleeper(desk)
    started = await desk.start(lease_s=1.5)
    waiting = [
        NewJob("t", queue="unserved", deadline_s=0.0),
        NewJob("t", queue="unserved", deadline_s=0.0, delay_s=3600.0),
    ]
    ids = await desk.enqueue(*waiting, NewJob("t", queue="unserved"))
    await desk.settled(*ids[:2])
    await desk.emitted.wait("jobs.expired", count=2, tasks={"t": 2})
    assert started.worker.parts.counts["failed"] == 2
    assert (await desk.row(ids[2]))["state"] == "queued"


async def test_a_claim_and_an_expiry_of_one_job_cannot_both_have_it(desk: Desk, other: Any) -> None:
    await desk.other_worker(7)
    [job_id] = await desk.enqueue(NewJob("t", queue="default", deadline_s=0.0))
    async with other.transaction():
        await other.execute("SELECT FROM taskd.job FOR UPDATE")
        assert await changes.expire(desk.lane, 10) == {}
        assert await jobs.claim(desk.lane, 7, "default", 10) == []
    [job] = await jobs.claim(desk.lane, 7, "default", 10)
    assert (job.id, job.late) == (job_id, True)
    assert await changes.expire(desk.lane, 10) == {}


# The form of arguments.


async def test_older_arguments_are_lifted_step_by_step(desk: Desk) -> None:
    seen: list[Any] = []

    def split(args: dict[str, Any]) -> dict[str, Any]:
        first, _, last = args.pop("name").partition(" ")
        return {**args, "first": first, "last": last}

    @desk.task(args_version=3, upgrade={1: split, 2: lambda args: {**args, "title": ""}})
    async def greet(first: str, last: str, title: str) -> None:
        seen.append((first, last, title))

    ids = await desk.enqueue(
        NewJob("greet", '{"name": "Ada Lovelace"}', queue="default"),
        NewJob("greet", '{"first": "Alan", "last": "Turing"}', queue="default", args_version=2),
        greet.job(first="Grace", last="Hopper", title="Admiral"),
    )
    await desk.start()
    rows = await desk.settled(*ids)
    assert [row["args_version"] for row in rows] == [None, 2, 3]
    assert sorted(seen) == [
        ("Ada", "Lovelace", ""), ("Alan", "Turing", ""), ("Grace", "Hopper", "Admiral")
    ]  # fmt: skip


async def test_an_upgrade_that_raises_fails_no_attempt_and_says_so(desk: Desk) -> None:
    @desk.task(args_version=2, upgrade={1: lambda args: args["gone"]}, max_attempts=1)
    async def greet(name: str) -> None: ...

    [job_id] = await desk.enqueue(NewJob("greet", '{"name": "Ada"}', queue="default"))
    await desk.start()
    row = await _unfit(desk, job_id)
    assert (row["state"], row["attempt"]) == ("scheduled", 0)
    assert "upgrading its arguments from version 1 to 2 failed: KeyError: 'gone'" in row["errors"]


async def _unfit(desk: Desk, job_id: int) -> Any:
    """Wait until the arguments of the job were refused; return its row."""

    async def refused() -> Any:
        row = await desk.row(job_id)
        return row if row["errors"] != "[]" else None

    return await until(refused)


async def test_newer_arguments_wait_for_newer_code(desk: Desk) -> None:
    @desk.task(name="greet")
    async def old(name: str) -> None:
        raise AssertionError("not mine")

    newer = Registry()
    done = Task(lambda first, last: None, name="greet", args_version=2)
    newer.add(done)
    [job_id] = await desk.enqueue(done.job(first="Ada", last="L"))
    first = await desk.start()
    await desk.emitted.wait("task.outdated", task="greet", args_version=2)
    row = await desk.state(job_id, "scheduled")
    assert (row["attempt"], row["errors"]) == (0, "[]")
    await first.stop()
    await desk.start(newer)
    await desk.sql.execute("UPDATE taskd.job SET run_at = now()")
    await desk.sql.execute("SELECT pg_notify('taskd_default', '')")
    assert [row["state"] for row in await desk.settled(job_id)] == ["done"]


async def test_jobs_under_a_former_name_run(desk: Desk) -> None:
    ran: list[str] = []

    @desk.task(name="send_report", aliases=["mail_report"])
    async def send(to: str) -> None:
        ran.append(to)

    await desk.start()
    by_sql = """SELECT taskd.enqueue('mail_report', '{"to": "ada"}')"""
    job_id = await desk.sql.fetchval(by_sql)
    await desk.settled(job_id)
    assert ran == ["ada"]
    assert await tasks.pause(desk.lane, ["send_report"], None, None) == [
        "mail_report", "send_report"
    ]  # fmt: skip


async def test_hidden_arguments_are_not_in_what_a_failure_leaves_behind(desk: Desk) -> None:
    @desk.task(redact=["password"], max_attempts=1)
    async def login(user: str, password: str) -> None:
        raise ValueError(f"{user} cannot log in with {password}")

    await desk.start()
    [job_id] = await desk.enqueue(login.job(user="ada", password="sesame-open"))
    [row] = await desk.settled(job_id)
    assert row["reason"] == "ValueError: ada cannot log in with ***"
    assert "sesame" not in row["errors"]
    assert "sesame" not in str(desk.emitted.all)


async def test_an_argument_that_had_another_name_once_is_hidden_as_well(desk: Desk) -> None:
    def renames(args: dict[str, Any]) -> dict[str, Any]:
        raise ValueError(f"odd: {args['secret']}")

    @desk.task(redact=["password", "secret"], args_version=2, upgrade={1: renames}, max_attempts=1)
    async def login(password: str) -> None: ...

    await desk.start()
    old = NewJob(login.name, '{"secret": "sesame-open"}', queue="default", checked=True)
    [job_id] = await desk.enqueue(old)
    row = await _unfit(desk, job_id)
    assert "odd: ***" in row["errors"]
    assert "sesame" not in row["errors"] + str(desk.emitted.all)
    assert "sesame" not in str(await reports.show_job(desk.lane, job_id))


async def test_a_deadline_in_the_past_is_accepted_and_the_job_expires(desk: Desk) -> None:
    task, _ = sleeper(desk)
    await desk.start(lease_s=1.5)
    past = datetime.now(UTC) - timedelta(hours=1)
    [job_id] = await desk.enqueue(NewJob(task.name, queue="default", deadline=past))
    [row] = await desk.settled(job_id)
    assert row["reason"] == "expired"
