"""Arguments that do not fit the code of their task: the job waits for other code, not counted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pydantic
import pytest

from taskd import NewJob
from taskd.core.tasks.registry import Registry
from taskd.core.tasks.task import Task
from taskd.handlers import Item
from tests.worker import process_app
from tests.worker.conftest import Desk, until

GIVE_BACK = "UPDATE taskd.job SET run_at = now()"


@dataclass
class Point:
    x: int

    def __post_init__(self) -> None:
        if self.x > 9:
            raise ValueError("too far")


class Model(pydantic.BaseModel):
    x: int = pydantic.Field(lt=10)


def _split(args: dict[str, Any]) -> dict[str, Any]:
    return {"x": args["y"]}


def _task(desk: Desk, kind: str) -> None:
    async def asynchronous(ctx: Any, x: int) -> None: ...

    def thread(x: int) -> None: ...

    async def batch(items: list[Item[Point]]) -> None: ...

    async def transaction(ctx: Any, x: int) -> None: ...

    async def model(order: Model) -> None: ...

    handlers: dict[str, tuple[Any, dict[str, Any]]] = {
        "async": (asynchronous, {}),
        "thread": (thread, {}),
        "batch": (batch, {"batch": 1}),
        "transaction": (transaction, {"transaction": True}),
        "model": (model, {}),
        "upgrade": (asynchronous, {"args_version": 2, "upgrade": {1: _split}}),
    }
    handler, options = handlers[kind]
    desk.task(name="work", max_attempts=1, **options)(handler)


async def unfit(desk: Desk, job: int) -> Any:
    """Wait until a worker has refused the arguments of a job; its row."""

    async def refused() -> Any:
        row = await desk.row(job)
        return row if row["state"] == "scheduled" and json.loads(row["errors"]) else None

    return await until(refused)


@pytest.mark.parametrize(
    ("kind", "args", "message"),
    [
        ("async", '{"x": "one"}', "task work: Expected `int`, got `str` - at `$.x`"),
        ("async", "{}", "task work: Object missing required field `x`"),
        ("thread", '{"x": 1, "y": 2}', "task work: Object contains unknown field `y`"),
        ("batch", '{"x": "one"}', "task work: Expected `int`, got `str` - at `$.x`"),
        ("batch", '{"x": 10}', "task work: too far"),
        ("transaction", '{"x": null}', "task work: Expected `int`, got `null` - at `$.x`"),
        ("model", '{"order": {"x": 10}}', "task work: x: Input should be less than 10 - at `$"),
        ("upgrade", '{"z": 1}', "task work: upgrading its arguments from version 1 to 2 failed"),
        ("async", '{"x": ' + "[" * 3000 + "]" * 3000 + "}", "task work: "),
    ],
)
async def test_the_job_is_put_aside_and_no_attempt_counts(
    desk: Desk, kind: str, args: str, message: str
) -> None:
    _task(desk, kind)
    job = await desk.sql.fetchval(
        "INSERT INTO taskd.job (queue, task, args) VALUES ('default', 'work', $1::text::jsonb) "
        "RETURNING id",
        args,
    )
    worker = await desk.start()
    row = await unfit(desk, job)
    assert (row["attempt"], row["reason"], row["finished_at"]) == (0, None, None)
    delay_s = await desk.sql.fetchval(
        "SELECT date_part('epoch', run_at - clock_timestamp()) FROM taskd.job WHERE id = $1", job
    )
    assert 0 < delay_s <= 10
    (error,) = json.loads(row["errors"])
    assert error["type"] == "ArgsDoNotFit"
    assert error["message"].startswith(message)
    (told,) = desk.emitted.of("task.args_unfit")
    assert (told["job_id"], told["error"]) == (job, error["message"])
    assert worker.worker.report.jobs["failed"] == worker.worker.report.jobs["retried"] == 0


async def test_arguments_for_a_process_are_checked_before_one_is_needed(desk: Desk) -> None:
    (job,) = await desk.enqueue(NewJob("adds", '{"a": "one"}', "default", max_attempts=1))
    await desk.start(process_app.REGISTRY, process_slots=1)
    row = await unfit(desk, job)
    assert row["attempt"] == 0
    assert "Expected `int`" in json.loads(row["errors"])[0]["message"]


async def test_an_error_that_stays_the_same_is_stored_and_logged_once(desk: Desk) -> None:
    _task(desk, "async")
    first, second = await desk.enqueue(
        NewJob("work", '{"x": "one"}', "default"), NewJob("work", '{"x": "two"}', "default")
    )
    await desk.start()
    for job in (first, second):
        await unfit(desk, job)
    fence = (await desk.row(first))["fence"]
    await desk.sql.execute(GIVE_BACK)
    await until(lambda: _claimed_again(desk, first, fence))
    row = await desk.row(first)
    assert (row["attempt"], len(json.loads(row["errors"]))) == (0, 1)
    # The log has one line for all of them.
    assert len(desk.emitted.of("task.args_unfit")) == 1


async def _claimed_again(desk: Desk, job: int, fence: int) -> bool:
    row = await desk.row(job)
    return row["fence"] > fence and row["state"] == "scheduled"


async def test_the_job_runs_when_a_worker_has_other_code(desk: Desk) -> None:
    _task(desk, "async")
    (job,) = await desk.enqueue(NewJob("work", '{"x": "one"}', "default", max_attempts=1))
    old = await desk.start()
    await unfit(desk, job)
    await old.stop()

    async def work(x: int | str) -> Any:
        return x

    deployed = Registry()
    deployed.add(Task(work))
    await desk.start(deployed)
    await desk.sql.execute(GIVE_BACK)
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"], row["result"]) == ("done", 1, '"one"')


async def test_an_error_of_the_same_class_in_a_handler_is_a_failed_attempt(desk: Desk) -> None:
    @desk.task(max_attempts=1)
    async def enqueues() -> None:
        Task(typed).encode("one")

    async def typed(n: int) -> None: ...

    (job,) = await desk.enqueue(enqueues.job())
    await desk.start()
    (row,) = await desk.settled(job)
    assert (row["state"], row["attempt"]) == ("failed", 1)
    assert row["reason"].startswith("InvalidArgs: task typed: Expected `int`")


async def test_a_secret_argument_is_in_no_error(desk: Desk) -> None:
    @desk.task(redact=["password"], args_version=2, upgrade={1: _quotes})
    async def log_in(password: str) -> None: ...

    (job,) = await desk.enqueue(NewJob("log_in", '{"password": "sesame-open"}', "default"))
    await desk.start()
    row = await unfit(desk, job)
    assert "sesame" not in row["errors"]
    assert "***" in row["errors"]


def _quotes(args: dict[str, Any]) -> dict[str, Any]:
    raise ValueError(f"cannot upgrade {args['password']}")


async def test_until_empty_does_not_wait_for_it(desk: Desk) -> None:
    _task(desk, "async")
    await desk.enqueue(
        NewJob("work", '{"x": "one"}', "default"), NewJob("work", '{"x": 1}', "default")
    )
    worker = desk.worker(until_empty=True)
    assert await worker.end() == 0
    assert worker.worker.report.left == {"unfit": 1}
    assert await desk.states() == {"scheduled": 1, "done": 1}
