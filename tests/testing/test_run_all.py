"""Running what is due, travelling, and workers that die."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from taskd import Cancel, Client, Fail, Fixed, Retry, Snooze
from taskd.errors import JobNotFound
from taskd.handlers import Item
from taskd.testing import AttemptFailed, Crash, TaskdDB
from taskd.workflows import pipeline, stage


async def test_jobs_run_one_after_the_other_the_most_urgent_first(
    db: TaskdDB, client: Client, task: Any
) -> None:
    running, most, order = 0, 0, []

    @task(queue="a")
    async def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        order.append(number)
        return number

    for number, priority in enumerate([100, 50, 100]):
        await client.enqueue_named("work", {"number": number}, queue="a", priority=priority)
    ran = await db.run_all(check=True)
    assert order == [1, 0, 2]
    assert [row.result for row in ran] == [0, 1, 2]
    assert most == 1


async def test_handlers_run_side_by_side_when_asked(db: TaskdDB, client: Client, task: Any) -> None:
    both = asyncio.Barrier(2)

    @task()
    async def meet() -> None:
        await both.wait()

    await client.enqueue_many([meet.job(), meet.job()])
    ran = await db.run_all(check=True, concurrency=2)
    assert [row.state for row in ran] == ["done", "done"]


async def test_what_a_handler_enqueues_runs_too_in_whatever_queue(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task(queue="a")
    async def parent() -> None:
        await client.enqueue_named("child", queue="of_no_task")

    @task(queue="b")
    async def child() -> None: ...

    await client.enqueue(parent.job())
    ran = await db.run_all(check=True)
    assert [(row.task, row.queue) for row in ran] == [("parent", "a"), ("child", "of_no_task")]


async def test_each_outcome_is_reported(db: TaskdDB, client: Client, task: Any) -> None:
    @task(backoff=Fixed(30))
    async def end(how: str) -> str:
        match how:
            case "raise":
                raise RuntimeError("raised")
            case "retry":
                raise Retry(40)
            case "snooze":
                raise Snooze(50)
            case "cancel":
                raise Cancel("not needed")
            case "fail":
                raise Fail("no use")
        return how

    for how in ("well", "raise", "retry", "snooze", "cancel", "fail"):
        await client.enqueue(end.job(how))
    rows = {row.args["how"]: row for row in await db.run_all()}
    assert rows["well"].state == "done"
    assert rows["well"].result == "well"
    assert rows["raise"].state == "scheduled"
    assert rows["raise"].error == "RuntimeError: raised"
    assert "in end" in rows["raise"].traceback
    assert 20 < rows["raise"].due_in_s <= 30
    assert 30 < rows["retry"].due_in_s <= 40
    assert (rows["snooze"].state, rows["snooze"].attempt) == ("scheduled", 0)
    assert (rows["cancel"].state, rows["cancel"].reason) == ("cancelled", "not needed")
    assert (rows["fail"].state, rows["fail"].reason) == ("failed", "no use")
    assert "due in" in str(rows["raise"])


async def test_check_raises_errors_but_not_what_a_handler_decides(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task()
    async def decide(how: str) -> None:
        raise {"retry": Retry(5), "cancel": Cancel(), "snooze": Snooze(5)}[how]

    @task(name="divide")
    def divide(by: int) -> float:
        return 1 / by

    for how in ("retry", "cancel", "snooze"):
        await client.enqueue(decide.job(how))
    assert len(await db.run_all(check=True)) == 3
    await client.enqueue_many([divide.job(by=0), divide.job(by=0)])
    with pytest.raises(AttemptFailed) as raised:
        await db.run_all(check=True)
    assert isinstance(raised.value.__cause__, ZeroDivisionError)
    assert "divide(by=0): scheduled" in str(raised.value)
    # The first one's source is shown by pytest, as that of the cause.
    assert raised.value.__cause__.__traceback__.tb_frame.f_code is divide.handler.__code__
    assert str(raised.value).count("return 1 / by") == 1


async def test_a_job_that_does_not_fit_its_task_is_reported_by_check(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task(max_attempts=1)
    async def work(number: int) -> None: ...

    await client.enqueue_named("work", {"number": "x"}, queue="default")
    with pytest.raises(AttemptFailed, match="ArgsDoNotFit: task work: Expected `int`"):
        await db.run_all(check=True)


async def test_a_stage_whose_result_the_next_one_cannot_have_is_reported_by_check(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task()
    async def first() -> Any:
        return 1j

    @task()
    async def second(n: int) -> None: ...

    line = pipeline("two", stage("first", first), stage("second", second), registry=None)
    await line.start(client=client)
    with pytest.raises(AttemptFailed, match="needs its result, but its result was not stored"):
        await db.run_all(check=True)


async def test_a_retry_without_a_delay_is_part_of_the_run(
    db: TaskdDB, client: Client, task: Any
) -> None:
    attempts = 0

    @task()
    async def work() -> None:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise Retry(0)

    await client.enqueue(work.job())
    [row] = await db.run_all()
    assert (row.state, row.attempt) == ("done", 3)


async def test_what_is_later_paused_or_of_an_unknown_task_stays(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task()
    async def work() -> None: ...

    later = await client.enqueue(work.job().after(60))
    unknown = await client.enqueue_named("nobody_knows", queue="default")
    await client.pause(["slow"], for_s=100)
    paused = await client.enqueue_named("work", queue="slow")
    assert await db.run_all() == []
    assert [row.id for row in db.enqueued()] == [later, unknown, paused]
    db.travel(60)
    assert [row.id for row in await db.run_all()] == [later]
    db.travel(40)
    assert [row.id for row in await db.run_all()] == [paused]


async def test_a_run_that_does_not_end_says_what_it_is_at(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task()
    async def wait() -> None:
        await asyncio.Event().wait()

    await client.enqueue(wait.job())
    with pytest.raises(TimeoutError, match=r"within 0\.5 s; live jobs:\n  job \d+ wait\(\)"):
        await db.run_all(timeout_s=0.5)


# Time.


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_time_goes_forward_only(db: TaskdDB, seconds: float) -> None:
    with pytest.raises(ValueError, match="forward"):
        db.travel(seconds)


# Crashes.


async def test_a_crash_runs_the_job_again_under_the_same_key_and_another_fence(
    db: TaskdDB, client: Client, task: Any
) -> None:
    seen = []

    @task()
    async def work(ctx: Any) -> None:
        seen.append((ctx.idempotency_key, ctx.fence, ctx.attempt))

    job_id = await client.enqueue(work.job())
    [row] = await db.run_all(crash=[job_id])
    assert (row.state, row.crashes) == ("done", 1)
    assert row.error.startswith("WorkerLost")
    assert len(seen) == 2
    assert seen[0][0] == seen[1][0]
    assert seen[0][1] < seen[1][1]


async def test_the_outcome_of_an_attempt_that_crashed_does_not_count(
    db: TaskdDB, client: Client, task: Any
) -> None:
    attempts = 0

    @task(max_attempts=2)
    async def work() -> int:
        nonlocal attempts
        attempts += 1
        if attempts == 1:
            raise RuntimeError("of a dead worker")
        return attempts

    job_id = await client.enqueue(work.job())
    [row] = await db.run_all(crash=[job_id], check=True)
    assert (row.state, row.result) == ("done", 2)


async def test_a_crash_in_the_middle_leaves_the_rest_of_the_handler_undone(
    db: TaskdDB, client: Client, task: Any
) -> None:
    steps = []

    @task()
    async def work() -> None:
        steps.append("first")
        if len(steps) == 1:
            raise Crash
        steps.append("second")

    await client.enqueue(work.job())
    await db.run_all(check=True)
    assert steps == ["first", "first", "second"]


async def test_a_third_crash_fails_the_job(db: TaskdDB, client: Client, task: Any) -> None:
    @task()
    def work() -> None:
        raise Crash

    job_id = await client.enqueue(work.job())
    [row] = await db.run_all()
    assert (row.id, db.job(job_id).state) == (job_id, "failed")
    assert (row.state, row.reason, row.crashes) == ("failed", "crashed", 3)


async def test_what_ran_beside_a_crash_runs_again(db: TaskdDB, client: Client, task: Any) -> None:
    began: list[str] = []
    begun = asyncio.Event()

    @task(queue="a")
    async def innocent() -> None:
        began.append("innocent")
        begun.set()
        if began.count("innocent") == 1:
            await asyncio.Event().wait()

    @task(queue="b")
    async def culprit() -> None:
        began.append("culprit")
        await begun.wait()

    await client.enqueue(innocent.job())
    job_id = await client.enqueue(culprit.job())
    ran = await db.run_all(crash=[job_id], check=True)
    assert [(row.state, row.crashes) for row in ran] == [("done", 1), ("done", 1)]
    assert sorted(began) == ["culprit", "culprit", "innocent", "innocent"]


async def test_a_crash_of_a_job_that_is_not_due_is_a_mistake(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task()
    async def work() -> None: ...

    job_id = await client.enqueue(work.job().after(60))
    with pytest.raises(ValueError, match=f"not due: {job_id}$"):
        await db.run_all(crash=[job_id])


# Without a loop.


def test_a_test_without_a_loop_runs_jobs_as_well(db: TaskdDB, dsn: str, task: Any) -> None:
    @task()
    async def work(number: int) -> int:
        return number + 1

    client = Client(dsn)
    job_id = client.enqueue_sync(work.job(1))
    assert [row.id for row in db.enqueued(work)] == [job_id]
    [row] = db.run_all_sync(check=True)
    assert row.result == 2
    client.close_sync()


def test_a_job_that_does_not_exist_is_reported(db: TaskdDB) -> None:
    with pytest.raises(JobNotFound, match="no job 5"):
        db.job(5)


@dataclass
class Page:
    number: int


async def test_batches_run_and_say_what_was_raised_for_each_job(
    db: TaskdDB, client: Client, task: Any
) -> None:
    @task(batch=3, max_wait_s=0.05, max_attempts=1)
    async def index(items: list[Item[Page]]) -> list[Any]:
        return [ValueError("odd") if item.args.number % 2 else item.args.number for item in items]

    await client.enqueue_many(index.job(Page(number)) for number in range(3))
    with pytest.raises(AttemptFailed, match="1 of 3 jobs failed") as failed:
        await db.run_all(check=True, concurrency=3)
    assert str(failed.value.__cause__) == "odd"


async def test_a_worker_that_dies_in_a_batch_gives_all_of_it_back(
    db: TaskdDB, client: Client, task: Any
) -> None:
    sizes: list[int] = []

    @task(batch=2, max_wait_s=0.05)
    async def index(items: list[Item[Page]]) -> None:
        sizes.append(len(items))

    ids = [await client.enqueue(index.job(Page(number))) for number in range(2)]
    ran = await db.run_all(concurrency=2, crash=[ids[0]])
    assert [row.state for row in ran] == ["done", "done"]
    assert sum(sizes) == 4


async def test_a_transaction_is_rolled_back_when_its_worker_dies(
    db: TaskdDB, client: Client, task: Any
) -> None:
    seen: list[int] = []

    @task(transaction=True)
    async def counts(ctx: Any) -> None:
        await ctx.conn.execute("CREATE TABLE IF NOT EXISTS effect ()")
        await ctx.conn.execute("INSERT INTO effect DEFAULT VALUES")
        seen.append(await ctx.conn.fetchval("SELECT count(*) FROM effect"))

    job = await client.enqueue(counts.job())
    [row] = await db.run_all(crash=[job])
    assert row.state == "done"
    assert seen == [1, 1]
