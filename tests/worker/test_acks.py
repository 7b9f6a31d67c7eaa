"""Writing outcomes: in batches, through outages, and so that one odd value harms one job."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import asyncpg
import pytest

from taskd.core.jobs.backoff import Fixed
from taskd.core.outcomes import policy
from taskd.errors import LeaseLost
from taskd.store.connections.error_translation import HeldUp, Silence, translate
from taskd.store.jobs import jobs
from taskd.worker.upkeep import reconciler as reconciler_module
from tests.schema import fetches
from tests.worker.conftest import Desk, until
from tests.worker.test_claims import TERMINATE, idle

NOW = Fixed(0.01)


def meddle(lane: Any, name: str, after: Any) -> list[int]:
    """Let statements of this name be followed by `after(rows)`; how often grows in the list."""
    fetch, calls = lane.fetch, []

    async def meddled(statement: str, *args: Any) -> Any:
        rows = await fetch(statement, *args)
        if statement == name:
            calls.append(len(rows))
            rows = await after(rows)
        return rows

    lane.fetch = meddled
    return calls


def once_silent() -> Any:
    """Loses the first reply: the statement has run."""
    lost = []

    async def lose(rows: Any) -> Any:
        if rows and not lost:
            lost.append(rows)
            raise Silence("no answer")
        return rows

    return lose


async def test_outcomes_are_written_in_batches_while_others_wait(desk: Desk) -> None:
    go = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        await go.wait()

    ids = await desk.enqueue(*(waits.job() for _ in range(100)))
    worker = await desk.start(concurrency=100)
    await until(lambda: worker.worker.parts.runners[0].running == 100)
    go.set()
    await desk.settled(*ids)
    written = await desk.emitted.wait("acks.written")
    assert sum(had["count"] for had in written) == 100
    assert len(written) <= 10


async def test_an_outage_of_the_connections_for_acks_and_claims_loses_nothing(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None:
        await asyncio.sleep(0.001)

    @desk.task()
    async def result() -> int:
        return 1

    ids = await desk.enqueue(*(quick.job() if n % 2 else result.job() for n in range(2000)))
    await desk.start()
    for _ in range(5):
        await desk.sql.execute(TERMINATE, "taskd work")
        await asyncio.sleep(0)
    rows = await desk.settled(*ids)
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
    assert not desk.emitted.of("job.lost")


@pytest.mark.parametrize("kind", ["result", "error", "reason"])
async def test_a_refused_outcome_harms_its_own_job_only(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    go = asyncio.Event()

    @desk.task(max_attempts=1)
    async def returns(odd: bool) -> str:
        await go.wait()
        if odd and kind != "result":
            raise ValueError("odd")
        return "odd" if odd else "fine"

    settle = policy.decide

    def poisoned(*args: Any) -> Any:
        ack = settle(*args)
        if ack.result == '"odd"':
            ack.result = '"\\u0000"'
        elif ack.state == "failed":
            setattr(
                ack, kind, '{"message": "\\u0000", "type": "x"}' if kind == "error" else "\ud800"
            )
        return ack

    monkeypatch.setattr(policy, "decide", poisoned)
    ids = await desk.enqueue(*(returns.job(n == 37) for n in range(100)))
    worker = await desk.start(concurrency=100)
    await until(lambda: worker.worker.parts.runners[0].running == 100)
    go.set()
    rows = await desk.settled(*ids)
    odd = rows.pop(37)
    assert {(row["state"], row["result"]) for row in rows} == {("done", '"fine"')}
    assert odd["state"] == ("done" if kind == "result" else "failed")
    assert odd["result"] is None
    assert odd["reason"].startswith("its result was not" if kind == "result" else "the outcome")
    assert json.loads(odd["errors"])[-1]["type"] == "UnstorableOutcome"
    assert [had["job_id"] for had in desk.emitted.of("job.outcome_refused")] == [odd["id"]]


@pytest.mark.parametrize("code", ["P0001", "23514", "XX000", "0A000", "42501", "42P01"])
@pytest.mark.parametrize("plain", [True, False])
async def test_a_trigger_that_refuses_one_job_delays_no_other(
    desk: Desk, code: str, plain: bool
) -> None:
    """Of any error that a trigger of the user raises, also one that taskd does not know."""
    go = asyncio.Event()

    @desk.task()
    async def returns(number: int) -> int | None:
        await go.wait()
        return None if plain else number

    ids = await desk.enqueue(*(returns.job(n) for n in range(50)))
    await desk.sql.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION 'not this one' USING ERRCODE = '{code}'; END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON taskd.job_history FOR EACH ROW "
        f"WHEN (NEW.id = {ids[7]}) EXECUTE FUNCTION public.refuse()"
    )
    worker = await desk.start(concurrency=50)
    await until(lambda: worker.worker.parts.runners[0].running == 50)
    go.set()
    others = [job_id for job_id in ids if job_id != ids[7]]
    rows = await desk.settled(*others)
    assert {row["state"] for row in rows} == {"done"}
    await desk.emitted.wait("job.outcome_refused", job_id=ids[7])
    assert not desk.emitted.of("service.crashed")
    # Without the trigger the outcome is written: the job has not run again.
    await desk.sql.execute("DROP TRIGGER refuse ON taskd.job_history")
    [row] = await desk.settled(ids[7])
    assert (row["state"], row["attempt"], row["fence"]) == ("done", 1, 1)


async def test_an_ack_whose_reply_was_lost_counts_as_written(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    @desk.task(max_attempts=2, backoff=Fixed(3600))
    async def settles(end: str) -> int:
        if end == "retry":
            raise ValueError
        return 1

    worker = await desk.start()
    lane = worker.worker.parts.acks
    meddle(lane, "ack_done", once_silent())
    meddle(lane, "ack_outcomes", once_silent())
    ids = await desk.enqueue(quick.job(), settles.job("retry"), settles.job("done"), quick.job())
    await desk.emitted.wait("store.back")
    await until(lambda: not worker.worker.parts.acker.backlog)
    assert (await desk.row(ids[1]))["state"] == "scheduled"
    rows = await desk.settled(ids[0], ids[2], ids[3])
    assert {(row["state"], row["attempt"]) for row in rows} == {("done", 1)}
    assert not desk.emitted.of("job.lost")
    assert await worker.stop() == 0


async def test_it_counts_as_written_without_a_history_too(desk: Desk) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start()
    await desk.sql.execute("UPDATE taskd.queue SET keep_done_s = 0")
    meddle(worker.worker.parts.acks, "ack_done", once_silent())
    await desk.enqueue(quick.job())
    await desk.emitted.wait("store.back")
    await until(lambda: not worker.worker.parts.acker.backlog)
    assert not await desk.states()
    assert not desk.emitted.of("job.lost")
    assert not desk.emitted.of("job.deleted")
    assert await worker.stop() == 0
    assert worker.worker.report.jobs["done"] == 1


async def test_an_ack_after_the_job_was_taken_over_changes_nothing(desk: Desk) -> None:
    go = asyncio.Event()
    owner: list[int] = []

    @desk.task()
    async def waits(ctx: Any) -> str:
        owner.append(ctx.fence)
        await go.wait()
        return "from the first"

    @desk.task()
    async def done(ctx: Any) -> None:
        await go.wait()

    ids = await desk.enqueue(waits.job(), done.job())
    worker = await desk.start()
    await until(lambda: worker.worker.parts.runners[0].running == 2)
    # Another worker has rescued and claimed them.
    await desk.other_worker(42)
    await desk.sql.execute("UPDATE taskd.job SET worker_id = 42, fence = fence + 1")
    go.set()
    await desk.emitted.wait("job.lost", 2)
    rows = [await desk.row(job) for job in ids]
    assert {(row["state"], row["worker_id"], row["fence"]) for row in rows} == {("running", 42, 2)}
    # The report counts no job as done whose outcome was not written.
    assert await worker.stop() == 0
    assert {how: n for how, n in worker.worker.report.jobs.items() if n} == {"lost": 2}


@pytest.mark.parametrize("end", ["plain", "result", "error", "retry", "transaction"])
async def test_an_outcome_whose_row_was_deleted_is_reported_as_deleted(
    desk: Desk, dsn: str, end: str
) -> None:
    go = asyncio.Event()

    @desk.task(max_attempts=2 if end == "retry" else 1)
    async def waits(ctx: Any) -> int | None:
        await go.wait()
        if end in ("error", "retry"):
            raise ValueError
        if end == "transaction":
            conn = await asyncpg.connect(dsn)
            with pytest.raises(LeaseLost):
                await ctx.complete(conn)
            await conn.close()
        return None if end == "plain" else 1

    (job,) = await desk.enqueue(waits.job())
    worker = await desk.start()
    await until(lambda: worker.worker.parts.runners[0].running == 1)
    await desk.sql.execute("DELETE FROM taskd.job")
    go.set()
    (deleted,) = await desk.emitted.wait("job.deleted", job_id=job)
    assert deleted == {"job_id": job, "fence": 1}
    assert not desk.emitted.of("job.lost")
    assert await worker.stop() == 0
    counted = {how: n for how, n in worker.worker.report.jobs.items() if n}
    assert counted == ({"retried": 1} if end == "retry" else {"lost": 1})


async def test_a_completed_job_that_was_deleted_after_a_rollback_is_not_reported_as_done(
    desk: Desk, dsn: str
) -> None:
    @desk.task(max_attempts=1)
    async def forgets(ctx: Any) -> None:
        conn = await asyncpg.connect(dsn)
        transaction = conn.transaction()
        await transaction.start()
        await ctx.complete(conn)
        await transaction.rollback()
        await conn.execute("DELETE FROM taskd.job")
        await conn.close()

    worker = await desk.start()
    (job,) = await desk.enqueue(forgets.job())
    await desk.emitted.wait("job.deleted", job_id=job)
    assert desk.emitted.ends(job) == []
    assert await worker.stop() == 0
    assert {how: n for how, n in worker.worker.report.jobs.items() if n} == {"lost": 1}


async def test_an_acker_without_room_stops_the_claims_and_the_stop_does_not_hang(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd.worker.finishing import acker

    monkeypatch.setattr(acker, "BACKLOG_MAX", 50)

    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start(concurrency=20)
    real, back = jobs.ack_done, asyncio.Event()

    async def slow(*args: Any) -> int:
        await back.wait()
        return await real(*args)

    monkeypatch.setattr(jobs, "ack_done", slow)
    await desk.enqueue(*(quick.job() for _ in range(3000)))
    await until(lambda: worker.worker.parts.acker.backlog >= 50)
    assert worker.worker.parts.acker.backlog < 50 + 1000
    stopping = asyncio.create_task(worker.stop())
    await desk.emitted.wait("worker.draining")
    back.set()
    assert await stopping == 0
    states = await desk.states()
    assert states["queued"] + states["done"] == 3000


async def test_what_cannot_be_written_is_reported_at_the_end(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd.worker.stopping import drain as module

    @desk.task()
    async def quick() -> None: ...

    async def down(*_: Any) -> int:
        raise Silence("no answer")

    monkeypatch.setattr(jobs, "ack_done", down)
    monkeypatch.setattr(module, "FLUSH_S", 0.2)
    worker = await desk.start()
    (job,) = await desk.enqueue(quick.job())
    await desk.emitted.wait("job.done", job_id=job)
    assert await worker.stop() == 75
    assert worker.worker.report.unwritten == 1
    await until(lambda: not [t for t in asyncio.all_tasks() if t.get_name() in {"acker", "timer"}])


async def test_rows_of_a_lost_claim_come_back_unharmed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task()
    async def quick(ctx: Any) -> int:
        return int(ctx.attempt)

    worker = await desk.start(statement_timeout_s=0.5, poll_s=60)
    reconciler = worker.worker.parts.reconciler
    reconciler.every_s = 0.1
    reconciler._grace_s = 1.0
    await idle(desk)  # no claim is under way that would be answered
    meddle(worker.worker.parts.claims, "claim_jobs", once_silent())
    ids = await desk.enqueue(*(quick.job() for _ in range(3)))
    rows = await desk.settled(*ids)
    assert {(row["attempt"], row["fence"], row["result"]) for row in rows} == {(1, 2, "1")}
    (found,) = desk.emitted.of("jobs.reconciled")
    assert found["job_ids"] == ids
    assert not desk.emitted.of("job.lost")


async def test_nobody_looks_for_lost_claims_while_one_is_under_way(desk: Desk) -> None:
    @desk.task()
    async def any_task() -> None: ...

    worker = await desk.start(queues=("one", "two"))
    parts = worker.worker.parts
    async with parts.backlog_claims.at_rest():
        parts.reconciler.claim_lost()
        looking = asyncio.create_task(parts.reconciler.tick())
        for _ in range(3):
            await parts.claims.fetch("turn_enqueue_checks_off")
        assert not looking.done()
    await looking


def once_cancelled() -> Any:
    """Cancel the task that waits for the first rows: the statement ran, its rows are lost."""
    lost = []

    async def lose(rows: Any) -> Any:
        if rows and not lost:
            lost.append(rows)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return rows

    return lose


@pytest.mark.parametrize("name", ["claim_jobs", "claim_suspects"])
async def test_rows_of_a_claim_whose_service_was_cancelled_come_back_as_soon(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    @desk.task()
    async def quick() -> None: ...

    worker = await desk.start(statement_timeout_s=0.5, poll_s=60)
    reconciler = worker.worker.parts.reconciler
    reconciler.every_s = 0.1
    reconciler._grace_s = 1.0
    await idle(desk)
    # No periodic check within the test: only the lost claim can have caused this one.
    monkeypatch.setattr(reconciler_module, "IDLE_CHECK_EVERY_S", 3600.0)
    meddle(worker.worker.parts.claims, name, once_cancelled())
    suspect = "UPDATE taskd.job SET state = 'scheduled', crashes = 1"
    async with desk.sql.transaction():
        (job,) = await jobs.enqueue(fetches(desk.sql), [quick.job()])
        if name == "claim_suspects":
            await desk.sql.execute(suspect)
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], row["fence"]) == ("done", 1, 2)
    (found,) = desk.emitted.of("jobs.reconciled")
    assert found["job_ids"] == [job]


async def test_effects_and_completion_commit_together(desk: Desk, dsn: str) -> None:
    import asyncpg

    await desk.sql.execute("CREATE TABLE ledger (job bigint)")

    async def booking(ctx: Any, how: str) -> None:
        conn = await asyncpg.connect(dsn)
        try:
            transaction = conn.transaction()
            await transaction.start()
            await conn.execute("INSERT INTO ledger VALUES ($1)", ctx.job_id)
            await ctx.complete(conn, {"how": how})
            if how == "commits" or ctx.attempt > 1:
                await transaction.commit()
                return
            await transaction.rollback()
            if how == "raises":
                raise ValueError("rolled back")
        finally:
            await conn.close()

    books = desk.task(backoff=NOW)(booking)
    ids = await desk.enqueue(*(books.job(how) for how in ("commits", "raises", "forgets")))
    await desk.start()
    committed, raised, forgot = await desk.settled(*ids)
    assert sorted(row[0] for row in await desk.sql.fetch("SELECT job FROM ledger")) == ids
    assert [row["state"] for row in (committed, raised, forgot)] == ["done"] * 3
    assert [row["attempt"] for row in (committed, raised, forgot)] == [1, 2, 2]
    assert json.loads(committed["result"]) == {"how": "commits"}
    assert json.loads(forgot["errors"])[0]["type"] == "NotCommitted"
    await desk.emitted.wait("job.done", 3)
    # The log has the actual outcome, not what the handler assumed.
    assert [desk.emitted.ends(job) for job in ids] == [
        ["job.done"],
        ["job.retried", "job.done"],
        ["job.retried", "job.done"],
    ]
    assert not desk.emitted.of("job.lost")


async def test_a_rollback_is_reported_although_the_reply_to_its_outcome_was_lost(
    desk: Desk, dsn: str
) -> None:
    import asyncpg

    @desk.task(backoff=Fixed(3600))
    async def forgets(ctx: Any) -> None:
        conn = await asyncpg.connect(dsn)
        transaction = conn.transaction()
        await transaction.start()
        await ctx.complete(conn)
        await transaction.rollback()
        await conn.close()

    started = await desk.start()
    meddle(started.worker.parts.acks, "ack_outcomes", once_silent())
    (job,) = await desk.enqueue(forgets.job())
    await desk.emitted.wait("job.retried", job_id=job)
    assert not desk.emitted.of("job.done")


async def test_who_lost_the_job_cannot_complete_it(desk: Desk, dsn: str) -> None:
    import asyncpg

    lost: list[BaseException] = []

    @desk.task()
    async def booking(ctx: Any) -> None:
        conn = await asyncpg.connect(dsn)
        try:
            await conn.execute("UPDATE taskd.job SET fence = fence + 1, worker_id = 42")
            async with conn.transaction():
                await conn.execute("CREATE TABLE effect ()")
                await ctx.complete(conn)
        except LeaseLost as error:
            lost.append(error)
            raise
        finally:
            await conn.close()

    await desk.other_worker(42)
    (job,) = await desk.enqueue(booking.job())
    await desk.start()
    await desk.emitted.wait("job.lost", job_id=job)
    assert lost
    assert not await desk.sql.fetchval("SELECT to_regclass('effect')")
    assert (await desk.row(job))["worker_id"] == 42


async def test_a_running_job_is_cancelled_from_sql(desk: Desk) -> None:
    @desk.task()
    async def waits() -> None:
        await asyncio.sleep(60)

    @desk.task(backoff=NOW)
    async def fails_when_told() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            raise ValueError("on its way out")

    ids = await desk.enqueue(waits.job(), fails_when_told.job())
    worker = await desk.start()
    worker.worker.parts.reconciler.every_s = 0.1
    await until(lambda: worker.worker.parts.runners[0].running == 2)
    assert set((await jobs.cancel(desk.lane, ids, "no more")).values()) == {"running"}
    rows = await desk.settled(*ids)
    assert {(row["state"], row["reason"]) for row in rows} == {("cancelled", "no more")}


async def test_a_cancel_that_races_with_the_end_has_one_outcome(desk: Desk) -> None:
    go = asyncio.Event()

    @desk.task(backoff=NOW)
    async def ends(n: int) -> None:
        await go.wait()
        if n % 2:
            raise ValueError("again")

    ids = await desk.enqueue(*(ends.job(n) for n in range(40)))
    worker = await desk.start(concurrency=40)
    await until(lambda: worker.worker.parts.runners[0].running == 40)
    cancelling = asyncio.create_task(jobs.cancel(desk.lane, ids, "no more"))
    go.set()
    answer = await cancelling
    rows = await desk.settled(*ids)
    for row in rows:
        if row["id"] in answer and int(row["args"].split(":")[1].strip(" }")) % 2:
            assert row["state"] == "cancelled"
    assert {row["state"] for row in rows} <= {"done", "cancelled"}


async def test_one_locked_row_keeps_nobody_elses_outcome_from_being_written(desk: Desk) -> None:
    go = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        await go.wait()

    @desk.task()
    async def says() -> str:
        await go.wait()
        return "so"

    ids = await desk.enqueue(*(waits.job() for _ in range(10)), *(says.job() for _ in range(10)))
    worker = await desk.start(statement_timeout_s=0.5)
    await until(lambda: worker.worker.parts.runners[0].running == 20)
    held = [ids[3], ids[14]]
    async with desk.sql.transaction():
        await desk.sql.execute("UPDATE taskd.job SET priority = 5 WHERE id = ANY ($1)", held)
        go.set()
        other = await asyncpg.connect(desk.dsn)
        await until(lambda: count_done(other, 18))
        assert worker.worker.parts.acker.backlog >= 2
        await other.close()
    rows = await desk.settled(*held)
    assert [(row["state"], row["attempt"]) for row in rows] == [("done", 1)] * 2
    assert await worker.stop() == 0
    assert {had["buffered"] for had in desk.emitted.of("acks.delayed")} == {1}


async def test_a_user_who_keeps_a_job_that_waits_holds_up_only_those_that_it_waits_for(
    desk: Desk,
) -> None:
    go = asyncio.Event()

    @desk.task()
    async def waits() -> None:
        await go.wait()

    ids = await desk.enqueue(*(waits.job() for _ in range(20)))
    after = "SELECT taskd.enqueue_after('waits', '{}', $1::bigint[], queue => 'default')"
    behind = [await desk.sql.fetchval(after, [each]) for each in ids]
    worker = await desk.start(statement_timeout_s=0.5)
    await until(lambda: worker.worker.parts.runners[0].running == 20)
    async with desk.sql.transaction():
        last = await desk.sql.fetchval(after, [behind[7]])
        go.set()
        other = await asyncpg.connect(desk.dsn)
        await until(lambda: count_done(other, 38))
        await other.close()
    rows = await desk.settled(*ids, *behind, last)
    assert {row["state"] for row in rows} == {"done"}
    assert await worker.stop() == 0
    assert {had["buffered"] for had in desk.emitted.of("acks.delayed")} == {1}


async def count_done(sql: Any, count: int) -> bool:
    done = await sql.fetchval("SELECT count(*) FROM taskd.job_history WHERE state = 'done'")
    return bool(done == count)


async def test_what_is_too_much_for_one_statement_is_written_in_parts(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, sizes = jobs.ack_outcomes, []

    async def hasty(lane: Any, worker_id: int, acks: Any) -> Any:
        sizes.append(len(acks))
        if len(acks) > 3:
            raise HeldUp("canceling statement due to statement timeout")
        return await real(lane, worker_id, acks)

    go = asyncio.Event()

    @desk.task()
    async def says(n: int) -> int:
        await go.wait()
        return n

    monkeypatch.setattr(jobs, "ack_outcomes", hasty)
    ids = await desk.enqueue(*(says.job(n) for n in range(10)))
    worker = await desk.start()
    await until(lambda: worker.worker.parts.runners[0].running == 10)
    go.set()
    rows = await desk.settled(*ids)
    assert [row["result"] for row in rows] == [str(n) for n in range(10)]
    assert sizes[0] == 10


async def test_a_batch_of_outcomes_is_bounded_by_its_size_too(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    from taskd.worker.finishing import acker

    monkeypatch.setattr(acker, "BATCH_BYTES_MAX", 1000)
    real, sizes = jobs.ack_outcomes, []

    async def counted(lane: Any, worker_id: int, acks: Any) -> Any:
        sizes.append(len(acks))
        return await real(lane, worker_id, acks)

    go = asyncio.Event()

    @desk.task()
    async def says(size: int) -> str:
        await go.wait()
        return "x" * size

    monkeypatch.setattr(jobs, "ack_outcomes", counted)
    ids = await desk.enqueue(*(says.job(size) for size in [300] * 6 + [5000]))
    worker = await desk.start()
    await until(lambda: worker.worker.parts.runners[0].running == 7)
    go.set()
    await desk.settled(*ids)
    assert sizes == [3, 3, 1]


async def test_a_full_notify_queue_delays_outcomes_and_changes_none(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    @desk.task(max_attempts=2, backoff=Fixed(0.01))
    async def fails() -> None:
        raise ValueError("its own error")

    full = asyncpg.ProgramLimitExceededError("too many notifications in the NOTIFY queue")
    full.server_source_filename = "async.c"
    real, refusals = jobs.ack_outcomes, []

    async def refused(*args: Any) -> Any:
        if len(refusals) < 3:
            refusals.append(1)
            raise translate(full)
        return await real(*args)

    monkeypatch.setattr(jobs, "ack_outcomes", refused)
    await desk.start()
    (job,) = await desk.enqueue(fails.job())
    (row,) = await desk.settled(job)
    assert [each["message"] for each in json.loads(row["errors"])] == ["its own error"] * 2
    assert not desk.emitted.of("job.outcome_refused")
    assert not desk.emitted.of("service.crashed")
