"""Handlers with transaction=: effects and completion commit together, at any failure."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from taskd import Cancel, Fail, Fixed, Task
from taskd.store.jobs import jobs
from tests.worker.conftest import Desk, until

NOW = Fixed(0.01)
LEDGER = "CREATE TABLE ledger (job bigint, amount bigint NOT NULL)"
BOOK = "INSERT INTO ledger VALUES ($1, $2)"
KILL = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND application_name = 'taskd transaction'"
)


async def booked(desk: Desk) -> list[int]:
    rows = await desk.sql.fetch("SELECT job FROM ledger ORDER BY job")
    return [row[0] for row in rows]


@pytest.fixture
async def ledger(desk: Desk) -> Desk:
    await desk.sql.execute(LEDGER)
    return desk


async def test_effects_and_completion_commit_together(ledger: Desk) -> None:
    seen: list[Any] = []

    @ledger.task(transaction=True)
    async def pay(ctx: Any, amount: int) -> dict[str, int]:
        await ctx.conn.execute(BOOK, ctx.job_id, amount)
        seen.append(await ctx.conn.fetchval("SHOW search_path"))
        seen.append(await ctx.conn.fetchval("SHOW transaction_isolation"))
        async with ctx.conn.transaction():  # a savepoint
            await ctx.conn.execute("SET LOCAL work_mem = '1MB'")
        return {"paid": amount}

    (job,) = await ledger.enqueue(pay.job(5))
    worker = await ledger.start()
    (row,) = await ledger.settled(job)
    assert (row["state"], json.loads(row["result"])) == ("done", {"paid": 5})
    assert await booked(ledger) == [job]
    server_default = await ledger.sql.fetchval("SHOW search_path")
    assert seen == [server_default, "read committed"]
    assert server_default != "pg_catalog", "the path of the worker's own statements"
    await ledger.emitted.wait("job.done", job_id=job)
    assert await worker.stop() == 0
    assert worker.worker.report.jobs["done"] == 1
    assert not await ledger.sql.fetchval(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND application_name = 'taskd transaction'"
    )


@pytest.mark.parametrize("how", ["raises", "snoozes", "returns a verdict", "exits", "aborted"])
async def test_what_does_not_end_well_is_rolled_back(ledger: Desk, how: str) -> None:
    @ledger.task(transaction=True, backoff=NOW, max_attempts=2)
    async def pay(ctx: Any) -> Any:
        await ctx.conn.execute(BOOK, ctx.job_id, 1)
        if ctx.fence > 1:
            return None
        if how == "raises":
            raise ValueError("no")
        if how == "snoozes":
            from taskd import Snooze

            raise Snooze(0.01)
        if how == "exits":
            raise SystemExit(1)
        if how == "aborted":
            with pytest.raises(Exception, match="division by zero"):
                await ctx.conn.execute("SELECT 1 / 0")
            return None
        return Cancel("not wanted")

    (job,) = await ledger.enqueue(pay.job())
    await ledger.start()
    (row,) = await ledger.settled(job)
    if how == "returns a verdict":
        assert (row["state"], row["reason"], await booked(ledger)) == (
            "cancelled",
            "not wanted",
            [],
        )
    else:
        assert (row["state"], row["attempt"]) == ("done", 1 if how == "snoozes" else 2)
        assert await booked(ledger) == [job]


async def test_a_lost_job_commits_nothing(ledger: Desk, other: Any) -> None:
    @ledger.task(transaction=True)
    async def pay(ctx: Any) -> None:
        await ctx.conn.execute(BOOK, ctx.job_id, 1)
        await other.execute("UPDATE taskd.job SET fence = fence + 1, worker_id = 42")

    await ledger.other_worker(42)
    (job,) = await ledger.enqueue(pay.job())
    await ledger.start()
    await ledger.emitted.wait("job.lost", job_id=job)
    assert await booked(ledger) == []
    assert (await ledger.row(job))["state"] == "running"


async def test_nothing_of_a_session_is_left_to_the_next_attempt(ledger: Desk) -> None:
    pids: list[int] = []

    @ledger.task(transaction=True)
    async def leaves(ctx: Any) -> str:
        pids.append(await ctx.conn.fetchval("SELECT pg_backend_pid()"))
        found: str = await ctx.conn.fetchval("SHOW work_mem")
        await ctx.conn.execute("SET work_mem = '1MB'")
        return found

    ids = await ledger.enqueue(leaves.job(), leaves.job())
    await ledger.start(transaction_connections=1)
    one, two = await ledger.settled(*ids)
    assert one["result"] == two["result"] != '"1MB"'
    assert pids[0] == pids[1]


async def test_who_ends_the_transaction_or_completes_it_is_reported(ledger: Desk) -> None:
    @ledger.task(transaction=True, max_attempts=1)
    async def commits(ctx: Any) -> None:
        await ctx.conn.execute("COMMIT")

    @ledger.task(transaction=True, max_attempts=1)
    async def completes(ctx: Any) -> None:
        await ctx.complete(ctx.conn)

    ids = await ledger.enqueue(commits.job(), completes.job())
    await ledger.start()
    one, two = await ledger.settled(*ids)
    assert one["reason"].startswith("TransactionEnded: the transaction of ctx.conn is over")
    assert two["reason"].startswith("TypeError: taskd completes the job")


async def test_a_timeout_does_not_wait_for_the_connection(ledger: Desk) -> None:
    @ledger.task(transaction=True, timeout_s=0.3, max_attempts=1)
    async def locks(ctx: Any) -> None:
        await ctx.conn.execute(BOOK, ctx.job_id, 1)
        await ctx.conn.execute("SELECT pg_sleep(60)")

    @ledger.task(transaction=True)
    async def next_one(ctx: Any) -> None:
        await ctx.conn.execute(BOOK, ctx.job_id, 1)

    slow, after = await ledger.enqueue(locks.job(), next_one.job())
    await ledger.start(transaction_connections=1)
    row, done = await ledger.settled(slow, after)
    assert row["reason"] == "TimedOut: the attempt took longer than 0.3 s"
    assert done["state"] == "done"
    assert await booked(ledger) == [after]


async def test_so_many_transactions_at_a_time_and_the_others_wait(ledger: Desk) -> None:
    running = most = 0

    @ledger.task(transaction=True)
    async def pay(ctx: Any) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await ctx.conn.execute(BOOK, ctx.job_id, 1)
        await asyncio.sleep(0.02)
        running -= 1

    @ledger.task()
    async def plain() -> None: ...  # so that the queue is not for transactions alone

    ids = await ledger.enqueue(*(pay.job() for _ in range(10)))
    await ledger.start(transaction_connections=2)
    rows = await ledger.settled(*ids)
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
    assert most == 2


async def test_a_conflict_of_serializable_transactions_is_tried_again_soon(ledger: Desk) -> None:
    await ledger.sql.execute("CREATE TABLE account (n bigint); INSERT INTO account VALUES (0)")
    both = asyncio.Barrier(2)

    @ledger.task(transaction="serializable", backoff=Fixed(3600))
    async def adds(ctx: Any) -> None:
        n = await ctx.conn.fetchval("SELECT n FROM account")
        if ctx.attempt == 1:
            await both.wait()
        await ctx.conn.execute("UPDATE account SET n = $1", n + 1)

    ids = await ledger.enqueue(adds.job(), adds.job())
    await ledger.start()
    rows = await ledger.settled(*ids)
    assert sorted(row["attempt"] for row in rows) == [1, 2]
    assert await ledger.sql.fetchval("SELECT n FROM account") == 2
    (failed,) = [row for row in rows if row["attempt"] == 2]
    assert "could not serialize" in json.loads(failed["errors"])[0]["message"]


async def test_a_rule_of_the_task_decides_about_a_constraint_that_is_checked_at_the_commit(
    ledger: Desk,
) -> None:
    from asyncpg import UniqueViolationError

    await ledger.sql.execute("CREATE TABLE once (n int UNIQUE DEFERRABLE INITIALLY DEFERRED)")
    await ledger.sql.execute("INSERT INTO once VALUES (1)")

    @ledger.task(transaction=True, on_error={UniqueViolationError: Fail})
    async def inserts(ctx: Any) -> None:
        await ctx.conn.execute("INSERT INTO once VALUES (1)")

    (job,) = await ledger.enqueue(inserts.job())
    await ledger.start()
    (row,) = await ledger.settled(job)
    assert (row["state"], row["attempt"]) == ("failed", 1)
    assert row["reason"].startswith("UniqueViolationError")


async def test_a_connection_that_breaks_at_the_commit_is_asked_about(
    ledger: Desk, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    """Both ways: the answer to a commit is lost, and the commit itself is."""
    from taskd.store.connections.transactions import Transaction

    commits = Transaction.commit

    async def commit(self: Any) -> bool:
        lost = calls.pop(0) if calls else None
        if lost == "answer":
            await self.conn.execute("COMMIT")
        if lost is not None:
            self.conn.terminate()
            self._owner.take_back(self)
            return False
        return await commits(self)

    calls = ["answer", "commit"]
    monkeypatch.setattr(Transaction, "commit", commit)

    @ledger.task(transaction=True, backoff=NOW, max_attempts=3)
    async def pay(ctx: Any) -> None:
        await ctx.conn.execute(BOOK, ctx.job_id, 1)

    await ledger.start(transaction_connections=1)
    (first,) = await ledger.enqueue(pay.job())
    await ledger.emitted.wait("job.done", job_id=first)
    (second,) = await ledger.enqueue(pay.job())
    one, two = await ledger.settled(first, second)
    assert (one["state"], one["attempt"]) == ("done", 1)
    assert (two["state"], two["attempt"]) == ("done", 2)
    assert json.loads(two["errors"])[0]["message"] == (
        "the connection broke at the commit, and nothing was committed"
    )
    assert await booked(ledger) == [first, second]
    assert ledger.emitted.ends(first) == ["job.done"]


async def test_the_ledger_is_right_while_connections_are_killed(ledger: Desk, other: Any) -> None:
    count = 200

    @ledger.task(transaction=True, backoff=NOW, max_attempts=1000)
    async def pay(ctx: Any, amount: int) -> None:
        await ctx.conn.execute(BOOK, ctx.job_id, amount)
        await asyncio.sleep(random.uniform(0, 0.01))

    ids = await ledger.enqueue(*(pay.job(n) for n in range(count)))
    worker = await ledger.start(transaction_connections=4)
    settling = asyncio.create_task(ledger.settled(*ids, within_s=60))
    kills = 0
    while not settling.done():
        kills += len(await other.fetch(f"{KILL} ORDER BY random() LIMIT 1"))
        await asyncio.sleep(random.uniform(0.01, 0.05))
    rows = await settling
    assert {row["state"] for row in rows} == {"done"}
    assert await booked(ledger) == ids
    assert await ledger.sql.fetchval("SELECT sum(amount) FROM ledger") == sum(range(count))
    assert kills >= 10
    assert await worker.stop() == 0


async def test_a_database_that_is_away_costs_no_attempt(
    ledger: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd.errors import StoreUnavailable
    from taskd.store.connections.database import Database

    tries = 0
    connects = Database.connect_plain

    async def refused(self: Any, purpose: str) -> Any:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StoreUnavailable("refused")
        return await connects(self, purpose)

    monkeypatch.setattr(Database, "connect_plain", refused)

    @ledger.task(transaction=True)
    async def pay(ctx: Any) -> None:
        await ctx.conn.execute(BOOK, ctx.job_id, 1)

    (job,) = await ledger.enqueue(pay.job())
    await ledger.start()
    (row,) = await ledger.settled(job)
    assert (row["state"], row["attempt"], tries) == ("done", 1, 3)


async def test_a_stop_and_a_cancellation_roll_back(ledger: Desk) -> None:
    begun = asyncio.Event()

    @ledger.task(transaction=True)
    async def waits(ctx: Any) -> None:
        await ctx.conn.execute(BOOK, ctx.job_id, 1)
        begun.set()
        await asyncio.sleep(60)

    (job,) = await ledger.enqueue(waits.job())
    worker = await ledger.start()
    await begun.wait()
    await jobs.cancel(ledger.lane, [job], "by hand")
    worker.worker.parts.runners[0].cancel_job(job, "by hand")
    (row,) = await ledger.settled(job)
    assert row["state"] == "cancelled"
    begun.clear()
    (job,) = await ledger.enqueue(waits.job())
    await begun.wait()
    assert await worker.stop(2) == 0
    row = await ledger.row(job)
    assert (row["state"], row["attempt"], row["interrupts"]) == ("queued", 0, 1)
    await until(lambda: ledger.sql.fetchval("SELECT count(*) = 0 FROM ledger"))


def test_what_a_transaction_needs_is_reported_at_the_definition() -> None:
    async def without(amount: int) -> None: ...

    def plain(ctx: Any) -> None: ...

    async def good(ctx: Any) -> None: ...

    with pytest.raises(TypeError, match="must take ctx"):
        Task(without, transaction=True)
    with pytest.raises(TypeError, match="`async def`"):
        Task(plain, transaction=True)
    with pytest.raises(ValueError, match="'serialisable' is none of True, 'read_committed'"):
        Task(good, transaction="serialisable")
